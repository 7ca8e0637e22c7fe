"""Good heads with one thing wrong each, and the rule that each was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SLOTS, find_shared
from kconv.drafters.dflash import DFlashSpec, Markov
from kconv.drafters.keys import CONVENTION, TOP
from kconv.drafters.spec import HeadSpec, Norms, Rope, Yarn
from kconv.engines import BY_NAME
from kconv.validate.options import ValidateOptions
from kconv.validate.report import Report
from kconv.validate.rules.subject import ENGINES

from .block_drafters import DFLASH, DSPARK
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
    exclude,
    fp8,
    fuse,
    initial,
    inside,
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
    write_twice,
)
from .good_heads import (
    LATENT_QUANTIZABLE,
    QUANTIZABLE,
    SGLANG,
    TRTLLM,
    VLLM,
    VLLM_V1,
    VLLM_V2,
    Good,
    make_config,
    trained_slots,
)
from .heads import GQA, MLA, PORTABLE, QK, TARGET, YARN
from .validated import validate


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
        lent: slots whose tensor of the target is at hand, another than the head's own.
        hints: what the user says of it.
    """

    name: str
    rule: str
    base: Good
    change: Change = lambda config, tensors: None
    engines: tuple[str, ...] = ()
    target: Config | None = None
    raw: Callable[[Path], None] | None = None
    lent: tuple[str, ...] = ()
    hints: Hints = field(default_factory=Hints)

    @property
    def told(self) -> Hints:
        """What the user says of the head, with its target's depth."""
        layers = self.target["num_hidden_layers"] if self.target else self.hints.target_layers
        return self.hints.model_copy(update={"target_layers": layers})

    def validate(self, folder: Path) -> Report:
        """Check the head that is written into a folder, for whom and for which target it is said to be."""
        target = None
        if self.target or self.lent:
            target = write_target(folder.with_name("target"), self.target or TARGET, self.lent, self.base.spec)
        options = ValidateOptions(for_=self.engines or self.base.engines)
        return validate(Folder(folder), options, hints=self.told, target=target)

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


def of_another(head: Good) -> Change:
    """Return the change that puts another head's config in the place of the own one."""

    def change(config: Config, _: object) -> None:
        config.clear()
        config.update(make_config(BY_NAME[head.layout], head.spec))

    return change


def write_target(folder: Path, config: Config, slots: tuple[str, ...] = (), spec: HeadSpec = GQA) -> Folder:
    """Write a target: its config, and tensors of its own for these slots of a head."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    own = trained_slots(spec, seed=5)
    names = {"lm_head": "lm_head.weight", "embed_tokens": "model.embed_tokens.weight"}
    save_file({names[slot]: own[slot] for slot in slots}, folder / "model.safetensors")
    return Folder(folder)


def left_to_its_target(folder: Path) -> None:
    """Convert a head in its place, without the lm_head that its target has too."""
    head, target = folder.with_name("whole"), folder.with_name("its-target")
    folder.rename(head)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    save_file({"lm_head.weight": load_file(head / "model.safetensors")["lm_head.weight"]}, target / "model.safetensors")
    options = WriteOptions(find_shared(Folder(target), SLOTS), drop_shared=True)
    execute(plan(read_head(open_checkpoint(head)), BY_NAME["vllm"], options), folder)


def good(layout: str, spec=MLA, engines: tuple[str, ...] = VLLM, nvfp4: bool = False) -> Good:
    """Return a good head of a layout, for these engines."""
    return Good(layout, layout, spec, engines, nvfp4)


REDUCED_SPEC = PORTABLE["gqa, reduced vocabulary"]
MLA_VLLM, GQA_VLLM = good("vllm"), good("vllm", GQA)
REDUCED = good("vllm", REDUCED_SPEC)
PARALLEL = good("vllm", replace(GQA, mask=3))
MLA_SGLANG, GQA_SGLANG = good("sglang", MLA, (SGLANG,)), good("sglang", GQA, (SGLANG,))
MLA_TRT, GQA_TRT = good("trtllm", MLA, (TRTLLM,)), good("trtllm", GQA, (TRTLLM,))
MODELOPT_MLA = good("modelopt", MLA, (TRTLLM,))
MODELOPT_GQA = good("modelopt", GQA, (TRTLLM,))
SPECULATORS = good("speculators", GQA)
TORCHSPEC = good("torchspec", GQA, (SGLANG, TRTLLM))
TWO_LAYERS = good("vllm", replace(GQA, layers=2))
BIASED = good("vllm", PORTABLE["gqa, attention biases"])
STATE_NORMS = good("vllm", PORTABLE["gqa, a norm per state"])
ONE_NORM = good("vllm", PORTABLE["gqa, one norm before fc"])
OTHER_WIDTH = good("vllm", PORTABLE["gqa, a target of another width"])
FOUR_STATES = good("vllm", PORTABLE["mla, four states"])
YARN_GQA = good("vllm", PORTABLE["gqa, YaRN"])
SHORT_YARN = good("vllm", replace(GQA, rope=Rope(1e4, Yarn(8.0, 64)), max_positions=512))
NVFP4 = good("vllm", QUANTIZABLE, nvfp4=True)
NVFP4_MLA = good("vllm", LATENT_QUANTIZABLE, nvfp4=True)


FACTOR = replace(GQA, rope=Rope(5e4, replace(YARN, mscale=None, mscale_all_dim=None, attention_factor=1.5)))


NESTED = "eagle_aux_hidden_state_layer_ids"
OF_CONFIGS = (
    # What cannot be opened or read.
    Fault("config.json deleted", "K001", MLA_VLLM, raw=no_config),
    Fault("weights as a pickle only", "K001", MLA_VLLM, raw=no_weights),
    Fault("the file cut short", "K002", MLA_VLLM, raw=shorten),
    Fault("an index of a missing shard", "K003", MLA_VLLM, raw=bad_index),
    Fault("config.json cut short", "K008", MLA_VLLM, raw=cut_config),
    Fault("fc and the captured layers lost", "K004", GQA_VLLM,
          also(drop("fc.weight"), put(**{TOP: ..., "eagle_config": ...}))),
    Fault("one norm under two names that differ", "K005", good("portable", replace(GQA, layers=2), ENGINES),
          twins_apart),
    Fault("no list of captured layers", "K006", GQA_VLLM, put(**{TOP: ...})),
    Fault("a list that may mean inputs or outputs", "K006", MODELOPT_MLA, nest(**{NESTED: [2, 30, 58]})),
    Fault("a second layer in TorchSpec's layout, which has names for one", "K007", TORCHSPEC, put(num_hidden_layers=2)),
    Fault("an MLA head of which RoPE turns a part of its own part", "K009", MLA_VLLM, put(partial_rotary_factor=0.5)),
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
    Fault("Kimi K3's NoPE, in a class that turns", "K013", MLA_VLLM, put(mla_use_nope=True)),
    Fault("a part of each head turned, under vLLM's older name", "K013", GQA_VLLM, put(rotary_pct=0.5)),
    Fault("YaRN's length at the top, where TensorRT-LLM looks first", "K013", GQA_TRT,
          put(original_max_position_embeddings=2048)),
    Fault("sparse attention, which no draft head has", "K013", MLA_VLLM, put(index_topk=64)),
    Fault("index_topk null, which is not index_topk absent", "K019", MLA_VLLM, put(index_topk=None)),
    Fault("model_type deleted", "K020", GQA_VLLM, put(model_type=...)),
    Fault("an MLA head without num_attention_heads", "K021", MLA_VLLM, put(num_attention_heads=...)),
    Fault("an MLA head without num_key_value_heads, for TensorRT-LLM", "K021", MLA_TRT, put(num_key_value_heads=...)),
    Fault("a dtype that torch has not", "K022", GQA_SGLANG, put(torch_dtype="bf16", dtype="bf16")),
    Fault("num_hidden_layers of the target", "K023", GQA_VLLM, put(num_hidden_layers=36)),
    Fault("layers that only the option states", "K024", GQA_VLLM, put(num_hidden_layers=36), hints=Hints(layers=1)),
    Fault("a sliding window", "K014", GQA_VLLM, put(sliding_window=4096)),
    Fault("speculators without norm_before_residual", "K015", SPECULATORS, put(norm_before_residual=...)),
    Fault("a P-EAGLE head without its mask token", "K025", PARALLEL, put(mask_token_id=...)),
    Fault("a P-EAGLE head with a mask token outside its embedding", "K012", PARALLEL, put(mask_token_id=64)),
    Fault("a P-EAGLE head without mask_hidden", "K108", PARALLEL, drop("mask_hidden")),
    Fault("speculators' root and inner config differ", "K016", SPECULATORS, put(hidden_size=96)),
    Fault("SpecForge's norm_output", "K017", good("specforge", REDUCED_SPEC, (SGLANG,)), put(norm_output=True)),
    Fault("norm_before_fc outside of eagle_config, for TensorRT-LLM", "K018", ONE_NORM, nest(norm_before_fc=...),
          (TRTLLM,)),
    Fault("fc_norm under SGLang's older name, for vLLM", "K018", STATE_NORMS, put(fc_norm=..., use_aux_norm=True)),
    # Captured layers.
    Fault("a ModelOpt head as it is, for vLLM's V1 runner", "K140", MODELOPT_GQA, engines=(VLLM_V1,)),
    Fault("a list of outputs that begins with 2, for SGLang", "K141", good("trtllm", replace(MLA, captured=(2, 3, 5))),
          engines=(SGLANG,)),
    Fault("a list in eagle_config alone that is no default, for vLLM's V2 runner", "K142",
          good("trtllm", replace(GQA, captured=(1, 2, 9))), engines=(VLLM_V2,)),
    Fault("the default list in eagle_config alone, for vLLM's V2 runner", "K143", MODELOPT_GQA, engines=(VLLM_V2,)),
    Fault("captured layers listed twice", "K145", GQA_VLLM, put(**{TOP: [2, 2, 6]})),
    Fault("captured layers in descending order", "K145", MLA_VLLM, put(**{TOP: [6, 4, 2]})),
    Fault("a captured layer as a text", "K145", MODELOPT_MLA, nest(**{NESTED: [1, "3", 5]}), (SGLANG,)),
    Fault("a list of outputs where vLLM looks for inputs", "K006", GQA_VLLM,
          put(**{TOP: [1, 3, 5], CONVENTION: ...})),
    Fault("two lists that contradict", "K146", good("portable", MLA, ENGINES), put(**{TOP: [2, 4, 7]})),
    Fault("layer input 0", "K147", GQA_VLLM, put(**{TOP: [0, 4, 6]})),
    Fault("num_aux_hidden_states of another count", "K149", MLA_VLLM, put(num_aux_hidden_states=2)),
    Fault("four states, and num_aux_hidden_states deleted", "K150", FOUR_STATES, put(num_aux_hidden_states=...)),
    Fault("use_aux_hidden_state off", "K151", MODELOPT_GQA, nest(use_aux_hidden_state=False)),
    Fault("ModelOpt's outputs, said to be inputs", "K155", MODELOPT_GQA, hints=Hints(captured_are="inputs")),
    Fault("eagle_config as a text", "K152", MODELOPT_GQA, put(eagle_config="eagle3")),
    # RoPE.
    Fault("rope_theta stated twice, differently", "K160", GQA_VLLM, put(rope_theta=50000.0)),
    Fault("YaRN's factor stated twice, differently", "K160", MLA_VLLM, rope("rope_scaling", factor=32.0)),
    Fault("YaRN without its factor", "K161", YARN_GQA,
          also(rope("rope_scaling", factor=...), rope("rope_parameters", factor=...))),
    Fault("a RoPE that no engine has", "K161", GQA_VLLM,
          put(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=...)),
    Fault("rope_theta lost", "K162", GQA_VLLM, also(put(rope_theta=...), rope("rope_parameters", rope_theta=...))),
    Fault("RoPE in transformers 5's spelling alone", "K163", good("sglang", GQA, (SGLANG,)),
          put(rope_theta=..., rope_scaling=...)),
    Fault("YaRN in transformers 5's spelling alone", "K163", good("sglang", YARN_GQA.spec, (SGLANG,)),
          put(rope_scaling=...)),
    Fault("YaRN in transformers 5's spelling alone, for TensorRT-LLM", "K158", MLA_TRT, put(rope_scaling=...)),
    Fault("YaRN's factor in rope_parameters alone, beside a rope_scaling", "K159", MLA_VLLM,
          rope("rope_scaling", factor=...)),
    Fault("YaRN's factor in rope_scaling alone, beside rope_parameters, for TensorRT-LLM", "K159", MLA_TRT,
          rope("rope_parameters", factor=...)),
    Fault("ModelOpt's YaRN of 32 over 2,048", "K164", MODELOPT_GQA,
          put(rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
              rope_parameters=...)),
    Fault("max_position_embeddings deleted", "K166", MLA_TRT, put(max_position_embeddings=...)),
    Fault("more positions than YaRN reaches, for vLLM", "K169", SHORT_YARN, put(max_position_embeddings=513)),
    Fault("half the positions that YaRN reaches, for TensorRT-LLM", "K157", MLA_TRT,
          put(max_position_embeddings=131072)),
    Fault("rope_interleave off", "K168", MLA_VLLM, put(rope_interleave=False)),
    # What the head calls itself.
    Fault("model_type deepseek_v3, for vLLM", "K183", MLA_VLLM, put(model_type="deepseek_v3")),
    Fault("no architectures", "K185", GQA_VLLM, put(architectures=...)),
    Fault("SpecForge's name of its MLA class, for vLLM", "K186", MLA_VLLM,
          put(architectures=["DeepseekV3ForCausalLMEagle3"])),
    Fault("a name of vLLM's table, which vLLM puts Eagle3 before", "K186", GQA_VLLM,
          put(architectures=["PEagleDraftModel"])),
    Fault("a GQA class for an MLA head", "K186", MLA_VLLM, put(architectures=["LlamaForCausalLMEagle3"])),
    Fault("LlamaForCausalLM, for SGLang", "K187", GQA_SGLANG, put(architectures=["LlamaForCausalLM"])),
    Fault("model_type kimi_k2 of a GQA head, for TensorRT-LLM", "K188", GQA_TRT, put(model_type="kimi_k2")),
    Fault("q_lora_rank null", "K189", MLA_VLLM, put(q_lora_rank=None)),
    Fault("n_routed_experts null", "K190", MLA_VLLM, put(n_routed_experts=None)),
    Fault("an MLA head in speculators' format", "K191", good("speculators", MLA)),
    Fault("speculators' format, for SGLang", "K192", SPECULATORS, engines=(SGLANG,)),
)  # fmt: skip


OF_TENSORS = (
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
    Fault("names with the prefix of a wrapped model", "K125", GQA_VLLM, rename("", "module.")),
    Fault("experts in the head", "K126", MLA_VLLM, add(f"{P}mlp.experts.0.gate_proj.weight", 8, 48)),
    Fault("a second layer that the config does not count", "K127", TWO_LAYERS, put(num_hidden_layers=1)),
    Fault("a tensor that nobody knows", "K120", GQA_VLLM, add("mystery.weight", 4)),
    Fault("fused q, k and v, for TensorRT-LLM", "K131", GQA_VLLM,
          fuse([f"{P}self_attn.{x}_proj.weight" for x in "qkv"], f"{P}self_attn.qkv_proj.weight"), (TRTLLM,)),
    Fault("fused gate and up, for SGLang", "K131", MLA_VLLM,
          fuse([f"{P}mlp.{x}_proj.weight" for x in ("gate", "up")], f"{P}mlp.gate_up_proj.weight"), (SGLANG,)),
    Fault("a second layer's norm under vLLM's name, for TensorRT-LLM", "K131", TWO_LAYERS, engines=(TRTLLM,)),
    Fault("fc_norm under SGLang's older names, for vLLM", "K132", good("sglang", STATE_NORMS.spec, (SGLANG,)),
          also(rename("fc_norm.0", "aux_norm_low"), rename("fc_norm.1", "aux_norm_mid"),
               rename("fc_norm.2", "aux_norm_high")), VLLM),
    Fault("no lm_head beside a draft_vocab_size, for SGLang", "K133", MLA_SGLANG, drop("lm_head.weight")),
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
    Fault("d2t that may be offsets or target ids, and no t2d", "K179", REDUCED,
          also(edit("d2t", lambda t: (len(t) - 2 * torch.arange(len(t))) % (len(t) + 1)), drop("t2d"))),
    Fault("t2d of another head", "K178", REDUCED, edit("t2d", lambda t: t.roll(1))),
    Fault("a map of a full vocabulary that leads elsewhere", "K182", GQA_SGLANG,
          add("d2t", 64, dtype=torch.int64)),
    # Against its target.
    Fault("a target of too few layers", "K148", GQA_VLLM, target=TARGET | {"num_hidden_layers": 4}),
    Fault("the output of the target's last layer, for SGLang", "K154", good("sglang", replace(GQA, captured=(3, 5, 8))),
          engines=(SGLANG,), target=TARGET),
    Fault("a target whose class captures nothing, for TensorRT-LLM", "K156", GQA_TRT,
          target=TARGET | {"model_type": "minimax_m2"}),
    Fault("a target that SGLang takes a list of otherwise", "K141", good("sglang", replace(GQA, captured=(2, 3, 5))),
          engines=(SGLANG,), target=TARGET | {"model_type": "qwen3"}),
    Fault("a target with another RoPE", "K165", GQA_VLLM, target=TARGET | {"rope_theta": 50000.0}),
    Fault("a target of a longer context, for TensorRT-LLM", "K167", GQA_TRT,
          target=TARGET | {"max_position_embeddings": 4096}),
    Fault("a target of a longer context, for SGLang", "K167", GQA_SGLANG,
          target=TARGET | {"max_position_embeddings": 4096}),
    Fault("a target of a longer context, for vLLM's V1 runner", "K215", GQA_VLLM,
          target=TARGET | {"max_position_embeddings": 4096}),
    Fault("a target of a longer context than YaRN reaches, for vLLM", "K167", SHORT_YARN,
          target=TARGET | {"max_position_embeddings": 4096}),
    Fault("a target of another vocabulary", "K180", GQA_VLLM, target=TARGET | {"vocab_size": 65}),
    Fault("a target of another width", "K181", GQA_VLLM, target=TARGET | {"hidden_size": 56}),
    Fault("a target of another depth, for a list in eagle_config alone", "K142", MODELOPT_GQA,
          engines=(VLLM_V2,), target=TARGET | {"num_hidden_layers": 30}),
    Fault("a target with a quantized KV cache", "K211", GQA_VLLM,
          target=TARGET | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}),
    # Quantized heads.
    Fault("scales without a quantization_config", "K197", NVFP4, put(quantization_config=...)),
    Fault("the target's quantization_config", "K198", MLA_VLLM, stale_quantization),
    Fault("ModelOpt's exclude of all that a head has", "K212", NVFP4, exclude("lm_head", "model*")),
    Fault("an exclude of the MLP, which is quantized", "K212", NVFP4, exclude("lm_head", "*.mlp.up_proj")),
    Fault("weight_scale_2 deleted", "K199", NVFP4, drop(f"{P}mlp.up_proj.weight_scale_2")),
    Fault("quantized in a format that nobody knows", "K200", NVFP4,
          edit(f"{P}mlp.up_proj.weight", lambda t: t.to(torch.int8))),
    Fault("a scale of another shape", "K119", NVFP4, edit(f"{P}mlp.down_proj.weight_scale", lambda t: t[:, :-1])),
    Fault("an NVFP4 MLA head, for SGLang", "K339", NVFP4_MLA, engines=(SGLANG,)),
    Fault("torch_dtype of another dtype", "K208", GQA_TRT, put(torch_dtype="float16", dtype="float16")),
    Fault("one tensor in fp32", "K209", GQA_TRT, edit("fc.weight", lambda t: t.float())),
    # Values.
    Fault("one NaN", "K201", MLA_VLLM, edit("fc.weight", one_nan)),
    Fault("one Inf in lm_head", "K201", GQA_VLLM, edit("lm_head.weight", one_inf)),
    Fault("a norm of zeros", "K202", MLA_VLLM, edit("norm.weight", torch.zeros_like)),
    Fault("a linear of zeros", "K202", GQA_VLLM, edit(f"{P}self_attn.q_proj.weight", torch.zeros_like)),
    Fault("a norm of ones", "K203", GQA_VLLM, edit("norm.weight", torch.ones_like)),
    Fault("lm_head as drawn from a normal distribution", "K204", MLA_VLLM, edit("lm_head.weight", initial(0.02))),
    Fault("lm_head as torch.nn.Linear leaves it", "K204", GQA_VLLM, edit("lm_head.weight", uniform)),
    Fault("rows of lm_head that were never filled", "K205", GQA_VLLM, edit("lm_head.weight", some_rows_zero)),
    Fault("the config of an MLA head", "K026", GQA_VLLM, of_another(MLA_VLLM)),
    Fault("the config of a GQA head", "K026", MLA_VLLM, of_another(GQA_VLLM)),
    Fault("up_proj written as gate_proj too", "K206", MLA_VLLM,
          write_twice(f"{P}mlp.up_proj.weight", over=f"{P}mlp.gate_proj.weight")),
    Fault("an embedding of another target", "K219", GQA_VLLM, lent=("embed_tokens",)),
    Fault("the target's lm_head, moved by a row", "K217", GQA_VLLM, lent=("embed_tokens", "lm_head"),
          change=edit("lm_head.weight", lambda t: trained_slots(GQA, seed=5)["lm_head"].roll(1, 0).to(t.dtype))),
    Fault("an lm_head that was left to another target", "K218", GQA_VLLM, raw=left_to_its_target, lent=("lm_head",)),
    Fault("an embedding of its own, for SGLang", "K213", GQA_SGLANG, lent=("embed_tokens",)),
    Fault("an embedding of its own, for TensorRT-LLM", "K213", MLA_TRT, lent=("embed_tokens",)),
    Fault("a head as ModelOpt 0.47 trains it, normed twice", "K210", MODELOPT_MLA,
          edit(f"{P}input_layernorm.weight", uneven)),
    # What an engine has no place for.
    Fault("one of YaRN's mscales deleted", "K311", MLA_VLLM,
          also(rope("rope_scaling", mscale_all_dim=...), rope("rope_parameters", mscale_all_dim=...))),
    Fault("plain linear RoPE of an MLA head", "K310", MLA_VLLM,
          put(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=...)),
    Fault("norm before fc in an MLA head, for vLLM", "K320", good("trtllm", replace(MLA, norms=Norms(before_fc=True))),
          engines=VLLM),
    Fault("MLP biases in an MLA head, for vLLM", "K321", good("trtllm", replace(MLA, mlp_bias=True)), engines=VLLM),
    Fault("a P-EAGLE head with MLA, for vLLM", "K353", good("trtllm", replace(MLA, mask=3)), engines=VLLM),
    Fault("a P-EAGLE head, for SGLang", "K354", PARALLEL, engines=(SGLANG,)),
    Fault("a P-EAGLE head, for TensorRT-LLM", "K355", PARALLEL, engines=(TRTLLM,)),
    Fault("a bias of fc, for vLLM", "K322", good("trtllm", replace(GQA, fc_bias=True)), engines=VLLM),
    Fault("layer 0 captured, for SGLang", "K330", good("vllm", replace(GQA, captured=(0, 3, 5))), engines=(SGLANG,)),
    Fault("one captured layer as wide as the head, for SGLang", "K331", good("vllm", replace(GQA, captured=(3,))),
          engines=(SGLANG,)),
    Fault("norm_before_residual, for SGLang", "K332", good("vllm", replace(GQA, norms=Norms(before_residual=True))),
          engines=(SGLANG,)),
    Fault("an MLA head of two layers, for SGLang", "K333", good("portable", replace(MLA, layers=2), ENGINES),
          engines=(SGLANG,)),
    Fault("attention biases, for SGLang", "K335", BIASED, engines=(SGLANG,)),
    Fault("MLP biases, for SGLang", "K336", good("vllm", PORTABLE["gqa, MLP biases"]), engines=(SGLANG,)),
    Fault("norm_before_residual, for TensorRT-LLM", "K340",
          good("vllm", replace(GQA, norms=Norms(before_residual=True))), engines=(TRTLLM,)),
    Fault("one captured layer, for TensorRT-LLM", "K341", good("vllm", replace(GQA, captured=(3,))),
          engines=(TRTLLM,)),
    Fault("an MLA head of a reduced vocabulary, for TensorRT-LLM", "K342", good("vllm", replace(MLA, draft_vocab=40)),
          engines=(TRTLLM,)),
    Fault("a norm before fc in an MLA head, for SGLang", "K334",
          good("trtllm", replace(MLA, norms=Norms(before_fc=True))), engines=(SGLANG,)),
    Fault("kv_b_proj quantized, for SGLang", "K338", good("vllm", LATENT_QUANTIZABLE),
          fp8(f"{P}self_attn.kv_b_proj"), (SGLANG,)),
    Fault("fc of a GQA head quantized, for SGLang", "K351", GQA_VLLM, fp8("fc"), (SGLANG,)),
    Fault("norms of queries and keys, for SGLang", "K352", good("vllm", QK), engines=(SGLANG,)),
    Fault("an MLA head in float32, for TensorRT-LLM", "K347", good("vllm", replace(MLA, dtype="F32")),
          engines=(TRTLLM,)),
    Fault("an MLA head in float16, for TensorRT-LLM", "K347", good("vllm", replace(MLA, dtype="F16")),
          engines=(TRTLLM,)),
    Fault("an MLA head that is to be cast to float16, for TensorRT-LLM", "K347", MLA_TRT,
          put(torch_dtype="float16", dtype="float16")),
    Fault("norms of queries and keys, for TensorRT-LLM", "K346", good("vllm", QK), engines=(TRTLLM,)),
    Fault("norms of queries and keys beside MLP biases, for vLLM", "K324", good("trtllm", replace(QK, mlp_bias=True)),
          engines=VLLM),
    Fault("norms of queries and keys under Llama's class", "K124", good("vllm", QK),
          put(model_type="llama", architectures=["LlamaForCausalLMEagle3"])),
    Fault("k_norm deleted", "K106", good("vllm", QK), drop(f"{P}self_attn.k_norm.weight")),
    Fault("lm_head of an MLA head quantized, for vLLM", "K323", MLA_VLLM, fp8("lm_head")),
    Fault("a bias of fc, for SGLang", "K350", good("vllm", replace(GQA, fc_bias=True)), engines=(SGLANG,)),
    Fault("YaRN's attention_factor, for SGLang", "K337", good("vllm", FACTOR), engines=(SGLANG,)),
    Fault("YaRN's attention_factor, for TensorRT-LLM", "K343", good("vllm", FACTOR), engines=(TRTLLM,)),
    Fault("fc that is as wide as it is high, for TensorRT-LLM", "K345",
          good("vllm", replace(GQA, target_hidden=24, captured=(1, 3))), engines=(TRTLLM,)),
    Fault("both norms before fc, for TensorRT-LLM", "K344",
          good("vllm", replace(GQA, norms=Norms(before_fc=True, fc=True))), engines=(TRTLLM,)),
)  # fmt: skip


def block(layout: str, spec: DFlashSpec = DFLASH, engines: tuple[str, ...] = VLLM) -> Good:
    """Return a good block drafter."""
    return Good(layout, f"dflash-{layout}", spec, engines)


def _mask_elsewhere(folder: Path) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"")


SHIFTED, CAUSAL = replace(DFLASH, shift=True), replace(DFLASH, causal=True)
GATED, REDUCED_BLOCK = replace(DSPARK, markov=Markov(8, "gated")), replace(DFLASH, draft_vocab=40)
UNSHIFTED = replace(DSPARK, shift=False)
SIX_LAYERS = TARGET | {"num_hidden_layers": 6}
OF_BLOCK_DRAFTERS: tuple[Fault, ...] = (
    Fault("the mask token deleted", "K501", block("vllm"), also(put(mask_token_id=...), inside(mask_token_id=...))),
    Fault("a Markov head under DFlash's class, with no word on the anchor", "K502", block("vllm", DSPARK),
          also(put(architectures=["DFlashDraftModel"], sample_from_anchor=...),
               inside(shift_label=..., projector_type=...))),
    Fault("the mask token after the last row", "K503", block("vllm"),
          also(put(mask_token_id=64), inside(mask_token_id=64))),
    Fault("the mask's embedding in a file", "K504", block("vllm"), raw=_mask_elsewhere),
    Fault("the mask token is the pad token", "K505", block("vllm"), put(pad_token_id=60)),
    Fault("the target's last layer captured", "K506", block("vllm"), target=SIX_LAYERS),
    Fault("DSpark under DFlash's class", "K507", block("sglang", DSPARK, (SGLANG,)),
          put(architectures=["DFlashDraftModel"])),
    Fault('a torch_dtype of "None"', "K508", block("sglang", DFLASH, (SGLANG,)), put(torch_dtype="None")),
    Fault("the target's partial_rotary_factor copied", "K509", block("vllm"), put(partial_rotary_factor=0.5)),
    Fault("the target's partial_rotary_factor copied into rope_parameters", "K509", block("vllm", DSPARK),
          rope("rope_parameters", partial_rotary_factor=0.5)),
    Fault("a block of the anchor's slot alone", "K012", block("vllm"), put(block_size=1)),
    Fault("DeepSpec's DFlash, which samples from the anchor", "K520", block("vllm", SHIFTED)),
    Fault("a gated Markov head, for vLLM", "K521", block("sglang", GATED), engines=VLLM),
    Fault("a reduced vocabulary of a DFlash drafter, for SGLang", "K522", block("vllm", REDUCED_BLOCK),
          engines=(SGLANG,)),
    Fault("a reduced vocabulary of a DFlash drafter, for TensorRT-LLM", "K523", block("vllm", REDUCED_BLOCK),
          engines=(TRTLLM,)),
    Fault("a gated Markov head, for TensorRT-LLM", "K524", block("sglang", GATED), engines=(TRTLLM,)),
    Fault("a causal block, for TensorRT-LLM", "K525", block("sglang", CAUSAL), engines=(TRTLLM,)),
    Fault("a DSpark speculator that does not say where it samples", "K530", block("speculators", DSPARK),
          put(sample_from_anchor=...)),
    Fault("a DFlash speculator as trained, for vLLM", "K531", block("speculators"),
          put(sliding_window_non_causal=False)),
    Fault("the Markov head's rank in dflash_config alone, for vLLM", "K532", block("vllm", DSPARK),
          put(markov_rank=...)),
    Fault("the Markov head's rank in dflash_config alone, for SGLang", "K541", block("sglang", DSPARK, (SGLANG,)),
          put(markov_rank=...)),
    Fault("a DSpark drafter that does not sample from the anchor, for SGLang", "K528", block("vllm", UNSHIFTED),
          engines=(SGLANG,)),
    Fault("the anchor under ModelOpt's name alone, for vLLM", "K534", block("vllm", UNSHIFTED),
          put(sample_from_anchor=...)),
    Fault("the anchor under vLLM's name alone, for TensorRT-LLM", "K540", block("trtllm", UNSHIFTED, (TRTLLM,)),
          inside(shift_label=...)),
    Fault("what the confidence head reads, in dflash_config alone, for vLLM", "K532", block("vllm", DSPARK),
          put(confidence_head_with_markov=...)),
    Fault("the Markov head's kind in dflash_config alone, for SGLang", "K541", block("sglang", GATED, (SGLANG,)),
          put(markov_head_type=...)),
    Fault("causality in dflash_config alone, for SGLang", "K535", block("sglang", CAUSAL, (SGLANG,)),
          put(is_causal=...)),
    Fault("the Markov head's kind deleted, for SGLang", "K536", block("sglang", DSPARK, (SGLANG,)),
          also(put(markov_head_type=...), inside(markov_head_type=...))),
    Fault("the target's last layer captured, for SGLang", "K537", block("sglang", DFLASH, (SGLANG,)),
          target=SIX_LAYERS),
    Fault("the last of the layers that the config states, for SGLang", "K537", block("sglang", DFLASH, (SGLANG,)),
          put(num_target_layers=6)),
    Fault("the last of the layers that an option states, for SGLang", "K537", block("sglang", DFLASH, (SGLANG,)),
          hints=Hints(target_layers=6)),
    Fault("captured layers at the top level alone, for TensorRT-LLM", "K539", block("vllm"),
          inside(target_layer_ids=...), engines=(TRTLLM,)),
)  # fmt: skip


FAULTS = (*OF_CONFIGS, *OF_TENSORS, *OF_BLOCK_DRAFTERS)
