"""Heads of Kimi-K2's real size, read by their headers alone: their parameters are the published counts."""

import json

import pytest
from click.testing import CliRunner
from support.heads import KIMI_MHA, KIMI_MLA, MODELOPT_KIMIK2, TORCHSPEC_MHA, TORCHSPEC_MLA, write_sparse

from kconv.cli import main
from kconv.engines import BY_NAME

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# NVIDIA's MLA head has its lm_head, lightseek's its embedding too; the MHA head is one of TorchSpec's config.
HEADS = {
    "NVIDIA's": ("modelopt", KIMI_MLA, MODELOPT_KIMIK2, (EMBED,), 16, 1_841_199_104, []),
    "lightseek's MLA": ("torchspec", KIMI_MLA, TORCHSPEC_MLA, (), 17, 3_015_604_224, []),
    "TorchSpec's MHA": ("torchspec", KIMI_MHA, TORCHSPEC_MHA, (), 14, 3_178_262_528, ["--captured", "1,29,57"]),
    "NVIDIA's older, without lm_head": ("modelopt", KIMI_MLA, MODELOPT_KIMIK2, (EMBED, LM_HEAD), 15, 666_793_984, []),
}


def kconv(*arguments):
    ended = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize("layout, spec, config, without, tensors, parameters, told", HEADS.values(), ids=HEADS)
def test_a_head_of_published_size(tmp_path, layout, spec, config, without, tensors, parameters, told):
    size = write_sparse(tmp_path / "head", BY_NAME[layout], spec, config, without)
    assert size == 2 * parameters, "in bf16"
    assert (tmp_path / "head" / "model.safetensors").stat().st_blocks * 512 < 100_000, "there is nothing but a header"
    shown = json.loads(kconv("inspect", tmp_path / "head", "--json", *told))
    assert (shown["parameters"], len(shown["tensors"]), shown["layout"]) == (parameters, tensors, layout)
    assert f"{tensors} tensors, {parameters:,} parameters, BF16" in kconv("inspect", tmp_path / "head", *told)
    for out in ("vllm", "trtllm"):
        planned = json.loads(kconv(f"to-{out}", tmp_path / "head", tmp_path / "out", "--dry-run", "--json", *told))
        assert len(planned["steps"]) == tensors and planned["dropped"] == {}
