"""Names, shapes and dtypes.

`drafters.contract` and the layouts state what a head must hold, and reading the head checks it; here it is also
compared with the tables of the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ...drafters.contract import FC_FIX, PREFIX, PREFIXED, compare
from ...engines.base import Engine
from ...engines.layout import Stored
from ...errors import KconvError, Problem, TensorMissing, TensorUnknown
from ...rule import EVERY_FAMILY, Found, Rule
from .head import HeadSubject, engine_layouts
from .subject import ENGINES, concerned

SILENT = "https://github.com/vllm-project/speculators/issues/1114"
FLAGS = "https://github.com/vllm-project/vllm/pull/42143"
AGAIN = "Export the head again."
MAPS = ("d2t", "t2d")


def prefix_model(subject: HeadSubject) -> Iterator[Found]:
    names = [name for name in subject.tensors if name.startswith(PREFIX)]
    if names:
        yield Found(names[0], f"{len(names)} of {len(subject.tensors)} names begin with `{PREFIX}`")
    else:
        # With any other prefix it is for the head's own layout to miss the names.
        yield from (Found(p.where, p.what, p.fix) for p in subject.problems if p.code == PREFIXED)


def _read_by(
    subject: HeadSubject, engines: Iterable[str], kind: type[KconvError]
) -> Iterator[tuple[Engine, Mapping[str, Stored], Problem]]:
    """Yield what an engine would miss, or not know, in a head that is complete in its own layout."""
    if subject.spec is None or subject.layout is None or subject.reading.misfits:
        return
    for engine, layout in engine_layouts(subject.engines.intersection(engines), subject.layout.drafter):
        if subject.layout.name in (layout.name, "portable"):
            continue
        rows = subject.rows_in(layout)
        # vLLM ignores t2d, and a map of a full vocabulary has a separate rule.
        ignored = {name: "" for name in subject.tensors if name in MAPS or name.endswith(".inv_freq")}
        for problem in compare(
            {n: row.expected for n, row in rows.items()}, subject.tensors, ignored=ignored, unclaimed={}
        ):
            if problem.kind is kind:
                yield engine, rows, problem


def name_not_read(subject: HeadSubject) -> Iterator[Found]:
    for engine, rows, problem in _read_by(subject, ENGINES, TensorMissing):
        stored_as = sorted({subject.slots[slot] for slot in rows[problem.where].slots if slot in subject.slots})
        if stored_as:
            what = f"{engine.title} looks for {problem.where}; the weight is stored as {', '.join(stored_as)}"
            yield Found(problem.where, what, engines=engine.runner_names)


def name_refused(subject: HeadSubject) -> Iterator[Found]:
    for engine, _, problem in _read_by(subject, concerned("K132"), TensorUnknown):
        what = f"{engine.title} has no parameter for {problem.where}, and refuses to load the head"
        yield Found(problem.where, what, engines=engine.runner_names)


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K101",
        "lm-head-missing",
        "error",
        "lm_head is missing, and the target's has another vocabulary or width."
        " Engines use the first rows of the target's, or a random matrix.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in="https://github.com/sgl-project/sglang/issues/27829",
    ),
    Rule(
        "K102",
        "d2t-missing",
        "error",
        "The vocabulary is reduced, but d2t is missing. vLLM uses draft ids as target ids.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in="https://github.com/NVIDIA-NeMo/Automodel/pull/2447",
    ),
    Rule(
        "K103",
        "embedding-missing",
        "error",
        "The embedding is missing, and the target's has another width. Engines use a random table.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/vllm/issues/18906",
    ),
    Rule(
        "K104",
        "fc-missing",
        "error",
        "fc is missing. vLLM and SGLang serve uninitialized memory.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in=SILENT,
    ),
    Rule(
        "K105",
        "flag-without-norm",
        "error",
        "A flag asks for fc_norm or input_norm, but the tensor is missing. Engines use ones.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in=FLAGS,
    ),
    Rule(
        "K106",
        "norm-missing",
        "error",
        "The weight of a norm is missing. Engines silently use ones.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in=SILENT,
    ),
    Rule(
        "K107",
        "flag-without-bias",
        "error",
        "The config asks for biases that are missing. Engines serve uninitialized memory.",
        fix="Set the flag to false if the head was trained without biases. Otherwise export it again.",
        engines=ENGINES,
    ),
    Rule(
        "K108",
        "linear-missing",
        "error",
        "The weight of a linear is missing. vLLM and SGLang serve uninitialized memory.",
        fix=AGAIN,
        engines=ENGINES,
        seen_in=SILENT,
    ),
    Rule(
        "K119",
        "scale-shape",
        "error",
        "A scale has the wrong shape or dtype for its weight's format.",
        fix="Export the head again. Each scale belongs to one weight.",
        engines=ENGINES,
    ),
    Rule(
        "K111",
        "lm-head-rows",
        "error",
        "lm_head does not have one row per draft token, as wide as the head.",
        fix="Correct draft_vocab_size if the rows are right. Otherwise export the head again.",
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/vllm/pull/29926",
    ),
    Rule(
        "K112",
        "fc-width",
        "error",
        "The width of fc does not match the number of captured layers.",
        fix=FC_FIX,
        says_fix=True,
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/vllm/issues/54526",
    ),
    Rule(
        "K113",
        "embedding-shape",
        "error",
        "embed_tokens does not have one row per target token, as wide as the head.",
        fix="Correct vocab_size or hidden_size if the tensor is right. Otherwise export the head again.",
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/vllm/issues/19174",
    ),
    Rule(
        "K114",
        "map-shape",
        "error",
        "The size of a vocabulary map differs from the config.",
        fix="Correct draft_vocab_size or vocab_size, or rebuild the map.",
        engines=ENGINES,
    ),
    Rule(
        "K115",
        "mlp-shape",
        "error",
        "The width of an MLP linear differs from the config.",
        fix="Transpose it if it is said to be transposed. Otherwise correct intermediate_size; the config may belong to"
        " another head.",
        engines=ENGINES,
    ),
    Rule(
        "K116",
        "norm-shape",
        "error",
        "The weight of a norm has the wrong width for its input.",
        fix="Correct the config's dims. The config may belong to another head.",
        says_fix=True,
        engines=ENGINES,
    ),
    Rule(
        "K117",
        "attention-shape",
        "error",
        "An attention linear does not have the shape that the config requires.",
        fix="Correct the config's dims. The config may belong to another head.",
        says_fix=True,
        engines=ENGINES,
    ),
    Rule(
        "K121",
        "norm-without-flag",
        "error",
        "A norm is stored, but no flag in the config asks for it. Engines silently drop it, or refuse the head.",
        fix="Set fc_norm or norm_before_fc if the head was trained with the norm. Remove the tensor if it was not.",
        engines=ENGINES,
        seen_in=FLAGS,
    ),
    Rule(
        "K122",
        "bias-without-flag",
        "error",
        "A bias is stored, but no flag in the config asks for it. vLLM silently drops it.",
        fix="Set attention_bias, mlp_bias or bias if the head was trained with it. Remove the tensor if it was not.",
        engines=ENGINES,
    ),
    Rule(
        "K123",
        "map-without-reduction",
        "error",
        "A vocabulary map is stored, but the config says that the vocabulary is full.",
        fix="Set draft_vocab_size to the rows of lm_head. Remove the map if the vocabulary is full.",
        engines=ENGINES,
    ),
    Rule(
        "K124",
        "qk-norm",
        "error",
        "Norms of queries or keys are stored, but the config's model class has none.",
        fix='Set model_type "qwen3" and architectures ["Eagle3Qwen3ForCausalLM"], vLLM\'s class for such heads.',
        engines=ENGINES,
    ),
    Rule(
        "K126",
        "moe-weights",
        "error",
        "The head has experts, but engines build a dense MLP.",
        fix="Train a head with a dense MLP. Engines ignore n_routed_experts in a head's config.",
        engines=ENGINES,
    ),
    Rule(
        "K127",
        "layer-uncounted",
        "error",
        "A tensor has a layer or a name that the config does not mention.",
        fix="Correct num_hidden_layers if the head has that layer. Remove the tensor if it does not.",
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/speculators/pull/812",
    ),
    Rule(
        "K120",
        "tensor-unknown",
        "error",
        "A tensor has no place in this head. vLLM refuses it; SGLang and TensorRT-LLM silently ignore it.",
        fix="Correct the config if the head needs the tensor. Remove it if not.",
        engines=ENGINES,
    ),
    Rule(
        "K118",
        "tensor-dtype",
        "error",
        "A tensor has a dtype that is impossible for its role.",
        fix=AGAIN,
        engines=ENGINES,
    ),
    Rule(
        "K125",
        "prefix-model",
        "error",
        "Tensor names begin with `model.`, which vLLM and TensorRT-LLM add themselves, or with another prefix. Engines"
        " find none of them.",
        fix="Export the head again without the prefix.",
        engines=ENGINES,
        seen_in="https://github.com/NVIDIA/Model-Optimizer/issues/628",
        check=prefix_model,
    ),
    Rule(
        "K131",
        "name-not-read",
        "error",
        "An engine does not look for a weight under this name. It leaves the weight uninitialized, or fails to load."
        " Examples: linears that are fused on disk, the norm of a later layer.",
        fix="Convert the head to the engine's layout: kconv to-vllm, to-trtllm, to-sglang or to-portable.",
        engines=ENGINES,
        seen_in="https://github.com/NVIDIA/Model-Optimizer/issues/628",
        check=name_not_read,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K132",
        "name-refused",
        "error",
        "vLLM refuses a head that has a tensor with an unknown name.",
        fix="Convert the head to vLLM's layout: kconv to-vllm.",
        engines=concerned("K132"),
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/utils.py#L458",
        check=name_refused,
        drafters=EVERY_FAMILY,
    ),
)
