"""Findings of a comparison with a source or an engine.

The comparisons themselves produce these findings; the rules have no checks of their own.
"""

from __future__ import annotations

from typing import Any

from ...rule import Rule

AGAIN = "Convert the source again. Do not serve this output."
QUANTIZE_AGAIN = "Quantize the target again, and pass exactly the target that it is made from."
# Minimum signal over noise of NVFP4, dB. The worst case for sixteen values and their scale: all but the largest are at
# 5/6 of it, the middle of the widest step, and lose a fifth each, which is 14 dB. Anything below was changed, not
# rounded.
FLOOR = 13.5
# An FP8 value, with three mantissa bits, is within a sixteenth of itself: 24 dB. Four dB are left for values that the
# scale of a fused group makes too small for that.
FP8_FLOOR = 20.0
MEASURE = "Measure it: give --target with --prompts or --states."
AS_THE_SOURCE = "State what the source's config.json does. The weights belong to that model."
RULES: tuple[Rule[Any], ...] = (
    Rule(
        "K301",
        "manifest-broken",
        "error",
        "The folder's bytes differ from its manifest.",
        "Fetch the folder again, or create it again with kconv; what you change on purpose, change in the source. Do"
        " not serve it as it is.",
        says_fix=True,
    ),
    Rule(
        "K302",
        "manifest-absent",
        "warning",
        "The folder has no manifest. Only its tensors can be compared with the source.",
        "Convert the head with kconv to get a manifest.",
    ),
    Rule(
        "K303",
        "another-head",
        "error",
        "The output's config describes a different head than the source's.",
        "Pass the --source that this head was made from, or convert that source again.",
    ),
    Rule(
        "K304",
        "bits-differ",
        "error",
        "A weight's bits differ from the source's, and no manifest says why.",
        "Pass the --source that this head was made from. If this is it, convert it again; do not serve this output.",
    ),
    Rule(
        "K305",
        "rounded-too-far",
        "error",
        "A quantized linear is further from its source than rounding allows. A scale, the nibble order, or"
        " the weight itself is wrong.",
        "Quantize the head again, and compare it with the head that it was made from.",
    ),
    Rule(
        "K306",
        "compared-by-noise",
        "note",
        "Only the head's linears are quantized, so noise is compared instead of bits.",
        "No action is needed. kconv quantize-head measured the acceptance that the head retains.",
    ),
    Rule(
        "K307",
        "told-otherwise",
        "warning",
        "A conversion's options contradicted the source's own files. The output is a different head, and"
        " kconv publish refuses it.",
        "Convert the source again without --captured, --captured-are and the other options that say how to read it. "
        "If its config is wrong, correct the config.",
    ),
    Rule(
        "K312",
        "reading-beaten",
        "error",
        "Measured on the target, another reading of the head accepts clearly more. The difference is more than three "
        "paired standard errors. The head was not trained the way it is read: layer inputs or outputs, RoPE's base, "
        "or the"
        " residual.",
        "Convert the source again with the reading that the finding names.",
    ),
    Rule(
        "K313",
        "reading-measured",
        "note",
        "Measured on the target, one reading of an open question accepts clearly more than all others. The "
        "difference is more than three paired standard errors.",
        "Use the option that the finding names.",
    ),
    Rule(
        "K314",
        "reading-not-told",
        "warning",
        "The measurement cannot tell the readings apart. Their differences are within the noise.",
        "Give more prompts, or longer ones.",
    ),
    Rule(
        "K315",
        "not-verified",
        "warning",
        "The reading of the head rests on an unconfirmed option or default, and the head's own files say otherwise.",
        MEASURE,
    ),
    Rule(
        "K316",
        "not-measured",
        "note",
        "The reading of the head rests on an unconfirmed option or default. The head's own files say nothing else.",
        MEASURE,
    ),
    Rule(
        "K360",
        "keeps-less-than-stated",
        "error",
        "An approximate head retains less acceptance than its manifest states. The difference is more than the "
        "standard error. It is not the head that was measured, or it was measured on another target.",
        AGAIN,
    ),
    Rule(
        "K361",
        "keeps-too-little",
        "error",
        "An approximate head retains less sampled or greedy acceptance than required.",
        "Convert the source with more text or more healing steps. A lower --min-retention accepts the loss.",
    ),
    Rule(
        "K362",
        "computes-otherwise",
        "error",
        "An approximate head computes something else than its manifest records. A weight, its order, or a"
        " config key has changed.",
        AGAIN,
    ),
    Rule(
        "K363",
        "worse-than-no-head",
        "error",
        "The head drafts worse than a bigram or prompt lookup on the same text. It is broken, hardly trained, or"
        " belongs to another target.",
        "Train it longer if it had few steps. Otherwise check its captured layers, RoPE and lm_head, or give the target"
        " that it was trained for.",
    ),
    Rule(
        "K364",
        "better-read-otherwise",
        "error",
        "Undoing a known mistake clearly raises the head's acceptance. Its weights or its config are not as"
        " they were trained.",
        "Correct what the finding names, then export or convert the head again, and measure it. If it still drafts"
        " worse than its training said, something else is wrong too. Do not serve it as it is.",
    ),
    Rule(
        "K365",
        "norm-off-its-scale",
        "note",
        "The head's acceptance rises when a norm or fc is scaled, a norm replaced, or by the target's RoPE or epsilon,"
        " by less than a fault costs. The head is not fully trained, or something was changed a little after training.",
        "Compare it with the trainer's. If they are equal, train longer.",
        also=("warning",),
    ),
    Rule(
        "K366",
        "rope-not-confirmed",
        "warning",
        "An MLA head's RoPE differs from its MLA target's. Such heads are built from the target's config. On this text"
        " neither drafts clearly better.",
        "Compare rope_theta and rope_scaling with the training config. Measure on longer text (--prompt-tokens,"
        " --new-tokens).",
    ),
    Rule(
        "K390",
        "too-noisy",
        "error",
        "A quantized tensor is further from its source than rounding to NVFP4 allows. A scale, the nibble"
        " order, or the tensor itself is wrong.",
        "Quantize the target again. A scale, the nibble order, or the tensor itself is wrong.",
    ),
    Rule(
        "K391",
        "values-changed",
        "error",
        "An unquantized tensor's values differ from the source's.",
        QUANTIZE_AGAIN,
    ),
    Rule(
        "K392",
        "tensor-not-the-sources",
        "error",
        "A tensor is missing or extra, or cannot be compared.",
        QUANTIZE_AGAIN,
        says_fix=True,
    ),
    Rule(
        "K393",
        "another-target",
        "error",
        "A quantized target's config describes another model than its source's. The tensors do not show"
        " this, but every answer would differ.",
        AS_THE_SOURCE,
    ),
    Rule(
        "K394",
        "accuracy-lower",
        "warning",
        "A quantized target answers fewer of a task's questions than its source. The difference is more than two "
        "standard errors.",
        "Quantize fewer modules (--recipe nvfp4-experts), or measure the input scales (kconv calibrate).",
    ),
    Rule(
        "K395",
        "perplexity-larger",
        "warning",
        "A quantized target's perplexity is above its source's by more than one percent and two standard errors "
        "together.",
        "Calibrate again and quantize with that (kconv calibrate, --input-scale), quantize fewer modules (--recipe "
        "nvfp4-experts), or search for scales (nvfp4-experts-mse).",
    ),
    Rule(
        "K701",
        "output-changed",
        "error",
        "An engine's greedy output differs with and without speculation. Speculation must not change a token.",
        "Do not serve this. Look for the engine's own bug first.",
        also=("warning",),
    ),
    Rule(
        "K702",
        "counts-differ",
        "error",
        "An engine accepted other numbers of drafts than kconv computes. It"
        " reads the head differently than the config says. For a server with its own dtype, which may be the"
        " cause, this is a warning.",
        "Compare the captured layers, RoPE, norms and loaded tensors in the engine's log with the head's.",
        also=("warning",),
    ),
    Rule(
        "K703",
        "parameter-unreached",
        "error",
        "An engine served the head with a parameter that no tensor of the folder reached. kconv started this engine."
        " The parameter holds uninitialized memory, and the engine reports nothing.",
        "Find the tensors that should fill it: kconv inspect shows which ones the folder has, and kconv validate "
        "the engine's names for them. Then convert the head again.",
    ),
)
RULE = {one.id: one for one in RULES}
