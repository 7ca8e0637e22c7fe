"""Eagle3 training with ModelOpt's hooks."""

from .. import _callable

_callable(__name__)
