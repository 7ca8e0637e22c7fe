"""The YAML at the top of a card, written and read with huggingface_hub's own ModelCard.

https://github.com/huggingface/hub-docs/blob/242f4a1eeb867daf4ac3f44026a5df4a68908a3d/modelcard.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.acceptance import LENGTHS, suite_name
from ..bench.tables import Benchmark
from ..checkpoint.schema import parse_yaml, read_text
from ..checkpoint.source import HUB_ID
from ..engines.registry import engines_of
from ..errors import KconvError
from .evidence import Evidence
from .target_card import TAGS as TARGET_TAGS
from .target_card import is_target, packed

# Imported where needed: it loads an HTTP client, and unreadable files are refused without one.
if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARD = "README.md"
TAGS = ("speculative-decoding", "draft-model")
INDEX = "model-index"
ORDER = (
    "language", "license", "license_name", "license_link", "library_name", "pipeline_tag", "base_model",
    "base_model_relation", "datasets", "tags", INDEX,
)  # fmt: skip


@dataclass(frozen=True)
class FrontMatter:
    """The parts of a card's front matter that kconv reads; "" or empty if missing.

    Attributes:
        results: the figures of its model index.
        problem: why it cannot be read, in one sentence; "" if it can.
    """

    license: str = ""
    license_name: str = ""
    license_link: str = ""
    library_name: str = ""
    pipeline_tag: str = ""
    base_models: tuple[str, ...] = ()
    results: tuple[EvalResult, ...] = ()
    problem: str = ""


def read_card(folder: Path) -> str:
    """Return README.md's text, "" if there is none."""
    file = folder / CARD
    return read_text(file, KconvError, fix="Put the text itself there, in UTF-8.") if os.path.lexists(file) else ""


def read_front_matter(card: str) -> FrontMatter:
    """Read an untrusted card's front matter; if it cannot be read, only `problem` is filled in."""
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    # For such a card huggingface_hub logs a warning and reads nothing.
    if not card.lstrip().startswith("---"):
        return FrontMatter(problem="the card has no front matter")
    try:
        # Bounded like any YAML, before huggingface_hub reads it: expanding aliases would never end there.
        if block := REGEX_YAML_BLOCK.search(card):
            parse_yaml(block[2], KconvError, where=CARD, what="card's front matter", fix="Write it with kconv card.")
        # A key of the front matter becomes an attribute of `data`, and may hide its methods.
        held = vars(ModelCard(card).data)
        return FrontMatter(
            base_models=_texts(held, "base_model"),
            results=tuple(held["eval_results"] or ()),
            **{key: _text(held, key) for key in ("license", "license_name", "license_link", "library_name")},
            pipeline_tag=_text(held, "pipeline_tag"),
        )
    # A hostile card makes PyYAML raise errors other than YAMLError (an impossible date: ValueError; nesting:
    # RecursionError; a number too large: OverflowError), and huggingface_hub KeyError, TypeError and AttributeError.
    except KconvError as fault:
        return FrontMatter(problem=fault.what[:200])
    except Exception as fault:
        said = " ".join(str(fault).split()) or type(fault).__name__
        return FrontMatter(problem=f"the card's front matter cannot be read: {said[:200]}")


def _text(held: Mapping[str, Any], key: str) -> str:
    value = held.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is a {type(value).__name__}, not text")
    return value or ""


def _texts(held: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = held.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        _text({key: one}, key)
    return tuple(one for one in values if one)


def front_matter(evidence: Evidence, *, link: str, model_index: bool) -> str:
    """Return the YAML between the two lines of dashes.

    Args:
        link: where the license's text is: a file of the folder or a URL, "" if nowhere.
    """
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard_data import eval_results_to_model_index

    facts = evidence.facts
    bases = [name for name in dict.fromkeys((facts.base_model, source_head(evidence))) if name]
    quantized = is_target(evidence.manifest)
    form = "compressed-tensors" if packed(evidence.manifest) else "modelopt"
    tags = (*TARGET_TAGS, form) if quantized else (evidence.drafter.name, *TAGS)
    data = ModelCardData(
        language=list(facts.languages) or None,
        # The Hub offers to load a model with the stated library, and no library on its list loads a head.
        # https://github.com/huggingface/huggingface.js/blob/00142be70773c00449b42eb1acb4cef3db6e0e17/packages/tasks/src/model-libraries.ts
        library_name=facts.library,
        pipeline_tag=facts.pipeline_tag,
        base_model=bases or None,
        # A draft head or a conversion is none of adapter, merge, quantized and finetune; a quantized one is quantized.
        base_model_relation="quantized" if bases and (quantized or _is_quantized(evidence)) else None,
        datasets=[dataset.id for dataset in facts.training.datasets if dataset.id] or None,
        tags=list(dict.fromkeys([*tags, *_engines(evidence), *facts.tags])),
        **_license(evidence, link),
    )
    if model_index and (figures := results(evidence)):
        # One by one: for several figures on one dataset the library would keep one name and one source, and so show one
        # category's figure, or one publisher's, under another's name.
        single = [eval_results_to_model_index(evidence.name, [figure])[0]["results"][0] for figure in figures]
        data[INDEX] = [{"name": evidence.name, "results": single}]
    return data.to_yaml(original_order=list(ORDER)) + "\n"


def _engines(evidence: Evidence) -> list[str]:
    return [engine.name for engine in engines_of(evidence.manifest.layout)] if evidence.manifest else []


def _is_quantized(evidence: Evidence) -> bool:
    return evidence.manifest is not None and any(step.action == "quantized" for step in evidence.manifest.tensors)


def source_head(evidence: Evidence) -> str | None:
    """Return the hub id of the head that this one was made from, None if it is not a repository."""
    if evidence.facts.source_head:
        return evidence.facts.source_head
    found = HUB_ID.fullmatch(evidence.manifest.source) if evidence.manifest else None
    # A path may look like a hub id; only a repository has a commit after the @.
    return found["repo"] if found and found["revision"] else None


def _license(evidence: Evidence, link: str) -> dict[str, Any]:
    if not evidence.facts.license.id:
        return {"license": "unknown"}
    license = evidence.licenses[0]
    if license.identifier != "other":
        return {"license": license.identifier}
    found: dict[str, Any] = {"license": "other"}
    if evidence.license_is_named:
        found["license_name"] = license.id
    if link:
        found["license_link"] = link
    return found


def results(evidence: Evidence) -> list[EvalResult]:
    """Return the acceptance lengths as the Hub's evaluation results."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite_name(row.dataset).lower(),
            dataset_name=Benchmark.of(row).name,
            metric_type="acceptance_length",
            metric_name=f"acceptance length, K={row.draft_tokens}",
            metric_value=row.value,
            source_name="published figures" if row.url else None,
            source_url=row.url,
        )
        for file in evidence.acceptance
        for row in file.rows
        if row.metric in LENGTHS
    ]
