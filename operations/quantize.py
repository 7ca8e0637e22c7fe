"""`kconv calibrate`, `kconv quantize` and `kconv quantize-head`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from ..errors import RequestInvalid
from .base import Context, Estimate, Name, Operation, argument, option, quiet_stdout
from .convert import Converted, Share
from .reading import Count, Reading, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from torch import Tensor

    from ..quantize.calibration import CalibrationPrompts, TargetCalibration
    from ..quantize.plan import QuantizePlan
    from ..quantize.recipe import Recipe

DATA_FREE = "data-free"
# Where each backend has the activations' scales from, and the options that it alone has.
SCALES = {"stream": f"a calibration file, or {DATA_FREE}", "modelopt": "a JSONL file"}
OF_BACKEND = {
    "stream": ("input_scale", "jobs"),
    "modelopt": ("prompts", "tokens", "chat", "trust_remote_code"),
}


class Prompted(Operation):
    """What of its prompts a target reads."""

    tokens: Count = option(512, "Cut each prompt to N tokens.", metavar="N")
    chat: bool = option(False, "Put prompts through the target's chat template.")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python; TARGET must be pinned.")


@dataclass(frozen=True)
class Calibrated:
    """A calibration that was written: where, and what it holds."""

    out: str
    calibration: TargetCalibration

    def to_json(self) -> Any:
        """Return what was calibrated on as plain values."""
        found = self.calibration
        return {"out": self.out, "modules": len(found.input_amax), "prompts": found.prompts.model_dump(mode="json")}


class Calibrate(Prompted):
    """Run TARGET over prompts, and write what each linear module's input reaches into the new file OUT (JSON).

    The target is run layer by layer from its disk with only one layer in memory, quantized ones dequantized. A run
    that was interrupted goes on behind its last layer when the same command is given again.
    """

    EXAMPLES = (
        "kconv calibrate my-target calibration.json --prompts calibration.jsonl --chat",
        "kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json",
    )
    OUTPUT = "calibration.json"
    HEAVY = True
    RESUMES = True

    target: Name = argument("The target: a folder or a hub id.", kind="checkpoint")
    out: Name = argument("The file to write; nothing may be there.", kind="output")
    prompts: Name = option(..., "Prompts (JSONL, MT-Bench's form among others).", kind="file")
    dtype: Literal["F32", "BF16", "F16"] | None = option(None, "What to compute in; by default the target's own.")

    def run(self, context: Context) -> Calibrated:
        """Write the calibration.

        Raises:
            OutputExists, OutputFailed: the file is there, or cannot be written.
            KconvError: the target or the prompts cannot be read.
        """
        from ..quantize.calibrate import calibrate_target

        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out)
        with context.status("calibrating") as say:
            found = calibrate_target(
                context.source(self.target),
                context.path(self.prompts),
                Path(self.out),
                dtype=self.dtype,
                tokens=self.tokens,
                chat=self.chat,
                trust_remote_code=self.trust_remote_code,
                log=context.log,
                progress=lambda done, total: say(f"{done} of {total} layers"),
            )
        return Calibrated(self.out, found)


@dataclass(frozen=True)
class Quantized:
    """A target that was quantized: where, and by which plan; a rank that is not the first has written only its part.

    Attributes:
        processes: that share the work; None where ModelOpt does it, whose files and time are not known before.
    """

    out: str
    plan: QuantizePlan
    processes: int | None
    written: bool = True


class Quantize(Prompted):
    """Write TARGET in NVFP4 into the new folder OUT, with kconv.json beside it.

    TARGET is stored in bf16, INT4 (Kimi-K2-Thinking, K2.5, K2.6) or FP8 blocks (Kimi-K2-Instruct, DeepSeek-V3).
    What is not quantized keeps its bytes. The streaming backend has one tensor at a time in memory, ranks of torchrun
    share the work, and a run that was interrupted goes on where it stopped when the same command is given again.
    --backend modelopt is one process, with the whole target in memory, and starts anew.

    Recipes: nvfp4-experts (the routed experts), nvfp4-mlp (shared experts and dense layers too), nvfp4 (attention
    too), nvfp4-weight-only (activations stay bf16), or a YAML file.
    """

    EXAMPLES = (
        "kconv quantize moonshotai/Kimi-K2.5 Kimi-K2.5-NVFP4 --recipe nvfp4-experts --input-scale data-free --dry-run",
        "kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json --jobs 8",
        "kconv quantize my-small-target out --recipe nvfp4 --backend modelopt --prompts calibration.jsonl",
        "torchrun --nproc-per-node 4 --no-python kconv quantize my-target out --recipe nvfp4 --input-scale data-free",
    )
    HEAVY = True
    RESUMES = True
    PLANS = True

    target: Name = argument("The target: a folder or a hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; nothing may be there.", kind="output")
    recipe: Name = option(..., "What is quantized: a recipe's name, or a file.", kind="file", metavar="NAME|FILE")
    input_scale: Name | None = option(
        None, "Where the activations' scales come from: a file that kconv calibrate wrote, or 1.0 for all.",
        kind="file", metavar="FILE|data-free", words=(DATA_FREE,),
    )  # fmt: skip
    kv_cache: Literal["fp8", "none"] | None = option(None, "What engines keep the KV cache in.")
    jobs: Count | None = option(None, "Processes; each takes about 1 GiB; by default one per core.", metavar="N")
    backend: Literal["stream", "modelopt"] = option(
        "stream",
        "stream: one tensor at a time, from the disk. modelopt: ModelOpt's own calibration and exporter, with the "
        "whole target in memory; it makes the same bits where the activations' scales are the same.",
    )
    prompts: Name | None = option(None, "Prompts that --backend modelopt calibrates on (JSONL).", kind="file")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for backend, names in OF_BACKEND.items():
            if backend != self.backend:
                self.refuse(*names, unless=f"with --backend {backend}")
        return self

    def run(self, context: Context) -> Quantized:
        """Write the target.

        Raises:
            OutputExists, OutputFailed: the folder is there, or cannot be written.
            KconvError: the target, the recipe or the scales cannot be read, or cannot be quantized so.
        """
        from ..quantize.run import quantize, read_world

        recipe, world = self._recipe(context), read_world()
        if world.size > 1 and self.backend == "modelopt":
            raise RequestInvalid("--backend modelopt is one process", fix="Start it without torchrun.")
        if not world.rank:
            refuse_existing_output(self.out)
        if self.backend == "modelopt":
            return self._modelopt(context, recipe)
        plan, processes = self._plan(context, recipe), self._processes()
        own = sum(unit.bytes_in for unit in (plan.units if world.rank == 0 else world.own(plan.units)))
        with context.bytes("quantizing", own) as advance:
            made = quantize(plan, Path(self.out), world=world, jobs=processes, advance=advance, say=context.log)
        return Quantized(self.out, plan, processes, bool(made and not world.rank))

    def estimate(self, context: Context) -> Estimate:
        """Return the plan, made of headers alone."""
        from ..quantize.run import read_world

        recipe = self._recipe(context)
        refuse_existing_output(self.out)
        if self.backend == "modelopt":
            plan = self._plan(context, recipe, self._sequences(context)[1], headers_only=True)
            return Estimate(plan.bytes_out, Quantized(self.out, plan, None))
        plan = self._plan(context, recipe, headers_only=True)
        processes = self._processes() * read_world().size
        return Estimate(sum(unit.bytes_out for unit in plan.units), Quantized(self.out, plan, processes))

    def precheck(self, context: Context) -> None:
        """Raise RecipeInvalid for a recipe that is not there, RequestInvalid for one without its scales."""
        self._recipe(context)

    def _recipe(self, context: Context) -> Recipe:
        from ..quantize.recipe import load_recipe

        recipe = load_recipe(str(context.path(self.recipe)), kv_cache=self.kv_cache)
        scaled, named = {"stream": (self.input_scale, "--input-scale"), "modelopt": (self.prompts, "--prompts")}[
            self.backend
        ]
        if recipe.weight_only and scaled:
            raise RequestInvalid(
                f"{named} has no use: {recipe.name} leaves activations as they are", fix=f"Leave {named} out."
            )
        if not recipe.weight_only and not scaled:
            raise RequestInvalid(f"{named} is required", fix=f"Give {SCALES[self.backend]}.")
        return recipe

    def _plan(
        self, context: Context, recipe: Recipe, prompts: CalibrationPrompts | None = None, *, headers_only: bool = False
    ) -> QuantizePlan:
        from ..quantize.run import plan_target

        measured = self.input_scale if self.input_scale != DATA_FREE else None
        return plan_target(
            context.source(self.target),
            recipe,
            input_scale=context.path(measured) if measured else None,
            backend=self.backend,
            prompts=prompts,
            headers_only=headers_only,
        )

    def _processes(self) -> int:
        from ..quantize.run import read_world

        return self.jobs or (1 if read_world().size > 1 else _cores())

    def _sequences(self, context: Context) -> tuple[list[Tensor], CalibrationPrompts | None]:
        """Return the token ids of each prompt, [T] each, and what they are, for the record; nothing without prompts."""
        from ..quantize.calibrate import read_sequences

        check_trusted(context, self.trust_remote_code, self.target)
        if not self.prompts:
            return [], None
        return read_sequences(
            context.source(self.target), context.path(self.prompts), tokens=self.tokens, chat=self.chat,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip

    def _modelopt(self, context: Context, recipe: Recipe) -> Quantized:
        from ..quantize.modelopt_backend import quantize_in_memory

        # Prompts first: a problem of theirs is found before anything large is downloaded.
        sequences, prompts = self._sequences(context)
        plan = self._plan(context, recipe, prompts)
        # ModelOpt tells of its work on stdout, which is for results.
        with context.status("quantizing") as say, quiet_stdout():
            quantize_in_memory(plan, Path(self.out), [ids.unsqueeze(0) for ids in sequences], say=say)
        return Quantized(self.out, plan, None)


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class QuantizeHead(Reading):
    """Write HEAD with its linears in FP8 or NVFP4 into the new folder OUT, with kconv.json beside it.

    A GQA or MHA head's attention and MLP are quantized, an MLA head's MLP: what each engine that reads the head builds
    quantized too. fc, lm_head, the embedding and the norms keep their bytes, and so does an MLA head's attention. What
    engines fuse shares its scales. OUT is in HEAD's layout; kconv to-vllm OUT and the like carry it whole.

    The scales of what the linears read are of the states' prompts but one in ten. On these the acceptance length is
    measured, with weights and inputs rounded as an engine rounds them, before anything is written. The whole head is
    in memory, in fp32.
    """

    EXAMPLES = (
        "kconv states my-target my-states --prompts prompts.jsonl --captured 1,29,57",
        "kconv quantize-head my-head my-head-fp8 --format fp8 --states my-states --target my-target",
        "kconv validate my-head-fp8 --source my-head",
    )

    head: Name = argument("The head: a folder or a hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; nothing may be there.", kind="output")
    format: Literal["fp8", "nvfp4"] = option(..., "What the linears are written in.")
    states: Name = option(..., "What kconv states wrote of the target, to calibrate on.", kind="file")
    min_retention: Share = option(
        0.97, "Refuse a result that keeps less of the acceptance length on held-out text.", metavar="SHARE"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.target is None:
            raise ValueError("--target is required: the states are of it, and so is what the acceptance is against")
        return self

    def run(self, context: Context) -> Converted:
        """Write the head.

        Raises:
            OutputExists, OutputFailed: the folder is there, or cannot be written.
            ConversionInaccurate: it keeps less than --min-retention.
            KconvError: the head, the target or the states cannot be read.
        """
        from ..quantize.head.formats import FORMATS
        from ..quantize.head.plan import quantize_head

        refuse_existing_output(self.out)
        head, target = self.open(context, self.head), context.source(self.target or "")
        with context.status("quantizing") as say:
            manifest, kept = quantize_head(
                head, FORMATS[self.format], Path(self.out), target, context.path(self.states),
                min_retention=self.min_retention, say=say,
            )  # fmt: skip
        return Converted(self.out, manifest, kept)
