"""The page of published forms of heads: what kconv shows of each, and what it writes of it for each engine."""

from __future__ import annotations

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

BLOCKS = {title: form for title, form in FORMS.items() if form.layout}
RELATIVES = {title: form for title, form in FORMS.items() if not form.layout}


def published() -> Iterator[str]:
    yield "Forms with the config keys and tensor names that their makers publish: the layout, options that decide"
    yield "what the files leave open, and conversions that kconv refuses, with the reason's number below."
    reasons: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = [_row(title, form, Path(name) / str(i), reasons) for i, (title, form) in enumerate(EAGLE3.items())]
        blocks = [
            _row(title, form, Path(name) / f"block-{i}", reasons) for i, (title, form) in enumerate(BLOCKS.items())
        ]
        others = [
            _other(title, form, Path(name) / f"other-{i}")
            for i, (title, form) in enumerate((OTHERS | RELATIVES).items())
        ]
    yield from ("", "## Eagle3 heads", "")
    yield from (f"- {title}: {', '.join(part for part in parts if part)}" for title, *parts in rows)
    yield from ("", "## DFlash and DSpark drafters", "")
    yield from (f"- {title}: {', '.join(part for part in parts if part)}" for title, *parts in blocks)
    yield from ("", "Why:", "")
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
    refused, numbers = [], []
    for layout in writable():
        try:
            head = decided.sound_head()
            plan(head, layout_for(layout, head.drafter), WriteOptions(target))
        except KconvError as error:
            refused.append(layout)
            numbers.append(reasons.setdefault(error.what, len(reasons) + 1))
    said = " ".join(f"{flag(name)} {_said(value)}" for name, value in form.options.items())
    return (
        link(title, form.source), bare.to_json()["layout"], f"`{said}`" if said else "",
        f"refused: all {next(iter(set(numbers)))}" if len(numbers) == len(writable()) and len(set(numbers)) == 1
        else "refused: " * bool(refused)
        + ", ".join(f"{layout} {number}" for layout, number in zip(refused, numbers, strict=True)),
    )  # fmt: skip


def _said(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)


def _other(title: str, form: Form | Block, folder: Path) -> tuple[str, object]:
    return link(title, form.source), Inspected(read(open_checkpoint(form.write(folder)), hints=Hints())).kind
