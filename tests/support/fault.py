"""What a corruption of a good head is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.source import Folder
from kconv.convert.shared import SharedTensors
from kconv.drafters.spec import HeadSpec, Rope, Yarn
from kconv.targets.config import parse_target_config
from kconv.validate.run import Checks

from .changes import Change, Config
from .good_heads import LATENT_QUANTIZABLE, QUANTIZABLE, SGLANG, TRTLLM, VLLM, Good, trained_slots
from .heads import GQA, MLA, PORTABLE, YARN


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a good head.

    Attributes:
        name: what was done to it.
        rule: the rule that must find it.
        base: the good head.
        change: does it, to the config and the tensors in place.
        engines: whom the head is checked for; the base's own if empty.
        target: the config of the target that the head is said to be for.
        raw: does it to the folder instead, where config and tensors cannot say it.
        lent: slots whose tensor of the target is at hand, another than the head's own.
        hints: what the user says of it.
    """

    name: str
    rule: str
    base: Good
    change: Change = lambda config, tensors: None
    engines: tuple[str, ...] = ()
    target: Config | None = None
    raw: Callable[[Path], None] | None = None
    lent: tuple[str, ...] = ()
    hints: Hints = field(default_factory=Hints)

    def wish(self, folder: Path) -> Checks:
        """Return for whom, and for which target, the head that is written into a folder is checked."""
        target = parse_target_config(self.target) if self.target else None
        layers = target.layers if target else None
        lent = partial(lend, folder.with_name("target"), self.lent, self.base.spec) if self.lent else None
        return Checks(
            self.engines or self.base.engines,
            hints=self.hints.model_copy(update={"target_layers": layers}),
            target=target,
            lent=lent,
        )

    def write(self, folder: Path) -> Path:
        """Write the head with its fault into a folder."""
        self.base.write(folder)
        if self.raw:
            self.raw(folder)
            return folder
        file, config_file = folder / "model.safetensors", folder / "config.json"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        config = json.loads(config_file.read_text())
        self.change(config, tensors)
        save_file(tensors, file)
        config_file.write_text(json.dumps(config))
        return folder


def lend(folder: Path, slots: tuple[str, ...], spec: HeadSpec, asked: Iterable[str]) -> SharedTensors:
    """Write a target's own tensors for these slots, and return what is asked for of them."""
    folder.mkdir(exist_ok=True)
    own = trained_slots(spec, seed=5)
    save_file({slot: own[slot] for slot in slots}, folder / "model.safetensors")
    return SharedTensors("org/target", Folder(folder).open_tensors(asked), is_folder=True)


def good(layout: str, spec=MLA, engines: tuple[str, ...] = VLLM, nvfp4: bool = False) -> Good:
    """Return a good head of a layout, for these engines."""
    return Good(layout, layout, spec, engines, nvfp4)


REDUCED_SPEC = PORTABLE["gqa, reduced vocabulary"]
MLA_VLLM, GQA_VLLM = good("vllm"), good("vllm", GQA)
REDUCED = good("vllm", REDUCED_SPEC)
MLA_SGLANG, GQA_SGLANG = good("sglang", MLA, (SGLANG,)), good("sglang", GQA, (SGLANG,))
MLA_TRT, GQA_TRT = good("trtllm", MLA, (TRTLLM,)), good("trtllm", GQA, (TRTLLM,))
MODELOPT_MLA = good("modelopt", MLA, (TRTLLM,))
MODELOPT_GQA = good("modelopt", GQA, (TRTLLM,))
SPECULATORS = good("speculators", GQA)
TORCHSPEC = good("torchspec", GQA, (SGLANG, TRTLLM))
TWO_LAYERS = good("vllm", replace(GQA, layers=2))
BIASED = good("vllm", PORTABLE["gqa, attention biases"])
STATE_NORMS = good("vllm", PORTABLE["gqa, a norm per state"])
ONE_NORM = good("vllm", PORTABLE["gqa, one norm before fc"])
OTHER_WIDTH = good("vllm", PORTABLE["gqa, a target of another width"])
FOUR_STATES = good("vllm", PORTABLE["mla, four states"])
YARN_GQA = good("vllm", PORTABLE["gqa, YaRN"])
SHORT_YARN = good("vllm", replace(GQA, rope=Rope(1e4, Yarn(8.0, 64)), max_positions=512))
NVFP4 = good("vllm", QUANTIZABLE, nvfp4=True)
NVFP4_MLA = good("vllm", LATENT_QUANTIZABLE, nvfp4=True)


FACTOR = replace(GQA, rope=Rope(5e4, replace(YARN, mscale=None, mscale_all_dim=None, attention_factor=1.5)))
