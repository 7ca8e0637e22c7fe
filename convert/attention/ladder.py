"""Which frequencies an MLA head can turn at.

MHA turns P pairs of each head, at `theta ** (-j / P)`; MLA has one rotary key of n pairs, at `theta' ** (-i / n)`.
With n < P not every frequency can be had. Two choices of theta' keep some of them exactly:

* "high", `theta' = theta ** (n / P)`: the n fastest pairs, each at its own frequency. The slow ones are not turned.
* "stride", `theta' = theta`: every (P / n)-th pair; the ones between are turned as the one before them.

Which loses less depends on how far back the head looks: over short distances slow pairs hardly turn. With n >= P
"high" has them all, and pairs to spare. YaRN's ramp moves along with "high": its bounds are pairs, and the same ones
as long as the last of them is below 2n, where engines clamp it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import LayoutCannot
from ...head.spec import Rope, Yarn

# Engines compute theta and its powers in fp32, which ends at 3.4e38.
LARGEST = 1e30


@dataclass(frozen=True)
class Ladder:
    """A rotary embedding for MLA, and which of MHA's pairs each of its pairs stands in for.

    Attributes:
        name: "high" or "stride".
        rope: of the MLA head; its ladder has `pairs` steps.
        pairs: n.
        folded: for each of MLA's pairs that is used, MHA's.
    """

    name: str
    rope: Rope
    pairs: int
    folded: tuple[tuple[int, ...], ...]


def find_ladders(rope: Rope, source_pairs: int, pairs: int) -> list[Ladder]:
    """Return the ladders of n pairs that can stand in for a head's P pairs.

    Raises:
        LayoutCannot: RoPE is scaled in a way that engines do not read of an MLA head, or the ladder would need a theta
            that they cannot hold.
    """
    if rope.scaling is not None and not isinstance(rope.scaling, Yarn):
        raise LayoutCannot(
            f"RoPE is scaled by {type(rope.scaling).__name__}, and engines read YaRN alone of an MLA head",
            where="rope_scaling",
            fix="Serve this head with its own attention.",
        )
    used = min(source_pairs, pairs)
    high = replace(lengthen(rope, source_pairs, pairs), partial_rotary_factor=1.0)
    ladders = [Ladder("high", high, pairs, tuple((j,) for j in range(used)))]
    if source_pairs > pairs and source_pairs % pairs == 0:
        fold = source_pairs // pairs
        groups = tuple(tuple(range(i * fold, (i + 1) * fold)) for i in range(pairs))
        ladders.append(Ladder("stride", replace(rope, partial_rotary_factor=1.0), pairs, groups))
    return ladders


def lengthen(rope: Rope, pairs: int, longer: int) -> Rope:
    """Return the ladder of `longer` pairs whose first ones are a given ladder's: pairs behind them may hold zeros.

    With fewer pairs, it is that of the fastest ones.

    Raises:
        LayoutCannot: it would need a theta that engines cannot hold.
    """
    theta = rope.theta ** (longer / pairs)
    if theta > LARGEST:
        raise LayoutCannot(
            f"a ladder of {longer} pairs that begins like one of {pairs} has a theta of {theta:.0e}",
            where="rope_theta",
            fix="Serve this head with its own attention.",
        )
    return replace(rope, theta=theta)
