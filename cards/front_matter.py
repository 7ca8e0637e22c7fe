"""The YAML at a card's top.

https://github.com/huggingface/hub-docs/blob/242f4a1eeb867daf4ac3f44026a5df4a68908a3d/modelcard.md
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from ..bench.acceptance import Row
from ..checkpoint.source import HUB_ID
from .evidence import Evidence

TAGS = ("eagle3", "speculative-decoding", "draft-model")
LIBRARY = "kconv"
INDEX = "model-index"


def front_matter(evidence: Evidence, *, link: str, model_index: bool) -> str:
    """Return the YAML between the two lines of dashes.

    Args:
        evidence: about the head.
        link: where the license's text stands: a file of the folder or a URL, "" if nowhere.
        model_index: whether figures go in as evaluation results too.
    """
    facts = evidence.facts
    found: dict[str, Any] = {}
    if facts.languages:
        found["language"] = list(facts.languages)
    found |= _license(evidence, link)
    library = facts.library or (LIBRARY if evidence.manifest else None)
    found |= ({"library_name": library} if library else {}) | {"pipeline_tag": facts.pipeline_tag}
    bases = [name for name in dict.fromkeys((facts.base_model, source_head(evidence))) if name]
    if bases:
        # A conversion has no value of its own among adapter, merge, quantized and finetune.
        found |= {"base_model": bases, "base_model_relation": "finetune"}
    datasets = [dataset.id for dataset in facts.training.datasets if dataset.id]
    if datasets:
        found["datasets"] = datasets
    found["tags"] = list(dict.fromkeys((*TAGS, *facts.tags)))
    if model_index and (figures := results(evidence)):
        found[INDEX] = [{"name": evidence.name, "results": figures}]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def source_head(evidence: Evidence) -> str | None:
    """Return the hub id of the head that this one was made from, None where it is no repository."""
    if evidence.facts.source_head:
        return evidence.facts.source_head
    found = HUB_ID.fullmatch(evidence.manifest.source) if evidence.manifest else None
    # A path may look like a hub id; the commit behind the @ is what only a repository has.
    return found["repo"] if found and found["revision"] else None


def _license(evidence: Evidence, link: str) -> dict[str, str]:
    if not evidence.facts.license.id:
        return {"license": "unknown"}
    license = evidence.licenses[0]
    if license.identifier != "other":
        return {"license": license.identifier}
    found = {"license": "other"}
    if evidence.license_is_named:
        found["license_name"] = license.id
    if link:
        found["license_link"] = link
    return found


def results(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the acceptance lengths as the Hub's evaluation results."""
    rows = [row for file in evidence.acceptance for row in file.rows if row.metric == "al_incl_bonus"]
    return list(_results(rows))


def _results(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    for row in rows:
        name = f"{row.dataset} ({row.category})" if row.category else row.dataset
        metric = {"type": "acceptance_length", "name": f"acceptance length, K={row.draft_tokens}", "value": row.value}
        result: dict[str, Any] = {
            "task": {"type": "text-generation"},
            "dataset": {"type": row.dataset.lower(), "name": name},
            "metrics": [metric],
        }
        if row.url:
            result["source"] = {"name": "published figures", "url": row.url}
        yield result
