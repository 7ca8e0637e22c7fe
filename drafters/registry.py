"""The known drafter families: kconv's own, and those of other packages.

Another package adds a family with an entry point in the group `kconv.drafters` that names a `Drafter`, and its layouts
with entry points in the group `kconv.engines`:

    [project.entry-points."kconv.drafters"]
    hydra = "my_package.hydra:HYDRA"
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import PluginInvalid
from ..installed import load_plugins
from .dflash import DFLASH
from .eagle3 import EAGLE3

if TYPE_CHECKING:
    from .base import Config, Drafter, Names

GROUP = "kconv.drafters"
# The marks of later ones fit earlier ones too.
OWN = (DFLASH, EAGLE3)


@functools.cache
def drafters() -> tuple[Drafter, ...]:
    """Return every family, other packages' first, since their marks are more specific.

    Raises:
        PluginInvalid: another package's family cannot be loaded, or its name is taken.
    """
    from .base import Drafter

    found: list[Drafter] = []
    for loaded, where in load_plugins(GROUP, "a drafter"):
        if not isinstance(loaded, Drafter):
            raise PluginInvalid(
                f"a {type(loaded).__name__} is no Drafter",
                where=where,
                fix="Make the entry point name a kconv.drafters.base.Drafter object.",
            )
        if loaded.name in {one.name for one in (*OWN, *found)}:
            raise PluginInvalid(f"there is already a drafter {loaded.name}", where=where, fix="Give it another name.")
        found.append(loaded)
    return (*found, *OWN)


def is_claimed(config: Config, names: Names) -> bool:
    """Return whether a config and tensor names are those of a drafter of any family, rather than a whole model's."""
    return any(one.marks(config, names) or any(name.endswith(one.signs) for name in names) for one in drafters())
