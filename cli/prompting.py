"""Prompts that a target is calibrated on: the options that say which, and their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..checkpoint.source import Source
    from ..quantize.calibration import Prompts


def read_sequences(
    target: Source, prompts: Path, *, tokens: int, chat: bool, trust_remote_code: bool
) -> tuple[list[torch.Tensor], Prompts]:
    """Return the token ids of each prompt, [T] each, and what they are, for the record.

    Raises:
        PromptsInvalid, TokenizerFailed: the prompts or the tokenizer cannot be read.
    """
    import torch

    from ..checkpoint.bytes import file_digest
    from ..quantize.calibration import Prompts
    from ..targets.prompts import read_prompts
    from ..targets.tokenizer import load_tokenizer

    given = read_prompts(prompts)
    tokenizer = load_tokenizer(target.fetch_tokenizer(), trust_remote_code=trust_remote_code)
    encoded = [
        tokenizer.encode_chat(one.turns[:1]) if chat else tokenizer.encode("\n\n".join(one.turns)) for one in given
    ]
    sequences = [torch.tensor(ids[:tokens]) for ids in encoded]
    found = Prompts(sha256=file_digest(prompts), count=len(given), tokens=sum(map(len, sequences)))
    return sequences, found
