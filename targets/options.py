"""The options of `kconv states`, which the request and what writes the states share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..options import Count, LayerIds, Name, Url, option
from ..strict import StrictModel

Tokens = Annotated[int, Field(ge=0)]
Dtype = Literal["F32", "BF16", "F16"]
# Of a dataset, if none is named.
SPLIT = "train"


class StatesOptions(StrictModel):
    """The states to create: of prompts and their continuations, or of dialogues, which already have their answers."""

    prompts: Name | None = option(None, "Prompts (JSONL).", kind="file")
    data: Name | None = option(
        None, "Dialogues or texts: a JSONL, or a dataset's Hub id.", kind="file", metavar="FILE|ID"
    )
    split: str | None = option(None, "Split of the dataset; train by default.")
    revision: str | None = option(None, "Revision of the dataset.")
    captured: LayerIds | None = option(None, "Layers, as 0-based outputs; by default 1, N//2 - 1, N - 4.", kind="ids")
    sampled: Tokens = option(0, "Also continue prompts by N sampled tokens.", metavar="N")
    greedy: Tokens = option(0, "Also continue prompts greedily by N tokens.", metavar="N")
    prompt_tokens: Count | None = option(None, "Cut prompts to N tokens.", metavar="N")
    text_tokens: Count | None = option(None, "Cut prompt text or dialogues to N tokens.", metavar="N")
    chat: bool = option(False, "Apply the target's chat template to prompts.")
    held_out: bool = option(True, "Leave out the prompts' own text.")
    seed: int = option(0, "Random seed for sampling.")
    dtype: Dtype | None = option(None, "Dtype; by default the target's.")
    shard_mib: Count = option(512, "Maximum size of a file.", metavar="MIB")
    seq: Count = option(4096, "Tokens of a training row, the recipe's seq.", metavar="N")
    url: Url | None = option(None, "A vLLM that runs TARGET with hidden-state extraction.")
    shared: Name | None = option(None, "The folder that this vLLM writes states to.", metavar="DIR")
    concurrency: Count = option(16, "Requests in flight.", metavar="N")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")
