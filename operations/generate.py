"""`kconv generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ..lines import Part, Result
from ..options import Name, Url, option
from ..train.options import GenerateOptions
from .base import Context, Operation


@dataclass(frozen=True, repr=False)
class Generated(Result):
    """What became of the prompts: how many were answered, failed, or already had an answer."""

    out: str
    counts: Mapping[str, int]
    prompts: int

    def to_json(self) -> Any:
        """Return the counts as plain values."""
        return {"out": self.out, "prompts": self.prompts} | {"counts": dict(self.counts)}

    def lines(self) -> Iterable[Part]:
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        return (f"{self.out}: {counts} of {self.prompts} prompts",)


class Generate(Operation, GenerateOptions):
    """Send each prompt, with all its turns, to the server at --url, and write the dialogues to --out for kconv train.

    Every prompt is answered, failed with a reason, or skipped because --out has its answer. The same command resumes a
    stopped run and retries failed prompts. Exit 1 if any failed.
    """

    EXAMPLES = (
        "kconv generate --url http://127.0.0.1:8000 --model my-target --prompts prompts.jsonl --out dialogues.jsonl",
    )
    OUTPUT = "dialogues.jsonl"
    RESUMES = True

    url: Url = option(..., "An OpenAI-compatible server, e.g. http://127.0.0.1:8000.")
    model: str = option(..., "The server's name for the target.")
    prompts: Name = option(..., "Prompts (JSONL).", kind="file")
    out: Name = option(..., "The dialogues (JSONL); existing answers are kept.", kind="output")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if Path(self.prompts).resolve() == Path(self.out).resolve():
            raise ValueError("--out is the file of --prompts; name another file for the answers")
        return self

    def run(self, context: Context) -> Generated:
        """Write the dialogues.

        Raises:
            PromptsInvalid: the prompts cannot be read.
            EngineFailed: the server cannot be reached.
        """
        from ..serving.client import Client
        from ..targets.prompts import read_prompts
        from ..train.generate import ANSWER_SECONDS, generate

        asked = read_prompts(context.path(self.prompts))
        server = Client(self.url, self.model, ANSWER_SECONDS)
        with context.status("asking") as say:
            counts = generate(
                asked, server, self, Path(self.out), lambda so_far: say(f"{so_far.total()} of {len(asked)} prompts")
            )
        return Generated(self.out, counts, len(asked))

    def passed(self, result: Generated) -> bool:
        """Return whether every prompt has an answer."""
        from ..train.generate import FAILED

        return not result.counts.get(FAILED)
