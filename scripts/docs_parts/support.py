"""The page of what is supported: head x target x engine, from the engines' limits and their classes of targets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kconv.drafters.spec import Gqa, HeadSpec, Linear, Mla, Norms, Rope, Yarn
from kconv.engines.base import Engine
from kconv.engines.common import VLLM_SOURCE, is_mla
from kconv.engines.registry import engines
from kconv.escape import link
from kconv.validate.markdown import table
from kconv.validate.rules.table import find_rule

# Decoder layers of the target that stands for each of its kind.
LAYERS = 36


@dataclass(frozen=True)
class Target:
    """A target as the engines' limits look at it."""

    model_type: str
    layers: int | None = LAYERS
    name: str = "target"
    architecture: str = ""


@dataclass(frozen=True)
class Form:
    """A form of a head.

    Attributes:
        spec: what it is.
        holds: slots that it has beside those of its spec: scales.
    """

    spec: HeadSpec
    holds: tuple[str, ...] = ()


_DIMS: dict[str, Any] = {
    "hidden": 64, "target_hidden": 64, "intermediate": 96, "layers": 1, "vocab": 512, "draft_vocab": 512, "eps": 1e-5,
    "captured": (1, LAYERS // 2 - 1, LAYERS - 4), "dtype": "BF16", "max_positions": 4096,
}  # fmt: skip
_YARN = Rope(5e4, Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0))
_GQA = HeadSpec(Gqa(4, 2, 16), rope=Rope(1e4), **_DIMS)
_MLA = HeadSpec(Mla(4, 32, 512, 32, 64, 32), rope=_YARN, **_DIMS)
_STATE_NORMS = Norms(fc=True, output=True)
_FP8 = tuple(f"{slot}.weight_scale" for slot in ("fc", "0.q_proj", "0.o_proj", "0.kv_b_proj"))
FORMS = {
    "MHA or GQA": Form(_GQA),
    "GQA, reduced vocabulary": Form(replace(_GQA, draft_vocab=256)),
    "GQA, YaRN": Form(replace(_GQA, rope=_YARN)),
    "GQA, two layers": Form(replace(_GQA, layers=2)),
    "GQA, five captured layers": Form(replace(_GQA, captured=(1, 9, 17, 25, 33))),
    "GQA, the target's layer 0 captured": Form(replace(_GQA, captured=(0, 17, 32))),
    "GQA, the target's last layer captured": Form(replace(_GQA, captured=(1, 17, 35))),
    "GQA, EAGLE-3.1 (fc_norm, norm_output)": Form(replace(_GQA, norms=_STATE_NORMS)),
    "GQA, norm_before_fc": Form(replace(_GQA, norms=Norms(before_fc=True))),
    "GQA, norm_before_residual": Form(replace(_GQA, norms=Norms(before_residual=True))),
    "GQA, norms of queries and keys": Form(replace(_GQA, norms=Norms(qk=True))),
    "GQA, P-EAGLE": Form(replace(_GQA, mask=3)),
    "GQA, attention_bias": Form(replace(_GQA, attention=Gqa(4, 2, 16, bias=True))),
    "GQA, fc in FP8 or NVFP4": Form(_GQA, ("fc.weight_scale",)),
    "MLA as Kimi's": Form(_MLA),
    "MLA, reduced vocabulary": Form(replace(_MLA, draft_vocab=256)),
    "MLA, plain RoPE": Form(replace(_MLA, rope=Rope(5e4))),
    "MLA, linear RoPE": Form(replace(_MLA, rope=Rope(5e4, Linear(4.0)))),
    "MLA, EAGLE-3.1": Form(replace(_MLA, norms=_STATE_NORMS)),
    "MLA, norm_before_fc": Form(replace(_MLA, norms=Norms(before_fc=True))),
    "MLA, two layers": Form(replace(_MLA, layers=2)),
    "MLA, kv_b_proj in FP8": Form(_MLA, ("0.kv_b_proj.weight_scale",)),
    "MLA in NVFP4": Form(_MLA, ("0.o_proj.weight_scale_2",)),
}
# Where an engine serves a head of a form beside a target of a type: the test, and the words that it has there.
FAMILIES = "tests/engine/test_families.py"
DRAFTS, WITNESS, QUANTIZED = (
    "tests/engine/test_drafts.py",
    "docs/evidence/witnesses.json",
    "tests/engine/test_quantized_heads.py",
)
RUNS: dict[tuple[str, str, str], tuple[str, str]] = {
    ("vllm", "MHA or GQA", "kimi_k2"): (WITNESS, '"engine": "vllm", "head": "gqa vllm"'),
    ("vllm", "GQA, reduced vocabulary", "kimi_k2"): (DRAFTS, "gqa, YaRN, reduced vocabulary"),
    ("vllm", "GQA, YaRN", "kimi_k2"): (DRAFTS, "gqa, YaRN, reduced vocabulary"),
    ("vllm", "GQA, two layers", "kimi_k2"): (DRAFTS, "gqa, 2 layers, every norm"),
    ("vllm", "GQA, EAGLE-3.1 (fc_norm, norm_output)", "kimi_k2"): (
        WITNESS, '"engine": "vllm", "head": "gqa EAGLE-3.1"'),
    ("vllm", "GQA, norm_before_fc", "kimi_k2"): (DRAFTS, "gqa, Llama-3 RoPE, one norm before fc"),
    ("vllm", "GQA, norm_before_residual", "kimi_k2"): (DRAFTS, "gqa, 2 layers, every norm"),
    ("vllm", "GQA, attention_bias", "kimi_k2"): (DRAFTS, "gqa, biases, half of each head turned"),
    ("vllm", "GQA, fc in FP8 or NVFP4", "kimi_k2"): (QUANTIZED, '"gqa": "nvfp4"'),
    ("vllm", "MLA as Kimi's", "kimi_k2"): (WITNESS, '"engine": "vllm", "head": "mla vllm"'),
    ("vllm", "MLA, reduced vocabulary", "kimi_k2"): (DRAFTS, "mla, plain RoPE, reduced vocabulary"),
    ("vllm", "MLA, plain RoPE", "kimi_k2"): (DRAFTS, "mla, plain RoPE, reduced vocabulary"),
    ("vllm", "MLA, EAGLE-3.1", "kimi_k2"): (WITNESS, '"engine": "vllm", "head": "mla EAGLE-3.1"'),
    ("vllm", "MLA, two layers", "kimi_k2"): (DRAFTS, "mla, 2 layers, norms"),
    ("vllm", "MLA, kv_b_proj in FP8", "kimi_k2"): (QUANTIZED, '"mla": "fp8"'),
    ("vllm", "GQA, P-EAGLE", "kimi_k2"): (DRAFTS, "gqa, P-EAGLE, 2 layers"),
    ("vllm", "GQA, P-EAGLE", "qwen3"): ("tests/support/trained_blocks.py", "P_EAGLE"),
    **{("vllm", "MHA or GQA", kind): (FAMILIES, f'"{kind} target"') for kind in ("llama", "qwen3", "gpt_oss")},
    ("vllm", "GQA, norms of queries and keys", "qwen3"): (FAMILIES, 'f"qwen3 target, {QK}"'),
    ("vllm", "GQA, norms of queries and keys", "kimi_k2"): (DRAFTS, "gqa, norms of queries and keys, 5 states"),
    ("vllm", "GQA, five captured layers", "kimi_k2"): (DRAFTS, "gqa, norms of queries and keys, 5 states"),
    ("sglang", "MHA or GQA", "kimi_k2"): (WITNESS, '"engine": "sglang", "head": "gqa sglang"'),
    **{("sglang", "MHA or GQA", kind): (FAMILIES, f'"{kind} target"') for kind in ("llama", "qwen3")},
    ("sglang", "GQA, EAGLE-3.1 (fc_norm, norm_output)", "kimi_k2"): (
        WITNESS, '"engine": "sglang", "head": "gqa EAGLE-3.1"'),
    ("sglang", "MLA as Kimi's", "kimi_k2"): (WITNESS, '"engine": "sglang", "head": "mla sglang"'),
    ("sglang", "MLA, EAGLE-3.1", "kimi_k2"): (WITNESS, '"engine": "sglang", "head": "mla EAGLE-3.1"'),
}  # fmt: skip
RUN, CODE, UNKNOWN = "run", "code", "–"
# Of what ran, what follows code, and what is refused.
COLORS = {RUN: "🟢", CODE: "🔵", "": "🔴"}
# Targets with an attention like an MLA head's. Beside others an engine would keep two kinds of cache: nobody tried.
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")


def model_types() -> tuple[str, ...]:
    """Return the model types of every target of which some engine's class is known to capture."""
    return tuple(dict.fromkeys(kind for one in engines() for capture in one.captures for kind in capture.model_types))


def cell(engine: Engine, name: str, model_type: str) -> str:
    """Return what is known of a form of heads beside a target in an engine: `RUN`, `CODE`, or rules that refuse it."""
    form, target = FORMS[name], Target(model_type)
    refused = [limit.id for limit in engine.layouts[0].limits if limit.applies(form.spec, form.holds)]
    beside = (limit.rule for limit in engine.layouts[0].target_limits if limit.hits(form.spec, target))
    capture = engine.capture(model_type)
    if refused:
        return ", ".join(refused)
    if capture is None or (is_mla(form.spec) and model_type not in LATENT):
        return UNKNOWN
    if capture.listed(form.spec.captured, target.layers) is None:
        return next(beside, "K154")
    return RUN if (engine.name, name, model_type) in RUNS else CODE


def support() -> Iterator[str]:
    yield f"{COLORS[RUN]} ran: a test served this form of head for these targets in the engine, and its drafts were"
    yield f"kconv's own. {COLORS[CODE]} code: kconv follows the engine's code; nobody ran it. {COLORS['']} no: kconv"
    yield "refuses it by the linked rule. Targets are `model_type`s of text models; each Kimi-K2.x is `kimi_k2`. The"
    yield "[last table](#how-each-engine-captures-from-a-target) has each engine's targets. [The same as"
    yield "JSON](../support.json)."
    yield from ("", "## Forms of Eagle3 heads", "")
    for kind in ("GQA", "MLA"):
        names = [name for name in FORMS if is_mla(FORMS[name].spec) is (kind == "MLA")]
        columns = (kind, *(f"{one.title} {one.release}" for one in engines()))
        yield f"| {' | '.join(columns)} |"
        yield "|" + "---|" * len(columns)
        for name in names:
            cells = (_known(one, name) for one in engines())
            yield f"| {name.removeprefix(f'{kind}, ')} | {' | '.join(cells)} |"
        yield ""
    yield f"An MLA head is for a target with MLA: {_code(sorted(LATENT))}."
    yield from ("", "## How each engine captures from a target", "")
    yield "What the engine's list adds to the captured layers (0-based outputs), with the code that decides it."
    yield f"{UNKNOWN}: kconv knows no class that captures. vLLM then has"
    yield f"[transformers' own]({VLLM_SOURCE}/model_executor/models/transformers/base.py#L828-L845)"
    yield "(`--model-impl transformers`)."
    yield ""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in model_types():
        kinds.setdefault(tuple(_listed(one, kind) for one in engines()), []).append(f"`{kind}`")
    yield from table(("target", *(one.title for one in engines())), [(", ".join(k), *c) for c, k in kinds.items()])


def as_json() -> str:
    """Return what is known of each form of Eagle3 heads, in each engine, for each target."""
    words = {RUN: "ran", CODE: "code", UNKNOWN: "unknown"}
    rows: list[dict[str, object]] = []
    for engine in engines():
        for name in FORMS:
            for kind in model_types():
                known = cell(engine, name, kind)
                refused = [] if known in words else known.split(", ")
                rows.append({"engine": engine.name, "release": engine.release, "head": name, "target": kind,
                             "known": words.get(known, "refused"), "rules": refused})  # fmt: skip
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _known(engine: Engine, name: str) -> str:
    """Return what is known of a form of heads in an engine, with the targets that are served, or that are excepted."""
    cells = {kind: known for kind in model_types() if (known := cell(engine, name, kind)) != UNKNOWN}
    ran = [kind for kind, known in cells.items() if known == RUN]
    refused: dict[str, list[str]] = {}
    for kind, known in cells.items():
        if known not in (RUN, CODE):
            refused.setdefault(known, []).append(kind)
    if CODE not in cells.values() and not ran:
        return f"{COLORS['']} no: {', '.join(map(_rule, refused))}"
    of_mla = [kind for kind in cells if kind in LATENT]
    most = len(cells) / 2
    but = [
        f"only {_code(kind for kind in cells if kind not in kinds)} ({_rule(rule)})" if len(kinds) > most
        else f"not {'MLA targets' if kinds == of_mla else _code(kinds)} ({_rule(rule)})"
        for rule, kinds in refused.items()
    ]  # fmt: skip
    said = f"{COLORS[RUN]} ran: {_code(ran)}" if ran else f"{COLORS[CODE]} code"
    return "; ".join([said, *but])


def _rule(name: str) -> str:
    rule = find_rule(name)
    return link(rule.id, f"rules.md#{rule.id.lower()}-{rule.name}")


def _listed(engine: Engine, kind: str) -> str:
    capture = engine.capture(kind)
    if capture is None:
        return UNKNOWN
    listed = capture.listed(_GQA.captured, LAYERS) or ()
    [ahead] = {one - layer for one, layer in zip(listed, _GQA.captured, strict=True)}
    return link(f"{ahead:+d}", capture.source)


def in_short() -> Iterator[str]:
    """Yield README's table: targets by engine, those alike together."""
    known: dict[tuple[str, ...], list[str]] = {}
    for kind in model_types():
        cells = []
        for one in engines():
            of_kind = [cell(one, name, kind) for name in FORMS]
            ran = of_kind.count(RUN)
            taken = ran + of_kind.count(CODE)
            cells.append("**yes**" if ran else "yes" if taken else UNKNOWN)
        known.setdefault(tuple(cells), []).append(kind)
    yield from table(
        ("target", *(one.title for one in engines())),
        [(", ".join(f"`{kind}`" for kind in kinds), *cells) for cells, kinds in known.items()],
    )
