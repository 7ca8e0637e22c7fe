"""Two pieces of ModelOpt's own code, as anchors, loaded by path: importing all of it takes ten seconds."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace


def _folder(*parts: str) -> Path:
    spec = find_spec("modelopt")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def check_exported_names(kind: str, layers: int, names: set[str]) -> None:
    """Run ModelOpt's exporter's own check over tensor names; it raises AssertionError.

    Args:
        kind: "llama" or "kimik2".
        layers: number of decoder layers.
        names: tensor names, as exported.
    """
    package = sys.modules.setdefault("modelopt_export_plugins", ModuleType("modelopt_export_plugins"))
    package.__path__ = [str(_folder("torch", "export", "plugins"))]
    exporter = importlib.import_module("modelopt_export_plugins.hf_spec_export").EagleExporter
    eagle = SimpleNamespace(eagle_decoder_type=kind, num_hidden_layers=layers, use_aux_hidden_state=True)
    exporter(SimpleNamespace(eagle_config=eagle))._check_valid_sd(dict.fromkeys(names))


def default_aux_layers(layers: int) -> set[int]:
    """Return what ModelOpt's default_eagle_aux_layer_ids says for a target of so many layers."""
    source = _folder("torch", "speculative", "plugins", "hf_eagle.py").read_text()
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "default_eagle_aux_layer_ids"
    )
    scope: dict = {}
    exec(compile(ast.Module([function], []), "hf_eagle.py", "exec"), scope)
    return set(scope["default_eagle_aux_layer_ids"](layers))
