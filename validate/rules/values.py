"""Values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from ...checkpoint.bytes import read_floats, row_bytes, same_bytes
from ...checkpoint.header import TensorInfo
from ...checkpoint.manifest import MANIFEST
from ...checkpoint.values import BEFORE_IT_BROKE
from ...convert.provenance import read_provenance
from ...convert.shared import OWN_EMBEDDING, SLOTS, find_displaced, measure_likeness
from ...drafters.contract import FLOATS
from ...drafters.slots import needs
from ...engines.registry import engines, own_layouts
from ...errors import KconvError
from ...rule import EVERY_FAMILY, Found, Rule
from .head import HeadSubject, engine_layouts

# Rows of two matrices that have nothing to do with each other have a mean cosine of 0; of fine-tunes of one target, 1.
UNRELATED = 0.9
# Norms of rows and columns that spread by at most this much more than those of independent numbers.
LIKENESS = 0.5
# Kurtosis of a uniform and a normal distribution is 1.8 and 3.
INITIALIZERS = (1.7, 3.3)


@dataclass(frozen=True)
class Spread:
    """The spread of a matrix's row and column norms, relative to independent numbers.

    Attributes:
        rows, columns: standard deviation over mean, measured over expected.
        kurtosis: of all values; 1.8 for a uniform, 3 for a normal distribution.
    """

    rows: float
    columns: float
    kurtosis: float

    @property
    def is_initial(self) -> bool:
        """Whether the matrix looks like independent numbers from one distribution, as initializers draw them."""
        alike = all(abs(share - 1) < LIKENESS for share in (self.rows, self.columns))
        return alike and INITIALIZERS[0] < self.kurtosis < INITIALIZERS[1]


def measure_spread(blocks: Iterable[np.ndarray]) -> Spread | None:
    """Measure a matrix given in blocks of rows, `[n, columns]`; None if it is constant or too small to tell."""
    by_row, by_column, fourth = [], 0.0, 0.0
    for block in blocks:
        square = np.square(block, dtype=np.float64)
        by_row.append(square.mean(1))
        by_column += square.sum(0)
        fourth += float(np.square(square, out=square).sum())
    rows = np.concatenate(by_row)
    columns = np.asarray(by_column / len(rows))
    if min(len(rows), len(columns)) < 16 or not np.isfinite(rows).all() or not rows.any():
        return None
    kurtosis = fourth / len(rows) / len(columns) / float(rows.mean()) ** 2

    def share(means: np.ndarray, count: int) -> float:
        # The mean of n independent squares spreads by sqrt((kurtosis - 1) / n), and its root by half of that.
        norms = np.sqrt(means)
        expected = ((kurtosis - 1) / count) ** 0.5 / 2
        return float(norms.std(ddof=1) / norms.mean()) / expected if expected else float("inf")

    return Spread(share(rows, len(columns)), share(columns, len(rows)), kurtosis)


SAMPLED_ROWS, BLOCK_ROWS = 2048, 128
# The record of kconv's own trainer, whose decoder, unless it is stock, norms the hidden state once; see train.decoder.
TRAINED_BY_KCONV = "modelopt/training.json"


def not_finite(subject: HeadSubject) -> Iterator[Found]:
    for name, values in subject.values.items():
        if values.not_finite:
            yield Found(name, f"{values.not_finite} of {prod(subject.tensors[name].shape)} values are NaN or Inf")


def all_zero(subject: HeadSubject) -> Iterator[Found]:
    known = needs(subject.spec) if subject.spec else {}
    zeros = {name for slot, name in subject.slots.items() if slot in known and known[slot].slot.may_be_zero}
    for name, values in subject.values.items():
        if values.zero and not name.endswith(".bias") and name not in zeros:
            yield Found(name, "every value is zero")


def _vector(subject: HeadSubject, name: str) -> np.ndarray | None:
    info = subject.tensors.get(name)
    return read_floats(info) if info and info.dtype in FLOATS and len(info.shape) == 1 else None


def norm_of_ones(subject: HeadSubject) -> Iterator[Found]:
    for slot, name in subject.slots.items():
        weight = _vector(subject, name) if "norm" in slot else None
        if weight is not None and weight.size > 1 and (weight == 1).all():
            yield Found(name, f"all {weight.size} values are 1")


def _lm_head(subject: HeadSubject) -> TensorInfo | None:
    info = subject.tensors.get("lm_head.weight")
    fits = info is not None and info.dtype in FLOATS and len(info.shape) == 2 and all(info.shape)
    return info if fits else None


def lm_head_untrained(subject: HeadSubject) -> Iterator[Found]:
    info = _lm_head(subject)
    if info is None:
        return
    # Spread evenly over all of them.
    rows = np.linspace(0, info.shape[0] - 1, min(info.shape[0], SAMPLED_ROWS)).astype(int).tolist()
    spread = measure_spread(read_floats(info, rows[i : i + BLOCK_ROWS]) for i in range(0, len(rows), BLOCK_ROWS))
    if spread is not None and spread.is_initial:
        yield Found(
            info.name,
            f"looks randomly initialized: its row and column norms spread as random numbers' do ({spread.rows:.2f} and"
            f" {spread.columns:.2f} times as much), kurtosis {spread.kurtosis:.2f}",
        )


def rows_never_filled(subject: HeadSubject) -> Iterator[Found]:
    info = _lm_head(subject)
    empty = subject.values[info.name].zero_rows if info else 0
    if info and 0 < empty < info.shape[0]:
        yield Found(info.name, f"{empty} of {info.shape[0]} rows are zero")


def _is_stock(subject: HeadSubject) -> bool:
    """Return whether kconv trained a head with ModelOpt's own decoder layer."""
    training = subject.manifest and subject.manifest.training
    return bool(training) and training.get("recipe", {}).get("decoder_layer") == "stock"


def normed_twice(subject: HeadSubject) -> Iterator[Found]:
    folder = subject.checkpoint.folder
    of_kconv = (folder / TRAINED_BY_KCONV).exists() or (folder / MANIFEST).exists()
    of_modelopt = subject.layout is not None and subject.layout.name == "modelopt" and not of_kconv
    if not of_modelopt and not _is_stock(subject):
        return
    name = subject.slots.get("0.input_layernorm", "")
    weight = _vector(subject, name)
    if weight is None or not np.isfinite(weight).all() or weight.size < 2:
        return
    # A constant weight only scales what hidden_norm norms again.
    spread = float(weight.std(ddof=1) / max(abs(weight.mean()), 1e-12))
    if spread > 0.01:
        yield Found(
            name, f"its weights vary by {spread:.1%} of their mean, so drafts in an engine will differ from training"
        )


def embedding_replaced(subject: HeadSubject) -> Iterator[Found]:
    replaced = _replaced(subject)
    if subject.lent is None or subject.spec is None or not replaced:
        return
    target = subject.lent(replaced)
    for slot, names in replaced.items():
        own = subject.tensors[subject.slots[slot]]
        if target.has_another(slot, own, subject.spec):
            yield Found(own.name, f"its rows differ from those of the target {target.name}, which {names} would use")


def embedding_not_compared(subject: HeadSubject) -> Iterator[Found]:
    replaced = _replaced(subject)
    target = subject.lent(replaced) if subject.lent and replaced else None
    for slot, names in replaced.items():
        if target is None or target.find(slot) is None:
            yield Found(subject.slots[slot], f"not compared with the target's, which {names} would use")


def target_of_another(subject: HeadSubject) -> Iterator[Found]:
    try:
        past = read_provenance(subject.checkpoint.folder)
    except KconvError:  # a broken manifest, which another rule reports
        return
    if subject.lent is None or not (left := past.left_to_target(())):
        return
    target = subject.lent(left)
    for slot in past.left_to_others(target):
        yield Found(slot, f"it was left to a target with an equal one, and that of {target.name} differs")


def _beside_target(subject: HeadSubject) -> Iterator[tuple[TensorInfo, TensorInfo, np.ndarray]]:
    """Yield the head's lm_head and embedding, each with the target's and the token of each row."""
    if subject.lent is None or subject.spec is None or not subject.lent(()).is_folder:
        return
    from ...drafters.vocab import target_ids

    try:
        target = subject.lent(SLOTS)
    except KconvError:  # an incomplete download, which the rules that need it report
        return
    spec = subject.spec
    kept = np.arange(spec.vocab) if subject.d2t is None else target_ids(subject.d2t)
    for slot, ids in (("lm_head", kept), ("embed_tokens", np.arange(spec.vocab))):
        own, theirs = subject.tensors.get(subject.slots.get(slot, "")), target.tensors.get(slot)
        if own is None or theirs is None or own.dtype not in FLOATS or theirs.dtype not in FLOATS:
            continue
        if own.shape[:1] == (len(ids),):
            yield own, theirs, ids


def rows_displaced(subject: HeadSubject) -> Iterator[Found]:
    for own, theirs, ids in _beside_target(subject):
        if found := find_displaced(own, theirs, ids):
            yield Found(own.name, found.words)


def unrelated_to_target(subject: HeadSubject) -> Iterator[Found]:
    asked = {subject.slots.get("embed_tokens")}
    if subject.manifest is not None:
        # What was the target's at the conversion is the target's still.
        asked |= {step.output.name for step in subject.manifest.tensors if step.action == "added"}
    for own, theirs, ids in _beside_target(subject):
        if own.name not in asked or find_displaced(own, theirs, ids):
            continue
        likeness = measure_likeness(own, theirs, ids)
        if likeness is not None and likeness < UNRELATED:
            yield Found(own.name, f"a token's row and the target's have a cosine of {likeness:.2f} on average")


def weight_twice(subject: HeadSubject) -> Iterator[Found]:
    names = dict.fromkeys(name for slot, name in subject.slots.items() if slot.endswith("_proj"))
    written = [info for name in names if (info := subject.tensors[name]).size and not _is_zero(subject, name)]
    for one, other in combinations(written, 2):
        # Of most pairs the first rows differ, which saves reading the rest.
        if (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and (row_bytes(one, [0]) == row_bytes(other, [0])).all()
            and same_bytes(one, other)
        ):
            yield Found(other.name, f"it has the bytes of {one.name}")


def _is_zero(subject: HeadSubject, name: str) -> bool:
    return name in subject.values and subject.values[name].zero


def _replaced(subject: HeadSubject) -> dict[str, str]:
    """Return the head's own slots for which engines use the target's tensor, with these engines."""
    if subject.spec is None or subject.layout is None:
        return {}
    named: dict[str, list[str]] = {}
    for engine, layout in engine_layouts(subject.engines, subject.layout.drafter):
        for slot in layout.replaces.keys() & subject.slots.keys():
            if needs(subject.spec)[slot].slot.absent_when(subject.spec):
                named.setdefault(slot, []).append(engine.title)
    return {slot: " and ".join(names) for slot, names in named.items()}


# Engines that use the target's tensor instead of a head's own.
REPLACING = tuple(name for one in engines() if any(x.replaces for x in own_layouts(one)) for name in one.runner_names)
RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K201",
        "not-finite",
        "error",
        "Values are NaN or Inf. The head drafts noise, or breaks the target's whole batch.",
        fix=BEFORE_IT_BROKE,
        values=True,
        check=not_finite,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K202",
        "all-zero",
        "error",
        "Every value of a weight is zero. The tensor was never filled.",
        fix="Export the head again.",
        seen_in="https://github.com/vllm-project/speculators/issues/358",
        values=True,
        check=all_zero,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K203",
        "norm-of-ones",
        "note",
        "Every weight of a norm is one. That is its initial value, and also what engines use for a missing norm.",
        fix="No action is needed if the norm was not trained. Otherwise export the head again.",
        seen_in="https://github.com/vllm-project/speculators/issues/1114",
        values=True,
        check=norm_of_ones,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K204",
        "lm-head-untrained",
        "warning",
        "lm_head looks randomly initialized. The acceptance length would be 1.00.",
        fix="Compare its rows with the target's. A trained lm_head was copied from them or trained from them.",
        seen_in="https://github.com/sgl-project/sglang/issues/27829",
        values=True,
        check=lm_head_untrained,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K205",
        "rows-never-filled",
        "warning",
        "Rows of lm_head are zero. Their tokens get the logit 0, not minus infinity, so the head drafts them.",
        fix="Remove the rows with d2t, or fill them so that they never win (kconv vocab HEAD OUT --expand).",
        values=True,
        check=rows_never_filled,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K206",
        "weight-twice",
        "error",
        "Two weights of the head are one and the same. An exporter wrote one of them in the place of the other.",
        fix="Export the head again.",
        values=True,
        check=weight_twice,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K210",
        "normed-twice",
        "warning",
        "ModelOpt 0.47 norms the hidden state twice in training, engines once. It does so with input_layernorm, then "
        "with its own norm. Drafts differ as much as input_layernorm's weights vary.",
        fix="Train with kconv (decoder_layer: served), or with a ModelOpt that norms once. Measure the acceptance in an"
        " engine before you release.",
        seen_in="https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/modeling_eagle.py#L76-L80",
        values=True,
        check=normed_twice,
    ),
    Rule(
        "K213",
        "embedding-replaced",
        "error",
        "The head's embedding differs from the target's, but an engine uses the target's. It would not serve"
        " what was trained and measured.",
        fix=OWN_EMBEDDING,
        engines=REPLACING,
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/eagle_worker_v2.py#L353-L363",
        values=True,
        check=embedding_replaced,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K214",
        "embedding-not-compared",
        "note",
        "The head has its own embedding, but an engine uses the target's. kconv could not compare the two,"
        " because the target's is not here.",
        fix="Give --target: a folder with the target's embedding, or a Hub id, from which only that file is"
        " downloaded.",
        engines=REPLACING,
        values=True,
        check=embedding_not_compared,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K218",
        "target-of-another",
        "error",
        "The head left a tensor to its target, which had an equal one, and this target's differs. The head would draft"
        " with a matrix that it was not trained on.",
        fix="Serve it with the target that it was converted with, or convert it again without --drop-shared.",
        values=True,
        check=target_of_another,
        drafters=EVERY_FAMILY,
    ),
    Rule(
        "K217",
        "rows-displaced",
        "error",
        "Rows of lm_head or of the embedding are other tokens' than the map says. The head drafts those tokens wrong.",
        fix="Export the head again with the map (d2t) that it was trained with. Compare its tokenizer with the"
        " target's.",
        seen_in="https://github.com/SafeAILab/EAGLE/issues/222",
        values=True,
        check=rows_displaced,
    ),
    Rule(
        "K219",
        "unrelated-to-target",
        "warning",
        "The head's embedding, or an lm_head that kconv added, has little in common with the target's. It was"
        " never filled, or the head belongs to another target.",
        fix="Give the target that it was trained for, or export the head with the embedding that it was trained"
        " with. No action is needed if its trainer trained an embedding of its own.",
        values=True,
        check=unrelated_to_target,
        drafters=EVERY_FAMILY,
    ),
)
# What no weight may contain, whatever the head.
WEIGHTS = tuple(one for one in RULES if one.check in (not_finite, all_zero))
