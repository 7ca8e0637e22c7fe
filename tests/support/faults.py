"""Good heads with one thing wrong each, and the rule that each was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kconv.convert.captured import TOP, Hints
from kconv.head.spec import Norms, Rope
from kconv.target.config import parse_target_config
from kconv.validate.rules.rule import ENGINES, SGLANG, TRTLLM, VLLM, VLLM_V1, VLLM_V2
from kconv.validate.run import Wish

from .changes import (
    Change,
    Config,
    P,
    add,
    also,
    as_ids,
    bad_index,
    cut_config,
    drop,
    edit,
    fp8_kv_b,
    fuse,
    initial,
    nest,
    no_config,
    no_weights,
    one_inf,
    one_nan,
    put,
    rename,
    rope,
    shorten,
    some_rows_zero,
    stale_quantization,
    twins_apart,
    uneven,
    uniform,
)
from .good_heads import LATENT_QUANTIZABLE, QUANTIZABLE, Good
from .heads import GQA, MLA, PORTABLE, YARN

NESTED = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a good head.

    Attributes:
        name: what was done to it.
        rule: the rule that must find it.
        base: the good head.
        change: does it, to the config and the tensors in place.
        engines: whom the head is checked for; the base's own if empty.
        target: the config of the target that the head is said to be for.
        raw: does it to the folder instead, where config and tensors cannot say it.
    """

    name: str
    rule: str
    base: Good
    change: Change = lambda config, tensors: None
    engines: tuple[str, ...] = ()
    target: Config | None = None
    raw: Callable[[Path], None] | None = None

    @property
    def wish(self) -> Wish:
        """Return for whom, and for which target, the head is checked."""
        target = parse_target_config(self.target) if self.target else None
        layers = target.layers if target else None
        return Wish(self.engines or self.base.engines, hints=Hints(target_layers=layers), target=target)

    def write(self, folder: Path) -> Path:
        """Write the head with its fault into a folder."""
        self.base.write(folder)
        if self.raw:
            self.raw(folder)
            return folder
        file, config_file = folder / "model.safetensors", folder / "config.json"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        config = json.loads(config_file.read_text())
        self.change(config, tensors)
        save_file(tensors, file)
        config_file.write_text(json.dumps(config))
        return folder


def _good(layout: str, spec=MLA, engines: tuple[str, ...] = VLLM, nvfp4: bool = False) -> Good:
    return Good(layout, layout, spec, engines, nvfp4)


REDUCED_SPEC = PORTABLE["gqa, reduced vocabulary"]
MLA_VLLM, GQA_VLLM = _good("vllm"), _good("vllm", GQA)
REDUCED = _good("vllm", REDUCED_SPEC)
MLA_SGLANG, GQA_SGLANG = _good("sglang", MLA, (SGLANG,)), _good("sglang", GQA, (SGLANG,))
MLA_TRT, GQA_TRT = _good("trtllm", MLA, (TRTLLM,)), _good("trtllm", GQA, (TRTLLM,))
MODELOPT_MLA = _good("modelopt", MLA, (TRTLLM,))
MODELOPT_GQA = _good("modelopt", GQA, (TRTLLM,))
SPECULATORS = _good("speculators", GQA)
TWO_LAYERS = _good("vllm", replace(GQA, layers=2))
BIASED = _good("vllm", PORTABLE["gqa, attention biases"])
STATE_NORMS = _good("vllm", PORTABLE["gqa, a norm per state"])
ONE_NORM = _good("vllm", PORTABLE["gqa, one norm before fc"])
OTHER_WIDTH = _good("vllm", PORTABLE["gqa, a target of another width"])
FOUR_STATES = _good("vllm", PORTABLE["mla, four states"])
YARN_GQA = _good("vllm", PORTABLE["gqa, YaRN"])
NVFP4 = _good("vllm", QUANTIZABLE, nvfp4=True)
NVFP4_MLA = _good("vllm", LATENT_QUANTIZABLE, nvfp4=True)


FACTOR = replace(GQA, rope=Rope(5e4, replace(YARN, mscale=None, mscale_all_dim=None, attention_factor=1.5)))


TARGET: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 48,
    "num_hidden_layers": 9,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}


FAULTS = (
    # What cannot be opened or read.
    Fault("config.json deleted", "K001", MLA_VLLM, raw=no_config),
    Fault("weights as a pickle only", "K001", MLA_VLLM, raw=no_weights),
    Fault("the file cut short", "K002", MLA_VLLM, raw=shorten),
    Fault("an index of a missing shard", "K003", MLA_VLLM, raw=bad_index),
    Fault("config.json cut short", "K008", MLA_VLLM, raw=cut_config),
    Fault("fc and the captured layers lost", "K004", GQA_VLLM,
          also(drop("fc.weight"), put(**{TOP: ..., "eagle_config": ...}))),
    Fault("one norm under two names that differ", "K005", _good("portable", replace(GQA, layers=2), ENGINES),
          twins_apart),
    Fault("no list of captured layers", "K006", GQA_VLLM, put(**{TOP: ...})),
    Fault("a list that may mean inputs or outputs", "K006", MODELOPT_MLA, nest(**{NESTED: [2, 30, 58]})),
    # Keys.
    Fault("hidden_size deleted", "K010", MLA_VLLM, put(hidden_size=...)),
    Fault("rms_norm_eps null", "K010", GQA_VLLM, put(rms_norm_eps=None)),
    Fault("num_key_value_heads of another count than an MLA head's heads", "K011", MLA_VLLM,
          put(num_key_value_heads=2)),
    Fault("norm_before_fc stated twice, differently", "K011", ONE_NORM, nest(norm_before_fc=False)),
    Fault("intermediate_size as a text", "K012", MLA_VLLM, put(intermediate_size="40")),
    Fault("attention_bias as a number", "K012", GQA_VLLM, put(attention_bias=1)),
    Fault("hidden_act gelu", "K013", GQA_VLLM, put(hidden_act="gelu")),
    Fault("eh_proj_before_attn on", "K013", MODELOPT_GQA, nest(eh_proj_before_attn=True)),
    Fault("a sliding window", "K014", GQA_VLLM, put(sliding_window=4096)),
    Fault("speculators without norm_before_residual", "K015", SPECULATORS, put(norm_before_residual=...)),
    Fault("speculators' root and inner config differ", "K016", SPECULATORS, put(hidden_size=96)),
    Fault("SpecForge's norm_output", "K017", _good("specforge", REDUCED_SPEC, (SGLANG,)), put(norm_output=True)),
    Fault("norm_before_fc outside of eagle_config, for TensorRT-LLM", "K018", ONE_NORM, nest(norm_before_fc=...),
          (TRTLLM,)),
    Fault("fc_norm under SGLang's older name, for vLLM", "K018", STATE_NORMS, put(fc_norm=..., use_aux_norm=True)),
    # Tensors.
    Fault("lm_head of a reduced vocabulary deleted", "K101", REDUCED, drop("lm_head.weight")),
    Fault("lm_head of a head of another width deleted", "K101", OTHER_WIDTH, drop("lm_head.weight")),
    Fault("d2t deleted", "K102", REDUCED, drop("d2t")),
    Fault("embedding of a head of another width deleted", "K103", OTHER_WIDTH, drop("embed_tokens.weight")),
    Fault("fc deleted", "K104", MLA_VLLM, drop("fc.weight")),
    Fault("a norm per state asked for and missing", "K105", STATE_NORMS, drop("fc_norm.1.weight")),
    Fault("norm before fc asked for and missing", "K105", ONE_NORM, drop("input_norm.weight")),
    Fault("hidden_norm deleted", "K106", MLA_VLLM, drop(f"{P}hidden_norm.weight")),
    Fault("final norm deleted", "K106", GQA_VLLM, drop("norm.weight")),
    Fault("attention_bias set without biases", "K107", GQA_VLLM, put(attention_bias=True)),
    Fault("gate_proj deleted", "K108", MLA_VLLM, drop(f"{P}mlp.gate_proj.weight")),
    Fault("kv_b_proj deleted", "K108", MLA_VLLM, drop(f"{P}self_attn.kv_b_proj.weight")),
    Fault("lm_head of the full vocabulary in a reduced head", "K111", REDUCED,
          edit("lm_head.weight", lambda t: t.repeat(2, 1)[:64])),
    Fault("fc one state too narrow", "K112", MLA_VLLM, edit("fc.weight", lambda t: t[:, :96])),
    Fault("embedding with a row less", "K113", MLA_VLLM, edit("embed_tokens.weight", lambda t: t[:-1])),
    Fault("d2t with a row less", "K114", REDUCED, edit("d2t", lambda t: t[:-1])),
    Fault("intermediate_size of another head", "K115", GQA_VLLM, put(intermediate_size=48)),
    Fault("a norm of another width", "K116", GQA_VLLM, edit("norm.weight", lambda t: t[:-8])),
    Fault("kv_lora_rank of another head", "K117", MLA_VLLM, put(kv_lora_rank=24)),
    Fault("o_proj transposed", "K117", GQA_VLLM, edit(f"{P}self_attn.o_proj.weight", lambda t: t.T)),
    Fault("d2t as floats", "K118", REDUCED, edit("d2t", lambda t: t.float())),
    Fault("fc_norm stored without its flag", "K121", STATE_NORMS, put(fc_norm=False)),
    Fault("input_norm stored without its flag", "K121", ONE_NORM,
          also(put(norm_before_fc=False), nest(norm_before_fc=False))),
    Fault("biases stored without their flag", "K122", BIASED, put(attention_bias=False)),
    Fault("draft_vocab_size of the full vocabulary beside a d2t", "K123", REDUCED, put(draft_vocab_size=64)),
    Fault("norms of queries and keys", "K124", GQA_VLLM, add(f"{P}self_attn.q_norm.weight", 16)),
    Fault("names with the prefix `model.`", "K125", MLA_VLLM, rename("", "model.")),
    Fault("the layer's names with the prefix `model.`", "K125", GQA_VLLM, rename("layers.", "model.layers.")),
    Fault("experts in the head", "K126", MLA_VLLM, add(f"{P}mlp.experts.0.gate_proj.weight", 8, 48)),
    Fault("a second layer that the config does not count", "K127", TWO_LAYERS, put(num_hidden_layers=1)),
    Fault("a tensor that nobody knows", "K120", GQA_VLLM, add("mystery.weight", 4)),
    Fault("fused q, k and v, for TensorRT-LLM", "K131", GQA_VLLM,
          fuse([f"{P}self_attn.{x}_proj.weight" for x in "qkv"], f"{P}self_attn.qkv_proj.weight"), (TRTLLM,)),
    Fault("fused gate and up, for SGLang", "K131", MLA_VLLM,
          fuse([f"{P}mlp.{x}_proj.weight" for x in ("gate", "up")], f"{P}mlp.gate_up_proj.weight"), (SGLANG,)),
    Fault("a second layer's norm under vLLM's name, for TensorRT-LLM", "K131", TWO_LAYERS, engines=(TRTLLM,)),
    Fault("fc_norm under SGLang's older names, for vLLM", "K132", _good("sglang", STATE_NORMS.spec, (SGLANG,)),
          also(rename("fc_norm.0", "aux_norm_low"), rename("fc_norm.1", "aux_norm_mid"),
               rename("fc_norm.2", "aux_norm_high")), VLLM),
    Fault("no lm_head beside a draft_vocab_size, for SGLang", "K133", MLA_SGLANG, drop("lm_head.weight")),
    # Captured layers.
    Fault("a ModelOpt head as it is, for vLLM's V1 runner", "K140", MODELOPT_GQA, engines=(VLLM_V1,)),
    Fault("a list of outputs that begins with 2, for SGLang", "K141", _good("trtllm", replace(GQA, captured=(2, 3, 5))),
          engines=(SGLANG,)),
    Fault("a list in eagle_config alone that is no default, for vLLM's V2 runner", "K142",
          _good("trtllm", replace(GQA, captured=(1, 2, 9))), engines=(VLLM_V2,)),
    Fault("the default list in eagle_config alone, for vLLM's V2 runner", "K143", MODELOPT_GQA, engines=(VLLM_V2,)),
    Fault("captured layers listed twice", "K145", GQA_VLLM, put(**{TOP: [2, 2, 6]})),
    Fault("captured layers in descending order", "K145", MLA_VLLM, put(**{TOP: [6, 4, 2]})),
    Fault("a captured layer as a text", "K145", MODELOPT_MLA, nest(**{NESTED: [1, "3", 5]}), (SGLANG,)),
    Fault("a list of outputs where vLLM looks for inputs", "K153", GQA_VLLM,
          put(**{TOP: [1, 3, 5], "eagle_config": ...})),
    Fault("two lists that contradict", "K146", _good("portable", MLA, ENGINES), put(**{TOP: [2, 4, 7]})),
    Fault("layer input 0", "K147", GQA_VLLM, put(**{TOP: [0, 4, 6]})),
    Fault("num_aux_hidden_states of another count", "K149", MLA_VLLM, put(num_aux_hidden_states=2)),
    Fault("four states, and num_aux_hidden_states deleted", "K150", FOUR_STATES, put(num_aux_hidden_states=...)),
    Fault("use_aux_hidden_state off", "K151", MODELOPT_GQA, nest(use_aux_hidden_state=False)),
    Fault("eagle_config as a text", "K152", MODELOPT_GQA, put(eagle_config="eagle3")),
    # RoPE.
    Fault("rope_theta stated twice, differently", "K160", GQA_VLLM, put(rope_theta=50000.0)),
    Fault("YaRN's factor stated twice, differently", "K160", MLA_VLLM, rope("rope_scaling", factor=32.0)),
    Fault("YaRN without its factor", "K161", YARN_GQA,
          also(rope("rope_scaling", factor=...), rope("rope_parameters", factor=...))),
    Fault("a RoPE that no engine has", "K161", GQA_VLLM,
          put(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=...)),
    Fault("rope_theta lost", "K162", GQA_VLLM, also(put(rope_theta=...), rope("rope_parameters", rope_theta=...))),
    Fault("RoPE in transformers 5's spelling alone", "K163", _good("sglang", GQA, (SGLANG,)),
          put(rope_theta=..., rope_scaling=...)),
    Fault("ModelOpt's YaRN of 32 over 2,048", "K164", MODELOPT_GQA,
          put(rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
              rope_parameters=...)),
    Fault("max_position_embeddings deleted", "K166", MLA_TRT, put(max_position_embeddings=...)),
    Fault("rope_interleave off", "K168", MLA_VLLM, put(rope_interleave=False)),
    # Vocabulary.
    Fault("tie_word_embeddings on", "K170", GQA_VLLM, put(tie_word_embeddings=True)),
    Fault("draft_vocab_size deleted, for SGLang", "K171", GQA_SGLANG, put(draft_vocab_size=...)),
    Fault("draft_vocab_size of a reduced head deleted", "K172", REDUCED, put(draft_vocab_size=...)),
    Fault("d2t of a full vocabulary, for vLLM", "K173", GQA_VLLM, add("d2t", 64, dtype=torch.int64)),
    Fault("d2t of zeros", "K174", REDUCED, edit("d2t", torch.zeros_like)),
    Fault("d2t of zeros, and no t2d", "K174", REDUCED, also(edit("d2t", torch.zeros_like), drop("t2d"))),
    Fault("d2t of target ids", "K175", REDUCED, edit("d2t", as_ids)),
    Fault("d2t of target ids, and no t2d", "K175", REDUCED, also(edit("d2t", as_ids), drop("t2d"))),
    Fault("d2t that leads outside", "K176", REDUCED, edit("d2t", lambda t: t + 60)),
    Fault("d2t below zero", "K176", REDUCED, edit("d2t", lambda t: t - 5)),
    Fault("d2t that leads twice to one token", "K177", REDUCED, edit("d2t", lambda t: t - torch.arange(40) // 20)),
    Fault("t2d of another head", "K178", REDUCED, edit("t2d", lambda t: t.roll(1))),
    Fault("a map of a full vocabulary that leads elsewhere", "K182", GQA_SGLANG,
          add("d2t", 64, dtype=torch.int64)),
    # What the head calls itself.
    Fault("model_type deepseek_v3, for vLLM", "K183", MLA_VLLM, put(model_type="deepseek_v3")),
    Fault("no architectures", "K185", GQA_VLLM, put(architectures=...)),
    Fault("SpecForge's name of its MLA class, for vLLM", "K186", MLA_VLLM,
          put(architectures=["DeepseekV3ForCausalLMEagle3"])),
    Fault("a GQA class for an MLA head", "K186", MLA_VLLM, put(architectures=["LlamaForCausalLMEagle3"])),
    Fault("LlamaForCausalLM, for SGLang", "K187", GQA_SGLANG, put(architectures=["LlamaForCausalLM"])),
    Fault("model_type kimi_k2 of a GQA head, for TensorRT-LLM", "K188", GQA_TRT, put(model_type="kimi_k2")),
    Fault("q_lora_rank null", "K189", MLA_VLLM, put(q_lora_rank=None)),
    Fault("n_routed_experts null", "K190", MLA_VLLM, put(n_routed_experts=None)),
    Fault("an MLA head in speculators' format", "K191", _good("speculators", MLA)),
    Fault("speculators' format, for SGLang", "K192", SPECULATORS, engines=(SGLANG,)),
    # Against its target.
    Fault("a target of too few layers", "K148", GQA_VLLM, target=TARGET | {"num_hidden_layers": 4}),
    Fault("a target with another RoPE", "K165", GQA_VLLM, target=TARGET | {"rope_theta": 50000.0}),
    Fault("a target of a longer context", "K167", GQA_VLLM, target=TARGET | {"max_position_embeddings": 4096}),
    Fault("a target of another vocabulary", "K180", GQA_VLLM, target=TARGET | {"vocab_size": 65}),
    Fault("a target of another width", "K181", GQA_VLLM, target=TARGET | {"hidden_size": 56}),
    Fault("a target of another depth, for a list in eagle_config alone", "K142", MODELOPT_GQA,
          engines=(VLLM_V2,), target=TARGET | {"num_hidden_layers": 30}),
    Fault("a target with a quantized KV cache", "K211", GQA_VLLM,
          target=TARGET | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}),
    # Quantized heads.
    Fault("scales without a quantization_config", "K197", NVFP4, put(quantization_config=...)),
    Fault("the target's quantization_config", "K198", MLA_VLLM, stale_quantization),
    Fault("weight_scale_2 deleted", "K199", NVFP4, drop(f"{P}mlp.up_proj.weight_scale_2")),
    Fault("quantized in a format that nobody knows", "K200", NVFP4,
          edit(f"{P}mlp.up_proj.weight", lambda t: t.to(torch.int8))),
    Fault("a scale of another shape", "K119", NVFP4, edit(f"{P}mlp.down_proj.weight_scale", lambda t: t[:, :-1])),
    Fault("an NVFP4 MLA head, for SGLang", "K339", NVFP4_MLA, engines=(SGLANG,)),
    Fault("torch_dtype of another dtype", "K208", GQA_TRT, put(torch_dtype="float16", dtype="float16")),
    # Values.
    Fault("one NaN", "K201", MLA_VLLM, edit("fc.weight", one_nan)),
    Fault("one Inf in lm_head", "K201", GQA_VLLM, edit("lm_head.weight", one_inf)),
    Fault("a norm of zeros", "K202", MLA_VLLM, edit("norm.weight", torch.zeros_like)),
    Fault("a linear of zeros", "K202", GQA_VLLM, edit(f"{P}self_attn.q_proj.weight", torch.zeros_like)),
    Fault("a norm of ones", "K203", GQA_VLLM, edit("norm.weight", torch.ones_like)),
    Fault("lm_head as drawn from a normal distribution", "K204", MLA_VLLM, edit("lm_head.weight", initial(0.02))),
    Fault("lm_head as torch.nn.Linear leaves it", "K204", GQA_VLLM, edit("lm_head.weight", uniform)),
    Fault("rows of lm_head that were never filled", "K205", GQA_VLLM, edit("lm_head.weight", some_rows_zero)),
    Fault("a head as ModelOpt 0.47 trains it, normed twice", "K210", MODELOPT_MLA,
          edit(f"{P}input_layernorm.weight", uneven)),
    # What an engine has no place for.
    Fault("one of YaRN's mscales deleted", "K311", MLA_VLLM,
          also(rope("rope_scaling", mscale_all_dim=...), rope("rope_parameters", mscale_all_dim=...))),
    Fault("plain linear RoPE of an MLA head", "K310", MLA_VLLM,
          put(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=...)),
    Fault("norm before fc in an MLA head, for vLLM", "K320", _good("trtllm", replace(MLA, norms=Norms(before_fc=True))),
          engines=VLLM),
    Fault("MLP biases in an MLA head, for vLLM", "K321", _good("trtllm", replace(MLA, mlp_bias=True)), engines=VLLM),
    Fault("a bias of fc, for vLLM", "K322", _good("trtllm", replace(GQA, fc_bias=True)), engines=VLLM),
    Fault("layer 0 captured, for SGLang", "K330", _good("vllm", replace(GQA, captured=(0, 3, 5))), engines=(SGLANG,)),
    Fault("one captured layer as wide as the head, for SGLang", "K331", _good("vllm", replace(GQA, captured=(3,))),
          engines=(SGLANG,)),
    Fault("norm_before_residual, for SGLang", "K332", _good("vllm", replace(GQA, norms=Norms(before_residual=True))),
          engines=(SGLANG,)),
    Fault("an MLA head of two layers, for SGLang", "K333", _good("portable", replace(MLA, layers=2), ENGINES),
          engines=(SGLANG,)),
    Fault("attention biases, for SGLang", "K335", BIASED, engines=(SGLANG,)),
    Fault("MLP biases, for SGLang", "K336", _good("vllm", PORTABLE["gqa, MLP biases"]), engines=(SGLANG,)),
    Fault("norm_before_residual, for TensorRT-LLM", "K340",
          _good("vllm", replace(GQA, norms=Norms(before_residual=True))), engines=(TRTLLM,)),
    Fault("one captured layer, for TensorRT-LLM", "K341", _good("vllm", replace(GQA, captured=(3,))),
          engines=(TRTLLM,)),
    Fault("an MLA head of a reduced vocabulary, for TensorRT-LLM", "K342", _good("vllm", replace(MLA, draft_vocab=40)),
          engines=(TRTLLM,)),
    Fault("a norm before fc in an MLA head, for SGLang", "K334",
          _good("trtllm", replace(MLA, norms=Norms(before_fc=True))), engines=(SGLANG,)),
    Fault("kv_b_proj quantized, for SGLang", "K338", _good("vllm", LATENT_QUANTIZABLE), fp8_kv_b, (SGLANG,)),
    Fault("YaRN's attention_factor, for SGLang", "K337", _good("vllm", FACTOR), engines=(SGLANG,)),
    Fault("YaRN's attention_factor, for TensorRT-LLM", "K343", _good("vllm", FACTOR), engines=(TRTLLM,)),
    Fault("fc that is as wide as it is high, for TensorRT-LLM", "K345",
          _good("vllm", replace(GQA, target_hidden=24, captured=(1, 3))), engines=(TRTLLM,)),
    Fault("both norms before fc, for TensorRT-LLM", "K344",
          _good("vllm", replace(GQA, norms=Norms(before_fc=True, fc=True))), engines=(TRTLLM,)),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
