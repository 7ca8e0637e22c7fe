"""The tiny target's tokenizer, a byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# As Kimi-K2 names them. Pad comes first, for a config class that falls back to its defaults says bos 0 and eos 1,
# and that must not happen to be right.
PAD, BOS, EOS = "[PAD]", "[BOS]", "[EOS]"

# The target has read documents, not dialogues: a turn is a document's beginning, without a role.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def train_tokenizer(documents: Iterable[str], vocab: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; any text is encodable and decodes to itself.

    Args:
        documents: the text to learn merges from.
        vocab: number of entries, special tokens and 256 bytes included.
        max_positions: tokens; stands in the tokenizer's config.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    tokenizer.save_pretrained(folder)
    # transformers 5 names a class here that transformers 4 does not know; this one both do.
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n")


def pack(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> torch.Tensor:
    """Return documents as one stream of ids, each between [BOS] and [EOS]: [N] int64."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encodings = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    return torch.tensor([i for ids in encodings for i in (bos, *ids, eos)])
