"""The contents of a target's config.json, with text_config unwrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.folder import read_json
from ..checkpoint.header import FLOAT_DTYPES
from ..errors import TargetInvalid

FETCH_AGAIN = "Fetch the target's config.json again."
# The files without which transformers finds no tokenizer; Kimi-K2's is a tiktoken.model with Python code.
TOKENIZER = ("tokenizer*.json", "*.model", "tokenization_*.py")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# Where a multimodal model keeps its text model and its output matrix, by the root's model_type: the prefixes that
# replace `model.` and precede `lm_head`. Others that wrap a text_config keep a causal model under `language_model.`.
WRAPPERS = {
    "qwen2_5_vl": ("model.", ""),
    "qwen3_vl": ("model.language_model.", ""),
    "qwen3_vl_moe": ("model.language_model.", ""),
}
# The keys that Kimi-K2 and Kimi-K2.5 share, and that every engine needs.
COUNTS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "max_position_embeddings")
# The number of experts to choose from, by the names of DeepSeek and Kimi, Qwen and GLM, and Mixtral and gpt-oss.
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True)
class TargetConfig:
    """A target as its config describes it.

    Attributes:
        architecture: the root's first architecture, e.g. "KimiK25ForConditionalGeneration"; empty if none is named.
        model_type: of the text model, e.g. "kimi_k2".
        vocab: rows of the embedding.
        rope: the keys that describe RoPE, as on disk.
        dtype: safetensors name of the weights' dtype, e.g. "BF16"; None if the config does not state it.
        prefix: what each text tensor's name starts with: "" or "language_model."; for the tensors of `body` only if a
            wrapper keeps that apart.
        body: what replaces "model." in the names of the text model's tensors.
        tied: the output matrix is the embedding.
        eos: the ids that end a text; empty if the config does not state any.
        quantization: the quantization_config of the root or of the text config, or None.
        text: the text model's part of the config; `raw` itself if nothing is wrapped.
        raw: config.json, unchanged.
    """

    architecture: str
    model_type: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    max_positions: int
    rope: dict[str, Any]
    dtype: str | None
    prefix: str
    body: str
    tied: bool
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    quantization: dict[str, Any] | None
    text: dict[str, Any] = field(repr=False)
    raw: dict[str, Any] = field(repr=False)

    @property
    def embed_tokens(self) -> str:
        """Name on disk of the embedding, [vocab, hidden]."""
        return f"{self.body}embed_tokens.weight"

    def on_disk(self, name: str) -> str:
        """Return the name in the target's files of a text model tensor, e.g. of "model.norm.weight"."""
        return f"{self.body}{name.removeprefix('model.')}" if name.startswith("model.") else f"{self.prefix}{name}"

    @property
    def lm_head(self) -> str:
        """Name on disk of the output matrix, [vocab, hidden]."""
        return self.embed_tokens if self.tied else f"{self.prefix}lm_head.weight"


def read_target_config(folder: Path) -> TargetConfig:
    """Read a folder's config.json.

    Raises:
        NotACheckpoint: the folder has no config.json.
        ConfigInvalid: config.json is not a JSON object.
        TargetInvalid: a dimension is missing or not a count, or a token id is not an id.
    """
    return parse_target_config(read_json(folder / "config.json"), where=folder / "config.json")


def parse_target_config(raw: dict[str, Any], *, where: object = "config.json") -> TargetConfig:
    """Read a config that is already in memory.

    Raises:
        TargetInvalid: a dimension is missing or not a count, a token id is not an id, or it is a draft head's config.
    """
    _refuse_head(raw, where)
    wrapped = "text_config" in raw
    text = raw["text_config"] if wrapped else raw
    if not isinstance(text, dict):
        raise TargetInvalid("text_config is not an object", where=where, fix=FETCH_AGAIN)
    hidden, layers, vocab, heads, positions = (_count(text, key, where) for key in COUNTS)
    both = {**raw, **text} if wrapped else raw
    _check_experts(text, where)
    body, prefix = "model.", ""
    if wrapped:
        body, prefix = WRAPPERS.get(str(raw.get("model_type")), ("language_model.model.", "language_model."))
    return TargetConfig(
        architecture=_architecture(raw, where),
        model_type=str(text.get("model_type", "")),
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        heads=heads,
        max_positions=positions,
        rope={key: text[key] for key in ROPE_KEYS if text.get(key) is not None},
        dtype=_dtype(both),
        prefix=prefix,
        body=body,
        tied=bool(both.get("tie_word_embeddings", False)),
        bos=_token(both, "bos_token_id", where),
        eos=_tokens(raw if raw.get("eos_token_id") is not None else text, "eos_token_id", where),
        pad=_token(both, "pad_token_id", where),
        quantization=_quantization(raw, text, where),
        text=text,
        raw=raw,
    )


def _quantization(raw: Mapping[str, Any], text: Mapping[str, Any], where: object) -> dict[str, Any] | None:
    block = raw.get("quantization_config") or text.get("quantization_config")
    if block is not None and not isinstance(block, dict):
        raise TargetInvalid(f"quantization_config is {block!r}, not an object", where=where, fix=FETCH_AGAIN)
    return block


def _check_experts(text: Mapping[str, Any], where: object) -> None:
    """Refuse a router that chooses more experts than there are; transformers fails on it in the middle of a run."""
    chosen = text.get("num_experts_per_tok")
    for key in EXPERTS:
        count = text.get(key)
        if isinstance(chosen, int) and isinstance(count, int) and chosen > count:
            raise TargetInvalid(f"num_experts_per_tok is {chosen}, but {key} is {count}", where=where, fix=FETCH_AGAIN)


def check_captured(captured: Sequence[int], layers: int) -> list[int]:
    """Return captured layers in ascending order.

    Raises:
        TargetInvalid: there are none, one does not exist in a target of `layers` layers, or one is listed twice.
    """
    order = sorted(set(captured))
    if not order or len(order) != len(captured) or not 0 <= order[0] <= order[-1] < layers:
        raise TargetInvalid(
            f"the layers {tuple(captured)} cannot be captured from a target of {layers} layers",
            where="--captured",
            fix=f"Choose distinct layers between 0 and {layers - 1}, counted as outputs.",
        )
    return order


def has_tokenizer(folder: Path) -> bool:
    return any(True for pattern in TOKENIZER for _ in folder.glob(pattern))


def no_tokenizer(folder: Path) -> TargetInvalid:
    return TargetInvalid(
        f"{folder} has no tokenizer, e.g. no tokenizer.json",
        where=folder,
        fix="Copy the tokenizer's files from the target's publisher into it (tokenizer.json, tokenizer_config.json).",
    )


# Keys that only draft heads have, also those whose architecture is a target's, e.g. LlamaForCausalLM.
OF_HEADS = ("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")


def is_draft(folder: Path) -> bool:
    """Return whether a folder's config is a draft head's."""
    return _is_draft(read_json(folder / "config.json"))


def _is_draft(raw: dict[str, Any]) -> bool:
    return "eagle" in str(raw.get("architectures")).lower() or not raw.keys().isdisjoint(OF_HEADS)


def _refuse_head(raw: dict[str, Any], where: object) -> None:
    # A head's config has every dimension of a target's, and its layers would count as the target's.
    if _is_draft(raw):
        raise TargetInvalid(
            f"this is a draft head ({raw.get('architectures')}), not a target",
            where=where,
            fix="Pass the model that the head drafts for.",
        )


def _count(config: dict[str, Any], key: str, where: object) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TargetInvalid(
            f"the target's {key} is {value!r}, not a positive number",
            where=where,
            fix="Pass the folder of a causal language model with its complete config.json.",
        )
    return value


def _dtype(config: dict[str, Any]) -> str | None:
    # transformers 5 writes `dtype`; earlier versions wrote `torch_dtype`.
    name = config.get("dtype") or config.get("torch_dtype")
    return FLOAT_DTYPES.get(str(name).removeprefix("torch."))


def _architecture(config: dict[str, Any], where: object) -> str:
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise TargetInvalid(
            f"the target's architectures are {names!r}, not a list of names", where=where, fix=FETCH_AGAIN
        )
    return names[0]


def _token(config: dict[str, Any], key: str, where: object) -> int | None:
    value = config.get(key)
    return None if value is None else _check_id(value, key, where)


def _tokens(config: dict[str, Any], key: str, where: object) -> tuple[int, ...]:
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_check_id(i, key, where) for i in ids)


def _check_id(value: object, key: str, where: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TargetInvalid(
            f"the target's {key} holds {value!r}, which is not a token id", where=where, fix=FETCH_AGAIN
        )
    return value
