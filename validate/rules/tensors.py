"""Names, shapes and dtypes.

What a head must hold is stated by `head.contract` and the layouts; the rules here report by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ...engines.layout import Stored
from ...errors import KconvError, TensorMissing, TensorShape, TensorUnknown
from ...head.contract import Breach, compare
from .head import HeadSubject, engine_layouts
from .rule import ENGINES, SGLANG, VLLM, Found, Rule, rule

SILENT = "https://github.com/vllm-project/speculators/issues/1114"
FLAGS = "https://github.com/vllm-project/vllm/pull/42143"
AGAIN = "Export the head again."


class Kind(NamedTuple):
    """A kind of breach: its fault, and the slots (of unknown tensors: the names) that it is about, as patterns."""

    id: str
    name: str
    fault: type[KconvError]
    about: tuple[str, ...]
    sentence: str
    fix: str = AGAIN
    seen_in: str = ""


MISSING, UNKNOWN, SHAPE = TensorMissing, TensorUnknown, TensorShape
MLP = ("*.gate_proj", "*.up_proj", "*.down_proj")
MAPS = ("d2t", "t2d")
OWN_NORMS = ("fc_norm.*", "input_norm")
PREFIX = "model."
PREFIXED = Kind("K125", "prefix-model", UNKNOWN, (f"{PREFIX}*",), "See `prefix_model`, which finds them as one.")
# The first kind that fits a breach speaks of it.
KINDS = (
    Kind("K101", "lm-head-missing", MISSING, ("lm_head",),
         "The head's vocabulary or width is not its target's, and its lm_head is missing: engines cut the target's"
         " lm_head to its first rows, or serve a random one.",
         seen_in="https://github.com/sgl-project/sglang/issues/27829"),
    Kind("K102", "d2t-missing", MISSING, MAPS,
         "The vocabulary is reduced and d2t is missing: vLLM takes draft id i for target id i.",
         seen_in="https://github.com/NVIDIA-NeMo/Automodel/pull/2447"),
    Kind("K103", "embedding-missing", MISSING, ("embed_tokens",),
         "The head is of another width than its target and has no embedding: engines leave a random table.",
         seen_in="https://github.com/vllm-project/vllm/issues/18906"),
    Kind("K104", "fc-missing", MISSING, ("fc",),
         "fc, which combines the captured states, is missing: vLLM and SGLang serve uninitialised memory.",
         seen_in=SILENT),
    Kind("K105", "flag-without-norm", MISSING, OWN_NORMS,
         "A flag asks for fc_norm or input_norm, and the tensor is missing: engines serve ones.", seen_in=FLAGS),
    Kind("K106", "norm-missing", MISSING, ("*norm*",),
         "The weight of a norm is missing: engines serve ones and say nothing.", seen_in=SILENT),
    Kind("K107", "flag-without-bias", MISSING, ("*.bias",),
         "The config asks for biases that are missing: engines serve uninitialised memory.",
         "Set the flag to false if the head was trained without biases; else export it again."),
    Kind("K108", "linear-missing", MISSING, ("*",),
         "The weight of a linear is missing: vLLM and SGLang serve uninitialised memory.", seen_in=SILENT),
    Kind("K119", "scale-shape", SHAPE, ("*_scale", "*_scale_2", "*_scale_inv"),
         "A scale is not of the shape or dtype that its weight's format demands.",
         "Export the head again; a scale belongs to the weight it was measured on."),
    Kind("K111", "lm-head-rows", SHAPE, ("lm_head",),
         "lm_head has not one row for each draft token, as wide as the head.",
         "Correct draft_vocab_size if the rows are right; else export the head again.",
         seen_in="https://github.com/vllm-project/vllm/pull/29926"),
    Kind("K112", "fc-width", SHAPE, ("fc", "fc.bias"),
         "fc is not as wide as the captured states that the config lists.",
         "Make the list of captured layers, num_aux_hidden_states and target_hidden_size those of the training.",
         seen_in="https://github.com/vllm-project/vllm/issues/54526"),
    Kind("K113", "embedding-shape", SHAPE, ("embed_tokens",),
         "embed_tokens has not one row for each of the target's tokens, as wide as the head.",
         "Correct vocab_size or hidden_size if the tensor is right; else export the head again.",
         seen_in="https://github.com/vllm-project/vllm/issues/19174"),
    Kind("K114", "map-shape", SHAPE, MAPS, "A map of the vocabulary is not of the size that the config states.",
         "Correct draft_vocab_size or vocab_size, or rebuild the map."),
    Kind("K115", "mlp-shape", SHAPE, (*MLP, "*.gate_proj.bias", "*.up_proj.bias", "*.down_proj.bias"),
         "A linear of the MLP is not of the width that the config states.",
         "Correct intermediate_size; the config belongs to another head."),
    Kind("K116", "norm-shape", SHAPE, ("*norm*",), "The weight of a norm is not as wide as what it norms.",
         "Correct the config's dims; it belongs to another head."),
    Kind("K117", "attention-shape", SHAPE, ("*",),
         "A linear of the attention is not of the heads, ranks and widths that the config states.",
         "Correct the config's dims; it belongs to another head."),
    Kind("K121", "norm-without-flag", UNKNOWN, ("fc_norm.*", "input_norm.*", "aux_norm_*"),
         "A norm is stored that no flag of the config asks for: engines drop it in silence, or refuse the head.",
         "Set fc_norm or norm_before_fc if the head was trained with the norm; remove the tensor if it was not.",
         seen_in=FLAGS),
    Kind("K122", "bias-without-flag", UNKNOWN, ("*.bias",),
         "A bias is stored that no flag of the config asks for: vLLM drops any *.bias in silence.",
         "Set attention_bias, mlp_bias or bias if the head was trained with it; remove the tensor if it was not."),
    Kind("K123", "map-without-reduction", UNKNOWN, MAPS,
         "A map of the vocabulary is stored though the config says that the vocabulary is full.",
         "Set draft_vocab_size to lm_head's rows; or remove the map, if the vocabulary is full."),
    Kind("K124", "qk-norm", UNKNOWN, ("*.q_norm.*", "*.k_norm.*"),
         "Norms of queries or keys are stored, which no Eagle3 class for a Kimi target has.",
         "Serve this head with the class it was trained for (Eagle3Qwen3ForCausalLM in vLLM)."),
    PREFIXED,
    Kind("K126", "moe-weights", UNKNOWN, ("*.experts.*", "*.mlp.gate.*", "*.shared_experts.*"),
         "The head has experts: engines build a dense MLP for it.",
         "Train a head with a dense MLP; n_routed_experts in its config means nothing."),
    Kind("K127", "layer-uncounted", UNKNOWN, ("layers.*",),
         "A tensor stands in a layer, or under a name, that the config knows nothing of.",
         "Correct num_hidden_layers if the head has that layer; remove the tensor if it does not.",
         seen_in="https://github.com/vllm-project/speculators/pull/812"),
    Kind("K120", "tensor-unknown", UNKNOWN, ("*",),
         "A tensor has no place in the head: vLLM refuses it, SGLang and TensorRT-LLM leave it out in silence.",
         "Correct the config if the head needs it; remove the tensor if it does not."),
)  # fmt: skip
DTYPE = Kind("K118", "tensor-dtype", SHAPE, (), "A tensor is of a dtype that its meaning cannot have.")


def _kind(subject: HeadSubject, breach: Breach) -> Kind:
    row, info = subject.rows.get(breach.where), subject.tensors.get(breach.where)
    scale = row is not None and "_scale" in row.slots[0]
    if breach.fault is SHAPE and row and info and info.shape == row.expected.shape and not scale:
        return DTYPE
    about = row.slots[0] if row and breach.fault is not UNKNOWN else breach.where
    return next(k for k in KINDS if k.fault is breach.fault and any(fnmatchcase(about, p) for p in k.about))


def _breach_rule(kind: Kind) -> Rule[HeadSubject]:
    def check(subject: HeadSubject) -> Iterator[Found]:
        for breach in subject.breaches:
            # Under a prefix of its own rule it is there.
            if _kind(subject, breach) is kind and f"{PREFIX}{breach.where}" not in subject.tensors:
                yield Found(breach.where, breach.what, kind.fix)

    return Rule(kind.id, kind.name, "error", kind.sentence, kind.fix, check, ENGINES, kind.seen_in)


@rule(
    "K125",
    "prefix-model",
    "error",
    "Names begin with `model.`: vLLM and TensorRT-LLM add the prefix themselves and find none of them.",
    fix="Export the head again without the prefix.",
    engines=ENGINES,
    seen_in="https://github.com/NVIDIA/Model-Optimizer/issues/628",
)
def prefix_model(subject: HeadSubject) -> Iterator[Found]:
    names = [name for name in subject.tensors if name.startswith(PREFIX)]
    if names:
        yield Found(names[0], f"{len(names)} of {len(subject.tensors)} names begin with `{PREFIX}`")


def _read_by(
    subject: HeadSubject, engines: Iterable[str], fault: type[KconvError]
) -> Iterator[tuple[str, Mapping[str, Stored], Breach]]:
    """Yield what an engine would miss, or not know, of a head that is whole in its own layout."""
    if subject.spec is None or subject.layout is None or subject.breaches:
        return
    for engine, layout in engine_layouts(subject.engines.intersection(engines)).items():
        if subject.layout.name in (layout.name, "portable"):
            continue
        rows = subject.rows_in(layout)
        # vLLM looks at no t2d, and a map of a full vocabulary has a rule of its own.
        ignored = {name: "" for name in subject.tensors if name in MAPS or name.endswith(".inv_freq")}
        for breach in compare(
            {n: row.expected for n, row in rows.items()}, subject.tensors, ignored=ignored, unclaimed={}
        ):
            if breach.fault is fault:
                yield engine, rows, breach


@rule(
    "K131",
    "name-not-read",
    "error",
    "A weight is stored under a name that an engine does not look for, and is left uninitialised or fails to load:"
    " linears that are fused on disk, or the norm of a later layer.",
    fix="Convert the head to the engine's layout: kconv to-vllm, to-trtllm, to-sglang or to-portable.",
    engines=ENGINES,
    seen_in="https://github.com/NVIDIA/Model-Optimizer/issues/628",
)
def name_not_read(subject: HeadSubject) -> Iterator[Found]:
    for engine, rows, breach in _read_by(subject, ENGINES, MISSING):
        stored_as = sorted({subject.slots[slot] for slot in rows[breach.where].slots if slot in subject.slots})
        if stored_as:
            yield Found(
                breach.where, f"{engine} looks for {breach.where}; the weight is stored as {', '.join(stored_as)}"
            )


@rule(
    "K132",
    "name-refused",
    "error",
    "vLLM refuses a head with a name that it does not know.",
    fix="Convert the head to vLLM's layout: kconv to-vllm.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/utils.py#L458",
)
def name_refused(subject: HeadSubject) -> Iterator[Found]:
    for engine, _, breach in _read_by(subject, VLLM, UNKNOWN):
        yield Found(breach.where, f"{engine} has no parameter for {breach.where}, and refuses to load the head")


@rule(
    "K133",
    "lm-head-random",
    "error",
    "SGLang serves a random lm_head where draft_vocab_size is set and the tensor is missing: acceptance length 1.00.",
    fix="Add the target's lm_head (kconv to-sglang HEAD OUT --target T), or set draft_vocab_size to null.",
    engines=(SGLANG,),
    seen_in="https://github.com/sgl-project/sglang/pull/27908",
)
def lm_head_random(subject: HeadSubject) -> Iterator[Found]:
    stated = subject.flat.get("draft_vocab_size")
    if subject.spec and not subject.breaches and "lm_head" not in subject.slots and stated is not None:
        yield Found("lm_head.weight", f"lm_head is missing, and draft_vocab_size is {stated!r}")


OF_BREACHES = tuple(_breach_rule(kind) for kind in (*KINDS, DTYPE) if kind is not PREFIXED)
RULES = (*OF_BREACHES, prefix_model, name_not_read, name_refused, lm_head_random)
