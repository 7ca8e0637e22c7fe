"""The page of published forms of heads: what kconv shows of each, and what it writes of it for each engine."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.block_drafters import FORMS
from support.block_drafters import Form as Block
from support.published import EAGLE3, OTHERS, Form

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read
from kconv.convert.shared import SharedTensors
from kconv.engines.registry import layout_for, writable
from kconv.errors import KconvError
from kconv.escape import link
from kconv.operations.inspect import Inspected
from kconv.operations.reading import Reading
from kconv.options import flag
from kconv.validate.markdown import table

HUB = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)")
BLOCKS = {title: form for title, form in FORMS.items() if form.layout}
RELATIVES = {title: form for title, form in FORMS.items() if not form.layout}


def published() -> Iterator[str]:
    yield "Forms with the config keys and tensor names that their makers publish, and what kconv writes of each: yes,"
    yield "or the [number](#why-not) of the reason why not. The command has the options that decide what the files"
    yield "leave open; `HEAD` is a head of this form. Instead of `--target-layers` you can give the target:"
    yield "`--target org/target`."
    reasons: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        heads = [_row(title, form, folder / f"{i}", reasons) for i, (title, form) in enumerate(EAGLE3.items())]
        blocks = [_row(title, form, folder / f"block-{i}", reasons) for i, (title, form) in enumerate(BLOCKS.items())]
        others = [
            _other(title, form, folder / f"other-{i}") for i, (title, form) in enumerate((OTHERS | RELATIVES).items())
        ]
    columns = ("form", "layout", *writable(), "command")
    yield from ("", "## Eagle3 heads", "", *table(columns, heads))
    yield from ("", "## DFlash and DSpark drafters", "", *table(columns, blocks))
    yield from ("", "## Why not", "")
    yield from (f"{number}. {reason}." for reason, number in reasons.items())
    yield from ("", "## Other drafts and checkpoints", "")
    yield from ("`kconv inspect` names them and says what serves them; no command converts them.", "")
    together: dict[object, list[str]] = {}
    for title, kind in others:
        together.setdefault(kind, []).append(title)
    yield from (f"- {kind}: {', '.join(titles)}" for kind, titles in together.items())


def _row(title: str, form: Form | Block, folder: Path, reasons: dict[str, int]) -> tuple[object, ...]:
    options = Reading.model_validate(dict(form.options))
    target = SharedTensors("target", {}, headers_only=True, layers=form.target_layers, model_type=form.model_type)
    checkpoint = open_checkpoint(form.write(folder))
    bare = Inspected(read(checkpoint, hints=Hints()))
    decided = read(checkpoint, hints=options.hints())
    cells = {}
    for layout in writable():
        try:
            head = decided.sound_head()
            plan(head, layout_for(layout, head.drafter), WriteOptions(target))
            cells[layout] = "yes"
        except KconvError as error:
            cells[layout] = f"no, {reasons.setdefault(error.what, len(reasons) + 1)}"
    head = found[1] if (found := HUB.match(form.source)) else "HEAD"
    said = " ".join(f"{flag(name)} {_said(value)}" for name, value in form.options.items())
    written = next((layout for layout, known in cells.items() if known == "yes"), None)
    command = f"`kconv to-{written} {head} OUT{f' {said}' * bool(said)}`" if written else "–"
    return link(title, form.source), bare.to_json()["layout"], *cells.values(), command


def _said(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)


def _other(title: str, form: Form | Block, folder: Path) -> tuple[str, object]:
    return link(title, form.source), Inspected(read(open_checkpoint(form.write(folder)), hints=Hints())).kind
