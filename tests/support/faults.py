"""Good heads with one thing wrong each, and the rule that each was made for."""

from __future__ import annotations

from .faults_of_configs import OF_CONFIGS
from .faults_of_tensors import OF_TENSORS

FAULTS = (*OF_CONFIGS, *OF_TENSORS)
