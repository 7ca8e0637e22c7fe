"""From one layout to another: layouts, config tables, moves, plan and execution."""

from ..functions import make_callable

make_callable(__name__)
