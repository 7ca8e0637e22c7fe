"""What a language model reads: docs/llms.txt, an index of the pages, and examples/skill, made from the operations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from kconv.cli import main as kconv
from kconv.cli.group import operation_commands
from kconv.operations import load
from kconv.validate.rules.table import all_rules

ROOT = Path(__file__).resolve().parents[2]
DOCS, SKILL, INDEX = ROOT / "docs", ROOT / "examples" / "skill" / "kconv" / "SKILL.md", ROOT / "docs" / "llms.txt"
HEAD = """\
---
name: kconv
description: {summary} Use it when a draft head has to be inspected, converted between engines, checked, served,
  measured, trained or released, or when speculative decoding accepts about one token per step.
---

# kconv

{summary}

## Rules of use

- Start with `kconv inspect HEAD`. It reads no weights. HEAD is a folder or a Hub id, `org/name[@revision]`.
- Ask the engine's verdict before serving: `kconv validate HEAD --for vllm --target TARGET`. PASS, FAIL or UNDECIDED.
- UNDECIDED: a fact is not in the files. Add the option that the line names. Never guess a captured layer.
- Convert with `to-vllm`, `to-sglang` or `to-trtllm`, never by editing config.json or tensor names. Then run the command
  after `next:`.
- Every command takes `--json` and prints one object, also for an error: `error.what`, `error.where`, `error.fix`. Do
  what `fix` says.
- Exit code 0: done and checked; 1: an error or a failed check; 2: wrong usage; 3: undecided.
- An output folder must not exist; kconv writes all of it or nothing. `kconv verify OUT` checks every byte.
- `kconv validate --explain RULE` explains a rule, `kconv COMMAND --help` a command.
"""


def skill(summary: str, first_rules: tuple[str, ...]) -> Iterator[str]:
    """Yield the skill: how to use kconv, the commands with an example each, and the rules that bite first."""
    yield HEAD.format(summary=summary)
    yield from ("## Commands", "")
    operations = operation_commands()
    for name in kconv.list_commands(click.Context(kconv)):
        command = kconv.get_command(click.Context(kconv), name)
        example = next(iter(load(operations[name]).EXAMPLES), "") if name in operations else ""
        about = command.get_short_help_str(120) if command else ""
        yield f"- `kconv {name}`: {about}" + (f" E.g. `{example}`" if example.startswith(f"kconv {name} ") else "")
    yield from ("", "## What heads most often lose", "")
    every = all_rules()
    yield from (f"- {one}: {every[one].sentence}" for one in first_rules)


def index(summary: str) -> Iterator[str]:
    """Yield the pages, in the order of the site, each with its first sentence."""
    yield from ("# kconv", "", f"> {summary}")
    nav: list[Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    alone = [entry for entry in nav if isinstance(next(iter(entry.values())), str)]
    sections: list[tuple[str, list[Any]]] = [("Start", alone)]
    sections += [item for entry in nav if entry not in alone for item in entry.items()]
    for title, pages in sections:
        yield from ("", f"## {title}", "")
        for page in pages:
            ((name, file),) = page.items()
            yield f"- [{name}]({file}): {_first_sentence((DOCS / file).read_text())}"


def _first_sentence(page: str) -> str:
    text = re.sub(r"<!--.*?-->|```.*?```|<[^>]*>", "", page, flags=re.DOTALL)
    paragraphs = (" ".join(one.split()) for one in text.split("\n\n"))
    first = next(one for one in paragraphs if len(one) > 20 and not one.startswith(("#", "|", "!", "-")))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first)
    return re.split(r"(?<=\.)\s", plain)[0]
