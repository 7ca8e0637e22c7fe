"""`kconv tiny`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..lines import Part, Result
from ..options import Count, Name, argument, option
from .base import Context, Estimate, Operation
from .reading import refuse_existing_output


@dataclass(frozen=True, repr=False)
class TinyMade(Result):
    """A tiny target."""

    out: str

    def to_json(self) -> Any:
        """Return its folder."""
        return {"out": self.out}

    def lines(self) -> Iterable[Part]:
        return (self.out,)


class Tiny(Operation):
    """Train a tiny Kimi-K2 and write it, with texts, into the new folder OUT, for the demo and the example recipe.

    Training takes a few minutes on two cores, once; the target is cached in $KCONV_CACHE or ~/.cache/kconv. OUT holds
    `target/`, `train.jsonl`, `eval.jsonl` and `held-out.jsonl`.
    """

    EXAMPLES = ("kconv tiny my-tiny",)

    out: Name = argument("The folder to write; it must not exist.", kind="output")
    size: Literal["demo", "test"] = option("test", "demo: the demo's target. test: a smaller one.")
    documents: Count = option(400, "Documents to train a head on.", metavar="N")
    prompts: Count = option(8, "Held-out prompts.", metavar="N")
    prompt_tokens: Annotated[int, Field(ge=8)] = option(96, "Minimum length of a held-out prompt.", metavar="N")

    def run(self, context: Context) -> TinyMade:
        """Train the target, or find it in the cache, and write texts for it.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            TrainingFailed: the target could not be trained.
        """
        refuse_existing_output(self.out)
        from ..tiny.target import write_tiny

        with context.status("tiny Kimi-K2"):
            write_tiny(
                Path(self.out), self.size, prompts=self.prompts, prompt_tokens=self.prompt_tokens,
                documents=self.documents,
            )  # fmt: skip
        return TinyMade(self.out)

    def estimate(self, context: Context) -> Estimate:
        """Return the target's size in bytes if it is in the cache."""
        from ..tiny.recipe import DEMO, TEST, cache_root
        from ..tiny.target import kept_at

        recipe = {"demo": DEMO, "test": TEST}[self.size]
        cached = kept_at(recipe, cache_root())
        if not cached.is_dir():
            return Estimate(None)
        return Estimate(sum(file.stat().st_size for file in cached.rglob("*") if file.is_file()))
