"""`kconv verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Context, Name, Operation, argument

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Verified:
    """An output that matches its manifest, and whether its source was compared too."""

    out: str
    manifest: Manifest
    with_source: bool


class Verify(Operation):
    """Re-check OUT against its kconv.json, byte by byte, and SOURCE's tensors too if it is given."""

    EXAMPLES = ("kconv verify my-head-vllm my-head",)

    head: Name = argument("The output of kconv to check.", kind="file", metavar="OUT")
    source: Name | None = argument("What it was made from.", kind="checkpoint", default=None)

    def run(self, context: Context) -> Verified:
        """Return the manifest that the output matches."""
        from ..checkpoint.manifest import verify

        source = context.maybe(self.source)
        manifest = verify(context.path(self.head), source.open_weights() if source else None)
        return Verified(self.head, manifest, source is not None)
