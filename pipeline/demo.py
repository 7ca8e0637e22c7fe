"""The demo: a tiny Kimi-K2, two heads trained by ModelOpt, converted and measured.

It compares two programs: before conversion ModelOpt's own module with its own weights, after it kconv's forward on the
converted folder.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import torch

from ..cards.card import write_card
from ..cards.facts import Facts
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.manifest import verify
from ..checkpoint.staging import refuse_existing, staged
from ..convert.execute import execute
from ..convert.plan import WriteOptions, plan
from ..convert.read import Head, read_head, read_slot
from ..drafters.baselines import Bigram, count_bigrams
from ..engines import by_name
from ..errors import KconvError, TrainingFailed
from ..measure.drafting import Proposer, head_drafter, measure
from ..measure.texts import Text, make_texts
from ..targets.config import TargetConfig, read_target_config
from ..targets.model import load_target
from ..targets.tokenizer import Tokenizer, load_tokenizer
from ..tiny.recipe import DEMO, TinyRecipe
from ..tiny.target import kept_at, make_target, pack
from ..tiny.text import read_corpus
from ..train.module import load_module, run_module
from ..train.recipe import TINY_GQA, TINY_MLA, EagleRecipe
from ..train.run import MODULE, OF_THE_STATES, head_key, share_states, train_head
from ..validate.parity import load_head
from ..validate.report import Report, figures, make_report
from ..validate.structure import check_source, check_values, is_identical

BEFORE, AFTER = "ModelOpt, before", "kconv, after"
Advance = Callable[[int, int, float], None]
# Seconds between two progress checks of training.
PATIENCE = 0.5
Heads = tuple[tuple[str, EagleRecipe], ...]
Stage = Callable[[str], AbstractContextManager[Advance]]
"""Opens a stage of the demo by its title; the yielded function takes (steps done, steps in total, loss)."""


@dataclass(frozen=True)
class DemoRecipe:
    """The demo's settings.

    Attributes:
        heads: recipes of the heads, by the name of their folder.
        prompts: how many held-out documents to draft on.
        steps: drafted tokens per verify step (K).
        seed: of the sampled continuations.
    """

    target: TinyRecipe
    heads: Heads
    prompts: int = 48
    prompt_tokens: int = 32
    new_tokens: int = 64
    steps: int = 3
    seed: int = 0


RECIPE = DemoRecipe(DEMO, (("mla", TINY_MLA), ("gqa", TINY_GQA)))


@dataclass(frozen=True)
class Made:
    """One head of the demo: its folder, its report, and whether TensorRT-LLM's folder holds its weights as rounded."""

    name: str
    folder: Path
    report: Report
    rounded: bool


@dataclass(frozen=True)
class _Bench:
    """What every head is measured with."""

    folder: Path
    checkpoint: Checkpoint
    config: TargetConfig
    model: torch.nn.Module
    texts: tuple[Text, ...]
    bigram: Bigram


def run_demo(out: Path, cache: Path, stage: Stage, recipe: DemoRecipe = RECIPE) -> list[Made]:
    """Make a target and heads, convert them, measure them, and write cards; return one result for each head.

    The cache keeps trained targets and heads between runs, by the hash of their recipe.

    Raises:
        OutputExists: something exists at `out`.
        TrainingFailed: a target or head could not be trained.
    """
    refuse_existing(out)
    # A new process starts torch with its own threads; a fork of one that has computed may hang.
    spawned = get_context("spawn")
    workers = min(len(recipe.heads), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, spawned, gc.set_threshold, gc.get_threshold()) as pool, staged(out) as folder:
        with stage(_title("tiny Kimi-K2", "training", kept_at(recipe.target, cache))) as advance:
            cached = make_target(recipe.target, cache, advance)
        shutil.copytree(cached, folder / "target")
        bench, found = None, {}
        for name, head in _train(recipe.heads, cached, cache, stage, pool):
            # While another is trained.
            if bench is None:
                with stage("prompts: continuing held-out text"):
                    bench = _prepare(folder, recipe)
            with stage(f"{name} head: converting and measuring"):
                shutil.copytree(head, folder / name / "trained")
                found[name] = _prove(folder / name, bench, recipe)
    return [replace(found[name], folder=out / name) for name, _ in recipe.heads]


def _train(
    heads: Heads, target: Path, cache: Path, stage: Stage, pool: ProcessPoolExecutor
) -> Iterator[tuple[str, Path]]:
    """Train heads with ModelOpt in parallel, one process and core each, or find those of the same recipes.

    Each is yielded as soon as it is trained.
    """
    tokenizer, corpus = load_tokenizer(target).inner, read_corpus()
    text, held_out = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    folders = {name: cache / f"head-{head_key(target, recipe, text, held_out)}" for name, recipe in heads}
    with ExitStack() as open_:
        titles = {name: _title(f"{name} head", "training with ModelOpt", out) for name, out in folders.items()}
        shown = {name: open_.enter_context(stage(title)) for name, title in titles.items()}
        missing = [(name, recipe) for name, recipe in heads if not folders[name].exists()]
        yield from ((name, out) for name, out in folders.items() if name not in dict(missing))
        if not missing:
            return
        for _ in missing:
            # What is to train imports while the target runs over what the heads share.
            pool.submit(_be_imported)
        progress = open_.enter_context(get_context("spawn").Manager()).Queue()
        shared = Path(open_.enter_context(TemporaryDirectory()))
        running: dict[Future[KconvError | None], str] = {}
        for name, recipe in missing:
            states = shared / "-".join(str(getattr(recipe, part)) for part in OF_THE_STATES)
            if not states.exists():
                share_states(target, states, recipe, text, held_out)
            job = pool.submit(_train_one, target, folders[name], recipe, text, held_out, states, name, progress)
            running[job] = name
        while running:
            done, _ = wait(running, timeout=PATIENCE, return_when=FIRST_COMPLETED)
            while not progress.empty():
                name, *state = progress.get()
                shown[name](*state)
            _raise_first(done)
            for job in done:
                yield (name := running.pop(job)), folders[name]


def _be_imported() -> None:
    """Do nothing; a new process imports all of this module first."""


def _train_one(
    target: Path,
    out: Path,
    recipe: EagleRecipe,
    text: torch.Tensor,
    held_out: torch.Tensor,
    states: Path,
    name: str,
    progress: Queue,
) -> KconvError | None:
    """Train one head in a separate process; return the error that ended it."""
    try:
        train_head(target, out, recipe, text, held_out, lambda *state: progress.put((name, *state)), states)
    except KconvError as error:
        return error
    return None


def _raise_first(done: Iterable[Future[KconvError | None]]) -> None:
    for job in done:
        try:
            error = job.result()
        except BrokenProcessPool as died:
            raise TrainingFailed(
                "a process that trained a head was killed", fix="Free some memory, and run the demo again."
            ) from died
        if error is not None:
            raise error


def _title(what: str, work: str, kept: Path) -> str:
    return f"{what}: {'kept from before' if kept.exists() else work}"


def _prepare(folder: Path, recipe: DemoRecipe) -> _Bench:
    target = folder / "target"
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    corpus = read_corpus()
    prompts = list(_prompts(corpus.held_out, tokenizer, recipe))
    lines = (json.dumps({"prompt": text, "category": "documentation"}) for text, _ in prompts)
    (folder / "held-out.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = load_target(target, torch.float32)
    texts = make_texts(
        model,
        [ids for _, ids in prompts],
        prompt_tokens=recipe.prompt_tokens,
        new_tokens=recipe.new_tokens,
        steps=recipe.steps,
        seed=recipe.seed,
    )
    bigram = count_bigrams((torch.tensor(tokenizer.encode(text)) for text in corpus.train), config.vocab)
    return _Bench(target, open_checkpoint(target), config, model, texts, bigram)


def _prompts(documents: tuple[str, ...], tokenizer: Tokenizer, recipe: DemoRecipe) -> Iterator[tuple[str, list[int]]]:
    """Yield the first held-out documents that are long enough for a prompt and its continuation."""
    length, found = recipe.prompt_tokens + recipe.new_tokens, 0
    for text in documents:
        ids = tokenizer.encode(text)
        if len(ids) >= length and found < recipe.prompts:
            found += 1
            yield text, ids[:length]


def _prove(folder: Path, bench: _Bench, recipe: DemoRecipe) -> Made:
    source = _open(folder / "trained")
    execute(plan(source, by_name("vllm")), folder / "vllm")
    converted = _open(folder / "vllm")
    # TensorRT-LLM runs an MLA head only in bfloat16.
    execute(plan(converted, by_name("trtllm"), WriteOptions(dtype="BF16")), folder / "trtllm")

    held = check_source(converted, source)
    identical = is_identical(converted, held)
    head = load_head(converted, bench.checkpoint, bench.config)
    module = load_module(folder / "trained" / MODULE, bench.folder)
    drafters = {
        BEFORE: Proposer(lambda tokens, states: run_module(module, tokens, states, recipe.steps), head.target_ids),
        AFTER: head_drafter(head, recipe.steps),
    }
    measured = [
        measure(
            text,
            bench.model,
            converted.spec.captured,
            recipe.steps,
            drafters,
            compare=(BEFORE, AFTER),
            bigram=bench.bigram,
        )
        for text in bench.texts
    ]
    provenance = {"target": "target", "prompts": "held-out.jsonl", "seed": recipe.seed, "dtype": "float32"}
    report = make_report(converted, check_values(converted) + held, figures(identical, measured), provenance)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    write_card(folder / "vllm", report, Facts())
    return Made(folder.name, folder, report, _is_rounded(source, _open(folder / "trtllm")))


def _open(folder: Path) -> Head:
    """Open a head under a name that is still valid in the finished folder."""
    return read_head(open_checkpoint(folder, source=f"{folder.parent.name}/{folder.name}"))


def _is_rounded(source: Head, rounded: Head) -> bool:
    """Return whether a head has the same spec and slots as its source, each float as torch rounds it to bfloat16."""
    verify(rounded.checkpoint.folder)

    def expected(slot: str) -> torch.Tensor:
        value = read_slot(source, slot)
        return value.bfloat16() if value.is_floating_point() else value

    return (
        replace(source.spec, dtype="BF16") == rounded.spec
        and source.places.keys() == rounded.places.keys()
        and all(torch.equal(expected(slot), read_slot(rounded, slot)) for slot in source.places)
    )
