"""A target's states on the card: captured, handed over as files of a server, and read by training."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .bench import Bench

LAYERS, CAPTURED = 3, (0, 1)


@dataclass
class Stand:
    """Stands for a vLLM that hands out states: the target on the card, and a file for each request.

    Attributes:
        model: the target.
        shared: the folder that it writes to.
        states: what it wrote last.
        url: for messages.
    """

    model: Any
    shared: Path
    states: torch.Tensor | None = None
    url: str = "here"

    def complete_whole(self, prompt: list[int], new_tokens: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
        """Answer as vLLM's server does, with the greatest logit of the last state."""
        from safetensors.torch import save_file

        streams: list[torch.Tensor] = []
        inner = self.model.model
        entered = [*inner.layers[1:], inner.norm]
        hooks = [part.register_forward_pre_hook(lambda _, given: streams.append(given[0])) for part in entered]
        try:
            with torch.no_grad():
                hidden = inner(torch.tensor([prompt], device=self.model.device), use_cache=False).last_hidden_state
                logprobs = self.model.lm_head(hidden[0, -1]).float().log_softmax(-1)
        finally:
            for hook in hooks:
                hook.remove()
        self.states = torch.stack([stream[0] for stream in streams], 1).cpu()
        file = self.shared / f"{more['request_id']}.safetensors"
        save_file({"hidden_states": self.states, "token_ids": torch.tensor(prompt)}, file)
        file.with_name(f"{file.name}.lock").touch()
        token = int(logprobs.argmax())
        said = {"choices": [{"logprobs": {"token_logprobs": [float(logprobs[token])]}}]}
        return [token], said | {"kv_transfer_params": {"hidden_states_path": str(file)}}


def check_states(bench: Bench) -> dict[str, Any]:
    """Capture of a few layers at the target's dims, and the same states through files in memory, back on the card.

    What a server hands out and training reads is bit for bit what was captured; both rates are of whole sequences.
    """
    from kconv.serving.states import ServedRunner
    from kconv.targets.config import parse_target_config
    from kconv.targets.forward import LocalRunner
    from kconv.targets.model import build_target
    from kconv.train.data import Rows
    from kconv.train.feed import Feed, Offline

    length, count = bench.size.batches[0][1], 8
    dense = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS, "num_nextn_predict_layers": 0}
    config = parse_target_config(bench.size.config | dense)
    torch.manual_seed(0)
    with torch.device(bench.device):
        target = build_target(replace(config, text=config.text | dense), torch.bfloat16)
    local = LocalRunner(target)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab, (count, length), generator=generator)
    captured, hidden = local.capture(ids[:1], CAPTURED)
    begin = time.perf_counter()
    for row in ids[1:]:
        local.capture(row[None], CAPTURED)
    capture = (count - 1) * length / (time.perf_counter() - begin)

    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=memory) as name:
        stand = Stand(target, Path(name))
        ends = {"norm": target.model.norm.weight.detach().cpu(), "lm_head": target.lm_head.weight.detach().cpu()}
        served: Any = ServedRunner(stand, Path(name), config, dtype="BF16", at_once=1, **ends)  # pyright: ignore
        streamed, final = served.capture(ids[:1], CAPTURED)
        assert torch.equal(streamed, captured), "states changed on their way through a file"
        apart = float((final.float() - hidden.float()).abs().max() / hidden.float().abs().max())
        assert apart < 0.01, f"the final states are apart by {apart:.4f} of their greatest"

        class Served:
            """The stand-in's sequences, as training reads them."""

            def read_span(self, index: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
                found = served.capture(ids[index : index + 1], CAPTURED)
                return found[0][0, first:last], found[1][0, first:last]

        places = [[(index, 0, length)] for index in range(count)]
        rows = Rows(ids, torch.ones_like(ids, dtype=torch.bool))
        feed = Feed(rows, 1, Offline(Served(), places), torch.bfloat16)
        on_card: list[torch.Tensor] = []
        begin = time.perf_counter()
        for index in range(count):
            batch = feed[index]["base_model_outputs"]
            on_card = [states.to(bench.device) for states in batch.values()]
        bench.wait()
        handed = count * length / (time.perf_counter() - begin)
        assert all(states.device.type == bench.device.type for states in on_card)
        left = len(list(Path(name).iterdir()))
        assert not left, f"{left} files are left that were read"
    return {
        "layers": LAYERS,
        "tokens": length,
        "capture_tokens_per_second": round(capture),
        "captured_and_handed_over_tokens_per_second": round(handed),
        "bytes_per_token": (len(CAPTURED) + 1) * config.hidden * 2,
        "final_states_apart": round(apart, 6),
        "peak_gib": bench.peak(),
    }
