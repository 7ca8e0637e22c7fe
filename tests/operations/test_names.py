"""Every option that names a checkpoint takes the same forms: a folder however it is written, and an id of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.faults import write_target
from support.good_heads import GOOD
from support.heads import TARGET
from support.hub import hub

from kconv.checkpoint.hub import HubRepo
from kconv.checkpoint.source import Folder, Source
from kconv.operations import OPERATIONS, load
from kconv.operations.base import Context

__all__ = ["hub"]

# What an operation needs besides the field in question; "OUT", "PROMPTS", "HEAD" and "TARGET" stand for paths.
NEEDS: dict[str, dict[str, Any]] = {
    "inspect": {"head": "HEAD"},
    "diff": {"a": "HEAD", "b": "HEAD"},
    "vocab": {"head": "HEAD"},
    "convert": {"head": "HEAD", "out": "OUT", "to": "trtllm"},
    "verify": {"head": "HEAD"},
    "validate": {"head": "HEAD"},
    "bench": {"head": "HEAD", "target": "TARGET", "suite": "PROMPTS", "out": "OUT"},
    "states": {"target": "TARGET", "prompts": "PROMPTS", "out": "OUT"},
    "train": {"target": "TARGET", "recipe": "eagle3-mla", "data": "PROMPTS", "out": "OUT"},
    "calibrate": {"target": "TARGET", "prompts": "PROMPTS", "out": "OUT"},
    "quantize": {"target": "TARGET", "recipe": "nvfp4-experts", "input_scale": "data-free", "out": "OUT"},
    "quantize_head": {"head": "HEAD", "target": "TARGET", "states": "PROMPTS", "format": "fp8", "out": "OUT"},
    "card": {"head": "HEAD", "out": "OUT"},
}
FIELDS = [(name, field) for name in OPERATIONS for field, found in load(name).inputs() if found.kind == "checkpoint"]
OF_FOLDERS = ("{folder}", "{folder}/", "{folder}//", "~/head", "~/head/", "./head", "head/", "../{here}/head")
OF_THE_HUB = (
    "{repo}", "{repo}@main", "{repo}@{commit}", "hf://{repo}", "hf://{repo}@main", "https://huggingface.co/{repo}",
    "https://huggingface.co/{repo}/", "https://huggingface.co/{repo}/tree/main", "huggingface.co/{repo}",
    "https://huggingface.co/{repo}/blob/{commit}/config.json",
)  # fmt: skip


class Asked(BaseException):
    """The operation asked for a checkpoint by the name that the test gave it."""


class Recording(Context):
    """A context that ends an operation once it asks for one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def source(self, name: str) -> Source:
        if name == self.name:
            raise Asked
        return super().source(name)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return a folder, which is home and the working directory, with a head and a target in it."""
    GOOD["gqa, trtllm"].write(tmp_path / "head")
    write_target(tmp_path / "target", TARGET, ("embed_tokens", "lm_head"))
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi", "response": "Hi"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def request(name: str, here: Path, **given: Any) -> Any:
    paths = {"HEAD": "head", "TARGET": "target", "PROMPTS": "prompts.jsonl", "OUT": "out"}
    values = {key: str(here / paths[value]) if value in paths else value for key, value in NEEDS[name].items()}
    return load(name).request(**values | given)


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_each_form_names_the_same_checkpoint(name, field, here, hub):
    commit = hub.commit("org/head", here / "head")
    for form in (*OF_FOLDERS, *OF_THE_HUB, here / "head"):
        given = str(form).format(folder=here / "head", here=here.name, repo="org/head", commit=commit)
        if isinstance(form, Path):
            given = form
        # A head cannot be its own target.
        others = {"head": str(here / "target")} if field == "target" and "head" in NEEDS[name] else {}
        source = Context().source(getattr(request(name, here, **others | {field: given}), field))
        if form in OF_THE_HUB:
            assert isinstance(source, HubRepo) and source.name == f"org/head@{commit}", form
        else:
            assert isinstance(source, Folder) and source.path.resolve() == (here / "head").resolve(), form


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_each_operation_takes_a_checkpoint_by_its_name_alone(name, field, here, hub):
    """None opens a path by itself, so each takes all that a name may be."""
    hub.commit("org/head", here / "head")
    with pytest.raises(Asked):
        request(name, here, **{field: "org/head"}).run(Recording("org/head"))
