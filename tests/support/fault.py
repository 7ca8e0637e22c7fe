"""What a corruption of a good head is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.source import Folder
from kconv.drafters.spec import HeadSpec, Rope, Yarn
from kconv.validate.options import ValidateOptions
from kconv.validate.report import Report
from kconv.validate.run import validate

from .changes import Change, Config
from .good_heads import LATENT_QUANTIZABLE, QUANTIZABLE, SGLANG, TRTLLM, VLLM, Good, trained_slots
from .heads import GQA, MLA, PORTABLE, TARGET, YARN


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

    @property
    def told(self) -> Hints:
        """What the user says of the head, with its target's depth."""
        layers = self.target["num_hidden_layers"] if self.target else None
        return self.hints.model_copy(update={"target_layers": layers})

    def validate(self, folder: Path) -> Report:
        """Check the head that is written into a folder, for whom and for which target it is said to be."""
        target = None
        if self.target or self.lent:
            target = write_target(folder.with_name("target"), self.target or TARGET, self.lent, self.base.spec)
        options = ValidateOptions(for_=self.engines or self.base.engines)
        return validate(Folder(folder), options, hints=self.told, target=target, say=lambda _: None)

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


def write_target(folder: Path, config: Config, slots: tuple[str, ...] = (), spec: HeadSpec = GQA) -> Folder:
    """Write a target: its config, and tensors of its own for these slots of a head."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    own = trained_slots(spec, seed=5)
    names = {"lm_head": "lm_head.weight", "embed_tokens": "model.embed_tokens.weight"}
    save_file({names[slot]: own[slot] for slot in slots}, folder / "model.safetensors")
    return Folder(folder)


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
