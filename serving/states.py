"""A target in a vLLM server that returns its hidden states.

vLLM 0.32's method extract_hidden_states with its ExampleHiddenStatesConnector writes one file per request: the streams
that *enter* the layers it was started with, `[T, layers, H]`. The completion names the file's path
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).
The output of layer i is the input of layer i + 1; the input of the layer after the last is the state before the
final norm, which is applied here.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..checkpoint.header import read_header
from ..checkpoint.posix import NONBLOCKING
from ..checkpoint.posix import lock as take
from ..checkpoint.tensors import NAMES, read_tensor
from ..drafters.keys import IDS
from ..errors import EngineFailed, KconvError, StatesInvalid
from .ask import again, ask_each
from .client import SHOWN, Client

WRITTEN_SECONDS, HEALTH_SECONDS, POLL_SECONDS = 120.0, 10.0, 0.01
# Tokens of the beginning that is compared too: what they cost is little of a prefill.
EARLY = 32
ROWS = 8192  # of the output matrix, processed at a time
LARGEST = 32  # logits of a row that are computed in float32
CONNECTOR = "ExampleHiddenStatesConnector"
# Allowed difference from the server's logprob: it sums in another order and rounds to its dtype in between.
NEAR = {"F32": 1e-3, "F16": 0.05, "BF16": 0.2}
# From a logprob that another request computed: another batch rounds otherwise, and may choose other experts. States of
# something else give the server's own choice some 10 less.
APART = {"F32": 1e-2, "F16": 1.0, "BF16": 3.0}


class TargetShape(Protocol):
    """A target, as far as its states depend on it: `text` is the config of its text model."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def text(self) -> Mapping[str, Any]: ...


def states_options(captured: Sequence[int], layers: int, shared: Path) -> dict[str, str]:
    """Return the options that a vLLM server needs to return the states of captured layers.

    Args:
        captured: layers, as outputs.
        shared: the folder that it writes to, which this machine must see too.
    """
    ids = [*(layer + 1 for layer in captured), *([layers] if captured[-1] + 1 < layers else [])]
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {IDS: ids}},
    }
    connect = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
    }
    return {"--speculative-config": json.dumps(extract), "--kv-transfer-config": json.dumps(connect)}


@dataclass(frozen=True)
class ServedRunner:
    """A target that runs in a server; see `Runner`.

    Attributes:
        client: the server, started with `states_options`.
        shared: the folder that it writes to, as seen from here.
        norm, lm_head: the target's final norm [H] and output matrix [V, H].
        dtype: safetensors name of the dtype that the server computes in.
        patience: seconds that writing a file may take.
        at_once: requests in flight.
        name: part of each request's name, and so of its file's name; see `swept`.
    """

    client: Client
    shared: Path
    config: TargetShape
    norm: torch.Tensor
    lm_head: torch.Tensor
    dtype: str
    patience: float = WRITTEN_SECONDS
    at_once: int = 1
    name: str = "kconv"

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Runner.capture`."""
        ids = tokens[0].tolist()
        early = ids[: min(EARLY, len(ids) // 2)]
        compared = []
        # The whole sequence is a prompt: the server prefills it and generates one token, which serves to check its
        # last state. So does its beginning, since a server that loses what it computed first keeps the end. The
        # logprobs of all tokens of a prompt, in one request, would take gigabytes of an unprepared GPU:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L5374-L5375
        if early:
            [token], file, said = self._ask(early, 1)
            self._drop(file)
            compared.append((len(early) - 1, token, said, APART))
        [token], file, said = self._ask(ids, 1)
        compared.append((len(ids) - 1, token, said, NEAR))
        count = len(captured) + (captured[-1] + 1 < self.config.layers)
        states = self._read(file, ids, count, captured)
        normed = F.rms_norm(states[:, -1].float(), (self.config.hidden,), None, float(self.config.text["rms_norm_eps"]))
        hidden = normed.to(states.dtype) * self.norm.to(states.dtype)
        self._hold(hidden, compared)
        return states[:, : len(captured)].flatten(1).unsqueeze(0), hidden.unsqueeze(0)

    def extend(self, kind: str, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        """See `Runner.extend`; greedy only, since sampling with speculation follows the engine, not the target."""
        if kind != "greedy":
            raise EngineFailed(
                "sampling on a server with speculation may not follow the target's distribution",
                where=self.client.url,
                fix="Write sampled answers with kconv generate, from a server without speculation, and pass them with "
                "--data.",
            )

        def continue_one(prompt: Sequence[int]) -> list[int]:
            tokens, file, _ = self._ask(list(prompt), length)
            self._drop(file)
            return tokens

        return ask_each(continue_one, prompts, self.at_once)

    def _ask(self, prompt: list[int], new_tokens: int) -> tuple[list[int], Path, float]:
        """Return new tokens, the file to which the prompt's states are being written, and the first token's logprob."""
        # A name of its own for each attempt, since two requests of one name would write one file.
        tokens, answer = again(
            lambda: self.client.complete_whole(
                prompt, new_tokens, logprobs=0, request_id=f"{self.name}-{secrets.token_hex(8)}"
            )
        )
        if len(tokens) != new_tokens or max(tokens) >= len(self.lm_head):
            raise EngineFailed(
                f"the server answered with the tokens {str(tokens)[:SHOWN]} instead of {new_tokens} of a vocabulary of "
                f"{len(self.lm_head)}",
                where=self.client.url,
                fix="Check that it serves this target, with a --max-model-len above the longest sequence.",
            )
        try:
            name = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
            if not name or "\0" in name:
                raise ValueError(name)
            said = float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
        except (KeyError, TypeError, IndexError, ValueError, OverflowError) as fault:
            raise EngineFailed(
                f"the server returns no hidden states or no logprobs: {str(answer)[:SHOWN]}",
                where=self.client.url,
                fix="Start vLLM with --speculative-config and --kv-transfer-config as kconv states --help shows.",
            ) from fault
        return tokens, self.shared / name, said

    def _drop(self, file: Path) -> None:
        """Remove the file of a request whose states are not needed, once it is written."""
        self._wait(file)
        _remove(file)

    def _read(self, file: Path, ids: list[int], count: int, captured: Sequence[int]) -> torch.Tensor:
        """Return the states of a file, `[T, count, H]`, and remove it."""
        self._wait(file)
        try:
            header = read_header(file)
            tokens, states = (read_tensor(header[name]) for name in ("token_ids", "hidden_states"))
        except (KconvError, KeyError) as fault:
            raise StatesInvalid(
                f"the server's {file.name} cannot be read: {fault}", where=file, fix="Check the server's log."
            ) from fault
        wanted = (len(ids), count, self.config.hidden)
        if tokens.tolist() != ids or states.shape != wanted:
            options = states_options(captured, self.config.layers, self.shared)
            raise StatesInvalid(
                f"the server returned {list(states.shape)} states for {tokens.numel()} tokens instead of "
                f"{list(wanted)}",
                where=self.client.url,
                fix="Start vLLM with " + " ".join(f"{name} '{value}'" for name, value in options.items()),
            )
        if NAMES[states.dtype] != self.dtype:
            raise StatesInvalid(
                f"the server computes in {NAMES[states.dtype]}, but {self.dtype} was requested",
                where=self.client.url,
                fix=f"Add --dtype {NAMES[states.dtype]}.",
            )
        # A NaN is both the least and the greatest of its row.
        low, high = states.amin(-1), states.amax(-1)
        for what, broken in (
            ("NaN or Inf", ~(low.isfinite() & high.isfinite())),
            ("nothing but zeros", (low == 0) & (high == 0)),
        ):
            if rows := int(broken.any(1).sum()):
                raise StatesInvalid(
                    f"the server's states of {rows} of {len(ids)} tokens hold {what}",
                    where=self.client.url,
                    fix="Check its log and the target's weights, or run the target in another dtype.",
                )
        _remove(file)
        return states

    def _wait(self, file: Path) -> None:
        """Wait until the server releases a file's lock, which it holds while it writes."""
        lock, began = file.with_name(f"{file.name}.lock"), time.monotonic()
        asked = began
        while True:
            try:
                with open(
                    lock, encoding="utf-8", opener=lambda path, flags: os.open(path, flags | NONBLOCKING)
                ) as held:
                    take(held.fileno(), shared=True)
                if file.is_file():
                    return
            except OSError:  # not there yet, or still locked
                pass
            now = time.monotonic()
            if now - asked > HEALTH_SECONDS:
                asked = now
                if not self.client.is_healthy():
                    raise EngineFailed(
                        f"the server died before it wrote {file.name}",
                        where=self.client.url,
                        fix="Check its log and restart it; the same command resumes.",
                    )
            if now - began > self.patience:
                raise StatesInvalid(
                    f"{file.name} was not written in {self.patience:.0f} s",
                    where=self.shared,
                    fix="Set --shared to the server's shared_storage_path, as this machine sees it.",
                )
            time.sleep(POLL_SECONDS)

    def _hold(self, hidden: torch.Tensor, compared: Sequence[tuple[int, int, float, Mapping[str, float]]]) -> None:
        """Refuse final states `[T, H]` that do not give the server's own next tokens the logprobs that it reported.

        Args:
            compared: rows, with the token that follows, its logprob, and the allowed difference by dtype.
        """
        states = hidden[[row for row, *_ in compared]]
        # Both are in bfloat16, as a rule: in float32 Kimi-K2's matrix takes 4.7 GB and ten times as long. What bfloat16
        # rounds cancels in the sum over a vocabulary, but for the largest terms and the token's own. Where the dtypes
        # differ, a few rows are cast at a time.
        dtype = torch.promote_types(states.dtype, self.lm_head.dtype)
        parts = [F.linear(states.to(dtype), rows.to(dtype)) for rows in self.lm_head.split(ROWS)]
        logits = torch.cat(parts, -1).float()
        for (row, token, said, allowed), state, own in zip(compared, states.float(), logits, strict=True):
            largest = own.topk(min(LARGEST, len(own))).indices
            rows = torch.cat([largest, torch.tensor([token])])
            own[rows] = self.lm_head[rows].float() @ state
            logprob = float(own[token] - own.logsumexp(-1))
            if not abs(logprob - said) <= allowed[self.dtype]:
                raise StatesInvalid(
                    f"after {row + 1} of {len(hidden)} tokens, the server's next token {token} has logprob {said:.4f}, "
                    f"but its states give {logprob:.4f}",
                    where=self.client.url,
                    fix="Check that it serves this target, and that its last layer id is the number of layers.",
                )


# Runs in its own process, which outlives the one that it waits for.
SWEEP = """
import sys, time
from pathlib import Path
folder, pattern, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
orderly = sys.stdin.read()
end = time.monotonic() + (0 if orderly else seconds)
while True:
    for file in folder.glob(pattern):
        file.unlink(missing_ok=True)
    if time.monotonic() > end:
        break
    time.sleep(0.2)
"""
# Seconds in which a server may still write files for a process that has died.
LATE_SECONDS = 30.0


@contextmanager
def swept(shared: Path) -> Iterator[str]:
    """Yield a name for requests; files written under it that nobody read are removed, however this process ends.

    vLLM names a request's file after the request, whose name the client may choose, and writes it even if the client
    has gone (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/completion/serving.py#L141).
    """
    name = f"kconv-{secrets.token_hex(8)}"
    words = [sys.executable, "-I", "-c", SWEEP, str(shared), f"*{name}*", str(LATE_SECONDS)]
    # In its own session, so that a signal to this process and its group does not end it. It holds none of this
    # process's streams, whose readers would wait for it.
    quiet = subprocess.DEVNULL
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    assert guard.stdin is not None
    try:
        yield name
        guard.communicate(b"done")
    finally:
        guard.stdin.close()


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
