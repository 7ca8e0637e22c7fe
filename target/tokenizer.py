"""A target's tokenizer. What belongs here: loading the one of a folder, and asking before its code is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..errors import TargetInvalid


@dataclass(frozen=True)
class Tokenizer:
    """A target's tokenizer, reduced to what prompts and texts need.

    Attributes:
        inner: transformers' tokenizer.
    """

    inner: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def encode_chat(self, turns: Sequence[str]) -> list[int]:
        """Return the ids of a dialogue up to where the target answers.

        Args:
            turns: what was said, in turn by the user and the assistant, beginning and ending with the user.

        Raises:
            TargetInvalid: the folder has no chat template.
        """
        if not self.inner.chat_template:
            raise TargetInvalid(
                "the target's tokenizer has no chat template",
                fix="Add the publisher's chat_template.jinja to the target's folder.",
            )
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = self.inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(str(text))


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer that stands in a target's folder.

    Args:
        folder: the target's.
        trust_remote_code: run the Python that the folder brings, as Kimi-K2's own tokenizer needs.

    Raises:
        TargetInvalid: there is no tokenizer, it is broken, or it needs code that may not be run.
    """
    try:
        # An empty config, for transformers knows no kimi_k2 and would look for remote code in config.json too.
        inner = AutoTokenizer.from_pretrained(
            folder, config=PreTrainedConfig(), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as fault:  # the tokenizers library raises bare Exception on a broken file
        raise TargetInvalid(
            f"the tokenizer of {folder.name} cannot be loaded: {str(fault).strip().splitlines()[0]}",
            where=folder,
            fix="Check tokenizer.json and tokenizer_config.json; if the tokenizer is Python code that you have "
            "read and trust, add --trust-remote-code.",
        ) from fault
    return Tokenizer(inner)
