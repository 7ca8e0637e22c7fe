"""Servers that forge acceptance: they accept a fixed number of drafts whatever the target says, to measure speed only.

vLLM calls it synthetic rejection sampling (https://github.com/vllm-project/vllm/pull/40662), SGLang
SGLANG_SIMULATE_ACC_LEN, TensorRT-LLM TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS
(https://github.com/NVIDIA/TensorRT-LLM/blob/2cbdaa0ffa36fbef7960a0ad9f0458373025fa9f/tensorrt_llm/_torch/speculative/interface.py#L1065-L1078).
All three always accept the whole part of the length, and one token more with the probability of the remainder. So the
counts reveal a setting that the server does not show: every position but one is accepted always or never.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..engines.counters import Counts
from ..errors import AcceptanceForged
from ..serving.client import Client

# Where servers show their settings: SGLang always, vLLM with VLLM_SERVER_DEV_MODE.
# https://github.com/vllm-project/vllm/blob/09cb327f1183534adbdf9eee3e438688e75fbe2b/vllm/entrypoints/serve/instrumentator/server_info.py
SETTINGS = ("/server_info?config_format=json", "/server_info")
# A setting and its value, in JSON and in Python's notation for a config.
_VALUE = r"""["']?\s*[:=]\s*["']?(?P<value>[^\s"',}\])]+)"""
FORGING = {
    "rejection_sample_method": ("synthetic",),
    "synthetic_acceptance_length": (),
    "synthetic_acceptance_rates": (),
    "SGLANG_SIMULATE_ACC_LEN": (),
    "simulate_acc_len": (),
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": (),
}
# Values that turn these settings off.
OFF = {"null", "None", "false", "False", "0", "0.0", "-1", "-1.0", ""}
# Accepts close matches, so the answers are not the target's own.
LOSSY = {"fly"}
# So few drafts may all be alike by chance.
FEWEST = 64
FIX = "To measure acceptance, start the server without that setting; it is only for measuring speed."


def check_settings(server: Client) -> dict[str, str]:
    """Refuse a server whose settings show that it forges acceptance.

    Returns:
        The sampling methods that it shows, under the names of `AcceptanceRow`.

    Raises:
        AcceptanceForged: its settings say so.
    """
    found: dict[str, str] = {}
    for page in dict.fromkeys(server.page(path) for path in SETTINGS):
        for name, values in FORGING.items():
            for shown in re.finditer(name + _VALUE, page):
                value = shown["value"]
                if value in values or (not values and value not in OFF):
                    raise AcceptanceForged(
                        f"the server forges its acceptance: {name} is {value}", where=server.url, fix=FIX
                    )
        for name in ("draft_sample_method", "rejection_sample_method"):
            if shown := re.search(name + _VALUE, page):
                found[name] = shown["value"]
    return found


def check_counts(groups: Sequence[Counts], draft_tokens: int, requests: int, where: str) -> None:
    """Refuse counts that no real drafting gives but a fixed acceptance length does.

    Accepting nothing and accepting everything are tolerated: a broken head does the former, and a target that repeats
    itself the latter.

    Args:
        groups: of prompts.
        draft_tokens: K.
        requests: the number answered; the last draft of each may be cut off.
        where: the server.

    Raises:
        AcceptanceForged: the counts are of this kind.
    """
    drafts, accepted = sum(group.drafts for group in groups), sum(group.accepted for group in groups)
    if drafts < FEWEST:
        return
    length = 1 + accepted / drafts
    if all(group.per_position is not None for group in groups):
        places = [sum(group.per_position[at] for group in groups if group.per_position) for at in range(draft_tokens)]
        never = sum(count == 0 for count in places)
        # If a position is never reached, an answer's end may have cut some of the drafts before it.
        always = sum(count >= drafts - (requests if never else 0) for count in places)
        forged = 0 < always < draft_tokens and always + never >= draft_tokens - 1
    else:
        lengths = {group.accepted / group.drafts for group in groups if group.drafts}
        forged = len(groups) >= 8 and len(lengths) == 1 and 0 < min(lengths) < draft_tokens
    if forged:
        raise AcceptanceForged(
            f"the server's acceptance length of {length:.3f} is a fixed one: in {drafts:.0f} drafts every position but "
            "at most one was accepted always or never",
            where=where,
            fix=FIX,
        )
