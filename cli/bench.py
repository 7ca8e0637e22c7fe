"""`kconv bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, check_trusted, open_head, reading, told

if TYPE_CHECKING:
    from ..bench.suites import Suite

HEAD_OPTIONS = ("layout", "captured", "captured_are", "max_positions", "norm_before_residual")
# What the other way of measuring would pass over.
OF_SERVERS = (
    "tree", "concurrency", "reasoning", "precision", "model", "engine_version", "baseline_url", "extra",
)  # fmt: skip
OFFLINE = ("target", "trust_remote_code", *HEAD_OPTIONS)


class JsonObject(click.ParamType):
    """A JSON object, e.g. '{"ignore_eos": true}'."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.fail(f"{value!r} is no JSON object", param, ctx)
        return found


def _split(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(short_help="Measure acceptance length, on a server or by kconv's own forward.")
@click.option("--url", help="The engine's own address: vLLM, SGLang or TensorRT-LLM, serving with speculation.")
@click.option("--head", type=PATH_OR_ID, help="Without --url: the head to measure. With it: what is being served.")
@click.option("--suite", required=True, metavar="NAME|FILE", help="mt-bench, speed-bench, or a JSONL of prompts.")
@click.option(
    "--revision", help="Of the suite on the Hub; SPEED-Bench is pinned, of MT-Bench it is main's commit, as recorded."
)
@click.option("--categories", default="", callback=_split, metavar="A,B", help="Only these categories of the suite.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many prompts of each category.")
@click.option("--out", type=FOLDER, required=True, help="The acceptance.json to write.")
@click.option("--draft-tokens", default=3, show_default=True, type=click.IntRange(1, 16), help="K, as it is served.")
@click.option("--tree", default="chain", show_default=True, help="How drafts branch, e.g. topk=4.")
@click.option("--concurrency", default=1, show_default=True, type=click.IntRange(min=1), help="Prompts side by side.")
@click.option("--max-tokens", default=1024, show_default=True, type=click.IntRange(min=1), help="An answer's limit.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0 is greedy.")
@click.option("--reasoning", help="The target's reasoning mode, where it has one, e.g. medium.")
@click.option("--target-name", help="Hub id of the target; the server's own name for it if not given.")
@click.option("--precision", help="Number format of the target that is served, e.g. NVFP4.")
@click.option("--model", help="The server's name for the target, where it serves several.")
@click.option("--engine-version", help="Where the server does not say it.")
@click.option("--baseline-url", help="The same target served without speculation, for the speed-up.")
@click.option("--extra", type=JsonObject(), default="{}", metavar="JSON", help="More fields of each request.")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; --target must be pinned.")
@reading
@click.option("--json", "as_json", is_flag=True, help="Print acceptance.json.")
def bench(
    url: str | None, head: Source | None, suite: str, revision: str | None, categories: tuple[str, ...],
    limit: int | None, out: Path, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure acceptance length per category of a suite, with what it was measured on.

    With --url from the engine's own counters, read before and after each group of prompts, so let no one else use the
    server. Without, with --head and --target, by kconv's own forward.

    \b
    Examples:
      kconv bench --url http://127.0.0.1:8000 --suite mt-bench --head my-head --precision NVFP4 --out acceptance.json
      kconv bench --head my-head --target my-target --suite prompts.jsonl --out acceptance.json
    """
    target: Source | None = options.pop("target")
    if not head or not (url or target):
        raise click.UsageError("give --head, and either --url or --target")
    if idle := told(*(OFFLINE if url else OF_SERVERS)):
        raise click.UsageError(f"{', '.join(idle)}: only {'without' if url else 'with'} --url")
    check_trusted(options["trust_remote_code"], target)
    from ..bench.suites import load_suite
    from ..checkpoint.staging import refuse_existing
    from .output import status
    from .tables import print_acceptance

    refuse_existing(out)
    prompts = load_suite(suite, revision=revision, categories=categories, limit=limit)
    with status("measuring") as say:
        if url:
            found = _on_server(url, head, prompts, options, say)
        else:
            assert target
            found = _offline(head, target, prompts, options, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json())
    print_acceptance(found, as_json=as_json)


def _on_server(url: str, head: Source, suite: Suite, options: dict[str, Any], say: Any) -> Any:
    from ..bench.measure import ServerRun, measure_server
    from ..checkpoint.bytes import file_digest

    # A folder's weights can be named by their digests; those of a hub id are named by its commit.
    folder = Path(head.name)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    config = folder / "config.json"
    fields = (
        "draft_tokens", "tree", "concurrency", "max_tokens", "temperature", "reasoning", "precision", "model",
        "engine_version", "baseline_url", "extra",
    )  # fmt: skip
    wish = ServerRun(
        head=head.name,
        target=options["target_name"],
        weights={file.name: file_digest(file) for file in files},
        config=file_digest(config) if config.is_file() else "",
        folder=folder if folder.is_dir() else None,
        **{name: options[name] for name in fields},
    )
    return measure_server(url, suite, wish, say)


def _offline(head: Source, target: Source, suite: Suite, options: dict[str, Any], say: Any) -> Any:
    from ..bench.offline import measure_head

    hints = {name: options[name] for name in HEAD_OPTIONS if name in options}
    return measure_head(
        open_head(head, target=target, **hints),
        target.fetch_model(),
        suite,
        draft_tokens=options["draft_tokens"],
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        target_name=options["target_name"] or target.name,
        trust_remote_code=options["trust_remote_code"],
        say=say,
    )
