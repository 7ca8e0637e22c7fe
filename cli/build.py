"""Commands generated from operations: an option for each field, with nothing that the operation does not declare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from click.types import FloatParamType, IntParamType
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..engines import registry
from ..errors import RequestInvalid
from ..operations.base import Operation, command_name, first_wrong, unwrap
from ..options import flag, marks
from .complete import VALUES, complete_value
from .group import AS_JSON, Command, OneOf
from .progress import Terminal

if TYPE_CHECKING:
    from ..rule import Rule


def _explain(context: click.Context, _: click.Parameter, wanted: str | None) -> None:
    if wanted is None or context.resilient_parsing:
        return
    from ..validate.rules.table import all_rules, find_rule, list_rules
    from .show import print_json, show_lines

    wants_all = wanted == "all"
    rules = list(all_rules().values()) if wants_all else [_release_rule(wanted) or find_rule(wanted)]
    if context.meta[AS_JSON]:
        told = [rule.to_json() for rule in rules]
        print_json({"rules": told} if wants_all else told[0])
    else:
        show_lines([list_rules(all_rules())] if wants_all else rules[0].lines())
    context.exit()


def _release_rule(wanted: str) -> Rule[Any] | None:
    """Return a check of kconv card or kconv publish by its id, None if it is none of theirs."""
    from ..cards.publish.gate import release_rules

    return release_rules().get(wanted.upper())


EXPLAIN = click.Option(
    ["--explain"],
    metavar="RULE",
    callback=_explain,
    is_eager=True,
    expose_value=False,
    help="Explain a rule, e.g. K101 or P113, and exit; all lists the K rules.",
    shell_complete=complete_value,
)
# Options of a command in addition to its operation's.
EXTRA: dict[str, tuple[click.Parameter, ...]] = {
    "validate": (
        EXPLAIN,
        click.Option(["-v", "--verbose"], is_flag=True, help="Show the notes too; by default they are only counted."),
    ),
    "card": (EXPLAIN,),
    "publish": (EXPLAIN,),
}
# Fields of these kinds are paths, or names that stand for paths.
PATHS = ("checkpoint", "file", "output")


def make_command(name: str, cls: type[Operation], summary: str, **fixed: Any) -> click.Command:
    """Return the command of an operation.

    Args:
        name: the command's name.
        cls: the operation.
        summary: its summary, one line.
        fixed: fields that the command's name determines.
    """
    fields = {field: info for field, info in _in_order(cls) if field not in fixed}
    params: list[click.Parameter] = [_parameter(field, info) for field, info in fields.items()]
    if cls.PLANS:
        params.append(click.Option(["--dry-run"], is_flag=True, help="Print what would be done; write nothing."))
    params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."))
    params += EXTRA.get(name, ())

    def call(**values: Any) -> None:
        context = click.get_current_context()
        as_json, dry_run = values.pop("as_json"), values.pop("dry_run", False)
        # Of a command's own options, only -v is left: it is for whoever prints the result.
        how = {"verbose": True} if values.pop("verbose", False) else {}
        given = {
            field: values[field]
            for field in fields
            if context.get_parameter_source(field) not in (None, ParameterSource.DEFAULT)
        }
        try:
            _carry_out(_request(cls, fixed | given), as_json=as_json, dry_run=dry_run, **how)
        except RequestInvalid as error:
            raise click.UsageError(f"{error.what}. {error.fix}".rstrip()) from error

    about = {field: info.description or "" for field, info in fields.items() if marks(info).argument}
    return Command(
        name, params=params, callback=call, help=_help(name, cls), short_help=summary, about=about,
        rare=cls.RARE, heading="If HEAD's files leave a fact open",
    )  # fmt: skip


def _described(name: str) -> str:
    """Return the layout that a command writes."""
    return registry.describe(name[3:]) if name.startswith("to-") else ""


def _in_order(cls: type[Operation]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield an operation's fields: its own first, then shared ones."""
    own = [name for name in cls.model_fields if name in vars(cls).get("__annotations__", {})]
    for name in (*own, *(name for name in cls.model_fields if name not in own)):
        yield name, cls.model_fields[name]


def _request(cls: type[Operation], values: dict[str, Any]) -> Operation:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise click.UsageError(first_wrong(cls, error)) from error


def _carry_out(request: Operation, *, as_json: bool, dry_run: bool, **how: bool) -> None:
    from .show import show

    context = Terminal()
    with context.waiting(f"{command_name(type(request))}: loading"):
        result = request.preview(context) if dry_run else request.run(context)
    if dry_run:
        show(result, as_json=as_json)
        return
    show(result, as_json=as_json, **how)
    if code := request.exit_code(result):
        raise SystemExit(code)


def _help(name: str, cls: type[Operation]) -> str:
    lines, text = list(cls.EXAMPLES), inspect.getdoc(cls) or ""
    if name.startswith("to-"):
        lines = [example.replace("to-vllm", name).replace("-vllm", name[2:]) for example in lines]
        described = _described(name)
        text = text.replace("an engine's layout", f"{described}," if ", " in described else described, 1)
        needs = [slot for layout in registry.written_by(name[3:]) for slot in layout.needs]
        if added := " and ".join(dict.fromkeys(needs)):
            text += f"\n\nIf HEAD has no {added}, --target adds its own."
    word = "Examples" if len(lines) > 1 else "Example"
    return text + (f"\n\n\b\n{word}:\n" + "\n".join(map(_example, lines)) if lines else "")


def _example(line: str) -> str:
    """Return an example as lines of at most 80 columns, of which a shell makes one command again."""
    lines, words = [], re.split(r" (?=--)", line)
    while words:
        taken = [words.pop(0)]
        while words and len(" ".join([*taken, words[0]])) <= (72 if lines else 74):
            taken.append(words.pop(0))
        lines.append(" ".join(taken))
    return "  " + " \\\n    ".join(lines)


def _parameter(name: str, info: FieldInfo) -> click.Parameter:
    said = marks(info)
    kind, several = _type(info)
    if said.argument:
        return click.Argument(
            [name], type=kind, required=info.is_required(), nargs=-1 if several else 1,
            metavar=said.metavar or None,
        )  # fmt: skip
    if kind is bool:
        off = info.default is True
        return click.Option(
            [flag(name, info), name], is_flag=True, default=off, flag_value=not off, help=info.description
        )
    default, spelled = info.default, flag(name, info)
    shown = "" if info.is_required() or default in (None, "", (), {}) else str(default)
    return Option(
        [spelled, name],
        type=kind,
        shell_complete=complete_value if spelled in VALUES else None,
        required=info.is_required(),
        multiple=several,
        help=info.description,
        metavar=said.metavar or None,
        show_default=shown or False,
    )


def _type(info: FieldInfo) -> tuple[Any, bool]:
    """Return click's type for a field, and whether the option is repeatable."""
    said = marks(info)
    inner, bounds = unwrap(info.annotation, list(info.metadata))
    if said.kind in ("ids", "list", "json", "yes-or-no"):
        return Words({"ids": "IDS", "list": "LIST", "json": "JSON", "yes-or-no": "yes|no"}[said.kind]), False
    if said.kind == "settings":
        return Words("KEY=VALUE"), True
    several = get_origin(inner) is tuple
    if several:
        inner, bounds = unwrap(get_args(inner)[0], [])
    if inner is bool:
        return bool, False
    if get_origin(inner) is Literal:
        return OneOf([str(value) for value in get_args(inner)]), several
    if inner in (int, float):
        return _range(inner, bounds), several
    return (click.Path() if said.kind in PATHS else Words("TEXT")), several


def _range(number: type, bounds: list[Any]) -> click.ParamType:
    found = {
        name: getattr(bound, name) for bound in bounds for name in ("ge", "gt", "le", "lt") if hasattr(bound, name)
    }
    limits: dict[str, Any] = {
        "min": found.get("ge", found.get("gt")), "max": found.get("le", found.get("lt")),
        "min_open": "gt" in found, "max_open": "lt" in found,
    }  # fmt: skip
    if not found:
        return click.INT if number is int else click.FLOAT
    return Whole(**limits) if number is int else Number(**limits)


class Option(click.Option):
    """An option whose help shows its default without click's parentheses."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        return extra | {"default": str(self.show_default)} if isinstance(self.show_default, str) else extra


class InWords:
    """A range of numbers, in words in help and in errors."""

    number: Any
    min: Any
    max: Any
    min_open: bool
    max_open: bool

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = self.number.convert(self, value, param, ctx)
        enough = self.min is None or found > self.min or (found == self.min and not self.min_open)
        few = self.max is None or found < self.max or (found == self.max and not self.max_open)
        if not (enough and few):
            share = "; it is a share, and 1 % is 0.01" if param and param.metavar == "SHARE" else ""
            raise click.BadParameter(f"{value} is not {self._describe_range()}{share}.", ctx, param)
        return found

    def _describe_range(self) -> str:
        low = "" if self.min is None else f"{'above' if self.min_open else 'at least'} {self.min}"
        high = "" if self.max is None else f"{'below' if self.max_open else 'at most'} {self.max}"
        if not (self.min_open or self.max_open) and low and high:
            return f"{self.min} to {self.max}"
        return " and ".join(filter(None, (low, high)))


class Whole(InWords, click.IntRange):
    """A whole number in a range."""

    name, number = "whole number", IntParamType


class Number(InWords, click.FloatRange):
    """A number in a range."""

    name, number = "number", FloatParamType


class Words(click.ParamType):
    """Text that the operation parses itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value
