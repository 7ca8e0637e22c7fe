"""Steps that make heads and targets.

A function makes its job's `out`, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.source import Folder, Source
from ..errors import CorruptIndex
from .job import Job, open_step_head
from .kinds import Convert, Quantize, Reading, Tiny, Train

if TYPE_CHECKING:
    from ..checkpoint.header import TensorInfo
    from ..convert.read import Head
    from ..convert.shared import Shared
    from ..engines.layout import Layout
    from ..targets.config import TargetConfig


def make_tiny(step: Tiny, job: Job) -> None:
    """Train a tiny target, or find it in the cache, and write texts for it."""
    from ..tiny.target import write_tiny

    job.say("the tiny target")
    write_tiny(job.out, step.target, prompts=step.prompts, prompt_tokens=step.prompt_tokens, documents=step.documents)


def train(step: Train, job: Job) -> None:
    """Train a head with ModelOpt, from where an interrupted run stopped."""
    from ..train.job import Data, Pace, prepare_job
    from ..train.recipe import read_recipe_file
    from ..train.run import train as run

    target, trusted = job.source("target"), job.trusts(step.trust_remote_code)
    start, states = job.maybe("start"), job.word("states")
    pace = Pace(step.save_every, step.look_every)
    made = prepare_job(
        target,
        read_recipe_file(job.word("recipe") or "") | step.set,
        data=None if states else Data(job.word("data") or "", job.word("held_out")),
        states=Path(states) if states else None,
        init_from=open_step_head(start, Reading(), target) if start else None,
        pace=pace,
        trust_remote_code=trusted,
    )
    run(made, job.out, pace, lambda done, steps, loss: job.say(f"step {done} of {steps}, loss {loss:.3f}"))


def quantize(step: Quantize, job: Job) -> None:
    """Quantize a target, from where an interrupted run stopped."""
    from ..quantize.recipe import load_recipe
    from ..quantize.run import plan_target
    from ..quantize.run import quantize as run

    recipe = load_recipe(job.word("recipe") or "", kv_cache=step.kv_cache)
    file = job.word("input_scale")
    plan = plan_target(job.source("target"), recipe, input_scale=Path(file) if file else None)
    run(plan, job.out, jobs=step.jobs, say=job.say)


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
