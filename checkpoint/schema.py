"""The one place where small files are read: JSON, YAML and text, read as if they lied.

A file has to be a regular one, as a pipe would wait for ever and a device never end; it is bounded in size, depth and
number of values, as 99 MB of empty lists are 4 GB once they are parsed; and every failure has the name that the caller
gives. `tests/checkpoint/test_one_reader.py` holds that nothing reads around it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ..errors import KconvError

if TYPE_CHECKING:
    # Imported where they are used: to read a safetensors header takes neither.
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

# Digits of the largest 64-bit count, and a sign.
MAX_DIGITS = 21
# A manifest of a target of a trillion parameters has half a million tensors, and takes some hundred MB.
MAX_JSON = 512 << 20
# Values of one JSON text, each of which takes some hundred bytes: of a header of 306,855 tensors they are 2.5 million,
# of such a manifest 8 million.
MAX_JSON_VALUES, MAX_RECORDS_VALUES = 3_000_000, 10_000_000
# More names than a target of a trillion parameters has tensors; pydantic takes 2 KB for each that a schema lacks.
MAX_KEYS, KEY = 300_000, re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
# A YAML file is written by hand.
MAX_YAML, MAX_DEPTH, MAX_VALUES = 4 << 20, 64, 200_000
# A text for people: a card, a license, a notice, a launch file.
MAX_TEXT = 8 << 20
# A file of lines, and one of its lines: a conversation of some million tokens.
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
        model: the schema.
        file: the file; a link to a regular file is followed.
        error: the class of the error to raise.
        what: what the file should be, for the message, e.g. "calibration of kconv's".
        fix: what the user should do about a file that is none.
        missing: the error to raise where there is no such file; one of `error` if None.

    Raises:
        KconvError: of class `error`: the file cannot be read, is too large or no regular file, or is not of the schema.
    """
    from pydantic import ValidationError

    text = read_bounded(file, error, limit=MAX_JSON, fix=fix, missing=missing)
    try:
        refuse_many(text, MAX_RECORDS_VALUES)
        _refuse_many_keys(text)
        return model.model_validate_json(text)
    except ValidationError as fault:
        raise error(f"{file.name} is not a valid {what}: {first_wrong(fault)}", where=file, fix=fix) from fault
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
    """Read a YAML file by a schema; an empty file has no keys. Arguments and errors as of `load_json`."""
    text = read_bounded(file, error, limit=MAX_YAML, fix=fix, missing=missing)
    values = parse_yaml(text, error, where=file, what=what, fix=fix)
    return check_values(model, values, error, where=file, what=what, fix=fix)


def check_values(
    model: type[Model], values: Any, error: type[KconvError], *, where: object, what: str, fix: str
) -> Model:
    """Return plain values as a model; None has no keys.

    Raises:
        KconvError: of class `error`: they are not of the schema.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate({} if values is None else values)
    except ValidationError as fault:
        at = first_wrong(fault) if fault.errors()[0]["loc"] else f"its top: {first_wrong(fault)}"
        raise error(f"the {what} is wrong at {at}", where=where, fix=fix) from fault


def parse_yaml(text: str | bytes, error: type[KconvError], *, where: object, what: str, fix: str) -> Any:
    """Return the values of a YAML text; None of an empty one.

    Args:
        text: the text; bytes in UTF-8 or UTF-16.
        error: the class of the error to raise.
        where: the file, for the message.
        what: what the text should be, for the message, e.g. "recipe".
        fix: what the user should do about a text that is none.

    Raises:
        KconvError: of class `error`: it is no YAML, nested too deeply, or larger than its text by its aliases.
    """
    import yaml

    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError("it is nested too deeply")
        values = yaml.safe_load(text)
        _count(values)
        return values
    except Exception as fault:  # PyYAML's constructors let through whatever Python raises: !!int "" an IndexError
        mark, problem = getattr(fault, "problem_mark", None), getattr(fault, "problem", None)
        why = f"line {mark.line + 1}: {problem}" if mark and problem else " ".join(str(fault).split())
        raise error(f"the {what} is not valid YAML: {why or type(fault).__name__}", where=where, fix=fix) from fault


def read_bounded(
    file: Path,
    error: type[KconvError],
    *,
    limit: int,
    fix: str,
    missing: KconvError | None = None,
    large: type[KconvError] | None = None,
) -> bytes:
    """Return the bytes of a regular file, of which there are at most `limit`.

    Args:
        file: the file; a link to a regular file is followed.
        error: the class of the error to raise.
        limit: bytes.
        fix: what the user should do about a file that cannot be read.
        missing: the error to raise where there is no such file; one of `error` if None.
        large: the class of the error to raise where there are more bytes; `error` if None.

    Raises:
        KconvError: `missing`, or one of class `error` or `large`.
    """
    try:
        with _opened(file, error, large or error, limit, fix) as (held, size):
            # Not `limit`: Python makes room for as much as is asked for.
            return held.read(size)
    except (OSError, ValueError) as fault:  # ValueError: a name with a NUL in it
        if missing is not None and isinstance(fault, FileNotFoundError):
            raise missing from fault
        raise error(f"{file.name} cannot be read: {_why(fault)}", where=file, fix=fix) from fault


@contextmanager
def _opened(
    file: Path, error: type[KconvError], large: type[KconvError], limit: int, fix: str
) -> Iterator[tuple[BinaryIO, int]]:
    """Hold a regular file open, and give it with its size."""
    # Without waiting, as the other end of a pipe may never come; and looked at once it is held, as what stands at the
    # name may be another file by then.
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
    """Return the text of a regular file in UTF-8; arguments and errors as of `read_bounded`."""
    return decode(read_bounded(file, error, limit=limit, fix=fix, missing=missing), error, where=file, fix=fix)


def decode(data: bytes, error: type[KconvError], *, where: Path, fix: str) -> str:
    """Return bytes as text.

    Raises:
        KconvError: of class `error`: they are no UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise error(f"{where.name} cannot be read as text in UTF-8: {fault.reason}", where=where, fix=fix) from fault


def read_lines(file: Path, error: type[KconvError], *, fix: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a regular file in UTF-8 with their numbers from 1 on, blank ones left out.

    One line is in memory at a time.

    Raises:
        KconvError: of class `error`: it cannot be read, is no UTF-8, or it or a line of it is too large.
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


def parse_json(text: str | bytes) -> Any:
    """Return the values of a JSON text of a stranger's, of any type.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds more than `MAX_JSON_VALUES`.
    """
    refuse_many(text if isinstance(text, bytes) else text.encode(errors="replace"), MAX_JSON_VALUES)
    try:
        return json.loads(text)
    except RecursionError as fault:
        raise ValueError("it is nested too deeply") from fault


def refuse_many(text: bytes, most: int) -> None:
    """Raise ValueError for a JSON text that holds more values than `most`, before it is parsed."""
    # Each value but the first of a list or an object has a comma before it, and the first one a bracket.
    if len(text) > most and text.count(b",") + text.count(b"[") + text.count(b"{") > most:
        raise ValueError(f"it holds more than {most:,} values")


def _refuse_many_keys(text: bytes) -> None:
    """Raise ValueError for a JSON text of more distinct keys than `MAX_KEYS`: pydantic describes each unknown one."""
    if len(text) < MAX_KEYS * len(b'"":0,'):
        return
    seen: set[bytes] = set()
    for key in KEY.finditer(text):
        seen.add(key[1])
        if len(seen) > MAX_KEYS:
            raise ValueError(f"it holds more than {MAX_KEYS:,} different keys")


def _why(fault: Exception) -> object:
    return fault.strerror or fault if isinstance(fault, OSError) else fault


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one JSON object as strangers send it.

    The standard parser takes a name that stands twice, NaN, half a surrogate pair and numbers of any length; each of
    these is read differently by different engines, or can be neither printed nor written again.

    Raises:
        ValueError: it is something else; the message is a phrase that says what.
    """
    refuse_many(text, MAX_JSON_VALUES)
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
        if b"\\u" in text:
            # Half a surrogate pair, smuggled in as an escape, has no bytes.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as fault:
        raise ValueError("it is nested too deeply") from fault
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def first_wrong(fault: ValidationError, known: Iterable[str] = ()) -> str:
    """Return the first thing that is wrong and its place, e.g. "draft_tokens is missing".

    Args:
        fault: what pydantic found. An unknown key comes first, as it may be a missing one with a typo.
        known: keys of the outermost object, for a suggestion.
    """
    errors = fault.errors()
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "extra_forbidden":
        *above, own = map(str, first["loc"])
        missing = [str(one["loc"][-1]) for one in errors if one["type"] == "missing"]
        close = get_close_matches(own, [*missing, *([] if above else known)], n=1)
        return f"{place} is not a known key" + (f"; did you mean {close[0]}?" if close else "")
    # What pydantic puts before the words of a validator of kconv's.
    what = "it must be a mapping of keys to values" if first["type"] in MAPPINGS else first["msg"]
    what = what.removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


# How pydantic calls what should be a mapping.
MAPPINGS = ("model_type", "dict_type", "dataclass_type", "model_attributes_type")


def _count(values: Any) -> None:
    """Raise ValueError for values that are many once every alias stands for a copy, or that hold themselves."""
    left, count = [values], 0
    while left:
        value = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            left += value


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
