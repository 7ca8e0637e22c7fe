"""The options of an attention conversion, which the request of `kconv to-LAYOUT` and what converts share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ..options import Name, Share, option
from ..strict import StrictModel

HeadDim = Annotated[Literal["auto", "192", "256"], BeforeValidator(str)]


class AttentionOptions(StrictModel):
    """How to fit another attention, and on what; without one, the states or prompts measure how a head is read."""

    states: Name | None = option(None, "Output of kconv states, to fit --attention or measure.", kind="file")
    prompts: Name | None = option(None, "Prompts (JSONL) for --target, instead of --states.", kind="file")
    context: Annotated[int, Field(ge=16)] = option(
        512, "Tokens per text of --prompts; as long as you serve.", metavar="N"
    )
    heal: Annotated[int, Field(ge=0)] | None = option(
        None, "Healing (fine-tuning) steps; 200 by default.", metavar="STEPS"
    )
    head_dim: HeadDim = option("auto", "Head dim of MHA; vLLM's FlashInfer needs 256.")
    latent: Annotated[int, Field(ge=1, le=512)] = option(
        512, "Entries that MLA's latent may use; it is padded to the 512 of engines.", metavar="N"
    )
    min_retention: Share = option(
        0.97,
        "Smallest share of the acceptance length that may remain.",
        metavar="SHARE",
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Device for all but the target, which --prompts runs on the CPU.")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")
