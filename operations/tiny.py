"""`kconv tiny`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Context, Estimate, Name, Operation, argument, option
from .reading import Count, refuse_existing_output

# Documents that are only evaluated on while a head is trained.
EVALUATED_ON = 6


@dataclass(frozen=True)
class TinyMade:
    """A tiny target that was made."""

    out: str

    def to_json(self) -> Any:
        """Return where it is."""
        return {"out": self.out}


class Tiny(Operation):
    """Make a tiny Kimi-K2 and texts for it in the new folder OUT: what the demo and the example recipe stand on.

    The target is really trained, some minutes on two cores, once; it is kept in $KCONV_CACHE, else ~/.cache/kconv. OUT
    holds `target/`, `train.jsonl`, `eval.jsonl` and `held-out.jsonl`.
    """

    JOB = "Try it"
    SUMMARY = "A tiny Kimi-K2 that is really trained, and texts for it."
    EXAMPLES = ("kconv tiny my-tiny",)

    out: Name = argument("The folder to write; nothing may be there.", kind="output")
    size: Literal["demo", "test"] = option("test", "demo: the demo's own. test: smaller.")
    documents: Count = option(400, "Documents to train a head on.", metavar="N")
    prompts: Count = option(8, "Held-out prompts.", metavar="N")
    prompt_tokens: Annotated[int, Field(ge=8)] = option(96, "Least length of a held-out prompt.", metavar="N")

    def run(self, context: Context) -> TinyMade:
        """Train the target, or find it in the cache, and write texts for it.

        Raises:
            OutputExists, OutputFailed: the folder is there, or cannot be written.
            TrainingFailed: the target could not be trained.
        """
        from ..checkpoint.staging import staged
        from ..targets.tokenizer import load_tokenizer
        from ..tiny.cache import cache_root
        from ..tiny.recipe import DEMO, TEST
        from ..tiny.target import make_target
        from ..tiny.text import read_corpus

        refuse_existing_output(self.out)
        with context.steps("tiny Kimi-K2") as advance:
            made = make_target({"demo": DEMO, "test": TEST}[self.size], cache_root(), advance)
        corpus, tokenizer = read_corpus(), load_tokenizer(made)
        long_enough = [text for text in corpus.held_out if len(tokenizer.encode(text)) >= self.prompt_tokens]
        prompts, rest = long_enough[: self.prompts], long_enough[self.prompts :]
        with staged(Path(self.out)) as folder:
            shutil.copytree(made, folder / "target")
            _write_lines(folder / "train.jsonl", ({"text": text} for text in corpus.train[: self.documents]))
            _write_lines(folder / "eval.jsonl", ({"text": text} for text in rest[:EVALUATED_ON]))
            _write_lines(folder / "held-out.jsonl", ({"prompt": text, "category": "documentation"} for text in prompts))
        return TinyMade(self.out)

    def estimate(self, context: Context) -> Estimate:
        """Return the target's bytes where it is in the cache."""
        from ..tiny.cache import cache_root, recipe_key
        from ..tiny.recipe import DEMO, TEST
        from ..tiny.target import KIND, SOURCE

        recipe = {"demo": DEMO, "test": TEST}[self.size]
        cached = cache_root() / f"{KIND}-{recipe_key(recipe, source=SOURCE)}"
        if not cached.is_dir():
            return Estimate(None)
        return Estimate(sum(file.stat().st_size for file in cached.rglob("*") if file.is_file()))


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
