"""Write docs/reference/, schemas, what language models read, and parts of docs/engines, docs/validate.md and README.md.

scripts/docs reference            write them
scripts/docs reference --check    exit 1 if any of them is not current
"""

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click
import yaml
from click.testing import CliRunner
from docs_parts import agents
from docs_parts.layouts import layouts
from docs_parts.models import attributes, default_of, schema_files, schemas
from docs_parts.published import published
from docs_parts.support import as_json, in_short, support
from pydantic_core import PydanticUndefined
from support.faults import FAULTS
from support.good_heads import GOOD
from support.target_faults import FAULTS as TARGET_FAULTS

from kconv import errors
from kconv.cli import main as kconv
from kconv.cli.group import operation_commands, sections
from kconv.engines.base import Deployment, Engine
from kconv.engines.registry import engines
from kconv.escape import command, link
from kconv.operations import OPERATIONS, load
from kconv.operations.reading import Reading
from kconv.options import flag
from kconv.quantize.recipe import Recipe, builtin_recipes
from kconv.train.drafter_recipe import DrafterRecipe
from kconv.train.recipe import RECIPES
from kconv.validate.rules.subject import ENGINES
from kconv.validate.rules.table import SUBJECTS, all_rules

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = DOCS.parent / "README.md"
MADE = "<!-- Made by scripts/docs reference; change the code, and run it again. -->"
WIDTH = 80
# Options that so many commands have, in the same words, are listed once.
SHARED = 2
# Options whose name says what they are; their help says the rest.
PLAIN = frozenset(
    "--seed --limit --private --public --split --model --max-tokens --temperature --engine-version --precision"
    " --date --license --concurrency --min-acceptance --dry-run --force --documents --revision --category".split()
)
# The command that stands for those of its kind.
CONVERSION = "to-vllm"
EVERYWHERE = ("--json  Print one JSON object.", "-h, --help  Show this message and exit.")
READ = {name for name in OPERATIONS if issubclass(load(name), Reading)}


def cli() -> Iterator[str]:
    yield "In short; `kconv COMMAND --help` says more, with examples. In brackets: the default. Exit code 0: done and"
    yield "checked; 1: an error or a failed check; 2: usage; 3: undecided (`kconv validate`)."
    yield ""
    yield "Each command but `run`, `serve`, `demo` and `completion` is also a Python function and a recipe's step:"
    yield "`--draft-tokens 3`, `draft_tokens=3`, `draft_tokens: 3`. In Python the arguments come first, and `from` and"
    yield "`for` are `from_` and `for_`. The `to-` commands are one function, `convert(to=LAYOUT)`. In a recipe the"
    yield "output is the step's folder."
    parts = {name: _parts(name) for name in kconv.list_commands(click.Context(kconv))}
    reading = {flag(name, info) for name, info in Reading.model_fields.items()}
    told = [name for name in parts if not name.startswith("to-") or name == CONVERSION]
    own = {
        name: {
            text: given
            for text, given in parts[name][2].items()
            if text not in EVERYWHERE and not (operation_commands().get(name) in READ and text.split()[0] in reading)
        }
        for name in told
    }
    seen = Counter(text for name in told for text in own[name])
    shared = [text for text in seen if seen[text] >= SHARED]
    yield from (
        "",
        "## Shared options",
        "",
        "All commands have `--help` and `--json` ([schemas](schemas.md)). A line *Shared* names others:",
    )
    yield from ("", "```text", *_options(dict.fromkeys(shared, "")), "```")
    yield from ("", "Options for *reading a head*, if its files leave something open:", "", "```text")
    yield from (*(_wrapped(text) for text in parts["inspect"][2] if text.split()[0] in reading), "```")
    for job, names in sections(kconv.list_commands(click.Context(kconv))).items():
        yield from ("", f"## {job}")
        for name in names:
            usage, about, _ = parts[name]
            yield from ("", f"### kconv {name}", "", about)
            if name not in told:
                continue
            lines = _options({text: given for text, given in own[name].items() if text not in shared})
            operands = [usage] if usage != f"kconv {name}" else []
            yield from (["", "```text", *operands, *lines, "```"] if operands or lines else [])
            others = [text.split()[0].rstrip(",") + own[name][text] for text in own[name] if text in shared]
            others += ["reading a head"] if operation_commands().get(name) in READ else []
            yield from (["", f"Shared: {', '.join(others)}."] if others else [])
            yield from (["", "The other `to-` commands take the same."] if name == CONVERSION else [])


def _options(given: dict[str, str]) -> list[str]:
    """Return the lines of options and their defaults; those whose name says what they are stand together."""
    plain = [text.split("  ")[0] + default for text, default in given.items() if text.split()[0] in PLAIN]
    others = [_wrapped(text + default) for text, default in given.items() if text.split()[0] not in PLAIN]
    return [*([_wrapped(", ".join(plain))] if plain else []), *others]


def _parts(name: str) -> tuple[str, str, dict[str, str]]:
    """Return a command's usage, its line in `kconv --help`, and its options: one line each, and its default."""
    # Options from lines that are too long to be folded at a hyphen.
    pages = [
        CliRunner().invoke(kconv, [name, "--help"], prog_name="kconv", terminal_width=width, max_content_width=width)
        for width in (WIDTH, 1000)
    ]
    (head, _, _), (_, _, tail) = (page.stdout.rstrip().partition("\nOptions:\n") for page in pages)
    usage = head.split("\n\n")[0]
    command = kconv.get_command(click.Context(kconv), name)
    about = command.get_short_help_str(WIDTH) if command else ""
    options: dict[str, str] = {}
    for block in re.findall(r"^  -.*(?:\n {6,}.*)*", tail, re.MULTILINE):
        option, text = re.split(r" {2,}|\n +", block.strip(), maxsplit=1)
        said, given = re.fullmatch(r"(.*?)(?: \[([^]]*)\])?", " ".join(text.split())).groups(default="")  # pyright: ignore
        # A bound, like x>=1, is what the error says.
        known = [
            re.sub(r"default: \(?(.*?)\)?$", r"\1", part) for part in given.split("; ") if not re.search(r"x[<>]", part)
        ]
        options[f"{option}  {said}"] = "".join(f" [{part}]" for part in known if part)
    return usage.removeprefix("Usage: ").replace(" [OPTIONS]", ""), about, options


def _wrapped(option: str) -> str:
    return textwrap.fill(option, 110, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)


# Rules of what heads most often lose between trainer and engine.
FIRST = ("K006", "K140", "K143", "K101", "K104", "K108", "K159", "K178", "K204", "K215")


def rules() -> Iterator[str]:
    every = all_rules()
    read = ", ".join(f"{one.title} {one.release}" for one in engines() if one.release)
    yield f"{len(every)} rules ([how they are applied](../validate.md)). In brackets: a warning or note, if no error,"
    yield f"and the engines, if not all: {read}. Links lead to code or a thread that shows the fault."
    yield "`kconv validate --explain RULE` prints what follows from it, and its fix."
    yield from ("", "Ten to know first:", "")
    yield from (f"- [{one} {every[one].name}](#{one.lower()}-{every[one].name})" for one in FIRST)
    groups = {title: {rule.id for rule in own} for title, own in SUBJECTS.items()}
    for title, ids in groups.items():
        yield from ("", f"## {title}")
        for rule in every.values():
            if rule.id in ids:
                yield from ("", f"### {rule.id} {rule.name}", "")
                releases = f" Releases: {rule.versions}." if rule.versions else ""
                kind = [] if rule.severity == "error" else [rule.severity]
                own = _concerned(rule.engines)
                first = rule.sentence.partition(". ")[0].rstrip(".")
                about = ", ".join([*kind, *(one for one in own if one not in first)])
                said = link(first, rule.seen_in) if rule.seen_in.startswith("http") else first
                yield f"{f'({about}) ' if about else ''}{said}.{releases}"


def _concerned(runners: tuple[str, ...]) -> list[str]:
    """Return the titles of engines that a rule is about: none of all of them, a runner where it is about one alone."""
    if set(ENGINES) <= set(runners):
        return []
    titles: list[str] = []
    for one in engines():
        own = [name for name in one.runner_names if name in runners]
        titles += [one.title] if own and len(own) == len(one.runner_names) else own
    return titles


def recipes() -> Iterator[str]:
    yield "For `kconv train` and `kconv quantize`: `--recipe NAME`, or a YAML file with the same keys."
    yield from ("", "## Training")
    folder = files("kconv.train") / "recipes"
    # The first of each family is shown whole, and of others what differs.
    shown: dict[str, tuple[str, str]] = {}
    for entry in _sorted(folder):
        name, text = entry.name.removesuffix(".yaml"), entry.read_text()
        first, whole = shown.setdefault(yaml.safe_load(text).get("drafter", ""), (name, text))
        if first == name:
            yield from _recipe(name, text)
        else:
            yield from _recipe(name, "\n".join(line for line in text.splitlines() if line not in whole.splitlines()))
            yield from ("", f"The rest: as {first}.")
    yield from ("", "### Keys of a training recipe", "")
    yield "Short forms: `decoder` (mla or gqa) is an Eagle3 head's attention with the target's dims; `layers` sets the"
    yield "`captured` of DFlash and DSpark to so many layers, spread as by ModelOpt; `passes` sets `steps`."
    yield from ("A key without a default (in brackets) is required.", "")
    kinds = [cls for kind in RECIPES.values() for cls in reversed(kind.__mro__) if issubclass(cls, DrafterRecipe)]
    for kind in dict.fromkeys(kinds):
        if kind is not DrafterRecipe:
            of = [name for name, one in RECIPES.items() if issubclass(one, kind)]
            yield from ("", f"Those of `drafter: {'` and `'.join(of)}` alone:", "")
        meanings = attributes(kind)
        for field in fields(kind):
            if field.name in kind.__annotations__:
                yield _key(field.name, default_of(field.default), meanings.get(field.name, ""))
    yield from ("", "## Quantization")
    yield ""
    for name, text in builtin_recipes().items():
        about, *keys = (f"{key} {_yaml_value(value)}" for key, value in yaml.safe_load(text).items() if key != "name")
        yield f"- `{name}`: {about.removeprefix('about ')} ({'; '.join(keys)})"
    yield from ("", "### Keys of a quantization recipe", "")
    meanings = attributes(Recipe)
    for name, field in Recipe.model_fields.items():
        yield _key(
            name, default_of(PydanticUndefined if field.is_required() else field.default), meanings.get(name, "")
        )


def _sorted(folder: Traversable) -> list[Traversable]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name)


def _key(name: str, default: str, meaning: str) -> str:
    return f"- `{name}`{'' if default == 'required' else f' ({default})'}: {meaning}"


def _yaml_value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"`{one}`" for one in value)
    return "true" if value is True else str(value)


def _recipe(name: str, text: str) -> list[str]:
    return ["", f"### {name}", "", "```yaml", text.rstrip(), "```"]


def error_pages() -> Iterator[str]:
    yield (
        "Exit code 1, or 2 for `request-invalid`. In Python each is a `kconv.KconvError` with a `code`; "
        "the class has the"
    )
    yield "same name (`NotACheckpoint`). With `--json` a command prints it on stdout too:"
    shown = errors.NotACheckpoint("there is no folder my-head", fix="Give a checkpoint folder; a Hub id is org/name.")
    yield from ("", "```json", json.dumps(shown.as_json(), indent=2), "```", "")
    known = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, errors.KconvError)]
    for x in known:
        if x is not errors.KconvError:
            same = x.__name__ == "".join(part.capitalize() for part in x("").code.split("-"))
            yield f"- `{x('').code}`{'' if same else f' ({x.__name__})'}: {inspect.getdoc(x)}"


PAGES = {
    "cli.md": ("Commands", cli),
    "layouts.md": ("Layouts", layouts),
    "support.md": ("Support", support),
    "heads.md": ("Published heads", published),
    "rules.md": ("Rules", rules),
    "recipes.md": ("Recipes", recipes),
    "schemas.md": ("Schemas", schemas),
    "errors.md": ("Errors", error_pages),
}


def engine_page(engine: Engine) -> str:
    """Return an engine's page with its launch command and its rules put between markers."""
    page = (DOCS / "engines" / f"{engine.name}.md").read_text()
    own = frozenset(engine.runner_names)
    launch = engine.launch
    blocks = {
        "launch": ["```text", command(launch.words(Deployment())), "```"] if launch else [],
        "checks": [
            ", ".join(
                f"[{rule.name}](../reference/rules.md#{rule.id.lower()}-{rule.name})"
                for rule in all_rules().values()
                if own & set(rule.engines) and not set(ENGINES) <= set(rule.engines)
            )
        ],
    }
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        if found:
            page = "\n".join([before + begin, *lines, end]) + rest.partition(end)[2]
    return page


def make() -> dict[Path, str]:
    """Return every page and schema that this script is for, by its path."""
    pages = {
        DOCS / "reference" / name: "\n".join([f"# {title}", "", MADE, "", *lines()]) + "\n"
        for name, (title, lines) in PAGES.items()
    }
    made = {DOCS / name: text for name, text in schema_files().items()} | {DOCS / "support.json": as_json()}
    with_page = [engine for engine in engines() if (DOCS / "engines" / f"{engine.name}.md").exists()]
    made |= {DOCS / "engines" / f"{engine.name}.md": engine_page(engine) for engine in with_page}
    validating = DOCS / "validate.md"
    summary = next(line for line in README.read_text().splitlines()[1:] if line)
    return (
        pages
        | made
        | {
            README: _put(README.read_text(), "support", in_short()),
            agents.SKILL: "\n".join(agents.skill(summary, FIRST)) + "\n",
            agents.INDEX: "\n".join(agents.index(summary)) + "\n",
            validating: _put(validating.read_text(), "rules", in_numbers()),
        }
    )


def in_numbers() -> Iterator[str]:
    """Yield how many rules there are, and on how many heads and targets the tests try them."""
    every = all_rules()
    counts = Counter(rule.severity for rule in every.values())
    yield (
        f"{len(every)} rules: {counts['error']} errors, {counts['undecided']} undecided, {counts['warning']} warnings, "
        f"{counts['note']} notes. The tests try them on {len(FAULTS)} corruptions of good heads, {len(TARGET_FAULTS)} "
        f"corruptions of good NVFP4 targets, and {len(GOOD)} good heads."
    )


def _put(page: str, name: str, lines: Iterator[str]) -> str:
    """Put lines between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"a page has no block {name!r}")
    return "\n".join([before + begin, *lines, end]) + rest.partition(end)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args().check
    made = make()
    stale = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    stale += [file for part in ("reference/*.md", "schemas/*") for file in DOCS.glob(part) if file not in made]
    for file in stale:
        print(f"{file.relative_to(DOCS.parent)} {'is not current' if check else 'written'}")
        if not check and file in made:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(made[file])
        elif not check:
            file.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
