"""`kconv to-vllm`, `to-trtllm`, `to-sglang`, `to-portable` and `kconv verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..checkpoint.source import Source
from .attention import convert, converting, take_attention
from .options import FOLDER, PATH_OR_ID, open_head, open_headers, reading

# Of the layouts whose `needs` name it, which --help must not import; a test holds the two together.
LENDS = " With --target, an lm_head that HEAD does not have is added from it."


def _writes(layout: str, form: str, lends: str = "") -> click.Command:
    @click.command(
        f"to-{layout}",
        short_help=f"Write a head in {form}.",
        help=f"""Write HEAD in {form} into the new folder OUT, with kconv.json beside it.

        Same attention, so exact unless --dtype is given: every weight keeps its bytes, and each source tensor is
        accounted for.{lends}

        \b
        Example:
          kconv to-{layout} my-head my-head-{layout}
          kconv to-{layout} my-head my-head-{layout} --target my-target --drop-shared

        With --attention the head gets the other attention: an approximation, fitted to --target's states, healed, and
        measured on held-out text. The manifest states what it kept.

        \b
        Example:
          kconv to-{layout} my-head my-head-mla --attention mla --target my-target --states my-states
        """,
    )
    @click.argument("head", type=PATH_OR_ID)
    @click.argument("out", type=FOLDER)
    @reading
    @converting
    @click.option("--drop-shared", is_flag=True, help="Leave out what equals --target's, byte for byte.")
    @click.option("--dtype", type=click.Choice(["bfloat16"]), help="Round the weights to this dtype; not exact.")
    @click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
    @click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the plan, as JSON.")
    def command(
        head: Source, out: Path, drop_shared: bool, dtype: str | None, dry_run: bool, as_json: bool, **hints: Any
    ) -> None:
        target: Source | None = hints["target"]
        wanted = take_attention(hints)
        if wanted is not None:
            if target is None or drop_shared or dtype or dry_run:
                raise click.UsageError("--attention needs --target, and takes no --drop-shared, --dtype or --dry-run")
            convert(head, out, layout, wanted, target, hints, as_json=as_json)
            return
        if drop_shared and target is None:
            raise click.UsageError("--drop-shared needs --target, to compare with")
        from ..checkpoint.header import FLOAT_DTYPES
        from ..checkpoint.staging import refuse_existing
        from ..convert.execute import execute
        from ..convert.plan import WriteOptions, plan
        from ..convert.shared import find_for_layout, find_shapes
        from ..engines import by_name
        from .head_output import print_manifest, print_plan
        from .output import progress

        refuse_existing(out)
        rounded = FLOAT_DTYPES[dtype] if dtype else ""
        # By headers first, so that what cannot be converted is refused before it is downloaded.
        shared = find_shapes(target) if target else None
        wishes = WriteOptions(shared, drop_shared and dry_run, rounded)
        table, headers = by_name(layout), open_headers(head, **hints)
        decided = plan(headers, table, wishes)
        if dry_run:
            print_plan(decided, as_json=as_json)
            return
        taken = find_for_layout(target, headers, table, drop_shared=drop_shared) if target else None
        decided = plan(open_head(head, **hints), table, WriteOptions(taken, drop_shared, rounded))
        with progress("converting", sum(step.size for step in decided.steps)) as advance:
            manifest = execute(decided, out, advance)
        print_manifest(manifest, out, as_json=as_json)

    return command


to_vllm = _writes("vllm", "vLLM's layout")
to_trtllm = _writes("trtllm", "TensorRT-LLM's layout")
to_sglang = _writes("sglang", "SGLang's layout", LENDS)
to_portable = _writes("portable", "one layout that TensorRT-LLM, vLLM and SGLang all load", LENDS)


@click.command(short_help="Re-check every byte of an output against its manifest.")
@click.argument("out", type=FOLDER)
@click.argument("source", type=PATH_OR_ID, required=False)
def verify(out: Path, source: Source | None) -> None:
    """Re-check OUT against its kconv.json, byte by byte, and SOURCE's tensors too if it is given.

    \b
    Example:
      kconv verify my-head-vllm my-head
    """
    from ..checkpoint.manifest import verify as verify_manifest

    manifest = verify_manifest(out, source.open_weights() if source else None)
    sides = "both sides" if source else "the output"
    shown = click.format_filename(out)
    click.echo(f"{shown}: {len(manifest.tensors)} tensors and {len(manifest.files)} files hold, on {sides}")
