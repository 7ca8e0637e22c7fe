"""What each kind of step does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MissingExtra
from .job import Job
from .kinds import Bench, Card, Convert, Publish, Quantize, StepBase, Tiny, Train, Validate
from .making import convert, make_tiny, quantize, train
from .proving import bench, publish, validate, write_card

STEPS: Mapping[type[StepBase], Callable[[Any, Job], None]] = {
    Tiny: make_tiny, Train: train, Quantize: quantize, Convert: convert, Validate: validate, Bench: bench,
    Card: write_card, Publish: publish,
}  # fmt: skip


def carry_out(step: StepBase, job: Job) -> None:
    """Do what a step says.

    Raises:
        MissingExtra: it takes packages that are not installed.
        KconvError: see the function of its kind.
    """
    try:
        STEPS[type(step)](step, job)
    except ImportError as fault:
        raise MissingExtra(
            f"the step takes {fault.name}, which is not installed", fix="pip install 'kconv[optimize,plots]'"
        ) from fault
