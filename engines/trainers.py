"""Heads as their trainers save them, of one decoder layer called `midlayer`.

They differ in marks and in what one config key means, not in names.
"""

from __future__ import annotations

from .keys import ConfigTable
from .layout import Layout
from .marks import has_midlayer, has_vocabulary, is_called
from .rows import MIDLAYER, OUTSIDE

ROWS = OUTSIDE + MIDLAYER

# The trainer turns by base 10000, and its own config has no rope_theta:
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/traineagle3/cnets.py#L207-L209
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/traineagle3/config.json
SAFEAILAB = Layout(
    name="safeailab",
    engine="SafeAILab's EAGLE-3",
    rows=ROWS,
    told_by=lambda config, names: (
        has_midlayer(names) and has_vocabulary(names) and is_called(config, "LlamaForCausalLM")
    ),
    config=ConfigTable(trained_theta=10000.0),
)

# `norm_output` is here whether the final norm stands before lm_head, and true where it is not stated; what the next
# draft step is fed does not depend on it.
# https://github.com/sgl-project/SpecForge/blob/a6b6b0230009d15ec2a97a57384e6f53f0f96946/specforge/modeling/draft/llama3_eagle.py#L1690
SPECFORGE = Layout(
    name="specforge",
    engine="SpecForge",
    rows=ROWS,
    told_by=lambda config, names: has_midlayer(names) and has_vocabulary(names) and not config.get("kv_lora_rank"),
    config=ConfigTable(otherwise={"norm_output": (True, None)}),
)

# TorchSpec has no `norm_output`; its MLA heads came to have EAGLE-3.1's. A GQA head that states the key and bears no
# mark of SpecForge could mean either, and is no layout's before its user says which.
TORCHSPEC = Layout(
    name="torchspec",
    engine="TorchSpec",
    rows=ROWS,
    told_by=lambda config, names: (
        has_midlayer(names) and (bool(config.get("kv_lora_rank")) or "norm_output" not in config)
    ),
)
