"""A target's tokenizer and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import read_json
from ..checkpoint.header import TensorInfo
from ..checkpoint.posix import bounded
from ..checkpoint.schema import read_text
from ..checkpoint.source import Source
from ..errors import PromptsInvalid, TargetInvalid
from .config import has_tokenizer, no_tokenizer, read_target_config
from .dialogues import encode_row, has_answers, read_rows
from .prompts import read_prompts

# Bytes of text whose tokens are counted; the counts converge long before.
MAX_COUNTED = 1 << 30
# Characters of a library's message.
SHOWN = 300
# Memory limit for rendering one dialogue: one line of a template can produce any length of text.
MAX_RENDERED = 1 << 30
# Kimi-K2's tokenizer is a tiktoken.model with Python code.
FILES = ("tokenizer*.json", "special_tokens_map.json", "chat_template.jinja", "*.model", "tokenization_*.py")
# Files of which one has the vocabulary; the others of a tokenizer name its class and its special tokens.
VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tokenization_*.py")
# Tokens read past a limit, since the last ones change where a text is cut.
SLACK = 16


@dataclass(frozen=True)
class Tokenizer:
    """A target's tokenizer, reduced to what prompts and texts need."""

    inner: PreTrainedTokenizerBase

    @property
    def identity(self) -> dict[str, str]:
        """Its class, and the sha256 of each of its files, which define the meaning of token ids."""
        folder = Path(self.inner.name_or_path)
        files = sorted(file for pattern in FILES for file in folder.glob(pattern))
        return {"class": type(self.inner).__name__} | {file.name: file_digest(file) for file in files}

    @property
    def specials(self) -> dict[int, str]:
        """The special tokens by id, ascending."""
        named = dict(zip(self.inner.all_special_ids, self.inner.all_special_tokens, strict=True))
        added = {i: token.content for i, token in self.inner.added_tokens_decoder.items() if token.special}
        return dict(sorted((added | named).items()))

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the ids of a text, without special tokens around it; for a long text only the first `limit`.

        All ids of a 100 MB text take gigabytes, so only as many characters are read as `limit` tokens can have.
        """
        if limit is not None:
            text = text[: (limit + SLACK) * self._longest]
        return self.inner.encode(text, add_special_tokens=False)[:limit]

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token: an upper bound, since tokens are spelled in bytes."""
        return max(map(len, self.inner.get_vocab()), default=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def encode_chat(self, turns: Sequence[str], limit: int | None = None) -> list[int]:
        """Return the ids of a dialogue up to the start of the target's answer.

        Turns of user and assistant alternate, beginning and ending with the user. `limit` is as in `encode`.
        """
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.encode(self.render_chat(messages, answer=True), limit)

    def render_chat(self, messages: Sequence[dict[str, str]], *, answer: bool) -> str:
        """Return a dialogue as rendered by the chat template.

        Args:
            messages: {"role": ..., "content": ...} of each turn.
            answer: whether to add the start of the assistant's next answer.
        """
        if not self.inner.chat_template:
            raise TargetInvalid(
                "the target's tokenizer has no chat template",
                where=self.inner.name_or_path,
                fix="Add the publisher's chat_template.jinja to it. For a base model, which has none, use plain text.",
            )
        try:
            with bounded(MAX_RENDERED):
                text = self.inner.apply_chat_template(list(messages), add_generation_prompt=answer, tokenize=False)
        except Exception as fault:  # Jinja's errors, or any other that an untrusted template causes
            why = "it takes too much memory" if isinstance(fault, MemoryError) else f"{type(fault).__name__}: {fault}"
            raise TargetInvalid(
                f"the target's chat template fails on this dialogue: {why}",
                where=self.inner.name_or_path,
                fix="Check the turns' roles and the publisher's chat_template.jinja.",
            ) from fault
        return str(text)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer in a target's folder.

    Args:
        trust_remote_code: run the Python code in the folder, as Kimi-K2's own tokenizer needs. Code is never fetched
            from elsewhere: only files in the folder run, at the revision of the folder.

    Raises:
        TargetInvalid: there is no tokenizer, it is broken, it needs code that may not run, or its code belongs to
            another repository.
    """
    if trust_remote_code:
        _refuse_elsewhere(folder)
    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    try:
        # An empty config: transformers does not know kimi_k2 and would look for remote code in config.json too.
        inner = AutoTokenizer.from_pretrained(
            folder, config=PreTrainedConfig(), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as fault:  # the tokenizers library raises bare Exception on a broken file
        if not any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
            raise no_tokenizer(folder) from fault
        raise TargetInvalid(
            f"the tokenizer of {folder.name} cannot be loaded: {_first_line(fault)}",
            where=folder,
            fix="Check tokenizer.json and tokenizer_config.json. If the tokenizer is Python code that you have "
            "read and trust, add --trust-remote-code.",
        ) from fault
    if not isinstance(inner.model_max_length, (int, float)):
        raise TargetInvalid(
            f"the tokenizer's model_max_length is {inner.model_max_length!r}, and no number",
            where=folder / "tokenizer_config.json",
            fix="Correct it, or take it out.",
        )
    return Tokenizer(inner)


def _refuse_elsewhere(folder: Path) -> None:
    """Refuse an auto_map that refers to another repository, whose revision is not pinned.

    transformers writes such a reference as org/name--module.Class:
    https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/dynamic_module_utils.py
    """
    file = folder / "tokenizer_config.json"
    named = read_json(file).get("auto_map") if file.exists() else None
    values = list(named.values()) if isinstance(named, dict) else [named]
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    for word in words:
        if isinstance(word, str) and "--" in word:
            raise TargetInvalid(
                f"the tokenizer's code belongs to {word.split('--')[0]}, whose revision is not pinned",
                where=file,
                fix="Read that module, copy it into the folder, and remove the repository from auto_map.",
            )


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a target from which a head's draft vocabulary is made; lm_head is [size, hidden]."""

    layers: int
    size: int
    lm_head: TensorInfo
    tokenizer: Tokenizer

    @property
    def specials(self) -> dict[int, str]:
        return self.tokenizer.specials

    def count_tokens(self, file: Path) -> np.ndarray:
        """Return how often each token id occurs in a text, [size] int64.

        A file whose name ends in .jsonl has dialogues, of which the answers count, or texts (see `dialogues`); or it
        has prompts, whose turns are counted without a template. Any other is plain text.
        """
        ids = np.fromiter(self._ids(file), np.int64)
        if not len(ids):
            raise PromptsInvalid(
                f"{file.name} holds no text", where=file, fix="Pass text that resembles what you serve."
            )
        if int(ids.max()) >= self.size:
            raise TargetInvalid(
                f"the tokenizer gives id {int(ids.max())}, but the target's vocabulary ends at {self.size - 1}",
                fix="Check that tokenizer and config.json belong to the same target.",
            )
        return np.bincount(ids, minlength=self.size)

    def _ids(self, file: Path) -> Iterator[int]:
        encode = self.tokenizer.encode
        if file.suffix != ".jsonl":
            yield from encode(_text(file))
        elif has_answers(file):
            for where, row in read_rows(str(file)):
                for sample in encode_row(row, self.tokenizer, where):
                    yield from sample.ids[sample.mask].tolist()
        else:
            for prompt in read_prompts(file):
                for turn in prompt.turns:
                    yield from encode(turn)


def _first_line(fault: Exception) -> str:
    """Return the first line of a library's message, whole: some break off at a colon, and go on in a list."""
    first, *rest = (line.strip() for line in str(fault).strip().splitlines() or [type(fault).__name__])
    return f"{first} {' '.join(rest)}"[:SHOWN] if first.endswith(":") else first


def read_vocabulary(source: Source, *, trust_remote_code: bool = False) -> Vocabulary:
    """Read a target's vocabulary; for a hub id, only the files that hold it are downloaded.

    Raises:
        HubRefused, HubUnreachable, OutputFailed: they cannot be downloaded.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: it is not a checkpoint.
        TargetInvalid: it is not a causal language model, or its tokenizer cannot be loaded.
    """
    folder = source.fetch_tokenizer()
    config = read_target_config(folder)
    tensors = source.open_tensors([config.lm_head])
    if config.lm_head not in tensors:
        raise TargetInvalid(f"the target has no {config.lm_head}", where=source.name, fix="Check the target.")
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return Vocabulary(config.layers, config.vocab, tensors[config.lm_head], tokenizer)


def _text(file: Path) -> str:
    return read_text(file, PromptsInvalid, limit=MAX_COUNTED, fix="Pass a UTF-8 file.")
