"""The recipe of a release: what it may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kconv.checkpoint.source import hub_id_of
from kconv.errors import RecipeInvalid
from kconv.pipeline.prepare import Selection, prepare
from kconv.pipeline.recipe import parse_release, read_release

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


FLOOR = {
    "metric": "al_incl_bonus", "suite": "mt-bench", "target": "o/t", "temperature": 0, "draft_tokens": 3,
    "prompts": 8, "at_least": 2, "max_loss": 0,
}  # fmt: skip


@pytest.mark.parametrize("part", [{"limit": 1}, {"categories": ["math"]}])
def test_a_floor_that_only_parts_of_a_suite_are_measured_for_is_refused_before_it_runs(part):
    bench = {"do": "bench", "head": "x", "suite": "mt-bench", "url": "http://x", "precision": "BF16"}
    card = {"do": "card", "head": "x", "acceptance": ["$part/acceptance.json"], "license_file": ["LICENSE"]}
    steps = {"part": bench | part, "card": card}
    with pytest.raises(RecipeInvalid, match=f"part measures only a part of the suite .{next(iter(part))}."):
        parse_release(yaml.safe_dump({"name": "x", "min_acceptance": FLOOR, "steps": steps}, sort_keys=False))
    # A whole one beside it counts; so does what was measured before, and what is allowed.
    publish = {"do": "publish", "folder": "$card", "repo": "o/r", "allow": {"P109": "a first try"}}
    both = steps | {"whole": bench, "card": card | {"acceptance": ["$part/acceptance.json", "$whole/acceptance.json"]}}
    both = {name: both[name] for name in ("part", "whole", "card")}
    for fine in (both, steps | {"card": card | {"acceptance": ["a.json"]}}, steps | {"publish": publish}):
        parse_release(yaml.safe_dump({"name": "x", "min_acceptance": FLOOR, "steps": fine}, sort_keys=False))


def test_a_floor_on_a_text_that_no_step_measures_is_refused_before_it_runs():
    floor = {
        "metric": "al_incl_bonus",
        "suite": "sampled",
        "draft_tokens": 3,
        "prompts": 8,
        "at_least": 2,
        "max_loss": 0,
    }

    def parse(more: dict[str, dict] | None = None, **report: str) -> None:
        steps = {
            "report": {"do": "validate", "head": "x", "source": "y"} | report,
            "card": {"do": "card", "head": "x", "report": "$report/report.json", "license_file": ["LICENSE"]},
        } | (more or {})
        parse_release(yaml.safe_dump({"name": "x", "min_acceptance": floor, "steps": steps}, sort_keys=False))

    with pytest.raises(RecipeInvalid, match="report measures no acceptance, which min_acceptance needs"):
        parse()
    parse(target="t", prompts="p.jsonl")
    parse(target="t", states="s")
    own = {"publish": {"do": "publish", "folder": "$card", "repo": "o/r", "report": "measured/report.json"}}
    parse(own)


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_a_recipe_that_cannot_be_is_refused(values):
    with pytest.raises(RecipeInvalid):
        parse_release(yaml.safe_dump({"name": "x"} | values))


@pytest.mark.parametrize("text", ["", "- a", "a: [", "name: x"])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(RecipeInvalid):
        parse_release(text)


GOOD = """\
name: x
steps:
  a: {do: convert, head: org/head, to: vllm}
  b:
    do: train
    target: $a
    recipe: eagle3-mla
    data: texts.jsonl
  c: {do: validate, head: $b}
"""
# What is changed in it, the line that is named, and what is said of it.
WRONG = {
    "a key with a typo": ("data: texts", "dta: texts", 8, "steps.b.dta is not a known key; did you mean data"),
    "an operation with a typo": ("do: train", "do: trian", 5, "did you mean train"),
    "a step with a typo": ("head: $b", "head: $bb", 9, r"did you mean \$b"),
    "a value of another kind": (
        "data: texts.jsonl",
        "save_every: many",
        8,
        "it must be a whole number, but is 'many'",
    ),
    "a number for text": ("data: texts.jsonl", "split: 1.0", 8, "it must be text, but is 1.0 without quotes"),
    "a fact with a typo": (
        "  c:",
        "facts: {licence: {}}\n#",
        9,
        "facts.licence is not a known key; did you mean license",
    ),
    "a fact below one": (
        "  c:",
        "facts:\n  license: {idd: mit}\n#",
        10,
        "facts.license.idd is not a known key; did you mean id",
    ),
    "a bracket that is left open": ("{do: convert", "{do: [convert", 3, "line 3 .* cannot be parsed"),
    "a tab": ("    target: $a", "\ttarget: $a", 6, "line 6 is indented by a tab"),
    "the command's own name": ("{do: convert, head", "{do: to-vllm, head", 3, "write do: convert, and to: vllm"),
    "a name that is a path": ("name: ", "name: ../", 1, "1 to 40 of a to z"),
    "a date that is none": ("data: texts.jsonl", "split: 2026-13-45", 8, "'2026-13-45' in line 8"),
    "a Python object": ("data: texts.jsonl", "split: !!python/name:os.system ''", 8, "line 8"),
    "options that do not go together": ("data: texts.jsonl", "data: x\n    states: y", 4, "either `data` or `states`"),
    "a key at the top": ("steps:", "step:", 2, "step is not a known key; did you mean steps"),
}
# Words of pydantic and PyYAML.
THEIRS = (
    "Input should",
    "Extra inputs",
    "Field required",
    "validation error",
    "pydantic",
    "expected",
    "found",
    "yaml.org",
)


@pytest.mark.parametrize("old, new, line, said", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_its_line_its_key_and_the_nearest_right_one(old, new, line, said):
    assert old in GOOD
    with pytest.raises(RecipeInvalid, match=said) as fault:
        parse_release(GOOD.replace(old, new, 1), where="release.yaml")
    assert fault.value.where == f"release.yaml:{line}"
    assert not [words for words in THEIRS if words in str(fault.value)]


def test_files_and_names_are_looked_for_before_anything_is_computed(tmp_path):
    values = {
        "name": "x",
        "steps": {
            "tiny": {"do": "tiny", "size": "test"},
            "head": {
                "do": "train", "target": "$tiny/target", "data": "$tiny/train.jsonl", "recipe": "eagle3-mla",
                "set": {"lrr": 1},
            },
            "vllm": {"do": "convert", "head": str(tmp_path / "no-head"), "to": "vllm"},
            "report": {"do": "validate", "head": "$vllm", "target": "$tiny/target", "prompts": "no-prompts.jsonl"},
        },
    }  # fmt: skip
    text = yaml.safe_dump(values, sort_keys=False)
    release = parse_release(text)
    with pytest.raises(RecipeInvalid, match=r"head\.set\.lrr: no recipe has a key 'lrr'") as fault:
        prepare(release, text, tmp_path / "out", Selection())
    assert not (tmp_path / "out").exists()
    assert "no-head" in fault.value.what and "no-prompts.jsonl" in fault.value.what and "line" in fault.value.where
    with pytest.raises(RecipeInvalid, match=r"vllm\.head: .*no-head does not exist"):
        prepare(release, text, tmp_path / "out", Selection(only="vllm"))


def test_keys_of_a_trainings_recipe_belong_under_set():
    step = {"do": "train", "target": "org/t", "data": "d.jsonl", "recipe": "eagle3-mla", "lr": 1.0, "batch_size": 2}
    with pytest.raises(RecipeInvalid, match=r"steps\.head\.lr is a key .* write lr, batch_size under set"):
        parse_release(yaml.safe_dump({"name": "x", "steps": {"head": step}}, sort_keys=False))


@pytest.mark.parametrize("target", ["$tiny/target", "TARGET"])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layers": 2, "captured": [1, 5]}, "captured is stated too"),
        ({"batch": 0}, "must be above 0"),
        # Of a target that is there, all of a recipe is checked.
        ({"layers": 2, "block": 1}, "drafts no token"),
    ],
)
def test_settings_that_contradict_each_other_are_found_before_anything_is_computed(
    tiny_target, tmp_path, target, keys, said
):
    steps = {
        "tiny": {"do": "tiny", "size": "test"},
        "drafter": {
            "do": "train", "target": target.replace("TARGET", str(tiny_target)), "data": "$tiny/train.jsonl",
            "recipe": "dflash", "set": {"mask": 511, **keys},
        },
    }  # fmt: skip
    text = yaml.safe_dump({"name": "x", "steps": steps}, sort_keys=False)
    if target.startswith("$") and "block" in keys:
        prepare(parse_release(text), text, tmp_path, Selection())
    else:
        with pytest.raises(RecipeInvalid, match=rf"drafter\.set\.\w+: .*{said}.*") as fault:
            prepare(parse_release(text), text, tmp_path, Selection())
        key = re.match(r"[\w.]+", fault.value.what)[0].split(".")[-1]
        line = next(number for number, line in enumerate(text.splitlines(), 1) if f"{key}:" in line)
        assert fault.value.where == f"line {line} of the recipe"


def test_what_is_no_path_is_the_same_wherever_a_recipe_is(tmp_path, monkeypatch):
    steps = {
        "tiny": {"do": "tiny", "size": "test"},
        "head": {
            "do": "train", "target": "org/target", "data": "org/data", "recipe": "eagle3-mla",
            "init_from": "/abs/head",
        },
        "vllm": {"do": "convert", "head": "$head", "to": "vllm", "target": "https://huggingface.co/org/target"},
        "report": {"do": "validate", "head": "$vllm", "target": "org/here", "prompts": f"mt-bench@{'a' * 40}"},
        "bench": {
            "do": "bench", "head": "$vllm", "target": "org/target", "suite": "mt-bench", "engine": "vllm",
            "engine_python": "env/bin/python",
        },
        "own": {"do": "states", "target": "org/target@refs/pr/1", "data": "texts.jsonl"},
        "nvfp4": {"do": "quantize", "target": "$tiny", "recipe": "own.yaml", "input_scale": "data-free"},
    }  # fmt: skip
    (tmp_path / "recipes" / "org" / "here").mkdir(parents=True)
    (tmp_path / "org" / "target").mkdir(parents=True)
    (tmp_path / "org" / "target@refs" / "pr" / "1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    file = Path("recipes/release.yaml")
    file.write_text(yaml.safe_dump({"name": "x", "steps": steps}, sort_keys=False))
    release, _ = read_release(file)
    found = {name: step.request for name, step in release.steps.items()}
    # A folder of that name where the command runs is not the recipe's.
    assert found["head"].target == "hf://org/target"
    assert hub_id_of(found["own"].target) == "org/target@refs/pr/1" and "://" in found["own"].target
    assert (found["head"].data, found["head"].recipe, found["head"].init_from) == (
        "org/data",
        "eagle3-mla",
        "/abs/head",
    )
    assert (found["vllm"].head, found["vllm"].target) == ("$head", "https://huggingface.co/org/target")
    assert (found["report"].target, found["report"].prompts) == ("recipes/org/here", f"mt-bench@{'a' * 40}")
    assert (found["bench"].suite, found["bench"].engine_python) == ("mt-bench", "./recipes/env/bin/python")
    assert (found["nvfp4"].recipe, found["nvfp4"].input_scale) == ("./recipes/own.yaml", "data-free")
    assert found["own"].data == "./recipes/texts.jsonl"
    # The record has the recipe's own words.
    assert release.steps["bench"].plain()["engine_python"] == "env/bin/python"
    assert release.steps["head"].plain()["target"] == "org/target"


def test_a_file_that_a_step_does_not_make_is_named():
    steps = {
        "a": {"do": "bench", "head": "o/h", "target": "o/t", "suite": "mt-bench"},
        "b": {"do": "card", "head": "x", "acceptance": ["$a/acceptence.json"]},
    }
    with pytest.raises(RecipeInvalid, match=r"a only makes \$a/acceptance\.json"):
        parse_release(yaml.safe_dump({"name": "x", "steps": steps}))
