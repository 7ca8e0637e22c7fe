"""`kconv synth`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import FOLDER


@click.command(short_help="Have the served target answer prompts, to train a head on.")
@click.option("--url", required=True, help="Root of an OpenAI-compatible server, e.g. http://127.0.0.1:8000.")
@click.option("--model", required=True, help="The name under which it serves the target.")
@click.option("--prompts", required=True, type=FOLDER, help="Prompts (JSONL, MT-Bench's form among others).")
@click.option("--out", required=True, type=FOLDER, help="A JSONL file of dialogues; what it has is kept.")
@click.option("--max-tokens", default=4096, show_default=True, type=click.IntRange(min=1), help="Of one answer.")
@click.option("--temperature", default=0.6, show_default=True, type=click.FloatRange(min=0), help="Of the draws.")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(min=1), help="Prompts at once.")
@click.option("--seed", default=0, show_default=True, help="Of the drawn tokens.")
def synth(
    url: str,
    model: str,
    prompts: Path,
    out: Path,
    max_tokens: int,
    temperature: float,
    concurrency: int,
    seed: int,
) -> None:
    """Ask the server at --url each prompt, all turns of it, and write the dialogues to --out for kconv train.

    Every prompt is accounted for: answered, failed with the reason, or skipped because --out has its answer. The
    same command goes on where a run was stopped, and asks failed prompts again. Exit 1 if any failed.

    \b
    Example:
      kconv synth --url http://127.0.0.1:8000 --model my-target --prompts prompts.jsonl --out dialogues.jsonl
    """
    from ..targets.prompts import read_prompts
    from ..train.generate import FAILED, GenerateRequest, generate
    from .output import status

    asked = read_prompts(prompts)
    asking = GenerateRequest(url, model, max_tokens, temperature, concurrency, seed=seed)
    with status("asking") as say:
        counts = generate(asked, asking, out, lambda so_far: say(f"{so_far.total()} of {len(asked)} prompts"))
    click.echo(
        f"{out}: " + ", ".join(f"{count} {what}" for what, count in counts.items()) + f" of {len(asked)} prompts"
    )
    sys.exit(1 if counts[FAILED] else 0)
