"""What a head is trained on, as rows of token ids.

A line of JSONL, or a row of a dataset, is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}     ShareGPT's form
    {"prompt": "...", "response": "..."}
    {"text": "..."}
A head drafts what the target says, so of a dialogue only the assistant's tokens count in the loss. What it thought
before an answer is said too, and stands beside "content" as "reasoning_content".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.schema import parse_json, read_lines
from ..errors import RecipeInvalid, TrainingDataInvalid
from ..head.vocab import keep_most_frequent, offsets
from ..targets.prompts import Prompt
from ..targets.states import StatesFolder
from ..targets.tokenizer import Tokenizer
from .generate import REASONING, read_reasoning

HELD_OUT = 0.02  # share of the samples, or of the prompts
FEWEST = 4  # rows to look at; fewer say nothing


@dataclass(frozen=True)
class Prepared:
    """Rows to train on, rows that are only looked at, what the manifest is to say of them, and the prompts trained on.

    Prompts are named by their digests.
    """

    text: Rows
    unseen: Rows
    facts: dict[str, object]
    prompts: frozenset[str]


@dataclass(frozen=True)
class Placed:
    """Rows cut from stored sequences: of each the sequence and the token it begins with; and the prompts' digests."""

    rows: Rows
    places: tuple[tuple[int, int], ...]
    prompts: frozenset[str]


def prepare_dialogues(
    name: str, tokenizer: Tokenizer, seq: int, *, held_out: str | None, split: str, revision: str | None
) -> Prepared:
    """Read and encode a file or dataset.

    Args:
        name: a JSONL file, or a dataset's id.
        tokenizer: the target's.
        seq: tokens per row.
        held_out: another file or dataset to look at; else one sample of `name` in fifty is held out, chosen by
            its tokens' digest, so that the choice hangs on nothing else.
        split, revision: of a dataset.

    Raises:
        TrainingDataInvalid: it cannot be read, or a row of `held_out` is trained on too.
    """
    samples = {_digest(s): s for s in _samples(name, tokenizer, split, revision)}
    if held_out:
        others = {_digest(s): s for s in _samples(held_out, tokenizer, split, None)}
        both = samples.keys() & others.keys()
        if both:
            raise TrainingDataInvalid(
                f"{len(both)} of the {len(others)} held-out samples are trained on too",
                where=held_out,
                fix="Take them out of one of the two.",
            )
    else:
        chosen = _choose(samples)
        others = {key: s for key, s in samples.items() if key in chosen}
        samples = {key: s for key, s in samples.items() if key not in others}
    text, unseen = (Rows(*pack_samples(part.values(), seq)) for part in (samples, others))
    _refuse_few(unseen, name)
    digest = hashlib.sha256("".join(sorted(samples)).encode()).hexdigest()
    facts: dict[str, object] = {"name": name, "samples": len(samples), "held_out": len(others), "sha256": digest}
    prompts = frozenset(prompt for sample in samples.values() for prompt in sample.prompts)
    return Prepared(text, unseen, facts | ({"revision": revision} if revision else {}), prompts)


def place_sequences(states: StatesFolder, seq: int, *, held_out: bool) -> Placed:
    """Cut stored sequences into rows.

    Args:
        states: what was stored.
        seq: tokens per row; what is shorter is padded and masked.
        held_out: the rows to look at instead of the rows to train on: those of one prompt in fifty.
    """
    places: list[tuple[int, int]] = []
    ids: list[Tensor] = []
    masks: list[Tensor] = []
    chosen = _choose({record.digest for record in states.sequences})
    for number, record in enumerate(states.sequences):
        if (record.digest in chosen) != held_out:
            continue
        stored = states.read(number)
        mask = stored.loss_mask.bool() if stored.loss_mask is not None else _behind(record.prompt_length, record.length)
        for start in range(0, record.length, seq):
            if mask[start : start + seq][1:].any():
                places.append((number, start))
                ids.append(_padded(stored.tokens[start : start + seq], seq))
                masks.append(_padded(mask[start : start + seq], seq))
    if len(places) < FEWEST:
        raise TrainingDataInvalid(
            f"the stored states give {len(places)} rows {'to look at' if held_out else 'to train on'}",
            where=states.folder,
            fix="Store the states of more prompts.",
        )
    prompts = frozenset(states.sequences[number].digest for number, _ in places)
    return Placed(Rows(torch.stack(ids), torch.stack(masks)), tuple(places), prompts)


def _samples(name: str, tokenizer: Tokenizer, split: str, revision: str | None) -> Iterable[Sample]:
    for where, row in read_rows(name, split, revision):
        yield from encode_row(row, tokenizer, where)


def _digest(sample: Sample) -> str:
    return hashlib.sha256(sample.ids.numpy().tobytes()).hexdigest()


def _choose(digests: Collection[str]) -> set[str]:
    """Return the digests of what is held out."""
    return set(sorted(digests)[: max(FEWEST, round(HELD_OUT * len(digests)))])


def _refuse_few(rows: Rows, name: str) -> None:
    if len(rows.ids) < FEWEST:
        raise TrainingDataInvalid(
            f"only {len(rows.ids)} rows are left to look at; {FEWEST} are the fewest that say anything",
            where=name,
            fix="Give more data, or --held-out FILE.",
        )


def _behind(prompt: int, length: int) -> Tensor:
    return torch.arange(length) >= prompt


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))


ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Attributes:
        ids: token ids [L] int64.
        mask: [L] bool, whether the token counts in the loss.
        prompts: the digests of what is answered in it: the user's turns up to each answer, or a plain text itself.
    """

    ids: Tensor
    mask: Tensor
    prompts: tuple[str, ...] = ()


def read_rows(name: str, split: str = "train", revision: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row of a JSONL file or of a dataset on the Hub, and where it stands.

    Args:
        name: a file's path, or a dataset's id.
        split, revision: of a dataset.

    Raises:
        TrainingDataInvalid: there is no such file or dataset, or a line is no JSON object.
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
            f"{name} is no file, and no dataset that can be read: {str(fault).splitlines()[0]}",
            where=name,
            fix="Give a JSONL file, or the id of a dataset on the Hub (with --split and --revision).",
        ) from fault


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    fix = "Give a JSONL file in UTF-8."
    for number, line in read_lines(file, TrainingDataInvalid, fix=fix):
        where = f"{file}:{number}"
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as fault:
            raise TrainingDataInvalid(f"the training data cannot be read: {fault}", where=where, fix=fix) from fault
        yield where, row


def encode_row(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Iterator[Sample]:
    """Yield the samples of a row: one, or more where the chat template forgets what an earlier turn said.

    Raises:
        TrainingDataInvalid: the row is of none of the forms, or holds reasoning that the chat template has no place
            for.
        TargetInvalid: it is a dialogue, and the tokenizer has no chat template.
    """
    if isinstance(row.get("text"), str):
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
        if not any(m["role"] == "assistant" for m in messages):
            raise ValueError("it holds no answer")
        if not all(said and isinstance(said, str) for m in messages for said in m.values()):
            raise ValueError("a turn is empty, or no text")
    except (AttributeError, KeyError, TypeError, ValueError) as fault:
        raise TrainingDataInvalid(
            f"this row is no dialogue: {fault}",
            where=where,
            fix='Write {"messages": [...]}, {"conversations": [...]}, {"prompt": "", "response": ""} or {"text": ""}.',
        ) from fault
    return messages


def _encode_dialogue(messages: Messages, tokenizer: Tokenizer, where: str) -> Iterator[Sample]:
    """Encode turn by turn, as an engine does: it never saw a token across the border of prompt and answer."""
    written, ids, mask, prompts = "", [], [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:place], answer=True)
        after = tokenizer.render_chat(messages[: place + 1], answer=False)
        # A template that writes reasoning itself gives another text where there is none.
        if REASONING in message and after == tokenizer.render_chat(
            [*messages[:place], message | {REASONING: ""}], answer=False
        ):
            after = add_reasoning(before, after, message[REASONING], where)
        if not before.startswith(written):
            # The template rewrote the past, e.g. it dropped an earlier turn's reasoning: what was is a sample of
            # its own, and what follows saw another text.
            yield _sample(ids, mask, prompts)
            written, ids, mask, prompts = "", [], [], []
        asked = tokenizer.encode(before[len(written) :])
        if not after.startswith(before):
            # The answer is not what follows the prompt (a template that closes an open tag): take it verbatim.
            after = before + message["content"]
        said = tokenizer.encode(after[len(before) :])
        ids += asked + said
        mask += [False] * len(asked) + [True] * len(said)
        prompts.append(prompt_digest([turn["content"] for turn in messages[:place] if turn["role"] == "user"]))
        written = after
    yield _sample(ids, mask, prompts)


def _sample(ids: list[int], mask: list[bool], prompts: list[str]) -> Sample:
    return Sample(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), tuple(prompts))


def pack_samples(samples: Iterable[Sample], seq: int) -> tuple[Tensor, Tensor]:
    """Lay samples out in rows of one length: cut what is longer into rows of its own, pad what is shorter.

    Padding stands at the end and is masked; a causal model's states before it do not depend on it.

    Args:
        samples: what to lay out.
        seq: tokens per row.

    Returns:
        ids [N, seq] int64 and mask [N, seq] bool. Rows in which nothing counts are left out.
    """
    rows: list[Tensor] = []
    masks: list[Tensor] = []
    for sample in samples:
        for ids, mask in zip(sample.ids.split(seq), sample.mask.split(seq), strict=True):
            # A draft starts behind the answer's first token, which the target's prefill gives.
            if mask[1:].any():
                rows.append(torch.nn.functional.pad(ids, (0, seq - len(ids))))
                masks.append(torch.nn.functional.pad(mask, (0, seq - len(mask))))
    if not rows:
        raise TrainingDataInvalid("the data holds nothing to train on", fix="Give dialogues with answers, or texts.")
    return torch.stack(rows), torch.stack(masks)


# How Kimi's chat templates write an answer whose reasoning they leave out, as it is history (commit 6126819):
# https://huggingface.co/moonshotai/Kimi-K2-Thinking/blob/main/chat_template.jinja
OPEN, CLOSE = "<think>", "</think>"


def add_reasoning(before: str, after: str, reasoning: str, where: str) -> str:
    """Return a rendered dialogue with the reasoning of its last answer in the place that was left empty for it.

    Args:
        before: the dialogue up to where that answer begins.
        after: the dialogue with the answer, as the chat template writes it without the reasoning.
        reasoning: what the target said before the answer.
        where: the row, for messages.

    Raises:
        TrainingDataInvalid: the template has no place for it.
    """
    # What the target is asked with may end in the opening tag already.
    start = len(before.removesuffix(OPEN))
    gap, empty, answer = after[start:].partition(OPEN + CLOSE)
    # Behind other text the tags are the answer's own.
    if not empty or gap.strip():
        raise TrainingDataInvalid(
            f"this row has {REASONING}, and the target's chat template no place for it ({OPEN}{CLOSE})",
            where=where,
            fix="Give answers of this very target, or the chat template that it is served with.",
        )
    return f"{after[:start]}{gap}{OPEN}{reasoning}{CLOSE}{answer}"


def prompt_digest(turns: Sequence[str]) -> str:
    """Return the digest of what a user said, as held-out prompts have it."""
    return Prompt("", "", tuple(turns)).digest


def cut_windows(text: Tensor, seq: int, count: int, seed: int) -> Tensor:
    """Return `count` windows of a text that do not overlap, in random order: `[count, seq]`.

    Args:
        text: [N] token ids.
        seq: tokens per window.
        count: how many.
        seed: of the choice and the order.

    Raises:
        RecipeInvalid: the text holds fewer.
    """
    whole = len(text) // seq
    if whole < count:
        raise RecipeInvalid(
            f"the recipe asks for {count:,} windows of {seq} tokens, and the text holds {whole:,}",
            fix="Lower the recipe's batches, or give more text.",
        )
    chosen = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
    return text[: whole * seq].view(whole, seq)[chosen]


def map_draft_vocab(text: Tensor, size: int, vocab: int, specials: Sequence[int] = ()) -> Tensor:
    """Return the map from draft to target ids that keeps a text's most frequent tokens: `d2t`, [size] int64.

    It holds offsets: draft id i means target id i + d2t[i]. Target ids ascend with draft ids.

    Args:
        text: token ids.
        size: rows of the draft vocabulary.
        vocab: rows of the target's.
        specials: ids that are kept whatever their frequency.

    Raises:
        RecipeInvalid: the text holds fewer distinct tokens.
        ConfigInvalid: the special tokens alone are more.
    """
    counts = torch.bincount(text, minlength=vocab)
    counts[list(specials)] += 1
    distinct = int((counts > 0).sum())
    if distinct < size:
        raise RecipeInvalid(
            f"the draft vocabulary has {size} tokens, and the text {distinct} distinct ones",
            fix="Lower draft_vocab, or give more text.",
        )
    return offsets(keep_most_frequent(counts, size, specials))


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool."""

    ids: Tensor
    mask: Tensor
