"""Eagle3 training with ModelOpt's hooks."""

from ..functions import make_callable

make_callable(__name__)
