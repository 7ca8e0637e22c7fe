"""Steps that make heads and targets.

A function makes its job's `out`, whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.source import Folder, Source
from ..checkpoint.staging import staged
from ..errors import CorruptIndex
from .job import Job, open_step_head
from .kinds import Convert, Quantize, Reading, Tiny, Train

if TYPE_CHECKING:
    from ..checkpoint.header import TensorInfo
    from ..convert.read import Head
    from ..convert.shared import Shared
    from ..engines.layout import Layout
    from ..targets.config import TargetConfig

# Documents that are only looked at while a head is trained.
LOOKED_AT = 6


def make_tiny(step: Tiny, job: Job) -> None:
    """Train a tiny target, or find it in the cache, and write texts for it."""
    from ..targets.tokenizer import load_tokenizer
    from ..tiny.recipe import DEMO, TEST, cache_root
    from ..tiny.target import make_target
    from ..tiny.text import read_corpus

    job.say("the tiny target")
    made = make_target({"demo": DEMO, "test": TEST}[step.target], cache_root())
    corpus, tokenizer = read_corpus(), load_tokenizer(made)
    long_enough = [text for text in corpus.held_out if len(tokenizer.encode(text)) >= step.prompt_tokens]
    prompts, look = long_enough[: step.prompts], long_enough[step.prompts :]
    with staged(job.out) as folder:
        shutil.copytree(made, folder / "target")
        _write_lines(folder / "train.jsonl", ({"text": text} for text in corpus.train[: step.documents]))
        _write_lines(folder / "look.jsonl", ({"text": text} for text in look[:LOOKED_AT]))
        _write_lines(folder / "held-out.jsonl", ({"prompt": text, "category": "documentation"} for text in prompts))


def train(step: Train, job: Job) -> None:
    """Train a head with ModelOpt, from where an interrupted run stopped."""
    from ..targets.config import read_target_config
    from ..targets.tokenizer import load_tokenizer
    from ..train.job import Data, Pace, offline_job, online_job
    from ..train.recipe import read_recipe_file
    from ..train.run import train as run

    target, trusted = job.source("target"), job.trusts(step.trust_remote_code)
    folder = target.fetch_model()
    config, tokenizer = read_target_config(folder), load_tokenizer(folder, trust_remote_code=trusted)
    start, states = job.maybe("start"), job.word("states")
    head = open_step_head(start, Reading(), target) if start else None
    values = read_recipe_file(job.word("recipe") or "") | step.set
    if states:
        made = offline_job(folder, config, tokenizer, values, Path(states), head)
    else:
        data = Data(job.word("data") or "", job.word("held_out"))
        made = online_job(folder, config, tokenizer, values, data, head)
    pace = Pace(step.save_every, step.look_every)
    run(made, job.out, pace, lambda done, steps, loss: job.say(f"step {done} of {steps}, loss {loss:.3f}"))


def quantize(step: Quantize, job: Job) -> None:
    """Quantize a target, from where an interrupted run stopped."""
    from ..quantize.calibration import data_free, from_calibration
    from ..quantize.plan import plan_quantize
    from ..quantize.recipe import load_recipe
    from ..quantize.run import quantize as run
    from ..targets.config import parse_target_config

    recipe = load_recipe(job.word("recipe") or "")
    if step.kv_cache:
        recipe = recipe.model_copy(update={"kv_cache": step.kv_cache})
    source = job.source("target").open_weights()
    config = parse_target_config(source.config, where=source.folder / "config.json")
    file = job.word("input_scale")
    inputs = from_calibration(Path(file), source, config) if file else data_free()
    run(plan_quantize(source, config, recipe, inputs), job.out, jobs=step.jobs, say=job.say)


def convert(step: Convert, job: Job) -> None:
    """Write a head in an engine's layout."""
    from ..convert.cast import DTYPES
    from ..convert.execute import execute
    from ..convert.plan import Wishes, plan
    from ..engines import by_name

    target, layout = job.maybe("target"), by_name(step.layout)
    head = open_step_head(job.source("head"), step.reading, target)
    shared = find_taken(target, head, layout, drop_shared=step.drop_shared) if target else None
    execute(plan(head, layout, Wishes(shared, step.drop_shared, DTYPES[step.dtype] if step.dtype else "")), job.out)


def find_taken(target: Source, head: Head, layout: Layout, *, drop_shared: bool) -> Shared:
    """Find what a conversion adds from the target, compares with it, or leaves to it.

    Of a folder all that is there is found, which also tells the target's parameters from the head's own; the Hub's
    copy takes too long to fetch for that alone.
    """
    from ..convert.beside import taken_slots
    from ..convert.shared import SLOTS

    if drop_shared or isinstance(target, Folder):
        return find_shared(target, SLOTS)
    return find_shared(target, taken_slots(head, layout))


def find_shared(target: Source, slots: Iterable[str]) -> Shared:
    """Find some of what a head may share with its target; of the Hub's copy, the files that hold it are downloaded.

    A tensor whose file is missing, as in a folder that was downloaded in part, is a fault only where it is asked for.
    """
    from ..convert.shared import Shared
    from ..targets.config import read_target_config

    config = read_target_config(target.fetch_config())
    found: dict[str, TensorInfo] = {}
    absent: dict[str, CorruptIndex] = {}
    for slot in slots:
        name = _names(config)[slot]
        try:
            tensors = target.open_tensors([name])
        except CorruptIndex as fault:
            absent[slot] = fault
            continue
        if name in tensors:
            found[slot] = tensors[name]
    return Shared(target.name, found, layers=config.layers, model_type=config.model_type, absent=absent)


def find_shapes(target: Source) -> Shared:
    """Find what a head may share with its target, of the Hub's copy by name and shape alone."""
    from ..convert.shared import SLOTS, Shared
    from ..targets.config import read_target_config

    if isinstance(target, Folder):
        return find_shared(target, SLOTS)
    config, tensors = read_target_config(target.fetch_config()), target.open_headers().tensors
    found = {slot: tensors[name] for slot, name in _names(config).items() if name in tensors}
    return Shared(target.name, found, headers_only=True, layers=config.layers, model_type=config.model_type)


def _names(config: TargetConfig) -> dict[str, str]:
    """Return the names, in a target's files, of what a head may share with it, by slot."""
    return {"lm_head": config.lm_head, "embed_tokens": config.embed_tokens}


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
