"""What to train, and on what data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import maxsize
from typing import Any, NoReturn

import torch
from pydantic_core import to_jsonable_python
from torch import Tensor

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.source import Folder, Source
from ..checkpoint.tensors import TORCH
from ..convert.provenance import read_provenance
from ..convert.read import Head, read_slot
from ..drafters.vocab import Coverage, measure_coverage, target_ids
from ..engines import by_name
from ..engines.layout import Layout, Limit
from ..errors import LayoutCannot, RecipeInvalid
from ..installed import sources_digest, version
from ..targets.config import TargetConfig, read_target_config
from ..targets.model import Ends, check_memory, find_ends, load_target
from ..targets.options import SPLIT, StatesOptions
from ..targets.prompts import KEPT
from ..targets.states import StatesFolder, StatesRecord, TargetRecord, open_states
from ..targets.stream_states import StreamedStates
from ..targets.tokenizer import Tokenizer, load_tokenizer
from ..targets.write_states import SHARD_BYTES, Runner, plan_states
from .data import Placed, TextRows, map_draft_vocab, place_rows, prepare_dialogues
from .drafter_recipe import DrafterRecipe
from .feed import Offline, StatesSource, keep_read_again, online_states
from .options import TrainOptions
from .recipe import check_fit, check_keys, complete, where_of, with_defaults


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_processes(batch: int, *, shard: bool) -> None:
    """Raise RecipeInvalid if this process belongs to a group that cannot share a run."""
    world = place()[1]
    if batch % world:
        raise RecipeInvalid(
            f"a batch of {batch} rows cannot be divided by {world} processes",
            fix="Make batch a multiple of the number of processes.",
        )
    if shard and not can_shard():
        refuse_sharding()


def can_shard() -> bool:
    """Return whether accelerate shards here: on CPUs it silently gives each process its own copy.

    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py#L986-L1016
    """
    return torch.cuda.is_available() and "RANK" in os.environ


def refuse_sharding() -> NoReturn:
    raise RecipeInvalid(
        "--shard needs GPUs and torchrun",
        fix="Remove --shard. Each process then holds a copy, and they share the batches.",
    )


LIBRARIES = ("torch", "transformers", "accelerate", "nvidia-modelopt")


@dataclass(frozen=True)
class TrainJob:
    """What to train, and on what data.

    Attributes:
        target: a folder with the target's config and tokenizer; only `states` loads its layers.
        text, unseen: the training rows, and the evaluation rows.
        states: returns the target's states for the two, when training begins.
        data: a description of the rows' origin, for the manifest.
        specials: token ids that a reduced draft vocabulary always keeps.
        init_from: a head to continue from, in any layout.
        ends: the target's ends, if nothing else of it is read; None if the whole target is in `target` and is read.
        recorded: the target that its states come from; None if the target is run.
        prompts: returns the training prompts, for the manifest, if `data` lacks them: only the end needs them.
    """

    target: Path
    recipe: DrafterRecipe
    text: TextRows
    unseen: TextRows
    states: Callable[[], tuple[StatesSource, StatesSource]]
    data: Mapping[str, Any] = field(default_factory=dict)
    specials: tuple[int, ...] = ()
    init_from: Head | None = None
    ends: Ends | None = None
    recorded: TargetRecord | None = None
    prompts: Callable[[], list[str]] | None = None

    @property
    def own_ends(self) -> Ends:
        """The target's ends, wherever they are."""
        return self.ends or find_ends(Folder(self.target))


def check_target(job: TrainJob) -> None:
    """Raise StatesInvalid for stored states of another target with the same config."""
    if job.recorded is not None:
        ends = job.own_ends
        own = ends.digests.get(ends.config.lm_head, job.recorded.lm_head_blake3)
        job.recorded.check_weights(ends.source, own, job.data["name"])


def draft_coverage(job: TrainJob) -> Coverage | None:
    """Return how much of the training text the head can draft; None if it drafts the whole vocabulary.

    Raises:
        RecipeInvalid: the text has too few distinct tokens for the draft vocabulary.
        ConfigInvalid: the draft vocabulary is too small for the special tokens.
    """
    if job.recipe.draft_vocab is None:
        return None
    vocab = read_target_config(job.target).vocab
    ids = target_ids(draft_map(job, job.recipe.draft_vocab, vocab).numpy())
    return measure_coverage(job.text.count(vocab).numpy(), ids)


def draft_map(job: TrainJob, size: int, vocab: int) -> Tensor:
    """Return `d2t` as offsets, [size] int64: from the head to continue, or from the text's most frequent tokens."""
    if job.init_from is not None:
        return read_slot(job.init_from, "d2t")
    return map_draft_vocab(job.text.count(vocab), size, job.specials)


def job_parts(job: TrainJob) -> dict[str, Any]:
    """Return what decides a job's result on this installation, by name; reads what it needs of the target.

    The recipe by its keys, anything else as 16 hex digits.
    """
    config = job.target / "config.json"
    # The layers of a target that is not run affect its states, whose digests are in `data`.
    files = [config] if job.ends else sorted([config, *job.target.glob("*.safetensors")])
    target = {file.name: file_digest(file) for file in files if file.exists()}
    parts = {
        "the target": [target | (job.ends.digests if job.ends else {}), job.specials],
        "the data": [*job.text.digests(), *job.unseen.digests(), dict(job.data)],
        "--init-from": {f.name: file_digest(f) for f in job.init_from.checkpoint.files} if job.init_from else None,
        "kconv or its libraries": [sources_digest("train", "muon.py"), *(version(name) for name in LIBRARIES)],
    }
    recipe = to_jsonable_python(dataclasses.asdict(job.recipe), fallback=str)
    return {"recipe": recipe} | {name: _digest(part) for name, part in parts.items()}


def job_key(parts: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify a job's result on this installation, from `job_parts`."""
    return _digest(parts)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


CPU = torch.device("cpu")


def prepare_job(
    target: Source,
    values: Mapping[str, Any],
    options: TrainOptions,
    *,
    connect: Callable[[TargetConfig, str], Runner] | None = None,
    init_from: Head | None = None,
) -> TrainJob:
    """Return a job from the user's options; checks everything possible before the target is downloaded.

    Args:
        target: the target; for a hub id the whole model is downloaded if it is run here, otherwise only its ends.
        connect: returns the target in a server, from its config and the dtype of its states; None to run it here.

    Raises:
        ValueError: neither `data` nor `states` is given, or both.
        RecipeInvalid: the recipe is invalid, or does not fit the target or the number of processes.
        LayoutCannot: no engine could load the head.
        ConfigInvalid: the head to continue from does not state what the trained one's config would.
        TrainingDataInvalid, StatesInvalid: the data or the states are unusable.
    """
    if (options.data is None) == (options.states is None):
        raise ValueError("give either data or states")
    check_keys(values)
    check_job(values, read_target_config(target.fetch_config()), init_from, shard=options.shard)
    trust_remote_code = options.trust_remote_code
    if options.states is not None:
        folder = target.fetch_tokenizer()
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        states, ends = Path(options.states), find_ends(target)
        return offline_job(folder, read_target_config(folder), tokenizer, values, states, init_from, ends)
    if connect is not None:
        folder = target.fetch_tokenizer()
        tokenizer, config = load_tokenizer(folder, trust_remote_code=trust_remote_code), read_target_config(folder)
        runner = connect(config, config.dtype or "BF16")
        return streamed_job(folder, config, tokenizer, values, options, runner, init_from, find_ends(target))
    # Checked before it is downloaded or hashed.
    check_memory(target.open_headers(), TORCH[values.get("dtype", DrafterRecipe.dtype)])
    folder = target.fetch_model()
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return online_job(folder, read_target_config(folder), tokenizer, values, options, init_from)


def check_job(values: Mapping[str, Any], config: TargetConfig, init_from: Head | None, *, shard: bool = False) -> None:
    """Raise the errors that a job must fail with whatever its data, since data and weights may take hours."""
    # Imported here: convert.config cannot be imported before convert.read.
    from ..convert.config import refuse_unstated

    if init_from is not None:
        refuse_unstated(init_from.read)
    recipe = complete(values, config, maxsize, init_from.spec if init_from else None)
    check_processes(recipe.batch, shard=shard)
    choose_layout(recipe, config)


def online_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    options: TrainOptions,
    init_from: Head | None,
) -> TrainJob:
    """Return a job that runs the target over dialogues or texts."""
    check_job(values, config, init_from)
    prepared = prepare_dialogues(
        options.data or "",
        tokenizer,
        _seq(values),
        held_out=options.held_out,
        split=options.split or SPLIT,
        revision=options.revision,
        pack=values.get("pack", DrafterRecipe.pack),
    )
    recipe = complete(values, config, len(prepared.text.ids), init_from.spec if init_from else None)
    check_fit(recipe.unfit_for_text(prepared.text.ids), where_of(values))

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
    """Return a job that reads the target's states from `folder`, written by kconv states.

    Captured layers that the recipe does not state come from the states. `ends` are the target's; by default they are in
    its folder.
    """
    stored = open_states(folder, config=config)
    if init_from is None:
        values = with_defaults(values, {"captured": list(stored.record.captured)})
    check_job(values, config, init_from)
    spec, rank = init_from.spec if init_from else None, place()[0]
    # The layers that the recipe wants, in its order.
    wanted = stored.choose(complete(values, config, maxsize, spec).captured)
    text, unseen = _place(wanted, values)
    recipe = complete(values, config, text.rows.usable, spec)
    # A node may hold only the files of its own processes.
    wanted.check_files(sorted({*text.files_of(rank, wanted), *unseen.files_of(rank, wanted)}))
    facts: dict[str, object] = {"name": folder.name, "sha256": stored.record.sha256}

    def states() -> tuple[StatesSource, StatesSource]:
        return Offline(text.states, text.places), Offline(unseen.states, unseen.places)

    job = TrainJob(target, recipe, text.rows, unseen.rows, states, facts, init_from=init_from)
    return _of_states(job, wanted.record, text, tokenizer, ends)


def streamed_job(
    target: Path,
    config: TargetConfig,
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    options: TrainOptions,
    runner: Runner,
    init_from: Head | None,
    ends: Ends | None = None,
) -> TrainJob:
    """Return a job whose states come from a server during training; the rows equal those of stored states.

    The options' `held_out` is ignored.
    """
    check_job(values, config, init_from)
    spec, own = init_from.spec if init_from else None, ends or find_ends(Folder(target))
    captured = complete(values, config, maxsize, spec).captured
    checkpoint = Checkpoint(target, config.raw, dict(own.tensors), own.source.name)
    # A recipe may name its layers in any order.
    asked = {"data": options.data, "captured": captured, "split": options.split, "revision": options.revision}
    wanted = StatesOptions().model_copy(update=asked)
    planned = plan_states(runner, checkpoint, config, tokenizer, wanted, SHARD_BYTES)
    served = StreamedStates(planned, runner)
    text, unseen = _place(served, values)
    recipe = complete(values, config, text.rows.usable, spec)

    def states() -> tuple[StatesSource, StatesSource]:
        # Even for one: several threads read batches ahead.
        spread = ThreadPoolExecutor(runner.at_once, thread_name_prefix="requests").map
        read, looked_at = (Offline(part.states, part.places, spread) for part in (text, unseen))
        return keep_read_again(read, looked_at, recipe)

    facts: dict[str, object] = {"name": planned.record.prompts.file, "streamed": True}
    job = TrainJob(target, recipe, text.rows, unseen.rows, states, facts, init_from=init_from)
    return _of_states(job, planned.record, text, tokenizer, own)


def _place(stored: StatesFolder, values: Mapping[str, Any]) -> tuple[Placed, Placed]:
    """Return the training rows and the evaluation rows, divided among the processes."""
    pack, processes = values.get("pack", DrafterRecipe.pack), place()[1]
    text = place_rows(stored, _seq(values), held_out=False, pack=pack, processes=processes)
    return text, place_rows(stored, _seq(values), held_out=True, processes=processes)


def _of_states(job: TrainJob, record: StatesRecord, text: Placed, tokenizer: Tokenizer, ends: Ends | None) -> TrainJob:
    """Complete a job with the record of its states."""
    facts = {"states": record.prompts.model_dump(), "sequences": record.count, "dtype": record.dtype}
    return replace(
        job,
        data=job.data | facts,  # pyright: ignore[reportOperatorIssue]
        specials=tuple(tokenizer.specials),
        ends=ends or find_ends(Folder(job.target)),
        recorded=record.target,
        prompts=lambda: record_prompts(text.prompts(), job.init_from),
    )


def _own_device() -> torch.device:
    """Return the device on which transformers' Trainer will train: the process's own GPU, if it has any."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU


def _seq(values: Mapping[str, Any]) -> int:
    return values.get("seq", DrafterRecipe.seq)


def record_prompts(digests: Iterable[str], init_from: Head | None) -> list[str]:
    """Return the leading digits of prompts' digests for the manifest, with those of the head to continue.

    The digest of a prompt whose text is unknown is "".
    """
    told = read_provenance(init_from.checkpoint.folder).training if init_from else None
    before = told.get("data", {}).get("prompts", ()) if told else ()
    return sorted({*before, *(digest[:KEPT] for digest in digests if digest)})


def choose_layout(recipe: DrafterRecipe, target: TargetConfig) -> Layout | None:
    """Return the layout to write a head in: the first of its family's that can hold it; None for ModelOpt's export.

    Checked before training, so that no head is trained that could not be written.
    """
    refused: list[Limit] = []
    for name in recipe.LAYOUTS:
        layout = by_name(name)
        found = next((limit for limit in layout.limits if limit.applies(recipe.spec(target), ())), None)
        if found is None:
            return layout
        refused.append(found)
    if not refused:
        return None
    last = refused[-1]
    raise LayoutCannot(last.what, where="config.json", fix=last.fix, see=last.source)
