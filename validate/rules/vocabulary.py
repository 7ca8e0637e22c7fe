"""Vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...rule import EVERY_FAMILY, Found, Rule
from .head import HeadSubject
from .subject import ENGINES, concerned

if TYPE_CHECKING:
    from ...drafters.vocab import Reading


REBUILD = (
    "kconv vocab HEAD --target TARGET shows what d2t holds: absolute ids it converts (--absolute). Otherwise export the"
    " head again with the d2t that it was trained with, as offsets."
)


def draft_vocab_unstated(subject: HeadSubject) -> Iterator[Found]:
    lm_head, vocab = subject.tensors.get("lm_head.weight"), subject.flat.get("vocab_size")
    unstated = subject.flat.get("draft_vocab_size") is None
    if subject.layout is not None and unstated and lm_head and lm_head.shape[:1] != (vocab,):
        yield Found(
            "config.json: draft_vocab_size", f"lm_head has {list(lm_head.shape)[:1]} rows, but vocab_size is {vocab!r}"
        )


def _readings(subject: HeadSubject) -> tuple[Reading, Reading] | None:
    """Return d2t read as offsets and as target ids; None if there is no map, or it may not be read."""
    if subject.d2t is None or subject.spec is None:
        return None
    from ...drafters.vocab import read_ids, target_ids  # imported here: a head without a map needs no numpy

    d2t, vocab = subject.d2t, subject.spec.vocab
    return read_ids(target_ids(d2t), vocab, subject.t2d), read_ids(d2t, vocab, subject.t2d)


def _is_either(readings: tuple[Reading, Reading]) -> bool:
    from ...drafters.vocab import EITHER, kind_of

    return kind_of(*readings) == EITHER


def d2t_zeros(subject: HeadSubject) -> Iterator[Found]:
    readings, d2t = _readings(subject), subject.d2t
    # A t2d with exactly these tokens shows that the first ones were meant.
    if readings and d2t is not None and not d2t.any() and readings[0].marked_otherwise != 0:
        yield Found("d2t", f"all {d2t.size} offsets are 0")


def d2t_undecided(subject: HeadSubject) -> Iterator[Found]:
    readings = _readings(subject)
    if readings and _is_either(readings):
        yield Found("d2t", "d2t may hold offsets or absolute ids: both are valid")


def not_the_targets_vocabulary(subject: HeadSubject) -> Iterator[Found]:
    spec, target = subject.spec, subject.target
    if spec and target and spec.vocab != target.vocab:
        yield Found("config.json: vocab_size", f"{spec.vocab} tokens, but the target has {target.vocab}")


def not_the_targets_width(subject: HeadSubject) -> Iterator[Found]:
    spec, target = subject.spec, subject.target
    if spec and target and spec.target_hidden != target.hidden:
        yield Found("config.json: target_hidden_size", f"{spec.target_hidden}, but the target has {target.hidden}")


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K170",
        "tie-word-embeddings",
        "error",
        "tie_word_embeddings is true. SGLang and TensorRT-LLM then use the embedding as lm_head, but the head"
        " has its own.",
        fix="Set tie_word_embeddings to false.",
        seen_in="https://github.com/sgl-project/SpecForge/pull/140",
    ),
    Rule(
        "K172",
        "draft-vocab-unstated",
        "error",
        "The vocabulary is reduced, but the config does not say so. vLLM refuses d2t, and TensorRT-LLM builds"
        " the full vocabulary. ModelOpt's kimik2 template leaves the key out.",
        fix="Set draft_vocab_size to the number of rows of lm_head. kconv's conversions do.",
        engines=ENGINES,
        seen_in="https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py#L58",
        check=draft_vocab_unstated,
    ),
    Rule(
        "K174",
        "d2t-zeros",
        "error",
        "d2t is all zeros, like a buffer that was never filled. Draft ids would be used as target ids.",
        fix=REBUILD,
        seen_in="https://github.com/NVIDIA-NeMo/Automodel/pull/2447",
        values=True,
        check=d2t_zeros,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K175",
        "d2t-absolute",
        "error",
        "d2t holds target ids instead of offsets. Engines add the draft id to each.",
        fix=REBUILD,
        says_fix=True,
        seen_in="https://github.com/SafeAILab/EAGLE/issues/222",
        values=True,
    ),
    Rule(
        "K176",
        "d2t-outside",
        "error",
        "d2t points to ids outside the target's vocabulary.",
        fix=REBUILD,
        seen_in="https://github.com/SafeAILab/EAGLE/issues/222",
        values=True,
    ),
    Rule(
        "K177",
        "d2t-duplicates",
        "error",
        "Several draft ids map to one target id, so other tokens are never drafted.",
        fix=REBUILD,
        seen_in="https://github.com/SafeAILab/EAGLE/issues/222",
        values=True,
    ),
    Rule(
        "K178",
        "t2d-contradicts",
        "error",
        "t2d marks other tokens than d2t maps to. One of the maps belongs to another head.",
        fix="Run kconv vocab HEAD --target T, which compares lm_head's rows with the target's. If d2t is right, rebuild"
        " t2d: kconv vocab HEAD OUT --rebuild-t2d --target T.",
        values=True,
    ),
    Rule(
        "K179",
        "d2t-undecided",
        "warning",
        "d2t can be read as offsets or as target ids. Engines read offsets.",
        fix="Run kconv vocab HEAD --target T, which compares lm_head's rows with the target's.",
        values=True,
        check=d2t_undecided,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K180",
        "not-the-targets-vocabulary",
        "error",
        "The head's vocabulary size differs from the target's.",
        fix="Give the target that the head was trained on.",
        seen_in="https://github.com/vllm-project/vllm/issues/50158",
        check=not_the_targets_vocabulary,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K181",
        "not-the-targets-width",
        "error",
        "The head reads hidden states of a different width than the target has.",
        fix="Give the target that the head was trained on.",
        seen_in="https://github.com/vllm-project/vllm/issues/24967",
        check=not_the_targets_width,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K182",
        "idle-map",
        "error",
        "The vocabulary is full, but a map does not map each token to itself. SGLang and TensorRT-LLM follow the map.",
        fix="Set draft_vocab_size if the head is reduced. Remove the map if it is not.",
        engines=concerned("K182"),
        values=True,
    ),
)
