"""Whether a folder is a head or a target."""

from __future__ import annotations

from ..checkpoint.folder import Checkpoint
from ..convert.read import Head
from ..errors import ComparisonUnfit

# Names that a target has and no head: its own layers, under the prefixes of Kimi-K2 and Kimi-K2.5.
TARGET_LAYERS = ("model.layers.", "language_model.model.layers.")


def is_target(checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint is a target, and no head."""
    if "eagle_config" in checkpoint.config or any(name.endswith("fc.weight") for name in checkpoint.tensors):
        return False
    return any(name.startswith(TARGET_LAYERS) for name in checkpoint.tensors)


def refuse_unfit(
    checkpoint: Checkpoint, whole: bool, source: Head | None, quantized_from: Checkpoint | None, *, measured: bool
) -> None:
    """Refuse what could only be passed over: a report would be clean of a comparison that nobody made.

    Raises:
        ComparisonUnfit: a target would be held against a head or the other way round, or its acceptance is asked for.
    """
    kind, other = ("target", "head") if whole else ("head", "target")
    if (source if whole else quantized_from) is not None:
        raise ComparisonUnfit(
            f"this is a {kind}, and its --source is a {other}",
            where=checkpoint.source,
            fix=f"Give the {kind} that it was made from.",
        )
    if whole and measured:
        raise ComparisonUnfit(
            "this is a target, and acceptance is a head's",
            where=checkpoint.source,
            fix="Check the head, and give this one as its --target; of a target, --source gives the perplexity.",
        )
