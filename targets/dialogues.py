"""Dialogues and texts, as token ids with a mask of the target's own tokens.

A line of JSONL, or a row of a dataset, is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}     ShareGPT's form
    {"prompt": "...", "response": "..."}
    {"text": "..."}
A head drafts what the target says, so only the assistant's tokens in a dialogue count in the loss. Reasoning before an
answer counts too; it is stored next to "content" as "reasoning_content".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.schema import parse_line, read_lines
from ..errors import TrainingDataInvalid
from .prompts import Prompt

if TYPE_CHECKING:
    # Imported where used: whether a row has one of the forms is checked before torch is loaded.
    from torch import Tensor

    from .tokenizer import Tokenizer

# SGLang's and TensorRT-LLM's name for what a reasoning parser takes out of an answer, and vLLM's:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/chat_completion/protocol.py#L79
REASONING = "reasoning_content"
NAMES = (REASONING, "reasoning")


def read_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's reasoning under the one name that kconv writes; empty if it has none."""
    found = next((message[name] for name in NAMES if message.get(name)), None)
    return {} if found is None else {REASONING: found}


FORMS = 'Write {"messages": [...]}, {"conversations": [...]}, {"prompt": "", "response": ""} or {"text": ""}.'
ANSWERED = "These are prompts. kconv generate has a server's target answer them; kconv states takes them as --prompts."

ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Attributes:
        ids: token ids [L] int64.
        mask: [L] bool, whether the token counts in the loss.
        prompts: the digests of the prompts answered in it: the user's turns up to each answer, or a plain text itself.
    """

    ids: Tensor
    mask: Tensor
    prompts: tuple[str, ...] = ()


def read_rows(name: str, split: str = "train", revision: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row of a JSONL file or of a dataset on the Hub, with its position.

    Raises:
        TrainingDataInvalid: there is no such file or dataset, or a line is not a JSON object.
    """
    file = Path(name)
    if file.exists():
        yield from _read_jsonl(file)
        return
    from datasets import load_dataset

    try:
        rows: Iterable[Any] = load_dataset(name, split=split, revision=revision, streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}:{split}[{number}]", row
    except (OSError, ValueError) as fault:
        raise TrainingDataInvalid(
            f"{name} is neither a file nor a readable dataset: {_why(fault)}",
            where=name,
            fix="Pass a JSONL file, or the id of a dataset on the Hub (with --split and --revision).",
        ) from fault


def _why(fault: Exception) -> str:
    """Return the first line of a library's message; that of its offline mode names a class."""
    first = str(fault).partition("\n")[0]
    return "HF_HUB_OFFLINE is set, and it is not in the local cache" if "OfflineModeIsEnabled" in first else first


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    fix = "Pass a UTF-8 JSONL file."
    for number, line in read_lines(file, TrainingDataInvalid, fix=fix):
        where = f"{file}:{number}"
        try:
            row = parse_line(line)
        except ValueError as fault:
            own = "Correct this line, or delete it; each is one JSON object."
            raise TrainingDataInvalid(f"this row cannot be read: {fault}", where=where, fix=own) from fault
        # What kconv generate writes for a prompt without an answer.
        if "failed" not in row or "messages" in row:
            yield where, row


def has_answers(file: Path) -> bool:
    """Return whether a JSONL file's first row is a dialogue or a text, not a prompt alone."""
    for _, line in read_lines(file, TrainingDataInvalid, fix="Pass a UTF-8 JSONL file."):
        with suppress(ValueError):  # which whatever reads the file reports
            return bool({"messages", "conversations", "response", "text"} & parse_line(line).keys())
        break
    return False


def check_first_row(file: Path) -> None:
    """Refuse a file of something else, from its first row alone.

    Raises:
        TrainingDataInvalid: see `read_rows` and `encode_row`.
    """
    for where, row in _read_jsonl(file):
        if not isinstance(row.get("text"), str):
            _messages(row, where)
        return


def encode_row(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Iterator[Sample]:
    """Yield the samples of a row: one, or more if the chat template drops parts of earlier turns.

    Raises:
        TrainingDataInvalid: the row has none of the forms, or has reasoning for which the chat template has no place.
        TargetInvalid: it is a dialogue, but the tokenizer has no chat template.
    """
    if isinstance(row.get("text"), str):
        import torch

        ids = torch.tensor(tokenizer.encode(row["text"]), dtype=torch.int64)
        yield Sample(ids, torch.ones_like(ids, dtype=torch.bool), (prompt_digest([row["text"]]),))
        return
    yield from _encode_dialogue(_messages(row, where), tokenizer, where)


def _messages(row: Mapping[str, Any], where: str) -> Messages:
    if isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    turns = row.get("messages", row.get("conversations"))
    try:
        messages = [
            {"role": ROLES[turn.get("role", turn.get("from"))], "content": turn.get("content", turn.get("value"))}
            | read_reasoning(turn)
            for turn in turns or ()
        ]
        if not messages and not {"prompt", "turns"} & row.keys():
            raise ValueError(f"its keys are {', '.join(map(str, row))[:80]}")
        if not any(m["role"] == "assistant" for m in messages):
            raise ValueError("it has no answer")
        if not all(said and isinstance(said, str) for m in messages for said in m.values()):
            raise ValueError("a turn is empty, or is not text")
    except (AttributeError, KeyError, TypeError, ValueError) as fault:
        why = f"a turn is from {fault}, not {', '.join(ROLES)}" if isinstance(fault, KeyError) else fault
        asks = {"prompt", "turns"} & row.keys() and not {"messages", "conversations", "response"} & row.keys()
        raise TrainingDataInvalid(
            f"this row is not a dialogue: {why}",
            where=where,
            fix=ANSWERED if asks else f"{FORMS} Leave out rows with an empty turn.",
        ) from fault
    return messages


def _encode_dialogue(messages: Messages, tokenizer: Tokenizer, where: str) -> Iterator[Sample]:
    """Encode turn by turn, as an engine does: no token crosses the border between prompt and answer."""
    written, ids, mask, prompts = "", [], [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:place], answer=True)
        after = tokenizer.render_chat(messages[: place + 1], answer=False)
        # A template that writes reasoning itself gives a different text without it.
        if REASONING in message and after == tokenizer.render_chat(
            [*messages[:place], message | {REASONING: ""}], answer=False
        ):
            after = add_reasoning(before, after, message[REASONING], where)
        if not before.startswith(written):
            # The template rewrote the past, e.g. it dropped an earlier turn's reasoning. So far is one sample; the rest
            # saw a different text and is another.
            yield _sample(ids, mask, prompts)
            written, ids, mask, prompts = "", [], [], []
        asked = tokenizer.encode(before[len(written) :])
        if not after.startswith(before):
            # The answer does not simply follow the prompt (the template closes an open tag): use it verbatim.
            after = before + message["content"]
        said = tokenizer.encode(after[len(before) :])
        ids += asked + said
        mask += [False] * len(asked) + [True] * len(said)
        prompts.append(prompt_digest([turn["content"] for turn in messages[:place] if turn["role"] == "user"]))
        written = after
    yield _sample(ids, mask, prompts)


def _sample(ids: list[int], mask: list[bool], prompts: list[str]) -> Sample:
    import torch

    return Sample(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), tuple(prompts))


# How Kimi's chat templates write an earlier answer, without its reasoning (commit 6126819):
# https://huggingface.co/moonshotai/Kimi-K2-Thinking/blob/main/chat_template.jinja
OPEN, CLOSE = "<think>", "</think>"


def add_reasoning(before: str, after: str, reasoning: str, where: str) -> str:
    """Return a rendered dialogue with the reasoning of its last answer filled in at the empty place for it.

    `before` is the dialogue up to the start of that answer; `after` is the dialogue with it, as the chat template
    renders it without the reasoning.
    """
    # The prompt may already end in the opening tag.
    start = len(before.removesuffix(OPEN))
    gap, empty, answer = after[start:].partition(OPEN + CLOSE)
    # After other text the tags belong to the answer.
    if not empty or gap.strip():
        raise TrainingDataInvalid(
            f"this row has {REASONING}, but the target's chat template has no place for it ({OPEN}{CLOSE})",
            where=where,
            fix="Use answers of this target, or the chat template that it is served with.",
        )
    return f"{after[:start]}{gap}{OPEN}{reasoning}{CLOSE}{answer}"


def prompt_digest(turns: Sequence[str]) -> str:
    """Return the digest of what a user said, in the form of held-out prompts."""
    return Prompt("", "", tuple(turns)).digest
