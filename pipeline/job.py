"""What a step is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..cards.facts import Facts
from ..cards.publish.floor import Floor
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.source import Folder, Source
from ..convert.captured import Hints
from ..convert.opening import open_head as open_beside
from ..convert.read import Head
from ..engines.layout import Layout
from ..errors import RecipeInvalid
from .kinds import Reading

Say = Callable[[str], None]


@dataclass(frozen=True)
class Output(Folder):
    """An earlier step's output: a folder that records name by `label`, as its path is this machine's own."""

    label: str = ""

    @property
    def name(self) -> str:
        """release/step, which holds wherever the release's folder is put."""
        return self.label

    def open_headers(self) -> Checkpoint:
        """Open the folder; see `open_checkpoint` for its faults."""
        return open_checkpoint(self.path, source=self.label)

    def open_weights(self) -> Checkpoint:
        """Open the folder; see `open_checkpoint` for its faults."""
        return open_checkpoint(self.path, source=self.label)


@dataclass(frozen=True)
class Job:
    """A step that is being carried out.

    Attributes:
        out: the folder to make; nothing is there.
        title: what the release is called.
        inputs: what each of its fields names: a folder, a hub id at a commit, or a file that is none of both.
        words: the values of these fields that name no checkpoint: paths of files, or a library's own names.
        facts: what no file of the head says.
        floor: what the head must reach.
        recipe: the whole recipe's text.
        say: told what is going on.
    """

    out: Path
    title: str
    inputs: Mapping[str, tuple[Source, ...]]
    words: Mapping[str, tuple[str, ...]]
    facts: Facts
    floor: Floor | None
    recipe: str
    say: Say

    def source(self, field: str) -> Source:
        """Return the checkpoint that a field names."""
        return self.inputs[field][0]

    def maybe(self, field: str) -> Source | None:
        """Return the checkpoint that a field names, None where it names none."""
        return self.inputs[field][0] if self.inputs.get(field) else None

    def trusts(self, asked: bool) -> bool:
        """Return what a step says of running the target's own Python, which its tokenizer may need.

        Raises:
            RecipeInvalid: it may be run, and the target is named by no commit.
        """
        target = self.maybe("target")
        if asked and target is not None and not target.pinned:
            raise RecipeInvalid(
                "trust_remote_code runs code of one commit only", where="target", fix=f"Name it: {target.name}"
            )
        return asked

    def word(self, field: str) -> str | None:
        """Return the file, as a path, or the name that a field holds; None where it holds none."""
        return self.words[field][0] if self.words.get(field) else None

    def files(self, field: str) -> list[Path]:
        """Return the files that a field names."""
        return [Path(word) for word in self.words.get(field, ())]


def open_step_head(source: Source, reading: Reading, target: Source | None) -> Head:
    """Open a head with its weights, as a recipe says to read it.

    Raises:
        TargetInvalid: the head reads other hidden states, or another vocabulary, than the target's.
        KconvError: it cannot be read; see `convert.read`.
    """
    return read_step_head(source.open_weights(), reading, target)


def read_step_head(checkpoint: Checkpoint, reading: Reading, target: Source | None) -> Head:
    """Read a head, by its headers alone where the checkpoint is of these; see `open_step_head`."""
    return open_beside(checkpoint, *told(reading), target)


def told(reading: Reading) -> tuple[Layout | None, Hints]:
    """Return the layout that a recipe names, None to go by a head's marks, and what it says where a config is silent.

    Raises:
        UnknownLayout: there is no such layout.
    """
    from ..engines import by_name

    return by_name(reading.layout) if reading.layout else None, Hints(
        reading.captured,
        reading.captured_are,
        max_positions=reading.max_positions,
        norm_before_residual=reading.norm_before_residual,
    )
