"""The options of `kconv train` and `kconv generate`, which the requests and what they call share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options import Count, Name, Url, option
from ..strict import StrictModel


class TrainOptions(StrictModel):
    """What to train on, and how to save and watch a run; the recipe and the target are the rest."""

    data: Name | None = option(
        None, "Dialogues or texts: a JSONL, or a dataset's Hub id.", kind="file", metavar="FILE|ID"
    )
    split: str | None = option(None, "Split of the dataset; train by default.")
    revision: str | None = option(None, "Revision of the dataset.")
    held_out: Name | None = option(
        None, "Evaluation text; by default a fiftieth of --data.", kind="file", metavar="FILE|ID"
    )
    states: Name | None = option(None, "Output of kconv states, instead of --data.", kind="file")
    url: Url | None = option(None, "A vLLM that runs TARGET with hidden-state extraction.")
    shared: Name | None = option(None, "The folder that this vLLM writes states to.", metavar="DIR")
    concurrency: Count = option(16, "Requests in flight per process.", metavar="N")
    init_from: Name | None = option(None, "A head to continue from, in any layout.", kind="checkpoint")
    save_every: Count = option(200, "Steps between checkpoints.", metavar="STEPS")
    eval_every: Count = option(200, "Steps between held-out evaluations.", metavar="STEPS")
    shard: bool = option(False, "Distribute the head over torchrun's processes (FSDP2).")
    tensorboard: bool = option(False, "Write TensorBoard event files.")
    rate: Annotated[float, Field(gt=0)] | None = option(
        None,
        "Tokens per second of all processes, for --dry-run.",
        metavar="N",
    )
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")


DEFAULTS = TrainOptions()


class GenerateOptions(StrictModel):
    """How a server samples answers."""

    max_tokens: Count = option(4096, "Maximum tokens per answer.", metavar="N")
    temperature: Annotated[float, Field(ge=0)] = option(0.6, "0 is greedy.", metavar="T")
    concurrency: Count = option(16, "Requests in flight.", metavar="N")
    seed: int = option(0, "Random seed for sampling.")
