"""Loaded by vLLM itself: its hidden-state connector for a machine without CUDA, whose streams it wants.

What is written, where and under which lock stays vLLM's own.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # pyright: ignore[reportMissingImports]
    example_hidden_states_connector as original,
)


class Copied:
    """Stands for a CUDA event behind a copy that is done."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(original.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending) -> None:
        blocks = torch.tensor(pending.block_ids)
        slots = (torch.arange(self._block_size) + blocks[:, None] * self._block_size).flatten()
        states = original.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        os.close(lock)
        self._req_copy_events[pending.req_id] = Copied()
