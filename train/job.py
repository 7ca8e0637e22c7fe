"""What to train, on what."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.bytes import file_digest
from ..convert.read import Head, read_slot
from ..head.vocab import Coverage, measure_coverage, target_ids
from ..targets.config import read_target_config
from .feed import States
from .recipe import EagleRecipe
from .windows import map_draft_vocab

# Raise it with each change to train/ that alters what a recipe makes.
SOURCE = "2"
LIBRARIES = ("torch", "transformers", "accelerate", "nvidia-modelopt")


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Job:
    """What to train, on what.

    Attributes:
        target: the target's folder; its ends are loaded, its layers only by `states`.
        recipe: how.
        text, unseen: what is trained on, and what is only looked at.
        states: gives the target's states over the two, when training begins.
        data: what the rows were made of, as the manifest is to say it.
        specials: token ids that a reduced draft vocabulary keeps in any case.
        start: a head to go on from, in any layout.
    """

    target: Path
    recipe: EagleRecipe
    text: Rows
    unseen: Rows
    states: Callable[[], tuple[States, States]]
    data: Mapping[str, Any] = field(default_factory=dict)
    specials: tuple[int, ...] = ()
    start: Head | None = None


def draft_coverage(job: Job) -> Coverage | None:
    """Return how much of what is trained on the head can draft; None where it drafts the whole vocabulary.

    Raises:
        RecipeInvalid, ConfigInvalid: the text holds too few distinct tokens for the draft vocabulary, or it is too
            small for the special ones.
    """
    if job.recipe.draft_vocab is None:
        return None
    vocab = read_target_config(job.target).vocab
    counts = job.text.ids[job.text.mask].bincount(minlength=vocab)
    return measure_coverage(counts, target_ids(draft_map(job, job.recipe.draft_vocab, vocab)))


def draft_map(job: Job, size: int, vocab: int) -> Tensor:
    """Return `d2t` as offsets, [size] int64: that of the head to go on from, or the text's most frequent tokens."""
    if job.start is not None:
        return read_slot(job.start, "d2t")
    return map_draft_vocab(job.text.ids[job.text.mask], size, vocab, job.specials)


def job_key(job: Job) -> str:
    """Return 16 hex digits that name what a job makes on this installation; all of the target's files are read."""
    files = sorted([job.target / "config.json", *job.target.glob("*.safetensors")])
    tensors = (job.text.ids, job.text.mask, job.unseen.ids, job.unseen.mask)
    parts = {
        "recipe": dataclasses.asdict(job.recipe),
        "source": SOURCE,
        "target": {file.name: file_digest(file) for file in files if file.exists()},
        "rows": [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors],
        "data": dict(job.data),
        "specials": job.specials,
        "start": {f.name: file_digest(f) for f in job.start.checkpoint.files} if job.start else None,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
