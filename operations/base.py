"""What an operation is: one typed request whose fields are its options, and the context that it runs in.

Command-line options, recipe steps, the Python functions and the reference pages are generated from these models.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from ..checkpoint.schema import in_words
from ..errors import KconvError, MissingExtra, RequestInvalid, StepFailed
from ..installed import install_command
from ..lines import Result
from ..options import Marks, flag, in_call, marks, plain_name, spell
from ..strict import StrictModel

if TYPE_CHECKING:
    from ..cards.facts import Facts
    from ..checkpoint.source import Source


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of an operation.

    Attributes:
        bytes: that it writes; None if unknown before an input exists.
        plan: what it would do, if that is more than a number.
    """

    bytes: int | None = 0
    plan: Result | None = None


@dataclass(frozen=True)
class ReleaseFacts:
    """The release to which a step's operation belongs.

    Attributes:
        title: the release's title.
        facts: facts that no file of the head states.
        text: the recipe.
    """

    title: str
    facts: Facts
    text: str


@dataclass
class Context:
    """The context of an operation: it resolves names and shows progress. This one is silent.

    Attributes:
        release: the release to which the operation belongs; None if it is called on its own.
    """

    release: ReleaseFacts | None = None
    _sources: dict[str, Source] = field(default_factory=dict)

    def source(self, name: str) -> Source:
        """Return the checkpoint for a name; a hub id stays at one commit for as long as this context lives."""
        if name not in self._sources:
            from ..checkpoint.source import resolve

            self._sources[name] = resolve(name)
        return self._sources[name]

    def maybe(self, name: str | None) -> Source | None:
        """Return the checkpoint for a name; None without a name."""
        return None if name is None else self.source(name)

    def path(self, name: str) -> Path:
        """Return the file or folder for a name."""
        return Path(name)

    def log(self, text: str) -> None:
        """Print a message."""

    def status(self, title: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show a task; the yielded function updates its message."""
        return nullcontext(lambda text: None)

    def bytes(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show a task's progress in bytes; the yielded function adds to it."""
        return nullcontext(lambda count: None)

    def steps(self, title: str) -> AbstractContextManager[Callable[[int, int, float], None]]:
        """Show a task's progress in steps; the yielded function takes steps done, steps in total, and the loss."""
        return nullcontext(lambda done, total, loss: None)


class Operation(StrictModel):
    """A request: its fields are the operation's options.

    Attributes:
        EXAMPLES: command lines.
        OUTPUT: if the output is a file, its name inside a step of a recipe; empty for a folder.
        HEAVY: whether it needs more than a hosted CI machine has.
        RESUMES: whether it resumes after a kill.
        PLANS: whether `preview` shows what it would do, for --dry-run.
        OF_RELEASE: whether its result depends on the facts of the release.
        RARE: the options that help shows last, since few files need them.
    """

    model_config = ConfigDict(alias_generator=plain_name, populate_by_name=True)

    EXAMPLES: ClassVar[tuple[str, ...]] = ()
    OUTPUT: ClassVar[str] = ""
    HEAVY: ClassVar[bool] = False
    RESUMES: ClassVar[bool] = False
    PLANS: ClassVar[bool] = False
    OF_RELEASE: ClassVar[bool] = False
    RARE: ClassVar[frozenset[str]] = frozenset()

    def run(self, context: Context) -> Any:
        """Run the operation.

        Raises:
            KconvError: it fails; see the operation.
        """
        raise NotImplementedError

    def precheck(self, context: Context) -> None:
        """Refuse invalid names and settings before anything is computed; missing files are accepted.

        Raises:
            KconvError: see the operation.
        """

    def estimate(self, context: Context) -> Estimate:
        """Return what it would cost; writes nothing and downloads no weights."""
        return Estimate()

    def preview(self, context: Context) -> Any:
        """Return what it would do; writes nothing."""
        return self.estimate(context).plan

    def passed(self, result: Any) -> bool:
        """Return whether a result means exit code 0; a result with findings may not."""
        return True

    def exit_code(self, result: Any) -> int:
        """Return the exit code that a result means."""
        return 0 if self.passed(result) else 1

    def failure(self, result: Any) -> KconvError:
        """Return the error of a result that does not pass, if another step depends on it."""
        return StepFailed(f"{command_name(type(self))} found errors", fix="Fix the errors above.")

    def given(self, *names: str) -> list[str]:
        """Return which of the named options the request sets, in the form of the command line."""
        fields = type(self).model_fields
        return [flag(name, fields[name]) for name in names if name in self.model_fields_set]

    def refuse(self, *names: str, unless: str) -> None:
        """Refuse options that would have no effect.

        Raises:
            ValueError: the request sets one of them.
        """
        if idle := self.given(*names):
            raise ValueError(f"{', '.join(idle)}: only {unless}")

    @classmethod
    def inputs(cls) -> Iterator[tuple[str, Marks]]:
        """Yield the fields that name a checkpoint or a file."""
        for name, info in cls.model_fields.items():
            if (found := marks(info)).kind in ("checkpoint", "file"):
                yield name, found

    def located(self, context: Context) -> Self:
        """Return the request with its files' paths; a recipe may name one by the step that makes it."""

        def locate(value: Any) -> Any:
            return tuple(map(locate, value)) if isinstance(value, tuple) else str(context.path(value))

        files = {name: getattr(self, name) for name, found in self.inputs() if found.kind == "file"}
        return self.model_copy(update={name: locate(value) for name, value in files.items() if value})

    @classmethod
    def output(cls) -> str | None:
        """Return the field that names the operation's output; None if it has none."""
        return next((name for name, info in cls.model_fields.items() if marks(info).kind == "output"), None)

    @classmethod
    def request(cls, *args: Any, **options: Any) -> Self:
        """Build a request as a Python call does: arguments by position, options by name.

        Raises:
            RequestInvalid: an option does not exist, has a wrong value, or conflicts with another one.
            TypeError: there are more arguments than the operation takes.
        """
        places = [name for name, info in cls.model_fields.items() if marks(info).argument]
        if len(args) > len(places):
            by_place = f"takes {len(places)} by position ({', '.join(places)}), but {len(args)} were given"
            raise TypeError(f"kconv.{_python_name(cls)} {by_place}; name the others, as in NAME=VALUE")
        return cls.checked(dict(zip(places, args, strict=False)) | options, f"help(kconv.{_python_name(cls)})")

    @classmethod
    def checked(cls, values: Mapping[str, Any], see: str = "") -> Self:
        """Build a request from plain values; `see` names the help about it, by default the command's.

        Raises:
            RequestInvalid: see `request`.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            fix = f"See {see or f'kconv {command_name(cls)} --help'}."
            raise RequestInvalid(first_wrong(cls, error), fix=fix) from None

    @classmethod
    @contextmanager
    def spelled(cls, spelling: Callable[[str, bool], str], others: Iterable[str] = ()) -> Iterator[None]:
        """Name this operation's options in an error as whoever made the request does; see `options.spell`."""
        try:
            yield
        except KconvError as fault:
            fault.what, fault.fix = (spell(text, cls, spelling, others) for text in (fault.what, fault.fix))
            fault.args = (fault.what,)
            raise


def command_name(cls: type[Operation]) -> str:
    """Return an operation's name on the command line, e.g. "quantize-head"."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("-")


def _python_name(cls: type[Operation]) -> str:
    return command_name(cls).replace("-", "_")


def first_wrong(cls: type[Operation], error: ValidationError) -> str:
    """Return the first error in a request, with the option's name on the command line."""
    found = error.errors()[0]
    message = in_words(found)
    if found["type"] == "extra_forbidden":
        name = str(found["loc"][0])
        if "set" in cls.model_fields:
            from ..train.recipe import find_key

            if key := find_key(name):
                return f"there is no option {flag(name)}; did you mean {key}, a key of {flag('set')}?"
        close = get_close_matches(name, map(plain_name, cls.model_fields), n=1)
        return f"there is no option {flag(name)}" + (f"; did you mean {close[0]}?" if close else "")
    if not found["loc"]:
        return message
    name = str(found["loc"][0])
    info = next((info for own, info in cls.model_fields.items() if plain_name(own) == plain_name(name)), None)
    shown = name.upper() if info is not None and marks(info).argument else flag(name, info)
    return f"{shown} is required" if found["type"] == "missing" else f"invalid value for {shown}: {message}"


@contextmanager
def extras() -> Iterator[None]:
    """Turn a missing package that belongs to one of kconv's extras into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error


def missing_extra(error: ModuleNotFoundError) -> MissingExtra:
    """Return the error for a missing package of one of kconv's extras; any other missing module is a bug and raised."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    fix = f"Run {install_command(EXTRAS[package])}"
    # What needs torch may need more.
    more = f", or {install_command('optimize')} to train or to run a target" if package == "torch" else ""
    return MissingExtra(f"{package} is not installed", fix=f"{fix}{more}.")


# Packages that only some operations need, and the extra that installs each.
EXTRAS = {
    "torch": "torch",
    **dict.fromkeys(("modelopt", "transformers", "accelerate", "datasets", "psutil", "requests"), "optimize"),
    "matplotlib": "plots",
}


def unwrap(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Return the type inside `X | None` and `Annotated[X, ...]`, and its annotations."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *beside = get_args(annotation)
            for one in beside:
                metadata += one.metadata if isinstance(one, FieldInfo) else [one]
        elif get_origin(annotation) in (Union, UnionType):
            (annotation,) = (one for one in get_args(annotation) if one is not type(None))
        else:
            return annotation, metadata


def parameter_type(info: FieldInfo) -> str:
    """Return what a Python caller may pass for a field, as an annotation of `kconv/__init__.pyi`."""
    inner, metadata = unwrap(info.annotation, list(info.metadata))
    several = get_origin(inner) is tuple
    one = unwrap(get_args(inner)[0], metadata)[0] if several else inner
    if one is str and marks(info).kind in ("checkpoint", "file", "output"):
        found = "_Path"
    elif get_origin(one) is Literal:
        found = f"Literal[{', '.join(map(repr, get_args(one)))}]"
    elif get_origin(one) is dict:
        found = "Mapping[str, Any]"
    else:
        found = one.__name__
    if several:
        found = f"Sequence[{found}]"
        if any(isinstance(beside, BeforeValidator) for beside in metadata):
            found += " | int | str" if marks(info).kind == "list" and one is int else " | str"
    return found if info.is_required() or info.default is not None else f"{found} | None"


def in_python(cls: type[Operation]) -> list[tuple[str, FieldInfo]]:
    """Return an operation's fields as a Python call takes them: arguments, the request's own options, shared ones."""
    models = [base for base in cls.__mro__ if issubclass(base, StrictModel) and not issubclass(base, Operation)]
    shared = {name for model in models for name in model.model_fields}
    return sorted(cls.model_fields.items(), key=lambda field: (not marks(field[1]).argument, field[0] in shared))


def describe(cls: type[Operation]) -> str:
    """Return an operation's docstring for Python: what it does, and a line for each option."""
    # A switch's sentence in the command's help says what its --no-form does.
    lines = (f"    {name}: {'False: ' * (info.default is True)}{info.description}" for name, info in in_python(cls))
    return "\n".join([f"{inspect.getdoc(cls)}\n\nArgs:", *lines])


class _Shown(str):
    """An annotation that `help` shows without quotes."""

    __repr__ = str.__str__


def function(cls: type[Operation], name: str) -> Callable[..., Any]:
    """Return an operation as a Python function; see `Operation.request` for its arguments."""

    def call(*args: Any, **options: Any) -> Any:
        with cls.spelled(in_call, options), extras():
            return cls.request(*args, **options).run(Context())

    required, keyword = [], []
    for field_name, info in in_python(cls):
        default = inspect.Parameter.empty if info.is_required() else info.get_default(call_default_factory=True)
        by_place = marks(info).argument
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if by_place else inspect.Parameter.KEYWORD_ONLY
        (required if by_place else keyword).append(
            inspect.Parameter(field_name, kind, default=default, annotation=_Shown(parameter_type(info)))
        )
    call.__name__ = call.__qualname__ = name
    call.__module__ = "kconv"
    call.__doc__ = describe(cls)
    returns = _Shown(inspect.signature(cls.run).return_annotation)
    signature = inspect.Signature([*required, *keyword], return_annotation=returns)
    call.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return call


def quiet_stdout() -> AbstractContextManager[Any]:
    """Send what libraries print to stderr: stdout is for results."""
    from contextlib import redirect_stdout

    return redirect_stdout(sys.stderr)
