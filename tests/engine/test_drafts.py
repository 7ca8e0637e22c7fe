"""vLLM drafts, token for token, what kconv's own forward drafts: heads of random weights, one of each kind.

Random weights agree by chance once in 512 tokens, so each config key that vLLM read otherwise than kconv meant it,
each tensor it put elsewhere and each layer it captured elsewhere shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import KIMI_MLA, random_slots, small, write_head
from support.record_drafts import Recorded, record_vllm

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.drafters.chain import draft_logits
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, HeadSpec, Linear, Llama3, Mla, Norms, Rope, Tokens, Yarn
from kconv.engines import TRTLLM, by_name
from kconv.engines.base import Serving
from kconv.engines.config import write_keys
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.validate.parity import load_head

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, NEW_TOKENS, PROMPT_LENGTHS = 3, 24, (5, 9, 17, 30)
# Where the likeliest two tokens are closer than fp32's rounding, either may be drafted. Logits here are around 5.
TIE = 2e-3

KIMI = Yarn(64.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
MLA = small(
    KIMI_MLA,
    64,
    512,
    # 512 + 64 is the only latent width that vLLM's MLA takes on CPU.
    attention=Mla(2, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32),
    intermediate=96,
    rope=Rope(50000.0, KIMI),
    captured=(1, 2, 3),
    dtype="F32",
    max_positions=4096,
)
GQA = replace(MLA, attention=Gqa(4, kv_heads=2, head_dim=32), rope=Rope(10000.0))
EVERY_NORM = Norms(before_residual=True, before_fc=True, fc=True, output=True)
PORTABLE_NORMS = Norms(fc=True, output=True)
EMBED, LM_HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True)
class Case:
    """A head of random weights, the tensors that it shares with the target, the layout that it is written in, and the
    one of the source that it is made of."""

    name: str
    spec: HeadSpec
    shared: tuple[str, ...] = ()
    layout: str = "vllm"
    source: str = "modelopt"

    @property
    def kind(self) -> str:
        return "mla" if isinstance(self.spec.attention, Mla) else "gqa"


TOKENS = Tokens(bos=1, eos=(2, 5), pad=0)
OTHER_MSCALE = replace(KIMI, factor=32.0, beta_fast=16.0, mscale=0.7, mscale_all_dim=1.2)
AUTOMODEL_YARN = replace(KIMI, mscale=0.0, mscale_all_dim=0.0)
NO_MSCALE = replace(KIMI, mscale=None, mscale_all_dim=None)
CASES = [
    Case("mla as Kimi's", MLA, (EMBED,)),
    Case("mla, plain RoPE, reduced vocabulary", replace(MLA, rope=Rope(5e4), draft_vocab=256), (EMBED,)),
    Case("mla, 2 layers, norms", replace(MLA, layers=2, norms=replace(EVERY_NORM, before_fc=False))),
    Case("mla, other mscale, shared lm_head", replace(MLA, rope=Rope(5e4, OTHER_MSCALE)), (EMBED, LM_HEAD)),
    Case("mla, no mscale, 4 states", replace(MLA, rope=Rope(5e4, NO_MSCALE), captured=(0, 2, 4, 6))),
    Case(
        "mla, bf16, more heads, tokens",
        replace(MLA, attention=replace(MLA.attention, heads=4, v_head_dim=64), dtype="BF16", tokens=TOKENS),
    ),
    Case("mla, portable", replace(MLA, norms=PORTABLE_NORMS), layout="portable"),
    Case("gqa, plain RoPE", GQA, (EMBED,)),
    Case("gqa, YaRN, reduced vocabulary", replace(GQA, rope=Rope(5e4, KIMI), draft_vocab=256), (EMBED,)),
    Case(
        "gqa, YaRN with an attention factor",
        replace(GQA, rope=Rope(5e4, Yarn(8.0, 4096, attention_factor=1.5))),
        (EMBED, LM_HEAD),
    ),
    Case("gqa, 2 layers, every norm", replace(GQA, layers=2, norms=EVERY_NORM)),
    Case(
        "gqa, Llama-3 RoPE, one norm before fc",
        replace(GQA, rope=Rope(5e5, Llama3(8.0, 1.0, 4.0, 64)), norms=Norms(before_fc=True)),
    ),
    Case(
        "gqa, biases, half of each head turned",
        replace(GQA, attention=replace(GQA.attention, bias=True), mlp_bias=True, rope=Rope(1e4, None, 0.5)),
    ),
    Case(
        "mha, linear RoPE, 1 state",
        replace(GQA, attention=Gqa(4, kv_heads=4, head_dim=64), rope=Rope(1e4, Linear(4.0)), captured=(3,)),
    ),
    Case("gqa, wider than the target, tokens", replace(GQA, hidden=96, tokens=TOKENS)),
    Case("gqa, 2 layers, portable", replace(GQA, layers=2), layout="portable"),
    Case(
        "gqa, reduced vocabulary, norms, portable",
        replace(GQA, draft_vocab=256, norms=PORTABLE_NORMS),
        layout="portable",
    ),
    Case(
        "gqa, norms of queries and keys, 5 states",
        replace(GQA, norms=Norms(qk=True), captured=(1, 2, 3, 4, 5)),
    ),
    Case("gqa, P-EAGLE", replace(GQA, mask=7), (EMBED,)),
    Case("gqa, P-EAGLE, 2 layers, every norm", replace(GQA, layers=2, norms=EVERY_NORM, mask=11, draft_vocab=256)),
    # Names under model., Llama's class for MLA too, no list of layers, and YaRN without its factors.
    Case("mla, Automodel's", replace(MLA, rope=Rope(5e4, AUTOMODEL_YARN)), (EMBED,), source="automodel"),
    Case("gqa, Automodel's", replace(GQA, norms=PORTABLE_NORMS, draft_vocab=256), source="automodel"),
    # SGLang's nested list is of layer inputs where it does not begin with 1, as vLLM takes it.
    Case("mla, SGLang's", replace(MLA, captured=(2, 3, 5), norms=PORTABLE_NORMS), layout="sglang"),
    Case("gqa, reduced vocabulary, SGLang's", replace(GQA, captured=(2, 4, 5), draft_vocab=256), layout="sglang"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Convert each head from its source's layout to its own, and return its folder by the case's name."""
    root = tmp_path_factory.mktemp("heads")
    made = {}
    for number, case in enumerate(CASES):
        source, made[case.name] = root / f"{number}-trained", root / f"{number}"
        trainer = by_name(case.source)
        config = TRTLLM.write_config(case.spec) if case.source == "modelopt" else automodel_config(case.spec)
        write_head(source, trainer, case.spec, lively_slots(case.spec, case.shared), config)
        head = read_head(open_checkpoint(source), layout=trainer, hints=Hints(captured=case.spec.captured))
        assert head.spec == case.spec
        # In float32, which TensorRT-LLM alone does not run.
        layout = replace(by_name(case.layout), limits=())
        # SGLang reads some lists by the target's class, and takes the target's embedding, which vLLM does not.
        target = SharedTensors("tiny", {}, layers=7, model_type="kimi_k2") if case.layout != "vllm" else None
        execute(plan(head, layout, WriteOptions(target)), made[case.name])
    return made


@pytest.fixture(scope="module")
def recorded(engine_python, random_target, folders, prompts, tmp_path_factory) -> dict[str, Recorded]:
    """Have the heads of each kind served, one after the other."""
    return {
        kind: record_vllm(
            engine_python,
            random_target,
            {
                case.name: Serving(engine_python, random_target, folders[case.name], case.spec, STEPS)
                for case in CASES
                if case.kind == kind
            },
            prompts,
            tmp_path_factory.mktemp(kind),
            steps=STEPS,
            new_tokens=NEW_TOKENS,
        )
        for kind in ("mla", "gqa")
    }


@pytest.fixture(scope="module")
def target(random_target):
    return load_target(random_target, torch.float32)


def automodel_config(spec: HeadSpec) -> dict[str, Any]:
    """Return a config as Automodel writes it: the target's model_type, one class for all heads, no captured layers."""
    kind = "deepseek_v3" if isinstance(spec.attention, Mla) else "llama"
    return write_keys(spec) | {"architectures": ["LlamaEagle3DraftModel"], "model_type": kind}


def lively_slots(spec: HeadSpec, without: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return random weights of such scales that each part of a head has a say in what it drafts."""
    scaled = {}
    for name, tensor in random_slots(spec, seed=1, without=without).items():
        if not tensor.is_floating_point():
            scaled[name] = tensor
        elif name.endswith("bias"):
            scaled[name] = (0.3 * tensor.float()).to(tensor.dtype)
        elif tensor.ndim == 1:
            scaled[name] = (1.0 + 0.2 * tensor.float()).to(tensor.dtype)
        else:
            scaled[name] = (1.5 * tensor.float() / tensor.shape[1] ** 0.5).to(tensor.dtype)
    return scaled


def disagreements(head: DraftHead, captured: tuple[int, ...], target, text: list[int], prompt: int, drafts) -> int:
    """Count the tokens that vLLM drafted and kconv, given the same tokens before, finds not to be the likeliest.

    Args:
        captured: the layers that kconv feeds the head, as outputs.
        text: a prompt and its continuation.
        prompt: length of the prompt.
        drafts: what vLLM drafted, in order.
    """
    states = run_target(target, torch.tensor([text]), captured).captured
    # Of a chain's later positions nothing is read.
    states = torch.cat([states, states.new_zeros(1, STEPS + 2, states.shape[-1])], dim=1)
    chain, wrong = prompt - 1, 0
    for draft in drafts:
        known = text[: chain + 2]
        if len(known) < chain + 2:
            break
        # The chain's own first drafts are its next inputs; the last one is only predicted.
        logits = draft_logits(head, torch.tensor([known + draft]), states, STEPS)[:, 0, chain]
        rows = {int(token): row for row, token in enumerate(head.target_ids)}
        for step, token in enumerate(draft):
            wrong += int(logits[step].max() - logits[step, rows[token]] > TIE)
        matches = [a == b for a, b in zip(draft, text[chain + 2 :], strict=False)]
        chain += 1 + [*matches, False].index(False)
    return wrong


@each_case
def test_the_output_is_the_targets_own(recorded, case):
    answers = recorded[case.kind].answers
    assert "error" not in answers[case.name], answers[case.name]["error"]
    assert answers[case.name]["outputs"] == answers[""]["outputs"]
    assert all(len(output) == NEW_TOKENS for output in answers[case.name]["outputs"])


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_without_a_head_vllm_computes_what_transformers_does(recorded, target, prompts, kind):
    """Both as MLA and, for the sake of the GQA heads, as plain attention."""
    for prompt, output in zip(prompts, recorded[kind].answers[""]["outputs"], strict=True):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output
        assert len(set(output)) > NEW_TOKENS // 2


@each_case
def test_vllm_drafts_what_kconv_drafts(recorded, folders, random_target, target, prompts, case):
    folder = open_checkpoint(folders[case.name])
    head = load_head(read_head(folder), open_checkpoint(random_target), read_target_config(random_target))
    # As if vLLM's own ids, which count layer inputs, had been left untranslated.
    astray_ids = tuple(sorted((i + 1) % 7 for i in case.spec.captured))
    answer = recorded[case.kind].answers[case.name]
    wrong = astray = drafted = 0
    for prompt, output, drafts in zip(prompts, answer["outputs"], answer["drafts"], strict=True):
        text = prompt + output
        wrong += disagreements(head, case.spec.captured, target, text, len(prompt), drafts)
        astray += disagreements(head, astray_ids, target, text, len(prompt), drafts)
        drafted += STEPS * len(drafts)
    assert drafted > len(prompts) * STEPS * NEW_TOKENS // 2
    assert wrong == 0
    # The comparison can tell: what is fed other layers drafts something else. The later places of a P-EAGLE head read
    # the states by attention alone.
    assert astray > (0.5 if case.spec.mask is None else 0.45) * drafted


@each_case
def test_vllm_says_that_it_takes_the_layers_from_the_head(recorded, case):
    inputs = tuple(i + 1 for i in case.spec.captured)
    assert f"Using auxiliary layers from speculative config: {inputs}" in recorded[case.kind].logs[case.name]
