"""What a head may share with its target: the embedding and lm_head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint.bytes import ROWS, read_floats, row_bytes, same_bytes
from ..checkpoint.header import TensorInfo
from ..checkpoint.source import Folder, Source
from ..checkpoint.values import cast_floats
from ..drafters.base import Spec
from ..drafters.contract import FLOATS
from ..drafters.slots import needs
from ..engines.layout import Layout
from ..errors import CorruptIndex, KconvError, LayoutCannot, TargetInvalid
from ..targets.config import TargetConfig, read_target_config
from .read import Head

if TYPE_CHECKING:
    import numpy as np

SLOTS = ("lm_head", "embed_tokens")
# What to do about an embedding that an engine replaces by the target's.
OWN_EMBEDDING = "Serve this head with vLLM, or train one with the target's embedding."
# Rows that are looked at, and how many of those that are unlike their own token's are compared with every token's.
SAMPLED, PROBED, FEWEST = 512, 64, 3
# The cosine from which two rows are alike, how like they are at most asked to be, and by how much another token's row
# must be more like than the own.
LIKE, MOST_LIKE, MARGIN = 0.5, 0.9, 0.3


@dataclass(frozen=True)
class SharedTensors:
    """The target's tensors that a head may share.

    Attributes:
        name: of the target, as the user gave it.
        tensors: header entries of the `SLOTS` that were found, by slot.
        headers_only: whether their bytes are still on the Hub.
        is_folder: whether the target is a folder, whose tensors need no download.
        served: how engines name the target; see `Source.served`.
        model_type: of its text model, e.g. "kimi_k2"; empty if unknown.
        architecture: of the whole target, e.g. "KimiK25ForConditionalGeneration"; empty if unknown.
        absent: why a slot's tensor cannot be read though the target has one, e.g. its shard is missing.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    headers_only: bool = False
    is_folder: bool = False
    served: tuple[str, str] = ("", "")
    layers: int | None = None
    model_type: str = ""
    architecture: str = ""
    config: Mapping[str, Any] | None = None
    absent: Mapping[str, KconvError] = field(default_factory=dict[str, KconvError])

    def find(self, slot: str) -> TensorInfo | None:
        """Return the target's tensor for a slot, None if it has none; raise if it has one that cannot be read."""
        if slot in self.absent:
            raise self.absent[slot]
        return self.tensors.get(slot)

    @property
    def lm_head(self) -> TensorInfo:
        """The target's own lm_head, whose vocabulary may be larger than a head's."""
        info = self.find("lm_head")
        if info is None:
            raise TargetInvalid(
                "the target has no lm_head",
                where=self.name,
                fix="Pass the target that the head was trained on.",
            )
        return info

    def matching(self, slot: str, spec: Spec) -> TensorInfo:
        """Return the target's tensor for a head's slot; refuse one of another shape or dtype than the head needs."""
        info, shape = self.find(slot), needs(spec)[slot].shape
        if info is None or info.shape != shape or info.dtype not in FLOATS:
            found = f"{info.name} {info.dtype} {list(info.shape)}" if info else "none"
            raise TargetInvalid(
                f"the head needs the target's {slot} of shape {list(shape)}, but the target has {found}",
                where=self.name,
                fix="Pass the unquantized target that the head was trained on.",
            )
        return info

    def has_another(self, slot: str, own: TensorInfo, spec: Spec) -> bool:
        """Return whether the target's tensor would fit a head's slot but differs from the head's own.

        They are compared row by row, in the head's dtype. If the bytes are still on the Hub, the answer is no.
        """
        theirs = self.find(slot)
        if theirs is None or self.headers_only or theirs.dtype not in FLOATS or own.dtype not in FLOATS:
            return False
        fits = needs(spec)[slot].slot.absent_when(spec)
        copies = count_copies(own, theirs, None) if fits else None
        return copies is not None and copies.by_offset < copies.rows


def find_for_layout(target: Source, head: Head, layout: Layout, *, drop_shared: bool) -> SharedTensors:
    """Find the target's tensors that a conversion adds, compares or leaves out.

    In a folder it finds everything present, which also separates the target's parameters from the head's own;
    downloading from the Hub takes too long for that purpose alone.
    """
    if drop_shared or isinstance(target, Folder):
        return find_shared(target, SLOTS)
    return find_shared(target, slots_from_target(head, layout))


def find_shared(target: Source, slots: Iterable[str]) -> SharedTensors:
    """Find tensors that a head may share with its target; from the Hub, the files that hold them are downloaded.

    A missing file, as in an incomplete download, is an error only if its tensor is requested.
    """
    config = read_target_config(target.fetch_config())
    found: dict[str, TensorInfo] = {}
    absent: dict[str, CorruptIndex] = {}
    for slot in slots:
        name = _names(config)[slot]
        try:
            tensors = target.open_tensors([name])
        except CorruptIndex as fault:
            absent[slot] = fault
            continue
        if name in tensors:
            found[slot] = tensors[name]
    return SharedTensors(
        target.name,
        found,
        is_folder=isinstance(target, Folder),
        served=target.served,
        layers=config.layers,
        model_type=config.model_type,
        architecture=config.architecture,
        config=config.raw,
        absent=absent,
    )


def find_shapes(target: Source) -> SharedTensors:
    """Find what a head may share with its target; from the Hub, only names and shapes."""
    if isinstance(target, Folder):
        return find_shared(target, SLOTS)
    config, tensors = read_target_config(target.fetch_config()), target.open_headers().tensors
    found = {slot: tensors[name] for slot, name in _names(config).items() if name in tensors}
    return SharedTensors(
        target.name, found, headers_only=True, layers=config.layers, model_type=config.model_type,
        architecture=config.architecture, config=config.raw,
    )  # fmt: skip


def _names(config: TargetConfig) -> dict[str, str]:
    return {"lm_head": config.lm_head, "embed_tokens": config.embed_tokens}


def refuse_target(head: Head, layout: Layout, target: SharedTensors | None) -> None:
    """Refuse a layout whose engine would serve a head differently with this target.

    The cause is a captured layer, or that the target's embedding replaces the head's own; without a target, a captured
    layer whose meaning depends on the target.
    """
    depth = target.layers if target else head.read.captured.depth
    for limit in layout.target_limits:
        if limit.hits(head.spec, target) or limit.at_depth(head.spec, depth):
            raise LayoutCannot(limit.what, where="config.json", fix=limit.fix, see=limit.source)
    if target is None:
        return
    for slot, why in layout.replaces.items() if not head.checkpoint.headers_only else ():
        if slot in head.places and target.has_another(slot, head.places[slot][1], head.spec):
            raise LayoutCannot(
                f"the head's {slot} differs from the target's, but the engine would use the target's: {why}",
                where=head.places[slot][1].name,
                fix=OWN_EMBEDDING,
            )


def slots_from_target(head: Head, layout: Layout) -> set[str]:
    """Return the slots for which the target's tensor is added to the head, or compared with the head's own."""
    held = head.places.keys()
    return (layout.needs.keys() - held) | (layout.replaces.keys() & held)


def omitted_slots(head: Head, layout: Layout, target: SharedTensors | None) -> dict[str, str]:
    """Return the slots that can be left to the target, with the reason; none if either one's bytes are on the Hub."""
    if target is None:
        raise TargetInvalid("there is no target to compare with", fix="Pass --target, a folder with its weights.")
    if head.checkpoint.headers_only or target.headers_only:
        return {}
    known = needs(head.spec)
    return {
        slot: f"byte-identical to {theirs.name} of the target {target.name}, which engines share"
        for slot in SLOTS
        if slot in head.places and slot not in layout.needs and known[slot].slot.absent_when(head.spec)
        if (theirs := target.find(slot)) is not None and same_bytes(head.places[slot][1], theirs)
    }


@dataclass(frozen=True)
class Copies:
    """How many rows of lm_head are bit-identical to the target's, after a cast to the head's dtype.

    Attributes:
        by_offset: rows i that equal the target's row `i + d2t[i]` (row i if there is no map).
        by_id: rows i that equal the target's row `d2t[i]`; same as `by_offset` if there is no map.
    """

    rows: int
    by_offset: int
    by_id: int


def count_copies(lm_head: TensorInfo, reference: TensorInfo, d2t: np.ndarray | None) -> Copies | None:
    """Compare a head's lm_head, [draft_vocab, hidden], with its target's, [vocab, target_hidden].

    Without a map `d2t` is None. Returns None if the widths differ, or one of them is quantized.
    """
    import numpy as np

    from ..drafters.vocab import target_ids

    rows = lm_head.shape[0]
    if lm_head.shape[1:] != reference.shape[1:] or (d2t is not None and len(d2t) != rows):
        return None
    if lm_head.dtype not in FLOATS or reference.dtype not in FLOATS:
        return None
    if d2t is None:
        equal = _count_equal(lm_head, reference, np.arange(rows))
        return Copies(rows, equal, equal)
    return Copies(rows, _count_equal(lm_head, reference, target_ids(d2t)), _count_equal(lm_head, reference, d2t))


def _count_equal(lm_head: TensorInfo, reference: TensorInfo, ids: np.ndarray) -> int:
    import numpy as np

    equal = 0
    for begin in range(0, len(ids), ROWS):
        own = np.arange(begin, min(begin + ROWS, len(ids)))
        own = own[(ids[own] >= 0) & (ids[own] < reference.shape[0])]
        theirs = cast_floats(row_bytes(reference, ids[own]).data, reference.dtype, lm_head.dtype)[0]
        mine = row_bytes(lm_head, own)
        equal += int((mine == theirs.view(np.uint8).reshape(mine.shape)).all(axis=1).sum())
    return equal


@dataclass(frozen=True)
class Displaced:
    """Rows of a head's matrix that are another token's in the target's.

    Attributes:
        first: the first row that is unlike its own token's.
        row: a row that is another token's.
        token: the token that it stands for.
        nearest: the token whose row in the target is most like it.
        likeness, own_likeness: its cosine with the row of `nearest` and of `token`.
        found, sampled: how many of the sampled rows are another token's.
    """

    first: int
    row: int
    token: int
    nearest: int
    likeness: float
    own_likeness: float
    found: int
    sampled: int

    @property
    def words(self) -> str:
        """What was found, as one sentence."""
        return (
            f"from row {self.first} on, its rows part from the target's: row {self.row} stands for token {self.token}, "
            f"but it is most like the row of token {self.nearest} (cosine {self.likeness:.2f}, with its own "
            f"{self.own_likeness:.2f}); so are about {self.found} of {self.sampled} sampled rows"
        )


def measure_likeness(own: TensorInfo, theirs: TensorInfo, ids: np.ndarray) -> float | None:
    """Return the mean cosine of a head's sampled rows with their tokens' rows in the target; arguments as below.

    Returns:
        None if the two have another width.
    """
    import numpy as np

    if not _comparable(own, theirs, ids):
        return None
    sampled = _spread(np.arange(len(ids)), SAMPLED)
    mine, its = (
        _directions(read_floats(info, rows), _common(info, rows))
        for info, rows in ((own, sampled), (theirs, ids[sampled]))
    )
    return float((mine * its).sum(1).mean())


def _comparable(own: TensorInfo, theirs: TensorInfo, ids: np.ndarray) -> bool:
    return own.shape[1:] == theirs.shape[1:] and int(ids.min()) >= 0 and int(ids.max()) < theirs.shape[0]


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    import numpy as np

    return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)]


def _unit(rows: np.ndarray) -> np.ndarray:
    import numpy as np

    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def _common(info: TensorInfo, rows: np.ndarray) -> np.ndarray:
    """Return what all rows of a matrix have in common, which says nothing about a token."""
    return _unit(read_floats(info, rows).mean(0))


def _directions(rows: np.ndarray, shared: np.ndarray) -> np.ndarray:
    import numpy as np

    return _unit(rows - np.outer(rows @ shared, shared))


def find_displaced(own: TensorInfo, theirs: TensorInfo, ids: np.ndarray) -> Displaced | None:
    """Look for rows of a head's embedding or lm_head that are another token's.

    Both matrices of a head are mostly trained from the target's, so each row stays most like its own token's. Rows that
    were drawn at random and trained are like no row of the target's, and nothing is found.

    Args:
        own, theirs: the head's, `[rows, hidden]`, and the target's, `[vocab, target_hidden]`.
        ids: `[rows]`, the token of each row.

    Returns:
        None if the rows are in order, like no row of the target's, or of another width.
    """
    import numpy as np

    if not _comparable(own, theirs, ids):
        return None
    sampled = _spread(np.arange(len(ids)), SAMPLED)
    common = _common(own, sampled), _common(theirs, ids[sampled])

    def looked_at(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of the head's, and the cosine of each with its own token's."""
        mine = _directions(read_floats(own, rows), common[0])
        return mine, (mine * _directions(read_floats(theirs, ids[rows]), common[1])).sum(1)

    # The best of many random directions is this like a row; a matrix that is narrow for its vocabulary shows little.
    chance = math.sqrt(2 * math.log(theirs.shape[0]) / theirs.shape[1])
    least = min(max(LIKE, 1.5 * chance), MOST_LIKE)
    unlike = sampled[looked_at(sampled)[1] < least]
    if len(unlike) < FEWEST:
        return None
    probed = _spread(unlike, PROBED)
    mine, before = looked_at(probed)
    best, nearest = np.full_like(before, -1.0), np.zeros_like(probed)
    for begin in range(0, theirs.shape[0], ROWS):
        block = read_floats(theirs, np.arange(begin, min(begin + ROWS, theirs.shape[0])))
        likeness = mine @ _directions(block, common[1]).T
        nearest = np.where(likeness.max(1) > best, likeness.argmax(1) + begin, nearest)
        best = np.maximum(likeness.max(1), best)
    of_another = (best > least) & (best - before > MARGIN)
    count = int(of_another.sum())
    if count < max(FEWEST, len(probed) / 2):
        return None
    at = int(of_another.argmax())
    # The rows between it and the sampled one before it may be another token's already.
    earlier = sampled[sampled < probed[at]]
    between = np.arange(int(earlier.max()) + 1 if len(earlier) else 0, int(probed[at]) + 1)
    apart = looked_at(between)[1] < least
    # The last one was unlike already; among other rows its cosine may be rounded otherwise.
    apart[-1] = True
    first = int(between[apart][0])
    return Displaced(
        first,
        int(probed[at]),
        int(ids[probed[at]]),
        int(nearest[at]),
        float(best[at]),
        float(before[at]),
        round(len(unlike) * count / len(probed)),
        len(sampled),
    )
