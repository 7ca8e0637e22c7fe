"""What the tests of several packages stand on: a cache in the repository, a trained tiny target, and two workers."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner, Result
from filelock import FileLock
from hypothesis import settings
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from kconv.cli import main

ROOT = Path(__file__).parent
DOCS = ROOT.parent / "docs"
# Commands that print what a file of theirs holds.
LIKE_FILES = {"bench": "acceptance", "quote": "acceptance", "states": "states", "quantize-head": "kconv"}

# A machine that is slow for a moment is no fault of the example that it was at.
settings.register_profile("kconv", deadline=None)
settings.load_profile("kconv")
os.environ.setdefault("KCONV_CACHE", str(ROOT.parent / ".cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first: in this order `--dist loadfile --no-loadscope-reorder` hands files out.

    The demo, which others find in the cache; the other slow tests; those that wait for the demo; those of engines; and
    the quick ones, whose small files even out the end. A file's tests stay on one worker, where its fixtures are made
    once.
    """
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("demo"):
        return 0 if item.path.name == "test_demo.py" else 2
    if item.get_closest_marker("engine"):
        return 3
    if item.get_closest_marker("slow"):
        return 1
    return 4 if item.path.parent.name in ("train", "pipeline") else 5


def pytest_collection_finish() -> None:
    """Take what the tests and their libraries are made of out of each later garbage collection; none of it is freed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def once(run_root: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a function that makes a folder by its name, once for all workers; tests must not change what it holds."""

    def once(name: str, make: Callable[[Path], object]) -> Path:
        out = run_root / name
        # Not the name of the lock that `train_head` takes for the same folder.
        with FileLock(run_root / f".{name}.once"):
            if not out.exists():
                make(out)
        return out

    return once


@pytest.fixture(scope="session")
def cache() -> Path:
    """Return where trained targets and heads are kept between runs."""
    from kconv.tiny.recipe import cache_root

    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(scope="session")
def tiny_target(cache: Path) -> Path:
    """Return the folder of the trained TEST target; trained once, then found in the cache."""
    from kconv.tiny.recipe import TEST
    from kconv.tiny.target import make_target

    with FileLock(cache / ".tiny-target.lock"):
        return make_target(TEST, cache)


@pytest.fixture(scope="session")
def other_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `tiny_target` but for its lm_head: another fine-tune, of the same config."""
    return _doubled(tiny_target, "lm_head.weight", tmp_path_factory.mktemp("other") / "target")


@pytest.fixture(scope="session")
def fine_tune(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `tiny_target` but for one layer's matrix, as LoRA leaves all ends."""
    return _doubled(tiny_target, "model.layers.2.self_attn.o_proj.weight", tmp_path_factory.mktemp("tuned") / "target")


def _doubled(target: Path, name: str, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def demo_lock(cache: Path) -> FileLock:
    """Return the lock under which the demo's target and heads are trained: it takes minutes, so one test does it."""
    return FileLock(cache / ".demo.lock")


@pytest.fixture(scope="module")
def short_gauges():
    """A few entries need no 400 steps, and small heads no steps of healing over many sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kconv.convert.attention.latents.GAUGE_STEPS", 40)
        patch.setattr("kconv.convert.attention.latents.GAUGE_BATCH", 512)
        patch.setattr("kconv.convert.attention.heal.STEP_TOKENS", 256)
        yield


@pytest.fixture(scope="session")
def schemas() -> dict[str, Draft202012Validator]:
    """Return the schema of what a command prints with --json, by its name; that of every `to-` is "to-vllm"'s."""
    files = {file.name.removesuffix(".schema.json"): file for file in (DOCS / "schemas").iterdir()}
    files |= {command: DOCS / f"{file}.schema.json" for command, file in LIKE_FILES.items()}
    return {name: Draft202012Validator(json.loads(file.read_text())) for name, file in files.items()}


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Let clients share a TLS context: loading one takes 20 ms, and the tests' servers speak HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        name = "httpx._transports.default.create_ssl_context"
        patch.setattr(name, functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def every_object_that_is_printed_is_of_its_schema(schemas: dict[str, Draft202012Validator]) -> Iterator[None]:
    invoke = CliRunner.invoke

    def checked(runner: CliRunner, cli: click.Command, args: Any = None, *rest: Any, **options: Any) -> Result:
        result = invoke(runner, cli, args, *rest, **options)
        if cli is main and isinstance(args, list) and "--json" in args and result.stdout.strip():
            printed = json.loads(result.stdout)
            command = "to-vllm" if str(args[0]).startswith("to-") else str(args[0])
            fault = best_match(schemas["error" if "error" in printed else command].iter_errors(printed))
            assert fault is None, f"{command}: {fault.json_path}: {fault.message}"
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CliRunner, "invoke", checked)
        yield
