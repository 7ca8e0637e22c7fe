"""`kconv to-vllm`, `kconv to-trtllm`, `kconv verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import FOLDER, open_head, reading


def _writes(layout: str, engine: str) -> click.Command:
    @click.command(
        f"to-{layout}",
        short_help=f"Write a head in {engine}'s layout.",
        help=f"""Write HEAD in {engine}'s layout into the new folder OUT, with kconv.json beside it.

        Same attention, so exact: every weight keeps its bytes, and each source tensor is accounted for.

        \b
        Example:
          kconv to-{layout} my-head my-head-{layout}
        """,
    )
    @click.argument("head", type=FOLDER)
    @click.argument("out", type=FOLDER)
    @reading
    @click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
    @click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the plan, as JSON.")
    def command(head: Path, out: Path, dry_run: bool, as_json: bool, **hints: Any) -> None:
        from ..checkpoint.staging import refuse_existing
        from ..convert.execute import execute
        from ..convert.layouts import by_name
        from ..convert.plan import plan
        from .output import print_manifest, print_plan, progress

        refuse_existing(out)
        decided = plan(open_head(head, **hints), by_name(layout))
        if dry_run:
            print_plan(decided, as_json=as_json)
            return
        with progress("converting", sum(s.info.size for step in decided.steps for s in step.sources)) as advance:
            manifest = execute(decided, out, advance)
        print_manifest(manifest, out, as_json=as_json)

    return command


to_vllm = _writes("vllm", "vLLM")
to_trtllm = _writes("trtllm", "TensorRT-LLM")


@click.command(short_help="Re-check every byte of an output against its manifest.")
@click.argument("out", type=FOLDER)
@click.argument("source", type=FOLDER, required=False)
def verify(out: Path, source: Path | None) -> None:
    """Re-check OUT against its kconv.json, byte by byte, and SOURCE's tensors too if it is given.

    \b
    Example:
      kconv verify my-head-vllm my-head
    """
    from ..checkpoint.folder import open_checkpoint
    from ..checkpoint.manifest import verify as verify_manifest

    manifest = verify_manifest(out, open_checkpoint(source) if source else None)
    sides = "both sides" if source else "the output"
    click.echo(f"{out}: {len(manifest.tensors)} tensors and {len(manifest.files)} files hold, on {sides}")
