"""`kconv vocab`: a report with its exit code, and one change at a time."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.heads import MLA, random_slots, write_head

from kconv.cli import main
from kconv.engines import BY_NAME

TEXT = "Return the sum of a and b.\n\nRaise ValueError if either of them is negative, or no number at all.\n"


def kconv(*args, code=0):
    result = CliRunner().invoke(main, ["vocab", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.stdout if code != 2 else result.output


@pytest.fixture(scope="module")
def full(tiny_target, tmp_path_factory):
    """Return a full-vocabulary head for the tiny target, whose rows are the target's, as a trainer freezes them."""
    rows = load_file(tiny_target / "model.safetensors")["lm_head.weight"].bfloat16()
    vocab, hidden = rows.shape
    spec = replace(MLA, hidden=hidden, target_hidden=hidden, vocab=vocab, draft_vocab=vocab, captured=(1, 2, 3))
    return write_head(
        tmp_path_factory.mktemp("full") / "head", BY_NAME["vllm"], spec, random_slots(spec) | {"lm_head": rows}
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def pruned(full, tiny_target, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "out"
    printed = kconv(full, "--prune", 300, "--text", text, "--target", tiny_target, out)
    return out, printed


def test_a_pruned_head_is_sound_and_covers_the_text_it_was_cut_by(pruned, tiny_target, text):
    out, printed = pruned
    assert "lm_head.weight pruned: the rows of 300 target ids" in printed and "100.00% of its" in printed
    report = json.loads(kconv(out, "--target", tiny_target, "--text", text, "--json"))
    assert (report["kind"], report["order"], report["t2d"], report["faults"]) == ("offsets", "ascending", "agrees", [])
    assert report["copies"] == {"rows": 300, "by_offset": 300, "by_id": report["copies"]["by_id"]}
    assert report["coverage"]["share"] == 1.0
    assert (len(report["kept"]), report["lost"]) == (3, [])


def test_the_report_reads_the_same_in_words(pruned, tiny_target, text):
    printed = kconv(pruned[0], "--target", tiny_target, "--text", text)
    for line in (
        "offsets, ascending",
        "300 of 512",
        "300 of 300 rows equal the target's",
        "3 kept, 0 lost",
        "100.00% of",
    ):
        assert line in printed


def test_an_expanded_head_is_full(pruned, tmp_path):
    manifest = json.loads(kconv(pruned[0], "--expand", tmp_path / "out", "--json"))
    assert not manifest["exact"]
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    assert "full vocabulary, no map" in kconv(tmp_path / "out")


def test_absolute_ids_fail_the_report_and_are_mended(pruned, tiny_target, tmp_path):
    broken, mended = tmp_path / "broken", tmp_path / "mended"
    tensors = load_file(pruned[0] / "model.safetensors")
    offsets = tensors["d2t"]
    write_broken(pruned[0], broken, d2t=offsets + torch.arange(300))
    printed = kconv(broken, "--target", tiny_target, code=1)
    assert "absolute ids" in printed and "fix:" in printed
    kconv(broken, "--absolute", mended, "--target", tiny_target)
    assert torch.equal(load_file(mended / "model.safetensors")["d2t"], offsets)
    assert kconv(mended, "--target", tiny_target)


def test_a_wrong_t2d_fails_the_report_and_is_rebuilt(pruned, tmp_path):
    broken, mended = tmp_path / "broken", tmp_path / "mended"
    t2d = load_file(pruned[0] / "model.safetensors")["t2d"]
    write_broken(pruned[0], broken, t2d=~t2d)
    assert "disagrees on 512 tokens" in kconv(broken, code=1)
    assert "byte-identical to the source" in kconv(broken, "--rebuild-t2d", mended)
    assert torch.equal(load_file(mended / "model.safetensors")["t2d"], t2d)


def write_broken(source, folder, **changes):
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(load_file(source / "model.safetensors") | changes, folder / "model.safetensors")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--expand", "--absolute", "out"], "one change at a time"),
        (["--expand", "--prune", "9", "out"], "one change at a time"),
        (["--expand"], "--expand needs OUT"),
        (["out"], "OUT also needs one of --rebuild-t2d, --absolute, --expand, --prune"),
        (["--prune", "9", "out"], "--prune needs --text, to count tokens, and --target"),
        (["--prune", "9", "--text", "t.txt", "out"], "--text needs --target"),
        (["--text", "t.txt"], "--text needs --target"),
        (["--text", "t.txt", "--target", "t", "--expand", "out"], "--text has no effect on --expand"),
        (["--prune", "0", "out"], "--prune"),
    ],
)
def test_contradictory_options_are_usage_errors(args, message):
    assert message in kconv("head", *args, code=2)


def test_an_output_that_is_there_is_refused_before_anything_is_read(tmp_path):
    result = CliRunner().invoke(main, ["vocab", "no-such-head", "--expand", str(tmp_path)])
    assert result.exit_code == 1
    assert "already exists" in result.stderr


def test_a_target_is_called_one(tiny_target):
    shown = CliRunner().invoke(main, ["vocab", str(tiny_target)])
    assert shown.exit_code == 1 and "a whole model, not a draft head" in shown.stderr
    assert f"{tiny_target}/config.json" in shown.stderr


def test_a_fault_writes_nothing(full, tmp_path):
    assert "already" in CliRunner().invoke(main, ["vocab", str(full), "--expand", str(tmp_path / "out")]).stderr
    assert not (tmp_path / "out").exists()
