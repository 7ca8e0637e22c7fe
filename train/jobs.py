"""Jobs from what a user gives."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from sys import maxsize
from typing import Any

import torch

from ..checkpoint.tensors import TORCH
from ..convert.config import refuse_unstated
from ..convert.read import Head
from ..targets.config import TargetConfig
from ..targets.model import load_target
from ..targets.states_record import StatesRecord
from ..targets.stored_states import StatesFolder, open_states
from ..targets.tokenizer import Tokenizer
from .arguments import Pace, check_processes
from .feed import Offline, States, online_states
from .job import Job
from .named import complete
from .prepare import place_sequences, prepare_dialogues
from .recipe import EagleRecipe
from .seen import record_prompts
from .watch import spec_of
from .written import choose_layout

CPU = torch.device("cpu")
DEFAULT_PACE = Pace()


@dataclass(frozen=True)
class Data:
    """Dialogues or texts, and what is held out.

    Attributes:
        name: a JSONL file, or a dataset's id.
        held_out: another one to look at; None for some of `name`.
        split, revision: of a dataset.
    """

    name: str
    held_out: str | None = None
    split: str = "train"
    revision: str | None = None


def check_job(values: Mapping[str, Any], config: TargetConfig, start: Head | None, pace: Pace = DEFAULT_PACE) -> None:
    """Raise what a job must fail on whatever its data: these, and the target's weights, may take hours to come.

    Args:
        values: the recipe, as `named.complete` takes it.
        config: the target's.
        start: a head to go on from.
        pace: how the run is to be watched and kept.

    Raises:
        RecipeInvalid: the recipe cannot be, is not the target's, or does not fit the processes.
        LayoutCannot: no engine could load the head.
        ConfigInvalid: the head to go on from does not state what the trained one's config would; see
            `refuse_unstated`.
    """
    if start is not None:
        refuse_unstated(start.read)
    recipe = complete(values, config, maxsize, start.spec if start else None)
    check_processes(recipe.batch, pace)
    choose_layout(spec_of(recipe, config))


def online_job(
    target: Path, config: TargetConfig, tokenizer: Tokenizer, values: Mapping[str, Any], data: Data, start: Head | None
) -> Job:
    """Return a job that runs the target over dialogues or texts.

    Args:
        target: its folder.
        config: the target's.
        tokenizer: the target's.
        values: the recipe, as `named.complete` takes it.
        data: what to train on.
        start: a head to go on from.

    Raises:
        TrainingDataInvalid, RecipeInvalid: the data or the recipe cannot be.
    """
    check_job(values, config, start)
    prepared = prepare_dialogues(
        data.name, tokenizer, _seq(values), held_out=data.held_out, split=data.split, revision=data.revision
    )
    recipe = complete(values, config, len(prepared.text.ids), start.spec if start else None)

    def states() -> tuple[States, States]:
        model: Any = load_target(target, TORCH[recipe.dtype])
        model.to(_own_device())
        return online_states(model, recipe)

    facts = prepared.facts | {"prompts": record_prompts(prepared.prompts, start)}
    job = Job(target, recipe, prepared.text, prepared.unseen, states, facts, start=start)
    return replace(job, specials=tuple(tokenizer.specials))


def offline_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    folder: Path,
    start: Head | None,
) -> Job:
    """Return a job that reads the target's states from `folder`, where kconv states wrote them.

    Other arguments and faults as of `online_job`.

    Raises:
        StatesInvalid: they are of another target, or lack a layer that the recipe captures.
    """
    check_job(values, config, start)
    stored = open_states(folder, config=config)
    text, unseen = (place_sequences(stored, _seq(values), held_out=held_out) for held_out in (False, True))
    recipe = complete(values, config, len(text.rows.ids), start.spec if start else None)
    # Now that the recipe is whole: the layers it wants, in its order.
    wanted: StatesFolder = open_states(folder, config=config, captured=recipe.captured)
    facts: dict[str, object] = {"name": folder.name, "states": stored.record.prompts.model_dump()}
    facts |= {"sequences": len(stored.sequences), "dtype": stored.record.dtype, "sha256": _digest(stored.record)}
    facts |= {"prompts": record_prompts(text.prompts, start)}

    def states() -> tuple[States, States]:
        return Offline(wanted, text.places), Offline(wanted, unseen.places)

    job = Job(target, recipe, text.rows, unseen.rows, states, facts, start=start)
    return replace(job, specials=tuple(tokenizer.specials))


def _digest(record: StatesRecord) -> str:
    """Return a sha256 of the shards' own: of the states themselves, where the rows' digests are of their tokens."""
    return hashlib.sha256("".join(shard.sha256 for shard in record.shards).encode()).hexdigest()


def _own_device() -> torch.device:
    """Return where transformers' Trainer will train, before there is one: the process's own GPU, if it has any."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU


def _seq(values: Mapping[str, Any]) -> int:
    return values.get("seq", EagleRecipe.seq)
