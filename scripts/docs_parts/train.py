"""Train heads of each kind with `kconv train` for the demo's target, measure them, and write docs/train.md.

    scripts/docs train [--work build/train-figures] [--only NAME ...] [--markdown]

Two are trained for up to 10 minutes on one core, the others for half a minute each. Results already in --work are not
made again; a stopped run resumes, and its seconds are the sum of its parts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from bench_parts.machine import Spent
from bench_parts.train_runs import CAPTURED, MEASURED, TOKENS, Run, list_runs, measured_texts, train, write_texts

from kconv.checkpoint.folder import open_checkpoint, read_json
from kconv.convert.read import read_head
from kconv.drafters.baselines import bigram_overlap, certain_overlap, count_bigrams, lookup_drafts
from kconv.drafters.chain import Acceptance, draft_logits, overlap, overlap_acceptance, pool
from kconv.measure.statistics import influences, standard_errors
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, cache_root
from kconv.tiny.target import make_target, pack
from kconv.tiny.text import read_corpus
from kconv.train.recipe import TINY_GQA, TINY_MLA, EagleRecipe, parse_recipe
from kconv.train.run import head_key, train_head
from kconv.validate.parity import load_head

ROOT = Path(__file__).resolve().parents[2]
PAGE, CURVES = ROOT / "docs" / "train.md", ROOT / "docs" / "train.png"
K = 3
DEMO_HEADS = {"demo gqa": TINY_GQA, "demo mla": TINY_MLA}


def make_demo_head(target: Path, recipe: EagleRecipe) -> Path:
    """Return the demo's own head, from the cache if `kconv demo` has run."""
    tokenizer, corpus = load_tokenizer(target).inner, read_corpus()
    texts = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    return train_head(target, cache_root() / f"head-{head_key(target, recipe, *texts)}", recipe, *texts)


@torch.no_grad()
def measure(folders: dict[str, Path], target: Path) -> dict[str, list[Acceptance]]:
    """Return the sampled acceptance of each head, and of two drafters without one, on each held-out text."""
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    model, checkpoint = load_target(target, torch.float32), open_checkpoint(target)
    tokens = torch.tensor([tokenizer.encode(text)[:TOKENS] for text in measured_texts(tokenizer)])
    states = run_target(model, tokens, CAPTURED)
    bigram = count_bigrams((torch.tensor(tokenizer.encode(text)) for text in read_corpus().train), config.vocab)
    shares = {
        "bigram": bigram_overlap(bigram, tokens, states.logits, K),
        "prompt lookup": certain_overlap(lookup_drafts(tokens, K), states.logits),
    }
    for name, folder in folders.items():
        head = load_head(read_head(open_checkpoint(folder)), checkpoint, config)
        shares[name] = overlap(draft_logits(head, tokens, states.captured, K), states.logits, head.target_ids)
    return {name: [overlap_acceptance(of[:, row : row + 1]) for row in range(MEASURED)] for name, of in shares.items()}


def describe(found: dict[str, list[Acceptance]], runs: list[Run], work: Path) -> list[str]:
    """Return the rows of the table."""
    rows = [f"| {name} | | {pool(found[name]).length:.3f} | |" for name in ("prompt lookup", "bigram", *DEMO_HEADS)]
    for run in runs:
        spent = Spent(**read_json(work / f"{run.folder}.spent.json"))
        apart = "; ".join(compare(found, run.name, other) for other in run.against)
        rows.append(
            f"| {run.name} | {spent.wall:.0f} ({spent.processor:.0f}) | {pool(found[run.name]).length:.3f} | {apart} |"
        )
    return rows


def covered(run: Run, work: Path) -> str:
    """Say which vocabulary a run's head drafts, and how much of the text that is; nothing of a full one."""
    training = read_json(work / run.folder / "kconv.json")["training"]
    share = training["draft_vocab"]
    return f"{parse_recipe(training['recipe']).draft_vocab} tokens, {share['share']:.1%} of the text" if share else ""


def seen(runs: list[Run], work: Path) -> str:
    """Say how many tokens each head is trained on, and how often; of short runs once."""
    recipes = dict(DEMO_HEADS)
    for run in runs:
        recipe = parse_recipe(read_json(work / run.folder / "kconv.json")["training"]["recipe"])
        recipes["short runs" if run.name.startswith("short") else run.name] = recipe
    heads: dict[str, list[str]] = {}
    for name, one in recipes.items():
        heads.setdefault(f"{one.batches * one.batch * one.seq:,} x {one.steps / one.batches:.1f}", []).append(name)
    return "; ".join(f"{tokens} of {' and '.join(names)}" for tokens, names in heads.items())


def compare(found: dict[str, list[Acceptance]], name: str, against: str) -> str:
    """Return the paired difference of two drafters over the same texts, with its standard error."""
    apart = pool(found[name]).length - pool(found[against]).length
    error = standard_errors(influences(found[name]) - influences(found[against]))[-1]
    return f"{apart:+.3f} ± {error:.3f} to {against}"


PAGE_TEXT = """# Training, measured

Heads for the demo's tiny Kimi-K2, each trained by one `kconv train` on one core and measured on {texts} held-out documents
of {tokens} tokens. The [acceptance length](how/acceptance.md) is sampled, at K = {steps}. Beside it: the paired difference
to another row, with its standard error. Seconds are of the whole command, and of the processor in brackets.

| head | seconds | acceptance length | difference |
|---|---|---|---|
{rows}

- Tokens x passes: {seen}.
- `mla` is the recipe `examples/tiny-eagle3-mla.yaml`; `gqa` is the same with the demo's GQA. Short runs only show that each
  kind works.
- `reduced` drafts {reduced}. `continued` continues the head that it is compared with. `seed 1` shows what chance makes.
- `offline` reads stored states, in other batches. Over the same batches both end with the same weights
  (`tests/train/test_offline.py`).

![Loss and acceptance of the mla row over its steps](train.png)

`scripts/docs train --markdown`, on {machine}, load average {load:.1f}.
"""  # noqa: E501  (its lines are those of the page)


def main() -> None:
    """Train what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "train-figures")
    parser.add_argument("--only", action="append", help="train this row and measure nothing; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="write docs/train.md and its picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    target, runs = make_target(DEMO, cache_root()), list(list_runs())
    write_texts(target, work)
    for run in runs:
        if not arguments.only or run.name in arguments.only:
            print(f"{run.name}: {train(run, target, work)}", flush=True)
    if arguments.only:
        return
    demo = {"demo mla": make_demo_head(target, TINY_MLA), "demo gqa": make_demo_head(target, TINY_GQA)}
    found = measure(demo | {run.name: work / run.folder for run in runs}, target)
    rows = describe(found, runs, work)
    print("\n".join(rows))
    if arguments.markdown:
        machine = f"one core of {os.cpu_count()}, {platform.system()} {platform.release()}, torch {torch.__version__}"
        reduced = " and ".join(dict.fromkeys(filter(None, (covered(run, work) for run in runs))))
        text = PAGE_TEXT.format(
            texts=MEASURED, tokens=TOKENS, steps=K, rows="\n".join(rows), machine=machine, load=os.getloadavg()[0],
            seen=seen(runs, work), reduced=reduced,
        )  # fmt: skip
        PAGE.write_text(text)
        shutil.copyfile(work / "mla" / "modelopt" / "curves.png", CURVES)


if __name__ == "__main__":
    main()
