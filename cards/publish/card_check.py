"""Whether a release's card is whole and true.

A card's prose is its owner's. What kconv wrote there of the manifest, the report and acceptance.json is rendered again
and must stand in it, so that no figure was put in by hand, nor is left from an earlier head.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from ..evidence import Evidence
from ..front_matter import INDEX, results
from ..rendering import not_repeated
from .release import CARD, IMAGES, Candidate

# The license checks see to the license and the base models.
NEEDED = ("library_name", "pipeline_tag")


def check_card(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a card: where, and one sentence."""
    if not candidate.card:
        yield CARD, "there is no card"
        return
    front = read_front_matter(candidate.card)
    if front is None:
        yield CARD, "the card has no front matter that can be read"
        return
    for key in NEEDED:
        if not front.get(key):
            yield f"{CARD}: {key}", f"the card does not say its {key}"
    for image in IMAGES.findall(candidate.card):
        if "://" not in image and image not in candidate.files:
            yield CARD, f"the card shows {image}, which is not in the folder"
    acceptance = tuple(candidate.acceptance.values())
    evidence = Evidence(candidate.folder, candidate.facts, candidate.manifest, candidate.report, acceptance)
    for line in not_repeated(evidence, candidate.card):
        yield CARD, f"the card does not say what its evidence does: {line}"
    indexed = [one for entry in front.get(INDEX) or [] for one in entry.get("results", [])]
    if indexed and indexed != results(evidence):
        yield f"{CARD}: {INDEX}", "the figures in the front matter are not those of acceptance.json"


def read_front_matter(card: str) -> dict | None:
    """Return the metadata at the head of a card; None where there is none that can be read."""
    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        held = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return None
    return held if isinstance(held, dict) else None
