"""What to train, on what."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from sys import maxsize
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.source import Folder, Source
from ..checkpoint.tensors import TORCH
from ..convert.provenance import read_provenance
from ..convert.read import Head, read_slot
from ..engines import by_name
from ..engines.layout import Layout, Limit
from ..errors import LayoutCannot, RecipeInvalid, StatesInvalid
from ..head.spec import HeadSpec
from ..head.vocab import Coverage, measure_coverage, target_ids
from ..targets.config import TargetConfig, read_target_config
from ..targets.model import Ends, check_memory, find_ends, load_target
from ..targets.prompts import KEPT
from ..targets.states import StatesFolder, StatesRecord, open_states
from ..targets.stream_states import StreamedStates
from ..targets.tokenizer import Tokenizer, load_tokenizer
from ..targets.write_states import SHARD_BYTES, Runner, WantedAnswers, plan_states
from .data import Placed, Rows, map_draft_vocab, place_sequences, prepare_dialogues
from .evaluate import spec_of
from .feed import Offline, StatesSource, keep_read_again, online_states
from .recipe import EagleRecipe, check_keys, complete


@dataclass(frozen=True)
class Pace:
    """How a run is watched and kept; nothing in it changes the head that comes out.

    Attributes:
        save_every: steps between checkpoints.
        eval_every: steps between evaluations on held-out text; the last step has one in any case.
        shard: spread parameters and optimizer over the processes (FSDP2) instead of copying them to each.
        tensorboard: write TensorBoard's event files.
    """

    save_every: int = 200
    eval_every: int = 200
    shard: bool = False
    tensorboard: bool = False


def place() -> tuple[int, int]:
    """Return which process this is, and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_processes(batch: int, pace: Pace) -> None:
    """Raise RecipeInvalid where this process is one of those that cannot share a run.

    Args:
        batch: the recipe's, rows.
        pace: whether the head is to be spread over them.
    """
    world = place()[1]
    if batch % world:
        raise RecipeInvalid(
            f"a batch of {batch} rows cannot be divided by {world} processes",
            fix="Make batch a multiple of the number of processes.",
        )
    if pace.shard and not can_shard():
        refuse_sharding()


def can_shard() -> bool:
    """Say whether accelerate shards here: on CPUs it goes on without a word, each process with a copy of its own.

    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py#L986-L1016
    """
    return torch.cuda.is_available() and "RANK" in os.environ


def refuse_sharding() -> NoReturn:
    """Raise what --shard is refused with."""
    raise RecipeInvalid(
        "--shard needs GPUs and torchrun",
        fix="Leave --shard out. Each process then holds a copy and they share the batches.",
    )


# Raise it with each change to train/ that alters what a recipe makes.
SOURCE = "2"
LIBRARIES = ("torch", "transformers", "accelerate", "nvidia-modelopt")


@dataclass(frozen=True)
class TrainJob:
    """What to train, on what.

    Attributes:
        target: a folder with the target's config and tokenizer; its layers are loaded only by `states`.
        recipe: how.
        text, unseen: what is trained on, and what is only looked at.
        states: gives the target's states over the two, when training begins.
        data: what the rows were made of, as the manifest is to say it.
        specials: token ids that a reduced draft vocabulary keeps in any case.
        init_from: a head to go on from, in any layout.
        ends: of the target, where nothing else of it is read; None where all of it lies in `target`, and is.
        lm_head: blake3 of the output matrix that the target has to have; None where no states say it.
    """

    target: Path
    recipe: EagleRecipe
    text: Rows
    unseen: Rows
    states: Callable[[], tuple[StatesSource, StatesSource]]
    data: Mapping[str, Any] = field(default_factory=dict)
    specials: tuple[int, ...] = ()
    init_from: Head | None = None
    ends: Ends | None = None
    lm_head: str | None = None

    @property
    def own_ends(self) -> Ends:
        """The target's ends, wherever they are."""
        return self.ends or find_ends(Folder(self.target))


def check_target(job: TrainJob) -> None:
    """Raise StatesInvalid where stored states are of a target with the same config and another output matrix."""
    if job.ends is None or job.lm_head is None:
        return
    name = job.ends.config.lm_head
    if job.ends.digests.get(name, job.lm_head) != job.lm_head:
        raise StatesInvalid(
            f"the states come from a target whose lm_head differs from {job.ends.name}'s",
            where=name,
            fix="Give the target that the states come from, or create states of this one.",
        )


def draft_coverage(job: TrainJob) -> Coverage | None:
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


def draft_map(job: TrainJob, size: int, vocab: int) -> Tensor:
    """Return `d2t` as offsets, [size] int64: that of the head to go on from, or the text's most frequent tokens."""
    if job.init_from is not None:
        return read_slot(job.init_from, "d2t")
    return map_draft_vocab(job.text.ids[job.text.mask], size, vocab, job.specials)


def job_key(job: TrainJob) -> str:
    """Return 16 hex digits that name what a job makes on this installation; what it needs of the target is read."""
    config = job.target / "config.json"
    # The layers of a target that is not run leave their mark in its states, whose digests stand in `data`.
    files = [config] if job.ends else sorted([config, *job.target.glob("*.safetensors")])
    tensors = [job.text.ids, job.text.mask, job.unseen.ids, job.unseen.mask]
    tensors += [] if job.text.documents is None else [job.text.documents]
    recipe = dataclasses.asdict(job.recipe)
    # A head of before there was a choice keeps its name.
    for field_ in ("kernel", "pack"):
        if recipe[field_] == getattr(EagleRecipe, field_):
            del recipe[field_]
    parts = {
        "recipe": recipe,
        "source": SOURCE,
        "target": {file.name: file_digest(file) for file in files if file.exists()}
        | (job.ends.digests if job.ends else {}),
        "rows": [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors],
        "data": dict(job.data),
        "specials": job.specials,
        "start": {f.name: file_digest(f) for f in job.init_from.checkpoint.files} if job.init_from else None,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


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


def prepare_job(
    target: Source,
    values: Mapping[str, Any],
    *,
    data: Data | None = None,
    states: Path | None = None,
    connect: Callable[[TargetConfig, str], Runner] | None = None,
    init_from: Head | None = None,
    pace: Pace = DEFAULT_PACE,
    trust_remote_code: bool = False,
) -> TrainJob:
    """Return a job from what a user gives; what can be refused before the target is downloaded is refused then.

    Args:
        target: the target; of a hub id the whole model is downloaded where it is run, and else its ends alone.
        values: the recipe, as `recipe.complete` takes it.
        data: dialogues or texts to run the target over; either these or `states`.
        states: a folder that kconv states wrote.
        connect: gives the target as a server runs it, by its config and the dtype of its states; None to run it here.
        init_from: a head whose weights training starts from, in any layout.
        pace: how the run is to be watched and kept.
        trust_remote_code: run the tokenizer's own Python.

    Raises:
        ValueError: neither `data` nor `states` is given, or both.
        RecipeInvalid, LayoutCannot, ConfigInvalid: see `check_job`.
        TrainingDataInvalid, StatesInvalid: the data or the states cannot be.
    """
    if data is not None and states is not None:
        raise ValueError("give either data or states")
    check_keys(values)
    check_job(values, read_target_config(target.fetch_config()), init_from, pace)
    if states is not None:
        folder = target.fetch_tokenizer()
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        return offline_job(folder, read_target_config(folder), tokenizer, values, states, init_from, find_ends(target))
    if data is None:
        raise ValueError("give either data or states")
    if connect is not None:
        folder = target.fetch_tokenizer()
        tokenizer, config = load_tokenizer(folder, trust_remote_code=trust_remote_code), read_target_config(folder)
        runner = connect(config, config.dtype or "BF16")
        return streamed_job(folder, config, tokenizer, values, data, runner, init_from, find_ends(target))
    # Before it is downloaded, or read for its digest.
    check_memory(target.open_headers(), TORCH[values.get("dtype", EagleRecipe.dtype)])
    folder = target.fetch_model()
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return online_job(folder, read_target_config(folder), tokenizer, values, data, init_from)


def check_job(
    values: Mapping[str, Any], config: TargetConfig, init_from: Head | None, pace: Pace = DEFAULT_PACE
) -> None:
    """Raise what a job must fail on whatever its data: these, and the target's weights, may take hours to come.

    Args:
        values: the recipe, as `recipe.complete` takes it.
        config: the target's.
        init_from: a head to go on from.
        pace: how the run is to be watched and kept.

    Raises:
        RecipeInvalid: the recipe cannot be, is not the target's, or does not fit the processes.
        LayoutCannot: no engine could load the head.
        ConfigInvalid: the head to go on from does not state what the trained one's config would; see
            `refuse_unstated`.
    """
    # Here, as convert.config cannot be imported before convert.read.
    from ..convert.config import refuse_unstated

    if init_from is not None:
        refuse_unstated(init_from.read)
    recipe = complete(values, config, maxsize, init_from.spec if init_from else None)
    check_processes(recipe.batch, pace)
    choose_layout(spec_of(recipe, config))


def online_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    data: Data,
    init_from: Head | None,
) -> TrainJob:
    """Return a job that runs the target over dialogues or texts.

    Args:
        target: its folder.
        config: the target's.
        tokenizer: the target's.
        values: the recipe, as `recipe.complete` takes it.
        data: what to train on.
        init_from: a head to go on from.

    Raises:
        TrainingDataInvalid, RecipeInvalid: the data or the recipe cannot be.
    """
    check_job(values, config, init_from)
    prepared = prepare_dialogues(
        data.name,
        tokenizer,
        _seq(values),
        held_out=data.held_out,
        split=data.split,
        revision=data.revision,
        pack=values.get("pack", EagleRecipe.pack),
    )
    recipe = complete(values, config, len(prepared.text.ids), init_from.spec if init_from else None)

    def states() -> tuple[StatesSource, StatesSource]:
        model: Any = load_target(target, TORCH[recipe.dtype])
        model.to(_own_device())
        return online_states(model, recipe, prepared.text.documents)

    facts = prepared.facts | {"prompts": record_prompts(prepared.prompts, init_from)}
    job = TrainJob(target, recipe, prepared.text, prepared.unseen, states, facts, init_from=init_from)
    return replace(job, specials=tuple(tokenizer.specials))


def offline_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    folder: Path,
    init_from: Head | None,
    ends: Ends | None = None,
) -> TrainJob:
    """Return a job that reads the target's states from `folder`, where kconv states wrote them.

    What the recipe does not say of the captured layers, the states do. `ends` are the target's, wherever they are; by
    default in its folder. Other arguments and faults as of `online_job`.

    Raises:
        StatesInvalid: they are of another target, or lack a layer that the recipe captures.
    """
    stored = open_states(folder, config=config)
    if init_from is None:
        values = {"captured": list(stored.record.captured), **values}
    check_job(values, config, init_from)
    text, unseen = _place(stored, values)
    recipe = complete(values, config, text.rows.usable, init_from.spec if init_from else None)
    # Now that the recipe is whole: the layers it wants, in its order.
    wanted = open_states(folder, config=config, captured=recipe.captured)
    # A node may hold the files of its own processes alone.
    wanted.check_files(text.sequences_of(place()[0]) | unseen.sequences_of(place()[0]))
    facts: dict[str, object] = {"name": folder.name, "sha256": _digest(stored.record)}

    def states() -> tuple[StatesSource, StatesSource]:
        return Offline(wanted, text.places), Offline(wanted, unseen.places)

    job = TrainJob(target, recipe, text.rows, unseen.rows, states, facts, init_from=init_from)
    return _of_states(job, stored.record, text, tokenizer, ends)


def streamed_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    data: Data,
    runner: Runner,
    init_from: Head | None,
    ends: Ends | None = None,
) -> TrainJob:
    """Return a job whose states a server gives while training runs: the rows are those of states that were stored.

    Args:
        runner: the target, as a server runs it.
        data: what to train on; its `held_out` is not looked at.

    Other arguments as of `offline_job`.

    Raises:
        TrainingDataInvalid, RecipeInvalid: the data or the recipe cannot be.
        TargetInvalid: a layer cannot be captured.
    """
    check_job(values, config, init_from)
    spec, own = init_from.spec if init_from else None, ends or find_ends(Folder(target))
    captured = complete(values, config, maxsize, spec).captured
    checkpoint = Checkpoint(target, config.raw, dict(own.tensors), own.name)
    wanted = WantedAnswers(data.name, captured, split=data.split, revision=data.revision)
    planned = plan_states(runner, checkpoint, config, tokenizer, wanted, SHARD_BYTES)
    served = StreamedStates(planned, runner)
    text, unseen = _place(served, values)
    recipe = complete(values, config, text.rows.usable, spec)

    def states() -> tuple[StatesSource, StatesSource]:
        # Of one too: batches are read ahead by several threads.
        spread = ThreadPoolExecutor(runner.at_once, thread_name_prefix="requests").map
        return keep_read_again(Offline(served, text.places, spread), Offline(served, unseen.places, spread), recipe)

    facts: dict[str, object] = {"name": planned.record.prompts.file, "streamed": True}
    job = TrainJob(target, recipe, text.rows, unseen.rows, states, facts, init_from=init_from)
    return _of_states(job, planned.record, text, tokenizer, own)


def _place(stored: StatesFolder, values: Mapping[str, Any]) -> tuple[Placed, Placed]:
    """Return the rows to train on and to look at, divided among the processes."""
    pack, processes = values.get("pack", EagleRecipe.pack), place()[1]
    text = place_sequences(stored, _seq(values), held_out=False, pack=pack, processes=processes)
    return text, place_sequences(stored, _seq(values), held_out=True, processes=processes)


def _of_states(job: TrainJob, record: StatesRecord, text: Placed, tokenizer: Tokenizer, ends: Ends | None) -> TrainJob:
    """Complete a job by what the record of its states says."""
    facts = {"states": record.prompts.model_dump(), "sequences": len(record.sequences), "dtype": record.dtype}
    facts |= {"prompts": record_prompts(text.prompts, job.init_from)}
    own, told = ends or find_ends(Folder(job.target)), record.target.lm_head_blake3
    return replace(job, data=job.data | facts, specials=tuple(tokenizer.specials), ends=own, lm_head=told)  # pyright: ignore[reportOperatorIssue]


def _digest(record: StatesRecord) -> str:
    """Return a sha256 of the shards' own: of the states themselves, where the rows' digests are of their tokens."""
    return hashlib.sha256("".join(shard.sha256 for shard in record.shards).encode()).hexdigest()


def _own_device() -> torch.device:
    """Return where transformers' Trainer will train, before there is one: the process's own GPU, if it has any."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU


def _seq(values: Mapping[str, Any]) -> int:
    return values.get("seq", EagleRecipe.seq)


def record_prompts(digests: Iterable[str], init_from: Head | None) -> list[str]:
    """Return the beginnings of prompts' digests, for the manifest.

    Args:
        digests: of the prompts that are trained on; "" where a prompt's text is not known.
        init_from: a head that training goes on from; what it was trained on counts too.
    """
    told = read_provenance(init_from.checkpoint.folder).training if init_from else None
    before = told.get("data", {}).get("prompts", ()) if told else ()
    return sorted({*before, *(digest[:KEPT] for digest in digests if digest)})


# TensorRT-LLM's first: its names are ModelOpt's own.
ORDER = ("trtllm", "vllm")


def choose_layout(spec: HeadSpec) -> Layout:
    """Return the layout that a head will be written in: TensorRT-LLM's, or vLLM's where only that engine can load it.

    It is asked for before training, so that no head is trained that could not be written.

    Args:
        spec: what the head will be.

    Raises:
        LayoutCannot: neither can load it; vLLM's reason is given.
    """
    refused: list[Limit] = []
    for name in ORDER:
        layout = by_name(name)
        found = next((limit for limit in layout.limits if limit.applies(spec, ())), None)
        if found is None:
            return layout
        refused.append(found)
    last = refused[-1]
    raise LayoutCannot(last.what, where="config.json", fix=last.fix, see=last.source)
