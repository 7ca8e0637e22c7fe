"""From one layout to another: layouts, config tables, moves, plan and execution."""

from .. import _callable

_callable(__name__)
