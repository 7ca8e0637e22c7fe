"""A target's vocabulary, to hold a head's against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.header import TensorInfo
from ..checkpoint.source import Source
from ..errors import PromptsInvalid, TargetInvalid
from .config import read_target_config
from .prompts import read_prompts
from .tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """What a head's draft vocabulary is cut from.

    Attributes:
        layers: number of the target's decoder layers.
        size: rows of its embedding.
        lm_head: its output matrix, [size, hidden].
        tokenizer: its tokenizer.
    """

    layers: int
    size: int
    lm_head: TensorInfo
    tokenizer: Tokenizer

    @property
    def specials(self) -> dict[int, str]:
        """The special tokens by id, ascending."""
        return self.tokenizer.specials

    def count_tokens(self, file: Path) -> torch.Tensor:
        """Count the tokens of a text.

        Args:
            file: prompts if its name ends in .jsonl (see `read_prompts`), whose turns are counted without a
                template; else plain text.

        Returns:
            [size] int64, how often each id stands in the text.

        Raises:
            PromptsInvalid: the file cannot be read, or holds no text.
            TargetInvalid: the tokenizer gives ids that the target has no row for.
        """
        texts = [turn for p in read_prompts(file) for turn in p.turns] if file.suffix == ".jsonl" else [_read(file)]
        ids = torch.tensor([i for text in texts for i in self.tokenizer.encode(text)], dtype=torch.int64)
        if not len(ids):
            raise PromptsInvalid(f"{file.name} holds no text", where=file, fix="Give a text like what will be asked.")
        if int(ids.max()) >= self.size:
            raise TargetInvalid(
                f"the tokenizer gives id {int(ids.max())}, and the target's vocabulary ends at {self.size - 1}",
                fix="Check that tokenizer and config.json are of the same target.",
            )
        return torch.bincount(ids, minlength=self.size)


def read_vocabulary(source: Source, *, trust_remote_code: bool = False) -> Vocabulary:
    """Read a target's vocabulary; of a hub id, only the files that hold it are downloaded.

    Args:
        source: the target's.
        trust_remote_code: run the Python that the folder brings, as Kimi-K2's own tokenizer needs.

    Raises:
        HubRefused, HubUnreachable, OutputFailed: see `checkpoint.hub_faults`.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: it is no checkpoint.
        TargetInvalid: it is no causal language model, or its tokenizer cannot be loaded.
    """
    folder = source.fetch_tokenizer()
    config = read_target_config(folder)
    tensors = source.open_tensors([config.lm_head])
    if config.lm_head not in tensors:
        raise TargetInvalid(f"the target has no {config.lm_head}", where=source.name, fix="Check the target.")
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return Vocabulary(config.layers, config.vocab, tensors[config.lm_head], tokenizer)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise PromptsInvalid(
            f"the text {file.name} cannot be read: {fault}", where=file, fix="Give a file in UTF-8."
        ) from fault
