"""This process among those that share one job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WorkerFailed
from .units import Unit


@dataclass(frozen=True)
class World:
    """This process among those that share one job, as torchrun numbers them.

    Attributes:
        rank: 0 to size - 1; 0 finishes the output.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def own(self, units: tuple[Unit, ...]) -> list[Unit]:
        """Return this rank's share: from the largest file on, each goes to the rank with the fewest bytes to read."""
        loads = [0] * self.size
        mine: set[str] = set()
        for unit in sorted(units, key=lambda unit: -unit.bytes_in):
            rank = loads.index(min(loads))
            loads[rank] += unit.bytes_in
            if rank == self.rank:
                mine.add(unit.file)
        return [unit for unit in units if unit.file in mine]


ALONE = World()


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read RANK and WORLD_SIZE; without them this process is alone.

    Raises:
        WorkerFailed: only one of them is there, or they are no rank and size.
    """
    said = {name: environment.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(said.values()):
        return ALONE
    try:
        world = World(*(int(value or "") for value in said.values()))
    except ValueError:
        world = World(-1, 0)
    if not 0 <= world.rank < world.size:
        raise WorkerFailed(
            "the environment has " + ", ".join(f"{name}={value}" for name, value in said.items()),
            fix="Start the ranks with torchrun, or set both: RANK from 0 to WORLD_SIZE - 1.",
        )
    return world
