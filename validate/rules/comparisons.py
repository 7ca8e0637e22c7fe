"""What a comparison finds, with a source or an engine.

The comparisons make these findings themselves, beside what they measure; the rules look for nothing on their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..report import Severity
from .rule import Found, Rule, Subject

AGAIN = "Convert the source again; do not serve this output."
MAKE_AGAIN = "Fetch the folder again, or make it again with kconv; do not serve it as it is."
QUANTIZE_HEAD_AGAIN = "Quantize the head again, and give the very head that it is made from."
QUANTIZE_AGAIN = "Quantize the target again, and give the very target that it is made from."
AS_THE_SOURCE = "State what the source's config.json does; the weights are of that model."


class Compared(NamedTuple):
    """A kind of finding; fields as in `Rule`."""

    id: str
    name: str
    severity: Severity
    sentence: str
    fix: str


COMPARED = (
    Compared("K301", "manifest-broken", "error", "The folder's bytes are not those that its manifest records.",
             MAKE_AGAIN),
    Compared("K302", "manifest-absent", "warning", "The folder has no manifest; only its tensors can be compared with"
             " the source's.", "Convert the head with kconv to have one."),
    Compared("K303", "another-head", "error", "The output's config describes another head than the source's.",
             "Convert the source again."),
    Compared("K304", "bits-differ", "error", "A weight's bits are not the source's, and no manifest says why.", AGAIN),
    Compared("K305", "rounded-too-far", "error", "A head's quantized linear is further from its source than rounding"
             " takes it: a scale, the order of the nibbles, or the weight itself is another's.", QUANTIZE_HEAD_AGAIN),
    Compared("K306", "compared-by-noise", "info", "Linears of the head are quantized, and the source's are not: they"
             " are compared by their noise and not by their bits.", "Nothing to do."),
    Compared("K307", "told-otherwise", "warning", "A conversion was told to read its source otherwise than the source's"
             " own files say: the output is another head, and kconv publish refuses it.",
             "Convert the source again without the options that say how to read it; or, if its config is wrong, correct"
             " it there."),
    Compared("K390", "too-noisy", "error", "A quantized tensor is further from its source than rounding to NVFP4 can"
             " take it: a scale, the order of the nibbles, or the tensor itself is another's.", QUANTIZE_AGAIN),
    Compared("K391", "values-changed", "error", "A tensor that is not quantized has not its source's values.",
             QUANTIZE_AGAIN),
    Compared("K392", "tensor-not-the-sources", "error", "A tensor of the source is missing, or one is there that the"
             " source has not, or the two cannot be compared.", QUANTIZE_AGAIN),
    Compared("K393", "another-target", "error", "A quantized target's config describes another model than its source's:"
             " no tensor tells, and every answer is another's.", AS_THE_SOURCE),
    Compared("K701", "output-changed", "error", "An engine's greedy output with speculation is not its output without:"
             " speculation may not change a token.", "Do not serve this; look for the engine's own fault first."),
    Compared("K702", "counts-differ", "error", "An engine accepted other numbers of drafts than kconv's own chain of"
             " the same head: it reads the head otherwise than its config says. Of a server that is reached,"
             " whose dtype is its own, a warning where that may be the cause.",
             "Compare the captured layers, RoPE and norms that the engine's log speaks of with the head's."),
)  # fmt: skip


def _nothing(_: Subject) -> Iterator[Found]:
    return iter(())


RULES: tuple[Rule[Any], ...] = tuple(Rule(*compared, check=_nothing) for compared in COMPARED)
