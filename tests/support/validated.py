"""A folder's report without the operation, which resolves names and opens what is beside it."""

from __future__ import annotations

from typing import Any

from kconv.checkpoint.source import Source
from kconv.errors import KconvError
from kconv.validate.files import is_target, open_subject, unreadable
from kconv.validate.head import validate_head
from kconv.validate.options import DEFAULTS, ValidateOptions
from kconv.validate.report import Report
from kconv.validate.target import validate_target


def validate(named: Source, options: ValidateOptions = DEFAULTS, **about: Any) -> Report:
    """Return the report of a head or a target; what `validate_head` or `validate_target` takes besides is by name."""
    say = about.setdefault("say", lambda _: None)
    try:
        checkpoint = open_subject(named, options, say)
    except KconvError as error:
        return unreadable(named, options, error)
    check = validate_target if is_target(checkpoint) and not about.get("layout") else validate_head
    return check(named, checkpoint, options, **about)
