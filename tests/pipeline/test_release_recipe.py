"""The recipe of a release: what it may say."""

from __future__ import annotations

import pytest
import yaml

from kconv.errors import RecipeInvalid
from kconv.pipeline.recipe import parse_release

BAD = {
    "a key that does not exist": {"steps": {"a": {"do": "convert", "head": "x", "to": "vllm", "speed": 1}}},
    "a kind that does not exist": {"steps": {"a": {"do": "deploy"}}},
    "no kind": {"steps": {"a": {"head": "x"}}},
    "a layout that does not exist": {"steps": {"a": {"do": "convert", "head": "x", "to": "gguf"}}},
    "a step that comes later": {
        "steps": {
            "a": {"do": "convert", "head": "$b", "to": "vllm"},
            "b": {"do": "convert", "head": "x", "to": "vllm"},
        }
    },
    "itself": {"steps": {"a": {"do": "convert", "head": "$a", "to": "vllm"}}},
    "a way out of the folder": {
        "steps": {
            "a": {"do": "convert", "head": "x", "to": "vllm"},
            "b": {"do": "convert", "head": "$a/../../x", "to": "vllm"},
        }
    },
    "a name that is a path": {"steps": {"../a": {"do": "convert", "head": "x", "to": "vllm"}}},
    "a name that is the run's": {"steps": {"run.json": {"do": "convert", "head": "x", "to": "vllm"}}},
    "an output of its own": {"steps": {"a": {"do": "convert", "head": "x", "to": "vllm", "out": "y"}}},
    "no steps": {"steps": {}},
    "a floor without a suite": {
        "min_acceptance": {"metric": "al_incl_bonus", "at_least": 2, "max_loss": 0},
        "steps": {"a": {"do": "convert", "head": "x", "to": "vllm"}},
    },
    "a repository that is none": {"steps": {"a": {"do": "publish", "folder": "x", "repo": "head"}}},
    "a reason that is empty": {
        "steps": {"a": {"do": "publish", "folder": "x", "repo": "o/r", "allow": {"P109": ""}}}
    },
    "nothing to train on": {"steps": {"a": {"do": "train", "target": "x", "recipe": "eagle3-mla"}}},
    "a target beside a server": {
        "steps": {"a": {"do": "bench", "head": "x", "suite": "mt-bench", "url": "http://x", "target": "t"}},
    },
    "a server's precision without one": {
        "steps": {"a": {"do": "bench", "head": "x", "suite": "mt-bench", "target": "t", "precision": "NVFP4"}},
    },
    "nothing to measure with": {"steps": {"a": {"do": "bench", "head": "x", "suite": "mt-bench"}}},
    "a fact that does not exist": {"facts": {"colour": "blue"}, "steps": {"a": {"do": "tiny"}}},
}  # fmt: skip


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_a_recipe_that_cannot_be_is_refused(values):
    with pytest.raises(RecipeInvalid):
        parse_release(yaml.safe_dump({"name": "x"} | values))


@pytest.mark.parametrize("text", ["", "- a", "a: [", "name: x"])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(RecipeInvalid):
        parse_release(text)
