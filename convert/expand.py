"""A reduced head made to draft from the full vocabulary.

TensorRT-LLM needs it of an MLA head, and a token without a trained row must not win there (`head.filler`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import row_blocks
from ..engines.layout import Layout, stored
from ..errors import LayoutCannot
from ..head.filler import LEAN, Filler, make_filler, measure_margin, random_states
from ..head.vocab import target_ids
from .captured import Hints
from .made import Expanded
from .plan import Plan, Source, Step
from .read import Head, read_head, read_slot
from .vocab import edit, refuse_quantized
from .vocab_report import examine, stored_name

STATES = 256  # random states that the margin is measured on
ROUNDING = 1e-9  # in logits; what fp64 leaves of a distance to the hull that is 0


def expand(checkpoint: Checkpoint, layout: Layout | None, hints: Hints) -> Plan:
    """Plan a head with a row for each token of the target, from one with a reduced vocabulary.

    Tokens that the head could not draft get a row that never is the sole argmax (`head.filler`).

    Raises:
        LayoutCannot: the head has a full vocabulary.
        ConfigUnsupported: lm_head is quantized.
        KconvError: whatever `vocab_report.examine` finds wrong with the map, or `read_head` with the head.
    """
    for fault in examine(checkpoint, layout=layout).faults:
        raise fault.error()
    head = read_head(checkpoint, layout=layout, hints=hints)
    if head.spec.draft_vocab == head.spec.vocab:
        raise LayoutCannot(
            "the head has a row for each token of the target already",
            where=checkpoint.folder,
            fix="There is nothing to expand; convert it as it is.",
        )
    refuse_quantized(head)
    spec = replace(head.spec, draft_vocab=head.spec.vocab)
    lm_head, d2t = (head.places[slot][1] for slot in ("lm_head", "d2t"))
    ids = target_ids(read_slot(head, "d2t"))
    filler, how = _choose_filler(head, lm_head, ids)
    made = Expanded(lm_head, ids, spec.vocab, filler.row, _say_filler(head, lm_head, filler, how))
    sources = tuple(Source(head.places[slot][0], info) for slot, info in (("lm_head", lm_head), ("d2t", d2t)))
    step = Step(lm_head.name, sources, stored(head.layout, spec)[lm_head.name], "expanded", made)
    return edit(head, spec, [step], {stored_name(head.layout, "t2d"): "a full vocabulary needs no map"})


def _choose_filler(head: Head, lm_head: TensorInfo, ids: Tensor) -> tuple[Filler, str]:
    """Return the filler and what it is made of: one that leans, unless only the mean's place in the hull is proven."""

    def make(unlikely: int | None) -> Filler:
        return make_filler(lambda: row_blocks(lm_head), unlikely)

    unlikely, mean = _find_unlikely(head, ids), "the mean of these rows"
    if unlikely is None:
        return make(None), mean
    leaning = make(unlikely)
    if leaning.bound(read_slot(head, "norm")) >= ROUNDING:
        plain = make(None)
        if plain.excess < leaning.excess:
            return plain, mean
    return leaning, f"{mean}, leaning by {LEAN:.0%} towards that of token {int(ids[unlikely])}"


def _find_unlikely(head: Head, ids: Tensor) -> int | None:
    """Return the row of the padding or of the beginning of a text, with which no text goes on; None without one."""
    tokens = head.spec.tokens
    ends = tokens.eos if isinstance(tokens.eos, tuple) else (tokens.eos,)
    rows = [row for token in (tokens.pad, tokens.bos) if token not in (None, *ends) for row in (ids == token).nonzero()]
    return int(rows[0]) if rows else None


def _say_filler(head: Head, lm_head: TensorInfo, filler: Filler, how: str) -> str:
    gain = read_slot(head, "norm")
    missing = head.spec.vocab - head.spec.draft_vocab
    margin = measure_margin(lambda: row_blocks(lm_head), filler.row, missing, random_states(gain, STATES))
    bound = filler.bound(gain)
    proof = f"for any state its logit is at most {bound:.1e} above the greatest of theirs"
    if bound < ROUNDING:
        proof = "a convex combination of them even as rounded, so for no state the sole argmax"
    return (
        f"{head.spec.draft_vocab} rows at their target ids; each of the {missing} others is {how}, "
        f"rounded to {lm_head.dtype}: {proof}. On {margin.states} random states its logit is "
        f"{margin.worst:.3g} below the greatest at the least, {margin.median:.3g} in the median, and sampling at "
        f"temperature 1 would give the {missing} tokens {margin.leak:.2g} of the probability."
    )
