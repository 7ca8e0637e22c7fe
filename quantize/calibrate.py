"""Run a target layer by layer from disk, to see the inputs of its modules.

Only one layer is in memory at a time, with the activations between two layers: [tokens, hidden] in the dtype of the
run. A killed run resumes after the last finished layer: those activations are stored unchanged, so the amaxes equal
those of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.schema import parse_json
from ..checkpoint.source import Source
from ..checkpoint.staging import refuse_existing, writing
from ..checkpoint.tensors import TORCH, read_rows
from ..errors import InputScalesInvalid, OutputFailed, TargetInvalid
from ..targets.config import TargetConfig, read_target_config
from ..targets.model import EXPERTS, build_target, check_tensors, fill, refuse_by_layers
from ..targets.prompts import KEPT, read_prompts
from ..targets.tokenizer import load_tokenizer
from ..targets.weights import stored_weights
from .calibration import CalibrationPrompts, TargetCalibration, identify, write_calibration
from .experts import ExpertsOneByOne, describe_memory, must_part, refuse_other_experts, run_together

Advance = Callable[[int, int], None]
# Tokens to which each prompt is cut.
TOKENS = 512
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def calibrate_target(
    target: Source,
    prompts: Path,
    out: Path,
    *,
    dtype: str | None = None,
    tokens: int = TOKENS,
    chat: bool = False,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TargetCalibration:
    """Run a target over prompts and write its calibration; resume an interrupted run.

    Args:
        target: the target; for a hub id the whole model is downloaded.
        dtype: safetensors name of the dtype to compute in; None for the target's own.

    Raises:
        OutputExists, OutputFailed: something exists at `out`, or it cannot be written.
        PromptsInvalid: the prompts cannot be read.
        TargetInvalid, SourceFormatUnknown, QuantizedWeightInvalid: the target cannot be read.
        TargetTooLarge: a layer does not fit into memory even with one expert at a time.
        InputScalesInvalid: there are no tokens, or a module was never run.
    """
    refuse_existing(out)
    sequences, used = read_sequences(target, prompts, tokens=tokens, chat=chat, trust_remote_code=trust_remote_code)
    config = read_target_config(target.fetch_config())
    chosen = TORCH[dtype or config.dtype or "BF16"]
    headers = target.open_headers()  # before hundreds of gigabytes are downloaded
    must_part(stored_weights(headers, config), config, chosen, target.name)
    checkpoint = open_checkpoint(target.fetch_model(), source=target.name)
    place = partial_of(out, checkpoint, sequences, chosen)
    before = find(place, config.layers)
    if before:
        log(f"{before.layers} of {config.layers} layers are already done")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        found = calibrate(
            checkpoint,
            config,
            sequences,
            used,
            dtype=chosen,
            resume=before,
            keep=partial(keep, place),
            advance=progress,
            say=log,
        )
        write_calibration(out, found)
        place.unlink()
    return found


def read_sequences(
    target: Source, prompts: Path, *, tokens: int = TOKENS, chat: bool = False, trust_remote_code: bool = False
) -> tuple[list[torch.Tensor], CalibrationPrompts]:
    """Return the token ids of each prompt, [T] each, and their description for the record.

    Args:
        chat: whether each prompt's first turn goes through the target's chat template; otherwise its turns are plain
            text.

    Raises:
        PromptsInvalid, TargetInvalid: the prompts or the tokenizer cannot be read.
    """
    given = read_prompts(prompts)
    tokenizer = load_tokenizer(target.fetch_tokenizer(), trust_remote_code=trust_remote_code)
    encoded = [
        tokenizer.encode_chat(one.turns[:1], tokens) if chat else tokenizer.encode("\n\n".join(one.turns), tokens)
        for one in given
    ]
    sequences = [torch.tensor(ids) for ids in encoded]
    return sequences, CalibrationPrompts(
        sha256=file_digest(prompts),
        count=len(given),
        tokens=sum(map(len, sequences)),
        digests=tuple(prompt.digest[:KEPT] for prompt in given),
    )


def calibrate(
    target: Checkpoint,
    config: TargetConfig,
    sequences: Sequence[torch.Tensor],
    prompts: CalibrationPrompts,
    *,
    dtype: torch.dtype,
    resume: CalibrationState | None = None,
    keep: Callable[[CalibrationState], None] = lambda between: None,
    advance: Advance = lambda done, total: None,
    say: Callable[[str], None] = lambda _: None,
) -> TargetCalibration:
    """Return the largest magnitude at the input of each linear module of the decoder.

    The experts of a layer share one value, as in ModelOpt: an expert with few tokens would get too small a scale.

    Args:
        sequences: token ids, [T] each.
        resume: the state of an interrupted run of the same calibration; None to start at the first layer.
        keep: called after each layer with the state from which the next one starts.
    """
    if not sum(map(len, sequences)):
        raise InputScalesInvalid("there are no tokens for calibration", fix="Use prompts that are not empty.")
    layers = Layers(target, config, dtype)
    say(layers.memory)
    if resume is None:
        resume = CalibrationState(0, [layers.embed(ids) for ids in sequences], {})
    hidden, found = list(resume.hidden), dict(resume.amaxes)
    for i, watch in layers.run(hidden, _Watch, first=resume.layers):
        found |= watch.amaxes()
        keep(CalibrationState(i + 1, hidden, found))
        advance(i + 1, config.layers)
    return TargetCalibration(target=identify(target, config), prompts=prompts, input_amax=found)


W = TypeVar("W", bound="LayerLinears")


class Layers:
    """A target's layers, run from disk with one in memory at a time; if a layer does not fit, one expert at a time.

    Attributes:
        memory: a layer's memory use, as one sentence.

    Raises:
        TargetInvalid: the target is of another class, or a tensor is missing, unknown or of a wrong shape.
        TargetTooLarge: a layer does not fit into memory even then.
        SourceFormatUnknown, QuantizedWeightInvalid: it is quantized in a way that kconv does not read.
    """

    def __init__(self, target: Checkpoint, config: TargetConfig, dtype: torch.dtype) -> None:
        self._stored, self._config, self._dtype = stored_weights(target, config), config, dtype
        refuse_by_layers(config, self._stored)
        self._embedding = target.tensors[config.embed_tokens]
        self._parted = must_part(self._stored, config, dtype, target.folder)
        self.memory = describe_memory(self._stored, config, dtype, self._parted)
        with torch.device("meta"):
            model = build_target(config, dtype)
        # Each linear layer separately: other implementations fuse all experts into one operation, which hides their
        # inputs.
        model.config._experts_implementation = "eager"
        check_tensors(model, target, config, self._stored)
        self._decoder, self._norm = model.model, model.model.norm
        self._layers = list(model.model.layers)
        for layer in self._layers if self._parted else ():
            refuse_other_experts(layer, target.folder)
        # The decoder itself then says what it would give to each layer: masks and positions, each layer's own.
        self._asked = [_Asked(layer) for layer in self._layers]
        self._decoder.layers, self._decoder.norm = torch.nn.ModuleList(self._asked), torch.nn.Identity()
        # Built again, since the model's own frequencies are on the meta device.
        self._decoder.rotary_emb = type(model.model.rotary_emb)(model.config)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input of a text, [1, T, hidden].

        Raises:
            TargetInvalid: the embedding has no row for a token.
        """
        if int(ids.max()) >= self._embedding.shape[0]:
            raise TargetInvalid(
                f"the tokenizer gives id {int(ids.max())}, but the embedding ends at {self._embedding.shape[0] - 1}",
                where=self._embedding.file,
                fix="Check that tokenizer and weights belong to the same target.",
            )
        return read_rows(self._embedding, ids).to(self._dtype).unsqueeze(0)

    def run(
        self, hidden: list[torch.Tensor], watching: Callable[[str], W], *, first: int = 0
    ) -> Iterator[tuple[int, W]]:
        """Run the layers in order, and yield each one's number with its observer.

        Args:
            hidden: the input of the first layer, [1, T, hidden] for each text; replaced by each layer's output.
            watching: returns the observer of a layer's linear layers, by the layer's name.
        """
        for i in range(first, len(self._layers)):
            watch = watching(f"model.layers.{i}")
            # torch.no_grad() must not span a yield: it would apply to the caller's code too.
            self._run_layer(i, hidden, watch)
            yield i, watch

    @torch.no_grad()
    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output, [..., hidden], as lm_head takes it."""
        with _resident(self._norm):
            fill(self._norm.state_dict(prefix="model.norm."), self._stored, self._config.prefix)
            return self._norm(hidden)

    @torch.no_grad()
    def _run_layer(self, i: int, hidden: list[torch.Tensor], watch: LayerLinears) -> None:
        layer: Any = self._layers[i]
        base = f"model.layers.{i}"
        parts = self._parted and hasattr(getattr(layer, "mlp", None), "experts")
        if parts:
            count, name = len(layer.mlp.experts.gate_up_proj), f"{base}.mlp.experts"
            watch.expect({f"{name}.{fused}": _experts(name, count, fused) for fused in FUSED})
            layer.mlp.experts = ExpertsOneByOne(
                layer.mlp.experts,
                self._stored,
                self._config.prefix + name,
                self._dtype,
                lambda which, x: watch.see(f"{name}.{which}", x),
            )
        with _resident(layer):
            state = layer.state_dict(prefix=f"{base}.")
            fill(state, self._stored, self._config.prefix)
            watch.place(state)
            with watch:
                if parts:
                    hidden[:] = run_together(layer, hidden, partial(self._run_text, i))
                    return
                for j, states in enumerate(hidden):
                    hidden[j] = self._run_text(i, states)

    def _run_text(self, i: int, states: torch.Tensor) -> torch.Tensor:
        found = self._layers[i](states, **self._given(i, states))
        return found[0] if isinstance(found, tuple) else found

    def _given(self, i: int, states: torch.Tensor) -> dict[str, Any]:
        """Return what the decoder gives to a layer besides the states, [1, T, hidden]."""
        self._decoder(inputs_embeds=states, use_cache=False)
        return self._asked[i].given


class _Asked(torch.nn.Module):
    """Stands for a layer, notes what it is given, and changes nothing."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}
        self._layer = (layer,)  # in a tuple, so that its weights are not this module's

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, such as its kind of attention, by which a decoder chooses a mask."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        self.given = given
        return hidden_states


@contextmanager
def _resident(layer: torch.nn.Module) -> Iterator[None]:
    layer.to_empty(device="cpu")
    try:
        yield
    finally:
        layer.to("meta")


def _experts(base: str, count: int, fused: str) -> tuple[str, ...]:
    return tuple(f"{base}.{e}.{part}" for e in range(count) for part in FUSED[fused])


class LayerLinears(TorchFunctionMode):
    """Sees the input of every linear layer, and identifies the module by its weight's place in memory."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.groups: dict[str, tuple[str, ...]] = {}
        """The modules that share an input, by the name of one of them or of the tensor that fuses them."""
        self._places: dict[int, str] = {}

    def expect(self, groups: Mapping[str, tuple[str, ...]]) -> None:
        """Add groups whose weights are not in memory; the code that runs them passes their inputs to `see`."""
        self.groups |= groups

    def place(self, state: Mapping[str, torch.Tensor]) -> None:
        """Record where the layer's tensors are in memory, by their names."""
        for name, tensor in state.items():
            base, _, last = name.rpartition(".")
            if EXPERTS.fullmatch(name):
                self.groups[name] = _experts(base, len(tensor), last)
                self._places |= {expert.data_ptr(): name for expert in tensor}
            elif tensor.dim() == 2 and base.endswith(("_proj", "_proj_with_mqa")):
                self.groups[name] = (base,)
                self._places[tensor.data_ptr()] = name

    def see(self, group: str, x: torch.Tensor) -> torch.Tensor:
        """Take a group's input, and return the input to multiply instead."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            group = self._places.get(args[1].data_ptr())
            if group is not None and args[0].numel():
                args = (self.see(group, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class _Watch(LayerLinears):
    """Keeps the largest magnitude at the input of each module of a layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self._seen: dict[str, float] = {}

    def see(self, group: str, x: torch.Tensor) -> torch.Tensor:
        """See `LayerLinears.see`; the input stays unchanged."""
        largest = float(x.abs().max())
        before = self._seen.get(group, 0.0)
        self._seen[group] = before if largest <= before else largest  # NaN stays
        return x

    def amaxes(self) -> dict[str, float]:
        unseen = sorted(self.groups.keys() - self._seen.keys())
        if unseen:
            raise InputScalesInvalid(
                f"{len(unseen)} modules of {self.layer} received no input, among them {unseen[0]}",
                fix="Use more prompts. If that fails, this transformers version runs the layer differently.",
            )
        if unfit := next((group for group, amax in self._seen.items() if not math.isfinite(amax)), None):
            raise InputScalesInvalid(
                f"the input of {self.groups[unfit][0]} has the largest magnitude {self._seen[unfit]}",
                where=self.layer,
                fix="Check the weights of this layer and those before it. In F16, use --dtype BF16 or F32.",
            )
        return {module: self._seen[group] for group, modules in self.groups.items() for module in modules}


@dataclass(frozen=True)
class CalibrationState:
    """The state of a calibration.

    Attributes:
        layers: how many are finished.
        hidden: the input of the next one, [1, T, hidden] for each sequence.
    """

    layers: int
    hidden: Sequence[torch.Tensor] = field(repr=False)
    amaxes: Mapping[str, float] = field(repr=False)


def partial_of(out: Path, target: Checkpoint, sequences: Sequence[torch.Tensor], dtype: torch.dtype) -> Path:
    """Return where a running calibration keeps its state; the path depends on target, text and dtype."""
    facts = {
        "config": target.config,
        "stamps": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in target.files],
        "sequences": [ids.tolist() for ids in sequences],
        "dtype": str(dtype),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return out.with_name(f".{out.name[:40]}-{key}.partial")


def keep(file: Path, between: CalibrationState) -> None:
    """Write the state of a calibration, replacing the earlier one, which stays if that fails."""
    said = {"layers": str(between.layers), "amaxes": json.dumps(dict(between.amaxes))}
    temporary = file.with_name(f"{file.name}.new")
    try:
        save_file({str(i): states.contiguous() for i, states in enumerate(between.hidden)}, temporary, metadata=said)
        with temporary.open("rb") as whole:
            os.fsync(whole.fileno())
        temporary.replace(file)
    except (OSError, SafetensorError) as fault:  # safetensors reports a full disk with its own exception
        temporary.unlink(missing_ok=True)
        raise OutputFailed(
            f"{file.name} could not be written: {fault}",
            where=file.parent,
            fix="Free some space, or choose an output on another disk; then run the command again to resume.",
        ) from fault


def find(file: Path, layers: int) -> CalibrationState | None:
    """Read what `keep` wrote; None if there is nothing."""
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as held:
            said, count = held.metadata(), len(held.keys())
            hidden = [held.get_tensor(str(i)) for i in range(count)]
        done = int(said["layers"])
        if not 0 <= done <= layers:
            raise ValueError(f"it is at layer {done} of {layers}")
        return CalibrationState(done, hidden, parse_json(said["amaxes"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as fault:
        raise InputScalesInvalid(
            f"{file.name}, which an interrupted run left, cannot be read: {fault}",
            where=file,
            fix="Delete it, and run the command again.",
        ) from fault
