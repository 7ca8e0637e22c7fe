"""`kconv verify`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RequestInvalid
from ..escape import command
from ..lines import Part, Result, filename
from ..options import Name, argument
from .base import Context, Operation

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


@dataclass(frozen=True, repr=False)
class Verified(Result):
    """An output that matches its manifest, and whether its source was compared too."""

    out: str
    manifest: Manifest
    with_source: bool

    def to_json(self) -> Any:
        """Return what was compared as plain values."""
        counts = {"tensors": len(self.manifest.tensors), "files": len(self.manifest.files)}
        return {"out": self.out, "matches": True, "source_compared": self.with_source} | counts

    def lines(self) -> Iterable[Part]:
        sides = "source and output" if self.with_source else "output"
        counts = f"{len(self.manifest.tensors)} tensors and {len(self.manifest.files)} files"
        return (f"{filename(self.out)}: {counts} match the manifest ({sides})",)


class Verify(Operation):
    """Check every byte of OUT against its kconv.json, and SOURCE's tensors too if you give it."""

    EXAMPLES = ("kconv verify my-head-vllm my-head",)

    head: Name = argument("A folder that kconv wrote.", kind="file", metavar="OUT")
    source: Name | None = argument("The checkpoint that it was made from.", kind="checkpoint", default=None)

    def run(self, context: Context) -> Verified:
        """Return the manifest that the output matches."""
        from ..checkpoint.folder import open_checkpoint
        from ..checkpoint.manifest import MANIFEST, verify
        from ..validate.claims import check_claims

        source, folder = context.maybe(self.source), context.path(self.head)
        if self.source and not (folder / MANIFEST).exists() and (context.path(self.source) / MANIFEST).exists():
            raise RequestInvalid(
                f"{self.head} has no {MANIFEST}, but {self.source} has one",
                fix=f"OUT comes first: {command(('kconv', 'verify', self.source, self.head))}",
            )
        origin = source.open_weights() if source else None
        manifest = verify(folder, origin)
        check_claims(open_checkpoint(folder), manifest, origin)
        return Verified(self.head, manifest, source is not None)
