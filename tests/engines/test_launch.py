"""Launch snippets: what they say is what the engine is to be told, in its own convention."""

import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from support.block_drafters import DFLASH, DSPARK
from support.commands import NAMES, ran
from support.heads import GQA, MLA

from kconv.engines.base import HEAD, TARGET, Deployment, Launch, needs_code
from kconv.engines.registry import launch_files
from kconv.errors import RequestInvalid


def told(script: str) -> dict[str, str]:
    """Return the options of the command that a launch script ends with."""
    words = shlex.split(script.splitlines()[-1])
    return {option: value for option, value in pairwise(words) if option.startswith("--")}


@pytest.mark.parametrize("spec", [MLA, replace(GQA, captured=(1, 29, 57))])
def test_tensorrt_llm_is_told_the_layer_outputs(spec):
    ((name, text),) = launch_files(spec, "trtllm").items()
    options = yaml.safe_load(text)["speculative_config"]
    assert name.endswith(".yaml") and name in text
    assert options["decoding_type"] == "Eagle3"
    assert options["eagle3_layers_to_capture"] == list(spec.captured)


def test_vllm_is_told_the_method_as_it_guesses_otherwise():
    ((_, text),) = launch_files(MLA, "vllm").items()
    assert "exec vllm serve " in text
    options = told(text)
    assert options["--speculative-config.method"] == "eagle3"
    assert int(options["--speculative-config.num_speculative_tokens"]) >= 1


def test_a_p_eagle_head_is_launched_with_the_flag_without_which_vllm_drafts_step_by_step():
    options = told(launch_files(replace(GQA, mask=3), "vllm")["serve-vllm.sh"])
    assert options["--speculative-config.method"] == "eagle3"
    assert options["--speculative-config.parallel_drafting"] == "true"
    assert "--speculative-config.parallel_drafting" not in told(launch_files(GQA, "vllm")["serve-vllm.sh"])


@pytest.mark.parametrize(
    ("spec", "method", "places"), [(DFLASH, "dflash", 3), (DSPARK, "dspark", 4)], ids=["DFlash", "DSpark"]
)
def test_a_block_drafter_is_launched_by_its_own_method_and_drafts_all_that_its_block_holds(spec, method, places):
    options = told(launch_files(spec, "dflash-vllm")["serve-vllm.sh"])
    assert options["--speculative-config.method"] == method
    assert options["--speculative-config.num_speculative_tokens"] == str(places)
    options = told(launch_files(spec, "dflash-sglang")["serve-sglang.sh"])
    assert options["--speculative-algorithm"] == method.upper()
    assert options["--speculative-num-draft-tokens"] == str(places + 1)
    config = yaml.safe_load(launch_files(spec, "dflash-trtllm")["serve-trtllm.yaml"])["speculative_config"]
    assert config == {
        "decoding_type": {"dflash": "DFlash", "dspark": "DSpark"}[method], "max_draft_len": places,
        "speculative_model": HEAD,
    }  # fmt: skip
    # Those are of a chain that is drafted step by step.
    assert not {"--speculative-num-steps", "--speculative-eagle-topk"} & set(options)


def test_tensorrt_llm_counts_drafts_once_the_two_lines_are_uncommented():
    ((_, text),) = launch_files(MLA, "trtllm").items()
    last = text.splitlines()[-2:]
    assert "return_perf_metrics" not in yaml.safe_load(text)
    on = yaml.safe_load("\n".join([*text.splitlines()[:-2], *(line.removeprefix("# ") for line in last)]))
    assert on["return_perf_metrics"] is on["enable_iter_perf_stats"] is True
    assert on["speculative_config"] == yaml.safe_load(text)["speculative_config"]


STARTS = {
    "serve-vllm.sh": ("vllm serve", "--speculative-config.model"),
    "serve-sglang.sh": ("python -m sglang.launch_server --model-path", "--speculative-draft-model-path"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_file_names_a_head_and_a_target_of_any_name(name, tmp_path):
    served = Deployment(name, name, own_code=True)
    files = launch_files(MLA, "portable", served)
    # A shell takes a newline from a path's end.
    (head := tmp_path / name.replace("/", "-").rstrip("\n")).mkdir()
    (head / "config.json").touch()
    for file, (start, option) in STARTS.items():
        (head / file).write_text(files[file])
        for given in ((), ("--port", name)):
            # The placeholder's own name is no target that is known.
            named = (name,) if name == TARGET else ()
            (call,) = ran(files[file], tmp_path, head / file, *named, *given)
            words = [*start.split(), name, "--trust-remote-code", option, str(head)]
            assert (call[: len(words)], tuple(call[len(call) - len(given) :])) == (words, given)
    text = files["serve-trtllm.yaml"]
    assert yaml.safe_load(text)["speculative_config"]["speculative_model"] == name
    # Its command is a comment, of as many lines as the name has.
    lines = text.splitlines()[: 1 + name.count("\n")]
    shown = "\n".join(line.removeprefix("# ") for line in lines)
    assert ran(shown, tmp_path) == [
        ["trtllm-serve", name, "--backend", "pytorch", "--trust_remote_code", "--config", "serve-trtllm.yaml"]
    ]


@pytest.mark.parametrize("file", STARTS)
def test_a_launch_file_takes_the_target_and_further_options_as_arguments(file, tmp_path):
    (tmp_path / "config.json").touch()
    script = launch_files(MLA, "portable")[file]
    (call,) = ran(script, tmp_path, tmp_path / file, "my target", "--port", "9000")
    assert "my target" in call and call[-2:] == ["--port", "9000"] and TARGET not in call
    known = launch_files(MLA, "portable", Deployment("org/target"))[file]
    for given, target in (((), "org/target"), (("--port", "9000"), "org/target"), (("another",), "another")):
        (call,) = ran(known, tmp_path, tmp_path / file, *given)
        assert target in call and ("another" in call) == ("another" in given)
    # Nor without a head: a link to the file, or a shell that reads it, is not in its folder.
    (elsewhere := tmp_path / "elsewhere").mkdir()
    lost = subprocess.run(["sh", "-c", script, str(elsewhere / file), "my target"], capture_output=True, text=True)
    assert lost.returncode == 2 and lost.stderr == f"{elsewhere / file} is not in a head's folder: " + (
        "call the file there, by its path\n"
    )
    # Without a target nothing is started.
    for given in ((), ("--port", "9000"), ("",)):
        done = subprocess.run(["sh", "-c", script, file, *given], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (
            2, f"usage: sh {file} TARGET [OPTIONS]; TARGET is a folder or an id on the Hub\n",
        )  # fmt: skip


COMMIT = "a" * 40


@pytest.mark.parametrize("file", STARTS)
def test_a_launch_file_serves_the_revision_that_a_target_is_pinned_to(file, tmp_path):
    (tmp_path / "config.json").touch()
    script = launch_files(MLA, "portable", Deployment("org/target", revision=COMMIT))[file]
    for given, target, pin in (
        ((), "org/target", ["--revision", COMMIT]),
        # The user's own options stand behind it, so that they decide.
        (("--revision", "mine"), "org/target", ["--revision", COMMIT, "--revision", "mine"]),
        (("org/target@v1",), "org/target", ["--revision", "v1"]),
        (("org/target@refs/pr/1",), "org/target", ["--revision", "refs/pr/1"]),
        (("org/target",), "org/target", []),
        (("./org/target@v1",), "./org/target@v1", []),
    ):
        (call,) = ran(script, tmp_path, tmp_path / file, *given)
        assert target in call and call[len(call) - len(pin) :] == pin
        assert call.count("--revision") == pin.count("--revision")


def test_a_folder_that_is_named_like_a_revision_is_that_folder(tmp_path):
    script = launch_files(MLA, "vllm")["serve-vllm.sh"].replace("exec vllm", "exec echo vllm")
    (tmp_path / "config.json").touch()
    (tmp_path / "serve-vllm.sh").write_text(script)
    (tmp_path / "org" / "here@v1").mkdir(parents=True)
    for name, said in (("org/here@v1", "vllm serve org/here@v1 "), ("org/gone@v1", "vllm serve org/gone ")):
        done = subprocess.run(["sh", "serve-vllm.sh", name], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.startswith(said)


def test_tensorrt_llm_serves_a_pinned_target_from_the_folder_that_its_revision_is_downloaded_to(tmp_path):
    text = launch_files(MLA, "trtllm", Deployment("org/target", revision=COMMIT))["serve-trtllm.yaml"]
    download, start = ran(text.splitlines()[0].removeprefix("# "), tmp_path)
    assert download == ["hf", "download", "org/target", "--revision", COMMIT]
    assert start[0] == "trtllm-serve" and "org/target" not in start and start[2:4] == ["--backend", "pytorch"]


def test_an_engine_that_takes_no_revision_says_so(tmp_path):
    (tmp_path / "config.json").touch()
    launch = Launch(lambda served: ["vllm", served.target], "serve-other.sh")
    pinned = Deployment("org/target", revision=COMMIT)
    with pytest.raises(RequestInvalid, match="takes no revision of org/target") as error:
        launch.command(pinned)
    assert f"hf download org/target --revision {COMMIT}" in error.value.fix
    (tmp_path / launch.file).write_text(launch.text(MLA, pinned))
    done = subprocess.run(["sh", tmp_path / launch.file], capture_output=True, text=True)
    assert done.returncode == 2 and "takes no revision" in done.stderr and f"org/target@{COMMIT}" in done.stderr
    assert launch.command(Deployment("org/target")) == ["vllm", "org/target"]


CODE = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}


@pytest.mark.parametrize(
    ("target", "head", "name", "needs"),
    [
        (CODE, {"model_type": "llama"}, "", True),
        ({"model_type": "llama"}, {"model_type": "kimi_k2"}, "", False),
        ({"model_type": "llama"}, {"model_type": "llama"}, "moonshotai/Kimi-K2.6", False),
        (None, {"model_type": "kimi_k2"}, "", True),
        (None, {"model_type": "llama"}, "", False),
        (None, {"model_type": "llama"}, "moonshotai/Kimi-K2.6", True),
        (None, {"model_type": "llama"}, "kimi-k2/Llama-3.1-8B", False),
        (None, {"model_type": ["kimi_k2"]}, "", False),
    ],
)
def test_only_a_target_with_code_of_its_own_is_trusted(target, head, name, needs):
    assert needs_code(target, head, name) == needs
    text = launch_files(MLA, "portable", Deployment(own_code=needs))
    assert ["--trust-remote-code" in text[name] for name in ("serve-vllm.sh", "serve-sglang.sh")] == [needs] * 2
    assert ("--trust_remote_code" in text["serve-trtllm.yaml"]) == needs
