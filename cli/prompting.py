"""Prompts that a target is calibrated on: the options that say which, and their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import check_trusted

if TYPE_CHECKING:
    import torch

    from ..checkpoint.source import Source
    from ..quantize.calibration import CalibrationPrompts

TOKENS = 512


def prompting(command: Callable) -> Callable:
    """Add the options that say what of the prompts a target reads."""
    for option in (
        click.option(
            "--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; TARGET must be pinned."
        ),
        click.option("--chat", is_flag=True, help="Put prompts through the target's chat template."),
        click.option(
            "--tokens",
            default=TOKENS,
            show_default=True,
            type=click.IntRange(min=1),
            metavar="N",
            help="Cut each prompt to N tokens.",
        ),
    ):
        command = option(command)
    return command


def read_sequences(
    target: Source, prompts: Path, *, tokens: int, chat: bool, trust_remote_code: bool
) -> tuple[list[torch.Tensor], CalibrationPrompts]:
    """Return the token ids of each prompt, [T] each, and what they are, for the record.

    Raises:
        UsageError: code shall be run that is not pinned.
        PromptsInvalid, TokenizerFailed: the prompts or the tokenizer cannot be read.
    """
    check_trusted(trust_remote_code, target)
    from ..quantize.calibrate import read_sequences as read

    return read(target, prompts, tokens=tokens, chat=chat, trust_remote_code=trust_remote_code)
