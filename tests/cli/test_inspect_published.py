"""`inspect` on the published forms of draft heads: each is shown, and what it leaves open is decided by word."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support.published import EAGLE3, OTHERS, Form

from kconv.cli import main
from kconv.drafters.facts import stored_layers
from kconv.engines import BY_NAME
from kconv.options import flag

KNOWN = {name: form for name, form in EAGLE3.items() if form.layout}
DECIDABLE = {name: form for name, form in KNOWN.items() if not form.refused}


def kconv(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def inspect(head, *options):
    shown = kconv("inspect", head, "--json", *options)
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.stderr
    return json.loads(shown.stdout)


def said(form: Form) -> list[object]:
    return [part for name, value in form.options.items() for part in (flag(name), value)]


def test_there_are_as_many_forms_as_promised():
    assert len(EAGLE3) >= 36 and len(OTHERS) >= 7
    assert all(form.source.startswith("https://") for form in (EAGLE3 | OTHERS).values())


@pytest.mark.parametrize("form", (EAGLE3 | OTHERS).values(), ids=EAGLE3 | OTHERS)
def test_every_form_is_shown(form, tmp_path):
    head = form.write(tmp_path / "head")
    found = inspect(head)
    assert found["kind"] == ("Eagle3 head" if form.kind == "eagle3" else form.kind)
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in found["tensors"]} == form.tensors
    shown = kconv("inspect", head)
    assert shown.exit_code == 0 and found["kind"] in shown.stdout


@pytest.mark.parametrize("form", KNOWN.values(), ids=KNOWN)
def test_what_a_head_leaves_open_stands_there_with_what_would_decide_it(form, tmp_path):
    head = form.write(tmp_path / "head")
    found, shown = inspect(head), kconv("inspect", head).stdout
    assert found["layout"] == form.layout
    assert {one["fact"] for one in found["undecided"]} == set(form.leaves_open)
    assert all(one["candidates"] and one["decide"] for one in found["undecided"])
    assert shown.count("UNDECIDED") == len(form.leaves_open)
    assert found["convertible"] is (not form.leaves_open and not form.refused)
    if "captured" in form.leaves_open and found["spec"]:
        assert found["spec"]["captured"] is None
    if "mask_token_id" in form.leaves_open and found["spec"]:
        assert found["spec"]["mask"] is None
    assert form.refused in " ".join(problem["what"] for problem in found["problems"])
    # Kimi's own layers are no other target's: no ids that do not follow from the head's own list.
    assert "1,29,57" not in shown


@pytest.mark.parametrize("form", DECIDABLE.values(), ids=DECIDABLE)
def test_what_is_left_open_is_decided_by_the_options_that_the_form_names(form, tmp_path):
    head = form.write(tmp_path / "head")
    found = inspect(head, *said(form))
    assert found["undecided"] == [] and found["convertible"]
    assert found["spec"]["layers"] == stored_layers(form.tensors)
    by_word = {one["fact"] for one in found["unverified"]}
    assert by_word >= set(form.leaves_open) - {"num_hidden_layers"}


@pytest.mark.parametrize("form", DECIDABLE.values(), ids=DECIDABLE)
def test_a_decided_head_is_converted_and_its_manifest_says_what_rests_on_a_word(form, tmp_path):
    head = form.write(tmp_path / "head")
    written = kconv("to-vllm", head, tmp_path / "out", *said(form))
    assert written.exit_code == 0, written.stderr
    manifest = json.loads((tmp_path / "out" / "kconv.json").read_text())
    assert {one["fact"] for one in manifest["unverified"]} >= set(form.leaves_open) - {"num_hidden_layers"}
    assert ("not verified" in written.stdout) is bool(manifest["unverified"])


@pytest.mark.parametrize("name", ["SafeAILab, Llama-3.1", "NVIDIA, gpt-oss-120b with an empty list"])
def test_the_targets_config_alone_decides_the_default(name, tmp_path):
    form = EAGLE3[name]
    head, target = form.write(tmp_path / "head"), form.write_target(tmp_path / "target")
    layers = form.target_layers
    found = inspect(head, "--target", target)
    assert found["spec"]["captured"] == [1, layers // 2 - 1, layers - 4] and found["undecided"] == []
    assert found == inspect(head, "--target-layers", layers)
    assert kconv("inspect", head, "--target", target, "--target-layers", layers).exit_code == 2


def test_the_targets_that_a_heads_files_name_are_offered(tmp_path):
    speculator = EAGLE3["RedHatAI speculators, Llama-3.1"].write(tmp_path / "speculator")
    assert "--target meta-llama/Llama-3.1-8B-Instruct" in kconv("inspect", speculator).stdout
    kimi = EAGLE3["k-l-lambda, Kimi-K2.7-Code MLA [2, 30, 58]"].write(tmp_path / "kimi")
    assert inspect(kimi)["targets"] == ["moonshotai/Kimi-K2.7-Code"]
    for text in ("base_model: $(rm -rf /)", "base_model: [org/a, '; ls', 7]", "base_model: [[[", "no matter"):
        (kimi / "README.md").write_text(f"---\n{text}\n---\n")
        assert inspect(kimi)["targets"] in ([], ["org/a"])


def test_a_stated_base_is_not_overruled(tmp_path):
    head = EAGLE3["SpecForge, Qwen3-32B"].write(tmp_path / "head")
    refused = kconv("to-vllm", head, tmp_path / "out", "--target-layers", 64, "--rope-theta", 10000)
    assert refused.exit_code == 1 and "1000000" in refused.stderr and not (tmp_path / "out").exists()


def test_a_number_of_layers_that_is_not_stored_is_refused(tmp_path):
    head = EAGLE3["SpecForge, Qwen3-8B with the target's depth"].write(tmp_path / "head")
    refused = kconv("to-vllm", head, tmp_path / "out", "--target-layers", 36, "--layers", 2)
    assert refused.exit_code == 1 and "the file stores 1 decoder layer" in refused.stderr


@pytest.mark.parametrize("engine", ["sglang", "all"])
def test_no_limit_of_layer_0_is_held_against_a_head_whose_layers_are_open(engine, tmp_path):
    head = EAGLE3["SpecForge, Qwen3-32B"].write(tmp_path / "head")
    report = json.loads(kconv("validate", head, "--for", engine, "--headers-only", "--json").stdout)
    assert "K330" not in {finding["rule"] for finding in report["findings"]}


def test_several_engines_are_all_checked(tmp_path):
    head = EAGLE3["TorchSpec, Kimi-K2.5 MLA [1, 29, 57]"].write(tmp_path / "head")
    both = kconv("validate", head, "--for", "vllm", "--for", "sglang", "--headers-only", "--json")
    assert json.loads(both.stdout)["provenance"]["for"] == ["vllm-v1", "vllm-v2", "sglang"]
    assert kconv("validate", head, "--for", "vllm", "--for", "vlm").exit_code == 2


def test_a_word_against_the_producers_marks_is_a_loud_warning(tmp_path):
    head = EAGLE3["NVIDIA, Kimi-K2 MLA"].write(tmp_path / "head")
    written = kconv("to-vllm", head, tmp_path / "out", "--captured-are", "inputs")
    assert written.exit_code == 0 and "WARNING" in written.stdout and "[1, 29, 57]" in written.stdout
    (unverified,) = json.loads((tmp_path / "out" / "kconv.json").read_text())["unverified"]
    assert unverified["value"] == [0, 28, 56] and "[1, 29, 57]" in unverified["against"]
    right = kconv("to-vllm", head, tmp_path / "right", "--captured-are", "outputs")
    assert right.exit_code == 0 and "WARNING" not in right.stdout and "not verified" not in right.stdout


@pytest.mark.parametrize("files, said", [({"model.gguf": b"GGUF"}, "GGUF"), ({"adapter_config.json": b"{}"}, "LoRA")])
def test_what_is_no_checkpoint_is_named(files, said, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refused = kconv("inspect", tmp_path)
    assert refused.exit_code == 1 and said in refused.stderr


def test_every_layout_of_the_table_is_one_of_kconvs():
    assert {form.layout for form in KNOWN.values()} <= BY_NAME.keys()
