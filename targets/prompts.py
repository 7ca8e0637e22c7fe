"""Prompts for drafting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.schema import parse_line, read_lines
from ..errors import PromptsInvalid

# Hex digits of a prompt digest in a trained head's manifest. With 64 bits, a prompt collides with one of a million
# others once in 10^13. A million of them take 24 MB of kconv.json, which stays one file: a sidecar would save a third
# of that, but could be lost or mixed up with another head's.
KEPT = 16


@dataclass(frozen=True)
class Prompt:
    """The user's side of a dialogue, turn by turn.

    Attributes:
        id: the file's own id, or the line number; unique in its file.
        category: "" if the file states none.
        turns: the user's turns, none of them empty.
    """

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """sha256 of the turns alone, so that a prompt is recognized under another id or category."""
        return hashlib.sha256(json.dumps(self.turns, ensure_ascii=False).encode()).hexdigest()


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """Read prompts, one JSON object per line; blank lines are skipped.

    A line is `{"prompt": "...", "category": "..."}`, or MT-Bench's
    `{"question_id": 81, "category": "...", "turns": ["...", "..."]}`
    (https://github.com/lm-sys/FastChat/blob/v0.2.36/fastchat/llm_judge/data/mt_bench/question.jsonl).
    Ids and categories are optional, and other keys are ignored.

    Raises:
        PromptsInvalid: the file is missing, empty or not UTF-8, or a line has neither form or repeats an id.
    """
    return tuple(each_prompt(file))


def refuse_repeated(prompts: tuple[Prompt, ...], file: Path) -> tuple[Prompt, ...]:
    """Return prompts to measure on, and refuse a repeated one, which would count as further evidence.

    Raises:
        PromptsInvalid: a prompt repeats another one, under whatever id.
    """
    first: dict[str, str] = {}
    for prompt in prompts:
        if (before := first.setdefault(prompt.digest, prompt.id)) != prompt.id:
            raise PromptsInvalid(
                f"prompt {prompt.id} repeats prompt {before}, and would count as further evidence",
                where=file,
                fix="Keep one of each.",
            )
    return prompts


def each_prompt(file: Path) -> Iterator[Prompt]:
    """Yield what `read_prompts` returns, keeping only the ids in memory."""
    seen: set[str] = set()
    for number, line in read_lines(file, PromptsInvalid, fix="Pass a UTF-8 JSONL file."):
        prompt = _parse(line, number, file)
        if prompt.id in seen:
            raise _invalid(f"repeats the id {prompt.id!r}", number, file, fix="Give each line its own id, or none.")
        seen.add(prompt.id)
        yield prompt
    if not seen:
        raise PromptsInvalid(f"{file.name} holds no prompts", where=file, fix="Write one JSON object per line.")


def _parse(line: str, number: int, file: Path) -> Prompt:
    try:
        value = parse_line(line)
    except ValueError as fault:
        raise _invalid(f"cannot be read: {fault}", number, file) from fault
    if ("prompt" in value) == ("turns" in value):
        held = f", but has {', '.join(value)}"[:80] if value else ""
        fix = f"{FORMS} {DIALOGUES}" if "messages" in value else FORMS
        raise _invalid(f'needs either "prompt" or "turns"{held}', number, file, fix)
    turns = value["turns"] if "turns" in value else [value["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        empty = turns and isinstance(turns, list) and all(isinstance(t, str) for t in turns)
        missing = f"has an empty {'turn' if 'turns' in value else 'prompt'}"
        raise _invalid(missing if empty else "has a turn that is not text, or no turns", number, file)
    name = value.get("question_id", value.get("id", number))
    category = value.get("category", "")
    if not isinstance(name, str | int) or not isinstance(category, str):
        raise _invalid("has an id or a category that is not text", number, file)
    return Prompt(str(name), category, tuple(turns))


FORMS = 'Write {"prompt": "...", "category": "..."} or {"question_id": 1, "category": "...", "turns": ["..."]}.'
DIALOGUES = "Dialogues with answers are for --data of kconv states and kconv train."


def _invalid(what: str, number: int, file: Path, fix: str = FORMS) -> PromptsInvalid:
    return PromptsInvalid(f"line {number} {what}", where=f"{file}:{number}", fix=fix)


def digest_prompts(prompts: tuple[Prompt, ...]) -> str:
    """Return one sha256 over prompts in any order, to identify what a figure was measured on."""
    return hashlib.sha256("".join(sorted(p.digest for p in prompts)).encode()).hexdigest()
