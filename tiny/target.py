"""A tiny target: its tokenizer, its training, and its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..checkpoint.staging import staged
from ..errors import OutputExists, PromptsInvalid, TrainingFailed
from ..installed import sources_digest
from ..targets.config import parse_target_config
from ..targets.model import CausalLM, build_target, one_thread
from ..targets.tokenizer import load_tokenizer
from .recipe import DEMO, TEST, TinyRecipe, cache_root, recipe_key
from .text import Corpus, read_corpus

# Documents for evaluating heads during training only.
EVALUATED = 6
# Named as in Kimi-K2. Pad comes first: a config class that falls back to its defaults says bos 0 and eos 1, and these
# must not happen to be right.
PAD, BOS, EOS = "[PAD]", "[BOS]", "[EOS]"

# The target was trained on documents, not dialogues: a turn is the start of a document, without a role.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def train_tokenizer(documents: Iterable[str], vocab: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; any text is encodable and decodes to itself.

    `vocab` includes special tokens and 256 bytes; the tokenizer's config states `max_positions`, in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    tokenizer.save_pretrained(folder)
    # transformers 5 would name a class here that transformers 4 does not know; both know this one.
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def pack(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> torch.Tensor:
    """Return documents as one stream of ids, each between [BOS] and [EOS]: [N] int64."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encodings = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    return torch.tensor([i for ids in encodings for i in (bos, *ids, eos)])


BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in total, and the step's loss in nats per token."""


@torch.no_grad()
def initialize(model: CausalLM) -> None:
    """Set a fresh model's weights so that it learns from the first step.

    With embeddings as small as transformers initializes them, the residual stream holds mostly what untrained layers
    add, and almost nothing of the token. Here it holds only the token: embeddings have unit scale, and each layer's
    outputs start at 0. With the demo's dims that gave 3.81 nats held out after 120 steps of AdamW at 3e-3, while 200
    steps from transformers' own weights gave 4.53 at best.
    """
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(parameter)


def train(model: CausalLM, tokens: torch.Tensor, recipe: TinyRecipe, progress: Progress) -> None:
    """Train a freshly initialized model in place on random windows of a token stream, [N] int64."""
    generator = torch.Generator().manual_seed(recipe.seed)
    parameters = list(model.parameters())
    offsets = torch.arange(recipe.seq + 1)
    optimizer = torch.optim.AdamW(_groups(model, recipe), betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    balance = Balance(model, recipe.balance)
    model.train()
    with ThreadPoolExecutor(recipe.parts) as pool:
        for step in range(recipe.steps):
            starts = torch.randint(len(tokens) - recipe.seq, (recipe.batch, 1), generator=generator)
            parts = pool.map(partial(_gradients, model, parameters), tokens[starts + offsets].chunk(recipe.parts))
            losses, gradients = zip(*parts, strict=True)
            loss = sum(losses) / recipe.parts
            if not math.isfinite(loss):
                raise TrainingFailed(f"the tiny target's loss is {loss} at step {step}", fix="Lower the recipe's lr.")
            for parameter, *own in zip(parameters, *gradients, strict=True):
                parameter.grad = torch.stack(own).mean(0)
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            schedule.step()
            balance.step()
            progress(step + 1, recipe.steps, loss)
    balance.close()
    model.eval()


def _gradients(
    model: CausalLM, parameters: Sequence[torch.Tensor], window: torch.Tensor
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Return the loss of a part of a batch, and its gradients, which are put nowhere: several threads take parts."""
    logits = model(input_ids=window[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    return loss.item(), torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


class Balance:
    """DeepSeek-V3's balancing without an auxiliary loss: a router's bias rises for experts with too few tokens."""

    def __init__(self, model: CausalLM, speed: float) -> None:
        self.speed = speed
        self.counts: dict[torch.nn.Module, torch.Tensor] = {}
        self._counting = Lock()
        gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        self.hooks = [gate.register_forward_hook(self._count) for gate in gates]

    def _count(self, gate: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
        bias = gate.get_buffer("e_score_correction_bias")
        counts = torch.bincount(output[2].flatten(), minlength=bias.numel()).float()
        with self._counting:
            self.counts[gate] = self.counts.get(gate, 0) + counts

    def step(self) -> None:
        """Move each router's bias by `speed` towards the experts below the mean load since the last step."""
        for gate, counts in self.counts.items():
            gate.get_buffer("e_score_correction_bias").add_(self.speed * torch.sign(counts.mean() - counts))
        self.counts.clear()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def held_out_loss(model: CausalLM, tokens: torch.Tensor, seq: int) -> float:
    """Return the mean negative log-likelihood of a token stream [N], in nats per token.

    The stream is cut into windows of `seq` tokens, each read without the text before it.
    """
    windows = (len(tokens) - 1) // seq
    inputs = tokens[: windows * seq].view(windows, seq)
    labels = tokens[1 : windows * seq + 1].view(windows, seq)
    total = 0.0
    for inputs_, labels_ in zip(inputs.split(16), labels.split(16), strict=True):
        logits = model(input_ids=inputs_, use_cache=False).logits
        total += cross_entropy(logits.flatten(0, 1), labels_.flatten(), reduction="sum").item()
    return total / labels.numel()


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor, vocab: int) -> float:
    """Return the held-out loss, in nats per token, of add-one smoothed token frequencies; any model must beat it."""
    counts = torch.bincount(train, minlength=vocab).double() + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()


def _rate(step: int, recipe: TinyRecipe) -> float:
    warm = min(1.0, (step + 1) / recipe.warmup)
    return warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def _groups(model: CausalLM, recipe: TinyRecipe) -> list[dict]:
    ends = [model.model.embed_tokens.weight, model.lm_head.weight]
    inner = [p for p in model.parameters() if all(p is not end for end in ends)]
    return [
        {"params": ends, "lr": recipe.ends_lr, "weight_decay": 0.0},
        {"params": [p for p in inner if p.ndim > 1], "lr": recipe.lr, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in inner if p.ndim == 1], "lr": recipe.lr, "weight_decay": 0.0},
    ]


KIND = "tiny-kimi-k2"

# What a tiny target shares exactly with Kimi-K2.5's text_config.
FIXED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
}  # fmt: skip
TRAINING_ONLY = ("steps", "batch", "parts", "seq", "lr", "ends_lr", "warmup", "balance", "seed")


def make_target(recipe: TinyRecipe, cache: Path, progress: Progress = lambda *_: None) -> Path:
    """Train a tiny target from scratch, or find in the cache the one that this recipe made before.

    Returns:
        A folder with config.json, generation_config.json, model.safetensors (fp32, one tensor per expert), the
            tokenizer, and training.json, which records how it was made and how well it predicts.

    Raises:
        TrainingFailed: the loss is NaN or infinite, or this Python has no text to train on.
        OutputFailed: the cache is not writable.
    """
    out = kept_at(recipe, cache)
    if out.exists():
        return out
    try:
        with one_thread(), staged(out) as folder:
            _write(folder, recipe, progress)
    except OutputExists:
        # Another process made the same target in the meantime and renamed it first.
        return out
    return out


def kept_at(recipe: TinyRecipe, cache: Path) -> Path:
    """Return the folder of a recipe's target, which need not exist yet."""
    key = recipe_key(recipe, source=sources_digest("tiny"))
    return cache / f"{KIND}-{key}"


def kimi_config(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the target's config.json, spelled as Kimi-K2's own."""
    dims = {key: value for key, value in dataclasses.asdict(recipe).items() if key not in TRAINING_ONLY}
    return FIXED | dims | {
        "num_key_value_heads": recipe.num_attention_heads,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _write(folder: Path, recipe: TinyRecipe, progress: Progress) -> None:
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train, recipe.vocab_size, FIXED["max_position_embeddings"])
    streams = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    config = kimi_config(recipe, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_target(parse_target_config(config), torch.float32)
        initialize(model)
        train(model, streams[0], recipe, progress)
    model.save_pretrained(folder)  # unfuses the experts into the hub's names
    save_tokenizer(tokenizer, folder)
    # transformers writes its own spelling, which no engine would read as Kimi-K2.
    _write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    _write_json(folder / "training.json", {
        "recipe": dataclasses.asdict(recipe),
        "steps": recipe.steps,
        "held_out_loss_nats": held_out_loss(model, streams[1], recipe.seq),
        "unigram_loss_nats": unigram_loss(*streams, recipe.vocab_size),
        "corpus": _describe(corpus, *map(len, streams)),
    })  # fmt: skip


def _describe(corpus: Corpus, train_tokens: int, held_out_tokens: int) -> dict[str, Any]:
    digest = hashlib.sha256("\0".join((*corpus.train, *corpus.held_out)).encode()).hexdigest()
    return {
        "source": "docstrings of the standard library, and pydoc_data.topics",
        "documents": [len(corpus.train), len(corpus.held_out)],
        "tokens": [train_tokens, held_out_tokens],
        "sha256": digest,
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tiny(
    out: Path, size: Literal["demo", "test"], *, prompts: int, prompt_tokens: int, documents: int | None = None
) -> None:
    """Train a tiny target, or find it in the cache, and write it with texts for it into a new folder.

    The folder has `target/`, `train.jsonl` to train heads on, `eval.jsonl` for the evaluations during training, and
    `held-out.jsonl`, prompts to draft on.

    Args:
        prompts, prompt_tokens: how many held-out prompts, and the minimum length of one.
        documents: the maximum number of documents to train on; None for all.

    Raises:
        OutputExists, OutputFailed: the folder exists, or cannot be written.
        TrainingFailed: see `make_target`.
        PromptsInvalid: there are fewer held-out texts of that length.
    """
    made = make_target({"demo": DEMO, "test": TEST}[size], cache_root())
    corpus, tokenizer = read_corpus(), load_tokenizer(made)
    long_enough = [text for text in corpus.held_out if len(tokenizer.encode(text)) >= prompt_tokens]
    if prompts > (most := len(long_enough) - EVALUATED):
        raise PromptsInvalid(
            f"{prompts} held-out prompts of {prompt_tokens} tokens are more than the {max(most, 0)} that there are",
            fix="Ask for fewer or shorter ones (--prompts, --prompt-tokens).",
        )
    asked, evaluated = long_enough[:prompts], long_enough[prompts:][:EVALUATED]
    with staged(out) as folder:
        shutil.copytree(made, folder / "target")
        _write_lines(folder / "train.jsonl", ({"text": text} for text in corpus.train[:documents]))
        _write_lines(folder / "eval.jsonl", ({"text": text} for text in evaluated))
        _write_lines(folder / "held-out.jsonl", ({"prompt": text, "category": "documentation"} for text in asked))


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
