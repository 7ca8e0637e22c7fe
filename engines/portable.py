"""One folder for TensorRT-LLM, vLLM and SGLang at once.

Each engine looks for the captured layers in a different place: vLLM in the top-level list, SGLang in eagle_config,
TensorRT-LLM in its serving YAML. The norm of later layers is stored under both of its names; each engine loads its
own name and ignores the other.
"""

from __future__ import annotations

from typing import Any

from ..drafters.eagle3 import EAGLE3
from ..drafters.keys import CONVENTION, TOP
from ..drafters.spec import HeadSpec
from . import sglang, trtllm, vllm
from .common import HIDDEN, INPUT, eagle_config, head_rows
from .config import identity, write_keys
from .layout import Layout, TargetFacts


def _write(spec: HeadSpec, target: TargetFacts | None = None) -> dict[str, Any]:
    config = identity(spec) | write_keys(spec) | vllm.captured_keys(spec)
    config["eagle_config"] |= trtllm.FLAGS | sglang.captured_keys(spec, target)
    return config


PORTABLE = Layout(
    name="portable",
    drafter=EAGLE3,
    engine="TensorRT-LLM, vLLM and SGLang from one folder",
    rows=head_rows("layers.{i}", later=(INPUT, HIDDEN)),
    told_by=lambda config, names: TOP in config and CONVENTION in eagle_config(config),
    write_config=_write,
    write_beside=_write,
    needs=sglang.LM_HEAD,
    replaces={**trtllm.TRTLLM.replaces, **sglang.SGLANG.replaces},
    target_limits=sglang.TARGET_LIMITS,
    limits=tuple(dict.fromkeys(trtllm.TRTLLM.limits + vllm.VLLM.limits + sglang.SGLANG.limits)),
    written_for=("trtllm", "vllm", "sglang"),
)
