"""JSON and YAML files, read as if they lied: bounded in size and depth, and every failure named."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import KconvError

if TYPE_CHECKING:
    # Imported where they are used: to read a safetensors header takes neither.
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

# Digits of the largest 64-bit count, and a sign.
MAX_DIGITS = 21
# A manifest of a target of a trillion parameters has half a million tensors, and takes some hundred MB.
MAX_JSON = 1 << 30
# A YAML file is written by hand.
MAX_YAML, MAX_DEPTH, MAX_VALUES = 4 << 20, 64, 200_000


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
        return model.model_validate_json(text)
    except ValidationError as fault:
        raise error(f"{file.name} is no {what}: {first_wrong(fault)}", where=file, fix=fix) from fault


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
        why = " ".join(str(fault).split()) or type(fault).__name__
        raise error(f"the {what} is no YAML that can be read: {why}", where=where, fix=fix) from fault


def read_bounded(
    file: Path, error: type[KconvError], *, limit: int, fix: str, missing: KconvError | None = None
) -> bytes:
    """Return the bytes of a regular file, of which there are at most `limit`.

    Raises:
        KconvError: `missing`, or one of class `error`.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{file.name} is no regular file", where=file, fix=fix)
        if found.st_size > limit:
            raise error(f"{file.name} is {found.st_size:,} bytes, more than {limit:,}", where=file, fix=fix)
        with file.open("rb") as held:
            # Not `limit`: Python makes room for as much as is asked for.
            return held.read(found.st_size)
    except (OSError, ValueError) as fault:  # ValueError: a name with a NUL in it
        if missing is not None and isinstance(fault, FileNotFoundError):
            raise missing from fault
        why = fault.strerror if isinstance(fault, OSError) else fault
        raise error(f"{file.name} cannot be read: {why}", where=file, fix=fix) from fault


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one JSON object as strangers send it.

    The standard parser takes a name that stands twice, NaN, half a surrogate pair and numbers of any length; each of
    these is read differently by different engines, or can be neither printed nor written again.

    Raises:
        ValueError: it is something else; the message is a phrase that says what.
    """
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


def first_wrong(fault: ValidationError) -> str:
    """Return the first thing that is wrong and its place, e.g. "draft_tokens: Field required"."""
    first = fault.errors()[0]
    place = ".".join(map(str, first["loc"]))
    # What pydantic puts before the words of a validator of kconv's.
    what = first["msg"].removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


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
        raise ValueError(f"{twice!r} stands twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"it holds {digits[:MAX_DIGITS]}, which is no finite number")
    return value
