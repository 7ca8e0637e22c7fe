"""The suites that acceptance is measured on."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ..checkpoint.bytes import file_digest
from ..errors import MissingExtra, SuiteInvalid
from ..installed import install_command
from .prompts import Prompt, digest_prompts, read_prompts, refuse_repeated

# Placeholder for rows whose text another owner holds, until NVIDIA's prepare_data.py (examples/specdec_bench) fills
# them: https://huggingface.co/datasets/nvidia/SPEED-Bench. Drafting the placeholder itself would measure nothing.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SHOWN = 3


@dataclass(frozen=True)
class NamedSuite:
    """A named suite.

    Attributes:
        dataset: its name in acceptance.json.
        repo, file: its location on the Hub, as a dataset.
        revision: the default unless the user pins another; a branch is resolved and its commit recorded.
        each: prompts per category.
        digest: `digest_prompts` of them; None if nobody may publish the whole suite and each user fills it in.
    """

    dataset: str
    repo: str
    file: str
    revision: str
    categories: tuple[str, ...]
    each: int
    digest: str | None = None

    def is_it(self, prompts: tuple[Prompt, ...]) -> bool:
        """Return whether prompts are this suite: by digest if it has one, else by the number in each category."""
        each = Counter(prompt.category for prompt in prompts)
        return each == dict.fromkeys(self.categories, self.each) and self.digest in (None, digest_prompts(prompts))


SUITES = {
    "mt-bench": NamedSuite(
        "MT-Bench",
        "philschmid/mt-bench",
        "question.jsonl",
        "main",
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        10,
        # https://github.com/lm-sys/FastChat/blob/v0.2.36/fastchat/llm_judge/data/mt_bench/question.jsonl
        "f52d0d29fff83b9be4cbd0ee496024c9b64f1a120d3645e71659167a56b5761c",
    ),
    "speed-bench": NamedSuite(
        "SPEED-Bench",
        "nvidia/SPEED-Bench",
        "qualitative/test-00000-of-00001.parquet",
        # The revision that SGLang's own loader pins after v0.5.23, SPEED_BENCH_REVISION in
        # benchmark/datasets/speed_bench.py.
        "487aa718444e816458d1a0a52bfce7a454285cf4",
        ("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem",
         "summarization", "writing"),
        80,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Prompts by category.

    Attributes:
        dataset: its name, or a file's.
        revision: a commit, or "sha256:..." of a file.
        groups: category and its prompts, in the suite's order; a single category "" if the file names none.
        whole: whether these are all categories of a named suite.
    """

    dataset: str
    revision: str
    groups: tuple[tuple[str, tuple[Prompt, ...]], ...]
    whole: bool = True

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(prompt for _, prompts in self.groups for prompt in prompts)

    @property
    def digest(self) -> str:
        """One sha256 over the prompts."""
        return digest_prompts(self.prompts)


def load_suite(
    name: str, *, revision: str | None = None, categories: Sequence[str] = (), limit: int | None = None
) -> Suite:
    """Load a suite by name from the Hub, or from a file.

    Args:
        name: "mt-bench", "speed-bench", or a JSONL file; a file that holds a named suite's prompts counts as that.
        categories: if given, only these.
        limit: at most this many prompts of each category, from the top.

    Raises:
        SuiteInvalid: a category is missing, prompts are placeholders, or a revision is given for a file.
        PromptsInvalid: the file cannot be read, or a prompt of it repeats another.
        HubRefused, HubUnreachable: the dataset cannot be downloaded.
        MissingExtra: reading it requires pyarrow.
    """
    known = SUITES.get(name)
    if known:
        prompts, pinned = _fetch(known, revision or known.revision)
    else:
        if revision:
            raise SuiteInvalid("a file has no revision", where=name, fix="Remove --revision.")
        if not Path(name).exists():
            close = get_close_matches(name.lower(), SUITES, n=1)
            fix = f"Did you mean {close[0]}?" if close else f"Use {', '.join(SUITES)}, or a JSONL file of prompts."
            raise SuiteInvalid(f"there is no suite and no file {name}", where="--suite", fix=fix)
        prompts = read_prompts(Path(name))
        pinned = f"sha256:{file_digest(Path(name))}"
        known = next((suite for suite in SUITES.values() if suite.is_it(prompts)), None)
        if known is None:
            refuse_repeated(prompts, Path(name))
    return _suite(prompts, known, known.dataset if known else Path(name).name, pinned, categories, limit, name)


def _suite(
    prompts: Sequence[Prompt],
    known: NamedSuite | None,
    dataset: str,
    revision: str,
    categories: Sequence[str],
    limit: int | None,
    name: str,
) -> Suite:
    order = known.categories if known else tuple(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = tuple(categories) or order
    by_category = {name: tuple(p for p in prompts if p.category == name)[:limit] for name in wanted}
    missing = [name for name, held in by_category.items() if not held]
    if missing:
        raise SuiteInvalid(
            f"{dataset} has no prompt of the category {', '.join(missing)}; its categories are "
            + ", ".join(category or "(none)" for category in order),
            where=name,
            fix="Use the whole suite, or choose --categories that it has.",
        )
    suite = Suite(dataset, revision, tuple(by_category.items()), whole=set(wanted) == set(order) and limit is None)
    empty = [p.id for p in suite.prompts if any(PLACEHOLDER in turn for turn in p.turns)]
    if empty:
        raise SuiteInvalid(
            f"{len(empty)} of {len(suite.prompts)} prompts are placeholders, {', '.join(empty[:SHOWN])} among them",
            where=f"{dataset} {revision}",
            fix="Run prepare_data.py of NVIDIA Model-Optimizer's examples/specdec_bench and pass the file that it "
            "writes, or choose complete --categories.",
        )
    return suite


def _fetch(known: NamedSuite, revision: str) -> tuple[tuple[Prompt, ...], str]:
    # Imported here: huggingface_hub takes some tenths of a second, which a file should not cost.
    from ..checkpoint.hub import fetch_dataset_file

    file, commit = fetch_dataset_file(known.repo, known.file, revision)
    return _READERS[Path(known.file).suffix](file), commit


def _read_parquet(file: Path) -> tuple[Prompt, ...]:
    try:
        from pyarrow import parquet
    except ImportError as fault:
        raise MissingExtra(
            "reading SPEED-Bench from the Hub needs pyarrow",
            fix=f"Run {install_command('optimize')}, or pass a JSONL file.",
        ) from fault
    columns = ["question_id", "category", "turns"]
    rows = parquet.read_table(file, columns=columns).to_pylist()
    # Read through the one reader of prompts, which reports errors in rows.
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
        lines.flush()
        return read_prompts(Path(lines.name))


_READERS: dict[str, Callable[[Path], tuple[Prompt, ...]]] = {".jsonl": read_prompts, ".parquet": _read_parquet}
