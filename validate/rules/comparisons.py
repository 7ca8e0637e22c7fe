"""What a comparison finds, with a source or an engine.

The comparisons make these findings themselves, beside what they measure; the rules look for nothing on their own.
"""

from __future__ import annotations

from typing import Any

from .rule import Rule

AGAIN = "Convert the source again; do not serve this output."
MAKE_AGAIN = "Fetch the folder again, or make it again with kconv; do not serve it as it is."
QUANTIZE_HEAD_AGAIN = "Quantize the head again, and give the very head that it is made from."
QUANTIZE_AGAIN = "Quantize the target again, and give the very target that it is made from."
# Signal over noise of NVFP4, dB. The worst that sixteen values and their scale can do: all but the largest at 5/6 of
# it, the middle of the widest step, lose a fifth each, which is 14 dB; what is below was not rounded but changed.
FLOOR = 13.5
AS_THE_SOURCE = "State what the source's config.json does; the weights are of that model."
RULES: tuple[Rule[Any], ...] = (
    Rule("K301", "manifest-broken", "error", "The folder's bytes are not those that its manifest records.",
             MAKE_AGAIN),
    Rule("K302", "manifest-absent", "warning", "The folder has no manifest; only its tensors can be compared with"
             " the source's.", "Convert the head with kconv to have one."),
    Rule("K303", "another-head", "error", "The output's config describes another head than the source's.",
             "Convert the source again."),
    Rule("K304", "bits-differ", "error", "A weight's bits are not the source's, and no manifest says why.", AGAIN),
    Rule("K305", "rounded-too-far", "error", "A head's quantized linear is further from its source than rounding"
             " takes it: a scale, the order of the nibbles, or the weight itself is another's.", QUANTIZE_HEAD_AGAIN),
    Rule("K306", "compared-by-noise", "note", "Linears of the head are quantized, and the source's are not: they"
             " are compared by their noise and not by their bits.", "Nothing to do."),
    Rule("K307", "told-otherwise", "warning", "A conversion was told to read its source otherwise than the source's"
             " own files say: the output is another head, and kconv publish refuses it.",
             "Convert the source again without the options that say how to read it; or, if its config is wrong, correct"
             " it there."),
    Rule("K312", "reading-beaten", "error", "Measured on the target, another reading of the head (layer inputs for"
             " outputs, another base of RoPE, the residual normed or not) accepts more, by more than three paired"
             " standard errors: the head was not trained as it is read.",
             "Convert the source again, read as the finding says."),
    Rule("K313", "reading-measured", "note", "Measured on the target, one reading of what the head's files leave open,"
             " or a user said, accepts more than every other, by more than three paired standard errors.",
             "Say the option that the finding names where kconv asks."),
    Rule("K314", "reading-not-told", "warning", "The measurement does not tell the readings of what the head's files"
             " leave open, or a user said: their differences are within the noise.",
             "Give more prompts, or longer ones."),
    Rule("K315", "not-verified", "warning", "What the head is read as rests on a user's word or on a default, and"
             " nothing has confirmed it; a warning where the head's own files say otherwise, else a note.",
             "Have it measured: --target with --prompts or --states."),
    Rule("K360", "keeps-less-than-stated", "error", "An approximate head keeps less of its source's acceptance than"
             " its manifest states, by more than its standard error: it is not the head that was measured.", AGAIN),
    Rule("K361", "keeps-too-little", "error", "An approximate head keeps less of its source's sampled or greedy"
             " acceptance than is asked for.", "Convert the source with more text or more healing; --min-retention"
             " accepts the loss by name."),
    Rule("K362", "computes-otherwise", "error", "An approximate head does not compute what the head did whose figures"
             " its manifest states: a weight, its order, or a config key is another's.", AGAIN),
    Rule("K363", "worse-than-no-head", "error", "A head drafts worse than a bigram or prompt lookup does over the same"
             " text: it is broken, or not this target's.", "Look for what is wrong with it (its captured layers, RoPE,"
             " lm_head), or give the target that it was trained for."),
    Rule("K364", "better-read-otherwise", "error", "A head is accepted clearly more often when a known mistake is"
             " undone: its weights or its config are not as it was trained.", "Export or convert the head again, and"
             " correct what is named; do not serve it as it is."),
    Rule("K365", "norm-off-its-scale", "warning", "A head is accepted clearly more often when a norm is stronger or"
             " weaker: the norm was scaled after training, or the head is not fully trained.", "Compare the norm with"
             " the trainer's own; where it is the same, train longer."),
    Rule("K390", "too-noisy", "error", "A quantized tensor is further from its source than rounding to NVFP4 can"
             " take it: a scale, the order of the nibbles, or the tensor itself is another's.", QUANTIZE_AGAIN),
    Rule("K391", "values-changed", "error", "A tensor that is not quantized has not its source's values.",
             QUANTIZE_AGAIN),
    Rule("K392", "tensor-not-the-sources", "error", "A tensor of the source is missing, or one is there that the"
             " source has not, or the two cannot be compared.", QUANTIZE_AGAIN),
    Rule("K393", "another-target", "error", "A quantized target's config describes another model than its source's:"
             " no tensor tells, and every answer is another's.", AS_THE_SOURCE),
    Rule("K701", "output-changed", "error", "An engine's greedy output with speculation is not its output without:"
             " speculation may not change a token.", "Do not serve this; look for the engine's own fault first."),
    Rule("K702", "counts-differ", "error", "An engine accepted other numbers of drafts than kconv's own chain of"
             " the same head: it reads the head otherwise than its config says. Of a server that is reached, whose"
             " dtype is its own, a warning where that may be the cause.",
             "Compare the captured layers, RoPE and norms that the engine's log speaks of with the head's."),
    Rule("K703", "parameter-unreached", "error", "An engine that kconv started served a head with a parameter that no"
             " tensor of the folder reached: it holds whatever the memory held, and the engine says nothing.",
             "Look for the tensors that it is filled from; convert the head again."),
)  # fmt: skip
