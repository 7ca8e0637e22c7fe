"""Options as the fields of a model: a request's own, and those that it shares with the package that obeys them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from pydantic.fields import FieldInfo

Kind = Literal["plain", "checkpoint", "file", "output", "ids", "list", "json", "settings", "yes-or-no"]


@dataclass(frozen=True)
class Marks:
    """What a field is, beyond its type.

    Attributes:
        kind: "checkpoint" (a folder or a hub id), "file" (a path), "output" (the operation's result); or how words are
            parsed: "ids", "list", "json", "settings", "yes-or-no". Empty for a plain value.
        argument: whether it is given by position, not by name.
        metavar: its placeholder in help.
        words: values that do not name a file, for a field that otherwise names one.
    """

    kind: Kind | None = None
    argument: bool = False
    metavar: str = ""
    words: tuple[str, ...] = ()


def expanded(name: str | os.PathLike[str]) -> str:
    """Return a path with ~ as the home folder: shells leave it in --target=~/head, and recipes and Python have none."""
    return os.fspath(name) if os.path.lexists(name) else os.path.expanduser(name)  # noqa: PTH111


def _path(value: Any) -> Any:
    """Accept a path with any bytes: pydantic's own strings must be UTF-8."""
    if isinstance(value, (str, os.PathLike)):
        if "\0" in str(value):
            raise ValueError("a path cannot contain a zero byte")
        return expanded(value)
    kind = type(value)
    written = "; pass what it was written to, as out= says" if kind.__module__.startswith(f"{__package__}.") else ""
    raise ValueError(f"it must name a file, a folder or a Hub id, but is of type {kind.__name__}{written}")


_NAME = PlainValidator(_path)
Name = Annotated[str, _NAME]


def option(default: Any = ..., help: str = "", *, kind: Kind | None = None, metavar: str = "",
           words: tuple[str, ...] = (), **constraints: Any) -> Any:  # fmt: skip
    """Declare an option: its default, its sentence in help, and pydantic's constraints on its value."""
    marks = Marks(kind, False, metavar, words)
    return Field(default, description=help, json_schema_extra={"marks": marks}, **constraints)  # pyright: ignore


def argument(help: str, *, kind: Kind, metavar: str = "", default: Any = ...) -> Any:
    """Declare an argument, which is given by position."""
    return Field(default, description=help, json_schema_extra={"marks": Marks(kind, True, metavar)})  # pyright: ignore


def marks(info: FieldInfo) -> Marks:
    """Return what a field is."""
    extra = info.json_schema_extra
    found = extra.get("marks") if isinstance(extra, Mapping) else None
    return found if isinstance(found, Marks) else Marks()


def is_path(info: FieldInfo) -> bool:
    """Return whether a field names paths, or what a path may stand for."""
    inner: list[Any] = [info.annotation, *info.metadata]
    while inner:
        one = inner.pop()
        if one is _NAME:
            return True
        inner += [*get_args(one), *getattr(one, "__metadata__", ())]
    return False


def plain_name(name: str) -> str:
    """Return a field's name in a recipe: Python reserves the word `from`, so the field is `from_`."""
    return name.rstrip("_")


def flag(name: str, info: FieldInfo | None = None) -> str:
    """Return a field's name on the command line."""
    no = "no-" if info is not None and info.default is True else ""
    return f"--{no}{plain_name(name).replace('_', '-')}"


def in_recipe(name: str, off: bool) -> str:
    """Return a field's name as a message about a recipe says it."""
    return f"`{plain_name(name)}`"


def in_call(name: str, off: bool) -> str:
    """Return a field's name as a message to a Python caller says it."""
    return f"{name}=False" if off else f"{name}="


# A command up to the end of its clause; settings, one or several; or an option, and the space before a value.
_OPTION = re.compile(
    r"kconv [a-z][a-z-]*(?:[^.;,()]|\.(?! ))*"
    r"|(?P<settings>--set \w+=[\w+-]+(?:[.,][\w+-]+)*(?: --set \w+=[\w+-]+(?:[.,][\w+-]+)*)*)"
    r"|(?P<option>--[a-z][a-z-]*)(?P<space> (?=['\d]))?"
)


def spell(text: str, model: type[BaseModel], spelling: Callable[[str, bool], str], others: Iterable[str] = ()) -> str:
    """Return a message with a request's options in the spelling of whoever made the request.

    Messages name options as the command line does. This is the one place that names them otherwise, for a recipe and
    for Python. A command that a message quotes stays as it is, and so does an option of anything else, e.g. of an
    engine.

    Args:
        text: the message.
        model: the request.
        spelling: `in_recipe` or `in_call`; its second argument says whether the option switches the field off.
        others: names of options that were passed and do not exist.
    """
    known = {flag(name): spelling(name, False) for name in (*others, *model.model_fields)}
    off = {name: info for name, info in model.model_fields.items() if info.default is True}
    known |= {flag(name, info): spelling(name, True) for name, info in off.items()}

    def said(found: re.Match[str]) -> str:
        if found["settings"] and (name := known.get("--set")):
            return _one_mapping(found["settings"], in_python=name.endswith("="))
        name = known.get(found["option"], "")
        return name if name.endswith("=") else f"{name}{found['space'] or ''}" if name else found[0]

    return _OPTION.sub(said, text)


def _one_mapping(settings: str, *, in_python: bool) -> str:
    """Return `--set a=1 --set b=2,3` as a recipe, or Python, states it."""
    pairs = [one.removeprefix("--set ").split("=") for one in settings.split(" --set ")]
    stated = {key: [_plain(part) for part in value.split(",")] for key, value in pairs}
    if in_python:
        return f"set={ {key: several if several[1:] else several[0] for key, several in stated.items()}!r}"
    inner = ", ".join(f"{key}: [{value}]" if "," in value else f"{key}: {value}" for key, value in pairs)
    return f"`set: {{{inner}}}`"


def _plain(value: str) -> int | float | str:
    """Return a setting as Python writes it."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def layer_ids(value: Any) -> Any:
    """Read ascending layer ids, from a list or from words, e.g. "1,29,57"."""
    if value is None:
        return None
    try:
        ids = tuple(int(part) for part in value.split(",")) if isinstance(value, str) else tuple(value)
    except (TypeError, ValueError):
        ids = ()
    if not ids or any(type(i) is not int for i in ids) or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"{value!r} is not an ascending list like 1,29,57")
    return ids


def words(value: Any) -> Any:
    """Read a list of words, from a list or from "A,B"."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


LayerIds = Annotated[tuple[int, ...], BeforeValidator(layer_ids)]
Words = Annotated[tuple[str, ...], BeforeValidator(words)]
Count = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
YES_OR_NO = {"yes": True, "no": False, "true": True, "false": False}


def _yes_or_no(value: object) -> object:
    if isinstance(value, str) and value.lower() not in YES_OR_NO:
        raise ValueError(f"{value!r} is neither yes nor no")
    return YES_OR_NO.get(str(value).lower(), value)


YesOrNo = Annotated[bool, BeforeValidator(_yes_or_no)]


@dataclass(frozen=True)
class Answer:
    """What an option takes that somebody else declares: its type, and its marks."""

    type: Any
    kind: Kind | None = None
    metavar: str = ""

    def option(self, help: str) -> Any:
        """Declare an option that takes it, and may be left out."""
        return option(None, help, kind=self.kind, metavar=self.metavar)


A_FLAG, A_TOKEN = Answer(YesOrNo, "yes-or-no"), Answer(Token, metavar="ID")


def _url(value: object) -> object:
    """Return the root of a server's address, as its clients expect it."""
    if isinstance(value, str):
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} does not begin with http:// or https://; write http://{value}")
        try:
            parts = urlsplit(value)
            # Reading the port checks it. A line break is taken out of an address before it is taken apart.
            valid = bool(parts.hostname) and (parts.port or 1) and value.isprintable() and " " not in value
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"{value!r} is not the address of a server")
        return value.rstrip("/").removesuffix("/v1")
    return value


Url = Annotated[str, BeforeValidator(_url)]
