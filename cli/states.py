"""`kconv states`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, LayerIds, check_trusted

if TYPE_CHECKING:
    from ..targets.config import TargetConfig
    from ..validate.engines.states import ServedRunner

POSITIVE = click.IntRange(min=1)
DTYPES = ("F32", "BF16", "F16")


@click.command(short_help="Write a target's hidden states, for calibration, training and validation without it.")
@click.argument("target", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option("--prompts", required=True, type=FOLDER, help="Prompts (JSONL, MT-Bench's form among others).")
@click.option("--captured", type=LayerIds(), help="Layers, as outputs of 0-based layers; by default 1, N/2 - 1, N - 4.")
@click.option(
    "--sampled", metavar="N", default=0, type=click.IntRange(min=0), help="Also continue each prompt by N drawn tokens."
)
@click.option(
    "--greedy",
    metavar="N",
    default=0,
    type=click.IntRange(min=0),
    help="Also continue each prompt greedily by N tokens.",
)
@click.option("--prompt-tokens", metavar="N", type=POSITIVE, help="Cut prompts to N tokens before continuing them.")
@click.option("--text-tokens", metavar="N", type=POSITIVE, help="Cut the prompts' own text to N tokens.")
@click.option("--chat", is_flag=True, help="Put prompts through the target's chat template.")
@click.option("--no-held-out", is_flag=True, help="Only continuations, not the prompts' own text.")
@click.option("--seed", default=0, show_default=True, help="Of the drawn tokens.")
@click.option("--dtype", type=click.Choice(DTYPES), help="What to compute and store in; by default the target's own.")
@click.option("--shard-mib", default=512, show_default=True, type=POSITIVE, help="Bound on the size of a file.")
@click.option("--url", help="A vLLM that serves TARGET and hands out hidden states; the target is not loaded here.")
@click.option("--shared", type=FOLDER, help="The folder that this vLLM writes states to, as seen from here.")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; TARGET must be pinned.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def states(
    target: Source,
    out: Path,
    prompts: Path,
    captured: tuple[int, ...] | None,
    sampled: int,
    greedy: int,
    prompt_tokens: int | None,
    text_tokens: int | None,
    chat: bool,
    no_held_out: bool,
    seed: int,
    dtype: str | None,
    shard_mib: int,
    url: str | None,
    shared: Path | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Run TARGET over prompts and write what an Eagle3 head reads of it into the new folder OUT.

    For each sequence: token ids, the captured layers' outputs side by side, the state after the final norm, and for
    continuations a mask of the target's own tokens. One sequence is in memory at a time; a run that was killed goes
    on where it stopped when it is started again.

    A target that only fits into a server is run there: vLLM 0.32 or later with its hidden-state extraction. Its layer
    ids are those of --captured plus one, and the number of layers as the last; they cannot be asked for, so what
    stands there is what you get. For 61 layers and --captured 1,29,57:

    \b
      --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
        {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/shared"}}'

    \b
    Examples:
      kconv states my-target my-states --prompts held-out.jsonl --prompt-tokens 32 --sampled 64 --greedy 64
      kconv states my-target my-states --prompts held-out.jsonl --url http://host:8000 --shared /shared
    """
    if bool(url) != bool(shared):
        raise click.UsageError("--url and --shared go together: the server's states come as files")
    if url and sampled:
        raise click.UsageError("--sampled is drawn by a target in memory; with --url take --greedy")
    if no_held_out and not sampled and not greedy:
        raise click.UsageError("--no-held-out leaves nothing to write; add --sampled or --greedy")
    check_trusted(trust_remote_code, target)
    from ..convert.captured import Hints, decide
    from ..targets.write_states import Wanted, capture_states
    from .output import print_states, status

    def wanted(config: TargetConfig) -> Wanted:
        return Wanted(
            prompts,
            captured or decide({}, Hints(target_layers=config.layers)).ids,
            prompt_tokens=prompt_tokens,
            text_tokens=text_tokens,
            sampled=sampled,
            greedy=greedy,
            held_out=not no_held_out,
            chat=chat,
            seed=seed,
        )

    with status("states") as say:
        record = capture_states(
            target,
            wanted,
            out,
            connect=(lambda config, kind: _reach(url, shared, target, config, kind)) if url and shared else None,
            dtype=dtype,
            shard_bytes=shard_mib << 20,
            trust_remote_code=trust_remote_code,
            log=say,
        )
    print_states(record, out, as_json=as_json)


def _reach(url: str, shared: Path, target: Source, config: TargetConfig, dtype: str) -> ServedRunner:
    from ..bench.server import connect
    from ..checkpoint.tensors import read_tensor
    from ..validate.engines.states import ServedRunner

    norm = f"{config.prefix}model.norm.weight"
    ends = target.open_tensors({norm, config.lm_head})
    return ServedRunner(
        connect(url, None, {}, 600.0), shared, config, read_tensor(ends[norm]), read_tensor(ends[config.lm_head]), dtype
    )
