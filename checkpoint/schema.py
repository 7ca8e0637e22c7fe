"""The only reader of small files: JSON, YAML and text, none of which is trusted.

A file must be regular, since a pipe would block forever and a device never end. Its size, depth and number of values
are bounded, since 99 MB of empty lists take 4 GB once parsed. Every failure raises the error that the caller passes.
A test checks that nothing reads files another way.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast, get_args

from ..errors import KconvError

if TYPE_CHECKING:
    # Imported where used: reading a safetensors header needs neither.
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

# A value of a JSON text.
Json = dict[str, Any] | list[Any] | str | float | bool | None

EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d{1,2}$")
# The digits of the largest 64-bit count, and a sign.
MAX_DIGITS = 21
# The manifest of a target with a trillion parameters has half a million tensors, and takes some hundred MB.
MAX_JSON = 512 << 20
# Limit on the values of one JSON text; each takes some hundred bytes. A header of 306,855 tensors has 2.5 million
# values, the manifest above 8 million.
MAX_JSON_VALUES, MAX_RECORDS_VALUES = 3_000_000, 10_000_000
# More than the tensors of a trillion-parameter target; pydantic takes 2 KB for each key that a schema lacks.
MAX_KEYS = 300_000
# A string, whole whether or not it is a key or ends at all: a search that begins again inside one takes hours.
STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"(\s*+:)?|\\?\Z)', re.DOTALL)
# A YAML file is written by hand.
MAX_YAML, MAX_DEPTH, MAX_VALUES = 4 << 20, 64, 200_000
# Text for people: a card, a license, a notice, a launch file.
MAX_TEXT = 8 << 20
# A file of lines, and one of its lines: a conversation of a few million tokens.
MAX_LINES, MAX_LINE = 4 << 30, 32 << 20


def load_json(
    model: type[Model],
    file: Path,
    error: type[KconvError],
    *,
    what: str,
    fix: str,
    missing: KconvError | None = None,
) -> Model:
    """Read a JSON file by a schema.

    Args:
        file: the file; a link to a regular file is followed.
        what: what the file should be, for the message, e.g. "kconv calibration".
        missing: the error to raise if the file does not exist; an `error` if None.

    Raises:
        KconvError: of class `error`: the file cannot be read, is too large, not regular, or does not match the schema.
    """
    from pydantic import ValidationError

    text = read_bounded(file, error, limit=MAX_JSON, fix=fix, missing=missing)
    try:
        refuse_many(text, MAX_RECORDS_VALUES)
        _refuse_many_keys(text)
        return model.model_validate_json(text)
    except ValidationError as fault:
        raise error(f"{file.name} is not a valid {what}: {find_wrong(fault)}", where=file, fix=fix) from fault
    except ValueError as fault:
        raise error(f"{file.name} is not a valid {what}: {fault}", where=file, fix=fix) from fault


def load_yaml(
    model: type[Model],
    file: Path,
    error: type[KconvError],
    *,
    what: str,
    fix: str,
    missing: KconvError | None = None,
) -> Model:
    """Read a YAML file by a schema; an empty file has no keys. Arguments and errors as in `load_json`."""
    text = read_bounded(file, error, limit=MAX_YAML, fix=fix, missing=missing)
    values = parse_yaml(text, error, where=file, what=what, fix=fix)
    return check_values(model, values, error, where=file, what=what, fix=fix, text=text)


def check_values(
    model: type[Model],
    values: Any,
    error: type[KconvError],
    *,
    where: object,
    what: str,
    fix: str,
    text: str | bytes = "",
) -> Model:
    """Validate plain values as a model; None has no keys. For YAML, `text` is its source, used to name the line.

    Raises:
        KconvError: of class `error`: they do not match the schema.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate({} if values is None else values)
    except ValidationError as fault:
        wrong = find_wrong(fault, model)
        line = line_of(text, wrong.place)
        where = f"{where or what}:{line}" if line else where
        raise error(wrong.of(what), where=where, fix=fix) from fault


def parse_yaml(text: str | bytes, error: type[KconvError], *, where: object, what: str, fix: str) -> Any:
    """Return the values of a YAML text; None for an empty one.

    Args:
        text: the text; bytes in UTF-8 or UTF-16.

    Raises:
        KconvError: of class `error`: it is not YAML, is nested too deeply, or its aliases expand beyond the limit.
    """
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        # Before it is made into values, which takes a mapping's merged keys into it.
        _refuse_twice(node)
        values = None if node is None else loader.construct_document(node)
        _count(values)
        return values
    except Exception as fault:  # PyYAML's constructors raise anything, e.g. IndexError for !!int ""
        why, line = _no_yaml(text, fault)
        where = f"{where or what}:{line}" if line else where
        raise error(f"the {what} is not valid YAML: {why}", where=where, fix=fix) from fault


@functools.cache
def _loader() -> Any:
    """Return PyYAML's safe loader, which stops at what is nested too deeply."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            # A scalar is no level of its own.
            if self.depth > MAX_DEPTH and not self.check_event(yaml.ScalarEvent, yaml.AliasEvent):
                raise ValueError("it is nested too deeply")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    # YAML 1.2's floats: of 1e-4 PyYAML, which knows 1.1's, makes a string.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
    return Loader


class _Twice(ValueError):
    """A key of a YAML mapping that occurs twice, and the line of the second one."""

    def __init__(self, key: str, line: int) -> None:
        self.line = line
        super().__init__(f"the key {key} occurs twice")


def _refuse_twice(node: Any) -> None:
    """Raise _Twice for a mapping with a key twice: PyYAML keeps the last one and drops the first without a word."""
    import yaml

    left, seen = [node], set[int]()
    while left:
        node = left.pop()
        # Nested aliases name a node more often than there is time for.
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = set[tuple[str, str]]()
            for key, value in node.value:
                # A key that is a list, or << with its meaning of its own, is left to the constructor.
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in keys:
                        raise _Twice(key.value[:80], key.start_mark.line + 1)
                    keys.add((key.tag, key.value))
                left.append(value)
        else:
            left += node.value


def _no_yaml(text: str | bytes, fault: Exception) -> tuple[str, int | None]:
    """Return why a text is not YAML, and the line if known."""
    import yaml

    if isinstance(fault, _Twice):
        return str(fault), fault.line

    mark = getattr(fault, "problem_mark", None) or getattr(fault, "context_mark", None)
    if mark is not None and not isinstance(fault, yaml.constructor.ConstructorError):
        held = text.decode(errors="replace") if isinstance(text, bytes) else text
        own = held.splitlines()[mark.line : mark.line + 1]
        if own and "\t" in own[0][: len(own[0]) - len(own[0].lstrip())]:
            return f"line {mark.line + 1} is indented by a tab; YAML takes only spaces", mark.line + 1
        shown = f" ({own[0].strip()[:80]})" if own and own[0].strip() else ""
        return f"line {mark.line + 1}{shown} cannot be parsed: check its brackets, quotes, colon and indentation", mark.line + 1  # fmt: skip  # noqa: E501
    if isinstance(fault, yaml.reader.ReaderError):
        return "it contains a character that YAML does not allow", None
    if type(fault) is ValueError and fault.args and str(fault).startswith("it "):
        return str(fault), None
    if isinstance(fault, RecursionError):
        return "it is nested too deeply", None
    # A value that does not fit its own type, e.g. the date 2026-13-45.
    with suppress(Exception):
        left: list[Any] = [yaml.compose(text, yaml.SafeLoader)]
        seen, one_by_one = set[int](), yaml.SafeLoader("")
        while left:
            node = left.pop()
            # Nested aliases name a node more often than there is time for.
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.ScalarNode):
                try:
                    one_by_one.construct_object(node)
                except Exception:
                    line = node.start_mark.line + 1
                    return (
                        f"the value {node.value[:80]!r} in line {line} is not valid for its type; put it in quotes",
                        line,
                    )
            elif node is not None:
                pairs = node.value if isinstance(node, yaml.MappingNode) else [(one,) for one in node.value]
                if node.tag.startswith("tag:yaml.org,2002:python"):
                    line = node.start_mark.line + 1
                    return f"line {line} asks for a Python object, but kconv reads only plain values", line
                left += [part for pair in reversed(pairs) for part in reversed(pair)]
    return "it holds a value with no plain YAML type", None


def line_of(text: str | bytes, place: Sequence[str | int]) -> int | None:
    """Return the line of a YAML text with a key, or with its nearest parent that exists; None without a text."""
    import yaml

    node = cast(Any, yaml.compose(text, yaml.SafeLoader)) if text else None
    line = None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        else:
            found = None
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    return line


def read_bounded(
    file: Path,
    error: type[KconvError],
    *,
    limit: int,
    fix: str,
    missing: KconvError | None = None,
    large: type[KconvError] | None = None,
) -> bytes:
    """Return the bytes of a regular file, up to `limit`.

    Args:
        file: the file; a link to a regular file is followed.
        limit: bytes.
        missing: the error to raise if the file does not exist; an `error` if None.
        large: the error class to raise if the file has more bytes; `error` if None.

    Raises:
        KconvError: `missing`, or one of class `error` or `large`.
    """
    try:
        with _opened(file, error, large or error, limit, fix) as (held, size):
            # Not `limit`: Python allocates as much as requested.
            return held.read(size)
    except (OSError, ValueError) as fault:  # ValueError: a name with a NUL in it
        if missing is not None and isinstance(fault, FileNotFoundError):
            raise missing from fault
        raise error(f"{file.name} cannot be read: {_why(fault)}", where=file, fix=fix) from fault


@contextmanager
def _opened(
    file: Path, error: type[KconvError], large: type[KconvError], limit: int, fix: str
) -> Generator[tuple[BinaryIO, int]]:
    # Nonblocking, since the other end of a pipe may never come; checked once open, since the name may point to another
    # file by then.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{file.name} is not a regular file", where=file, fix=fix)
        if found.st_size > limit:
            raise large(f"{file.name} is {found.st_size:,} bytes, more than {limit:,}", where=file, fix=fix)
        with os.fdopen(descriptor, "rb", closefd=False) as held:
            yield held, found.st_size
    finally:
        os.close(descriptor)


def read_text(
    file: Path, error: type[KconvError], *, fix: str, limit: int = MAX_TEXT, missing: KconvError | None = None
) -> str:
    """Return the text of a regular UTF-8 file; arguments and errors as in `read_bounded`."""
    return decode(read_bounded(file, error, limit=limit, fix=fix, missing=missing), error, where=file, fix=fix)


def decode(data: bytes, error: type[KconvError], *, where: Path, fix: str) -> str:
    """Return bytes as text; bytes that are not UTF-8 raise an `error`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise error(f"{where.name} cannot be read as text in UTF-8: {fault.reason}", where=where, fix=fix) from fault


def read_lines(file: Path, error: type[KconvError], *, fix: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a regular UTF-8 file with their numbers from 1, skipping blank ones.

    Only one line is in memory at a time.

    Raises:
        KconvError: of class `error`: it cannot be read, is not UTF-8, or it or one of its lines is too large.
    """
    number = 0
    try:
        with _opened(file, error, error, MAX_LINES, fix) as (held, _):
            while line := held.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise error(f"line {number} is longer than {MAX_LINE:,} bytes", where=f"{file}:{number}", fix=fix)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as fault:
        raise error(f"{file.name} cannot be read as text in UTF-8: {fault.reason}", where=file, fix=fix) from fault
    except (OSError, ValueError) as fault:
        raise error(f"{file.name} cannot be read: {_why(fault)}", where=file, fix=fix) from fault


def no_json(fault: ValueError) -> str:
    """Return why a line is not JSON, without the parser's own count of lines, which is always 1."""
    return f"{fault.msg}: column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else str(fault)


def parse_line(line: str) -> dict[str, Any]:
    """Return the JSON object of a line of a JSONL file.

    Raises:
        ValueError: it holds none; the message is a phrase that says why.
    """
    ends, line = line.endswith("\n"), line.strip()
    value: Json
    try:
        value = parse_json(line)
    except ValueError as fault:
        if line.startswith("[") or line == "{":
            raise ValueError(_NO_JSONL) from fault
        # Only a file's last line has no end; what its parser misses then is the rest, or the end of a string.
        rest = isinstance(fault, json.JSONDecodeError) and (fault.pos >= len(line) or line[fault.pos] == '"')
        cut = "; the file may have been cut off here" if rest and not ends else ""
        raise ValueError(f"it is not JSON: {no_json(fault)}{cut}") from fault
    if not isinstance(value, dict):
        raise ValueError(_NO_JSONL if isinstance(value, list) else "it is not a JSON object")
    return value


_NO_JSONL = "it begins one JSON text of several lines or objects; write each object on a line of its own, without [ ]"


def parse_json(text: str | bytes) -> Any:
    """Return the values of an untrusted JSON text, of any type.

    Raises:
        ValueError: it is not JSON, nested too deeply, has more than `MAX_JSON_VALUES`, or half a surrogate pair.
    """
    refuse_many(text if isinstance(text, bytes) else text.encode(errors="replace"), MAX_JSON_VALUES)
    try:
        value = _loads(text)
        _refuse_halves(text, value)
        return value
    except RecursionError as fault:
        raise ValueError("it is nested too deeply") from fault


def _loads(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON; of a comma before a closing bracket, Python below 3.13 names the bracket."""
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError as fault:
        before, after = fault.doc[: fault.pos].rstrip(), fault.doc[fault.pos :].lstrip()
        if before.endswith(",") and after[:1] in ("}", "]"):
            raise json.JSONDecodeError("a comma too many", fault.doc, len(before) - 1) from fault
        raise


HALF = "it holds half a surrogate pair, which is not valid text"


def _refuse_halves(text: str | bytes, value: Any) -> None:
    """Raise ValueError for half a surrogate pair, smuggled in as an escape: it cannot be encoded."""
    if b"\\u" in text if isinstance(text, bytes) else "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise ValueError(HALF) from fault


def refuse_many(text: bytes, most: int) -> None:
    """Raise ValueError for a JSON text with more values than `most`, before it is parsed."""
    # In a list or an object each value but the first follows a comma, and the first one follows a bracket.
    if len(text) > most and text.count(b",") + text.count(b"[") + text.count(b"{") > most:
        raise ValueError(f"it holds more than {most:,} values")


def _refuse_many_keys(text: bytes) -> None:
    """Raise ValueError for a JSON text with more than `MAX_KEYS` distinct keys: pydantic reports each unknown one."""
    if len(text) < MAX_KEYS * len(b'"":0,'):
        return
    seen: set[bytes] = set()
    for found in STRING.finditer(text):
        if found[2]:
            seen.add(found[1])
        if len(seen) > MAX_KEYS:
            raise ValueError(f"it holds more than {MAX_KEYS:,} different keys")


def _why(fault: Exception) -> object:
    return fault.strerror or fault if isinstance(fault, OSError) else fault


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one untrusted JSON object; the message of a ValueError is a phrase that says what is wrong.

    The standard parser accepts repeated names, NaN, half a surrogate pair and numbers of any length. Engines read these
    differently, or they can be neither printed nor written again.
    """
    refuse_many(text, MAX_JSON_VALUES)
    try:
        value: Json = _loads(
            text.decode(), object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
        _refuse_halves(text, value)
    except RecursionError as fault:
        raise ValueError("it is nested too deeply") from fault
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


@dataclass(frozen=True)
class Wrong:
    """What is wrong with values that do not match a schema; as text, one sentence with its place.

    Attributes:
        place: the keys that lead there.
        what: a sentence; or, if its subject is the key, the rest of it.
        subject: what the sentence calls the key, before its name; None if the key is not its subject.
    """

    place: tuple[str | int, ...]
    what: str
    subject: str | None = None

    def __str__(self) -> str:
        key = ".".join(map(str, self.place))
        if not key:
            return self.what
        return f"{key}: {self.what}" if self.subject is None else f"{self.subject}{key} {self.what}"

    def of(self, whole: str) -> str:
        """Return the sentence that says what is wrong with the whole, e.g. "recipe"."""
        if self.subject is not None:
            return f"the {whole} is wrong: {self}"
        return f"the {whole} is wrong at {'.'.join(map(str, self.place)) or 'its top'}: {self.what}"


class WrongValue(ValueError):
    """Raised by a validator for a part of its value: what is wrong, with the keys that lead there."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong
        super().__init__(wrong.what)


def find_wrong(fault: ValidationError, model: type[BaseModel] | None = None) -> Wrong:
    """Return the first error, with the nearest valid key, or the keys of what should be a mapping."""
    errors = fault.errors()
    # A misspelled key also leaves the right one missing; the typo is what the user must fix.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    place = tuple(first["loc"])
    inner = (first.get("ctx") or {}).get("error")
    if isinstance(inner, WrongValue):
        return replace(inner.wrong, place=(*place, *inner.wrong.place))
    if first["type"] == "extra_forbidden":
        return no_such_key(place, _keys_at(model, place[:-1]))
    wrong = wrong_value(first, place)
    keys = _keys_at(model, place) if WORDS.get(first["type"]) == MAPPING else []
    return replace(wrong, what=f"{wrong.what}; its keys are {', '.join(keys)}") if keys else wrong


def wrong_value(error: Mapping[str, Any], place: tuple[str | int, ...]) -> Wrong:
    """Return one of pydantic's errors in words."""
    return Wrong(place, in_words(error), "the key " if error["type"] == "missing" else None)


def no_such_key(place: tuple[str | int, ...], known: Sequence[str]) -> Wrong:
    """Return that the last key of a place is unknown, with the nearest key or all keys."""
    if str(place[-1]).isdigit():  # YAML's {captured: 1, 3, 5} has three keys
        return Wrong(place, "is a number where a key belongs; write several values in brackets, as in [1, 3, 5]", "")
    near = get_close_matches(str(place[-1]), known, n=1)
    others = f"; did you mean {near[0]}?" if near else f"; the keys are {', '.join(known)}" if known else ""
    return Wrong(place, f"is not a known key{others}", "")


# Plain wording for pydantic's error types; its own messages are about Python.
WHOLE, NUMBER, TRUTH = "it must be a whole number", "it must be a number", "it must be true or false"
LIST, MAPPING = "it must be a list", "it must be a mapping of keys to values"
WORDS = {
    "missing": "is missing",
    "json_invalid": "it is not valid JSON",
    "string_type": "it must be text",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), NUMBER),
    "finite_number": "it must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), TRUTH),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), MAPPING),
    **dict.fromkeys(("literal_error", "enum"), "it must be {expected}"),
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be {le} or less",
    "string_pattern_mismatch": "it must be of the form {pattern}",
    **dict.fromkeys(("too_short", "string_too_short"), "it must have {min_length} or more"),
    **dict.fromkeys(("too_long", "string_too_long"), "it must have {max_length} or fewer"),
}


def in_words(first: Mapping[str, Any]) -> str:
    if first["type"] in ("value_error", "assertion_error"):
        # The prefix that pydantic puts before the message of kconv's own validators.
        return first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    said = WORDS.get(first["type"], "it cannot be").format_map(first.get("ctx") or {})
    value = first.get("input")
    if first["type"] == "string_type" and isinstance(value, int | float):
        return f"{said}, but is {str(value)[:80]} without quotes"
    plain = isinstance(value, (str, int, float, bool, type(None))) and first["type"] != "missing"
    return f"{said}, but is {str(value)[:80]!r}" if plain and value is not None else said


def _keys_at(model: Any, place: Sequence[str | int]) -> list[str]:
    """Return the keys of the model at a place inside another model; none if there is no model."""
    for part in place:
        fields = getattr(model, "model_fields", {})
        info = next((info for name, info in fields.items() if part in (name, info.alias)), None)
        model = info.annotation if info is not None else model
        while not hasattr(model, "model_fields") and get_args(model):
            # `X | None` without None; for a list or a mapping, the type of its values.
            model = [one for one in get_args(model) if one not in (type(None), Ellipsis)][-1]
    return [info.alias or name for name, info in getattr(model, "model_fields", {}).items()]


def _count(values: Any) -> None:
    """Raise ValueError for values that contain themselves or half a surrogate pair, or expand to too many."""
    left, count = [values], 0
    while left:
        value: dict[Any, Any] | list[Any] | tuple[Any, ...] | set[Any] | str | float | None = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            left += value
        elif isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise ValueError(HALF)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} occurs twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"it holds {digits[:MAX_DIGITS]}, which is not a finite number")
    return value
