"""`kconv calibrate`, `kconv quantize` and `kconv quantize-head`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..errors import InputScalesInvalid, RequestInvalid, TargetInvalid
from ..lines import Line, Part, Result, Styled, Table, counted, duration, megabytes, next_command
from ..options import Count, Name, Share, argument, option
from .base import Context, Estimate, Operation, quiet_stdout
from .convert import Converted
from .reading import Reading, check_prompts, check_target, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from torch import Tensor

    from ..quantize.calibration import CalibrationPrompts, TargetCalibration
    from ..quantize.plan import QuantizePlan
    from ..quantize.recipe import Recipe
    from ..quantize.stream import Estimate as Estimated

DATA_FREE = "data-free"
# Where each backend gets the input scales from, and the options that only it has.
SCALES = {"stream": f"a file of kconv calibrate, or {DATA_FREE}", "modelopt": "a JSONL file"}
OF_BACKEND = {
    "stream": ("input_scale", "jobs"),
    "modelopt": ("prompts", "tokens", "chat", "trust_remote_code"),
}


class Prompted(Operation):
    """How a target reads its prompts."""

    tokens: Count = option(512, "Cut each prompt to N tokens.", metavar="N")
    chat: bool = option(False, "Apply the target's chat template to prompts.")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")


@dataclass(frozen=True, repr=False)
class Calibrated(Result):
    """A written calibration: its file, and its contents."""

    out: str
    calibration: TargetCalibration

    def to_json(self) -> Any:
        """Return the calibration text as plain values."""
        found = self.calibration
        return {"out": self.out, "modules": len(found.input_amax), "prompts": found.prompts.model_dump(mode="json")}

    def lines(self) -> Iterable[Part]:
        found = self.calibration
        text = f"{found.prompts.tokens:,} tokens of {found.prompts.count} prompts"
        return (f"{self.out}: {len(found.input_amax):,} modules, {text}",)


class Calibrate(Prompted):
    """Run TARGET on prompts, and write the largest input of each linear layer to the new file OUT (JSON).

    The target runs layer by layer from disk, with one layer in memory; quantized layers are dequantized. The same
    command resumes an interrupted run after its last layer.
    """

    EXAMPLES = (
        "kconv calibrate my-target calibration.json --prompts calibration.jsonl --chat",
        "kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json",
    )
    OUTPUT = "calibration.json"
    HEAVY = True
    RESUMES = True

    target: Name = argument("The target: a folder or a Hub id.", kind="checkpoint")
    out: Name = argument("The file to write; it must not exist.", kind="output")
    prompts: Name = option(..., "Prompts (JSONL).", kind="file")
    dtype: Literal["F32", "BF16", "F16"] | None = option(None, "Dtype; by default the target's.")

    def run(self, context: Context) -> Calibrated:
        """Write the calibration.

        Raises:
            OutputExists, OutputFailed: the file exists, or cannot be written.
            KconvError: the target or the prompts cannot be read.
        """
        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out)
        check_prompts(context.path(self.prompts))
        check_target(context, self.target, tokenizer=True)
        from ..quantize.calibrate import calibrate_target

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


@dataclass(frozen=True, repr=False)
class Quantized(Result):
    """A quantized target: its folder, and the plan; a rank other than the first has written only its part."""

    out: str
    plan: QuantizePlan
    written: bool = True

    def to_json(self) -> Any:
        """Return what was done as plain values."""
        return self.plan.to_json(self._files) | {"out": self.out}

    def lines(self) -> Iterator[Part]:
        """Yield what was written; nothing for a part of it."""
        if self.written:
            plan = self.plan
            fp8 = f", {len(plan.rounded):,} in FP8" if plan.rounded else ""
            yield (
                f"{self.out}: {len(plan.modules):,} modules in NVFP4{fp8} ({plan.recipe.name}), "
                f"{megabytes(plan.bytes_in)} -> {megabytes(plan.bytes_out)} in {counted(self._files, 'file')}"
            )
            yield f"block scales: {plan.weight_scales}"
            yield f"input_scale: {plan.scales}"
            yield next_command("validate", self.out, "--source", plan.source.source)

    @property
    def _files(self) -> int:
        return len(list(Path(self.out).glob("*.safetensors")))


@dataclass(frozen=True, repr=False)
class QuantizationPlanned(Result):
    """What a quantization would do: tensors by part, sizes, disk and time.

    Attributes:
        processes: that share the work; None for ModelOpt, whose files and time are not known in advance.
    """

    FOLDS: ClassVar[bool] = True

    out: str
    plan: QuantizePlan
    processes: int | None

    def to_json(self) -> Any:
        """Return the plan as plain values."""
        from ..checkpoint.staging import free_bytes
        from ..quantize.output import bytes_needed

        plan, taken = self.plan, self._estimate()
        return plan.to_json(None if self.processes is None else len(plan.units)) | {
            "becomes": [
                {"part": part, "action": action, "tensors": count, "bytes_in": before, "bytes_out": after}
                for (part, action), (count, before, after) in plan.parts().items()
            ],
            "disk": {"needed": bytes_needed(plan), "free": free_bytes(Path(self.out))},
            "estimate": taken
            and {"processes": self.processes, "bytes_per_second": taken.rate, "seconds": taken.seconds},
        }

    def lines(self) -> Iterator[Part]:
        """Yield what becomes of each part of the model, and what it takes."""
        from ..checkpoint.staging import free_bytes
        from ..quantize.output import bytes_needed, copied_files

        plan = self.plan
        needed, free = bytes_needed(plan), free_bytes(Path(self.out))
        parts = [(*key, f"{count:,}", before, after) for key, (count, before, after) in plan.parts().items()]
        parts.append(("all", "", "", plan.bytes_in, plan.bytes_out))
        sized = [(*what, f"{before / 1e9:.3f} GB", f"{after / 1e9:.3f} GB") for *what, before, after in parts]
        yield Table(("part", "becomes", "modules", "before", "after"), sized)
        yield Line(f"block scales: {plan.weight_scales}")
        yield Line(f"input_scale: {plan.scales}")
        weights = "ModelOpt's" if self.processes is None else len(plan.units)
        yield Line(f"files: {weights}, and {len(copied_files(plan.source.folder))} copied")
        enough = () if free >= needed else (" ", Styled("NOT enough", "red"))
        yield Line((f"disk: {needed / 1e9:.3f} GB needed, {free / 1e9:.1f} GB free", *enough))
        if (taken := self._estimate()) is not None:
            yield Line(
                f"time: about {duration(taken.seconds)} on {self.processes} processes, estimated from a packed sample "
                f"({taken.rate / 1e6:.0f} MB/s each); a slow disk takes longer"
            )

    def _estimate(self) -> Estimated | None:
        from ..quantize.stream import estimate

        if self.plan.source.headers_only or self.processes is None:
            return None
        return estimate(self.plan, self.processes)


class Quantize(Prompted):
    """Write TARGET in NVFP4 into the new folder OUT, with a kconv.json manifest.

    TARGET may be bf16, INT4 (Kimi-K2-Thinking, K2.5, K2.6), FP8 blocks (Kimi-K2-Instruct, DeepSeek-V3) or
    compressed-tensors' or DeepSeek-V4's MXFP4, which is cast exactly.
    Unquantized tensors keep their bytes. The streaming backend holds one tensor at a time, divides the work over
    torchrun's ranks, and resumes an interrupted run. --backend modelopt is one process with the whole target in memory,
    and does not resume.

    Recipes: nvfp4-experts (the routed experts), nvfp4-mlp (shared experts and dense layers too), nvfp4 (attention
    too), nvfp4-weight-only (activations stay bf16), nvfp4-experts-mse and nvfp4-experts-four-over-six (block scales
    by search), nvfp4-experts-fp8-attention (attention in FP8), or a YAML file.
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

    target: Name = argument("The target: a folder or a Hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; it must not exist.", kind="output")
    recipe: Name = option(..., "A recipe's name or file.", kind="file", metavar="NAME|FILE")
    input_scale: Name | None = option(
        None, "A file of kconv calibrate, or data-free: 1.0 everywhere.",
        kind="file", metavar="FILE|data-free", words=(DATA_FREE,),
    )  # fmt: skip
    jobs: Count | None = option(None, "Processes, about 1 GiB each; by default one per core.", metavar="N")
    backend: Literal["stream", "modelopt"] = option(
        "stream",
        "stream: one tensor at a time. modelopt: ModelOpt's own, with the whole target in memory.",
    )
    prompts: Name | None = option(None, "Calibration prompts (JSONL) for --backend modelopt.", kind="file")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for backend, names in OF_BACKEND.items():
            if backend != self.backend:
                self.refuse(*names, unless=f"with --backend {backend}")
        return self

    def run(self, context: Context) -> Quantized:
        """Write the target.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            KconvError: the target, the recipe or the scales cannot be read, or do not fit together.
        """
        recipe = self._recipe(context)
        if self.input_scale not in (None, DATA_FREE) and not context.path(self.input_scale or "").is_file():
            raise InputScalesInvalid(
                f"there is no file {self.input_scale}",
                where="--input-scale",
                fix=f"Pass a file that kconv calibrate wrote, or {DATA_FREE}.",
            )
        _check_model(context, self.target)
        from ..quantize.run import quantize, read_world  # loads torch, so wrong requests are refused first

        world = read_world()
        if world.size > 1 and self.backend == "modelopt":
            raise RequestInvalid("--backend modelopt runs in one process", fix="Start it without torchrun.")
        if not world.rank:
            refuse_existing_output(self.out, self.target)
        if self.backend == "modelopt":
            return self._modelopt(context, recipe)
        plan, processes = self._plan(context, recipe), self._processes()
        own = sum(unit.bytes_in for unit in (plan.units if world.rank == 0 else world.own(plan.units)))
        with context.bytes("quantizing", own) as advance:
            made = quantize(plan, Path(self.out), world=world, jobs=processes, advance=advance, say=context.log)
        return Quantized(self.out, plan, bool(made and not world.rank))

    def estimate(self, context: Context) -> Estimate:
        """Return the plan, made from headers alone."""
        recipe = self._recipe(context)
        refuse_existing_output(self.out, self.target)
        _check_model(context, self.target)
        from ..quantize.run import read_world

        if self.backend == "modelopt":
            plan = self._plan(context, recipe, self._sequences(context)[1], headers_only=True)
            return Estimate(plan.bytes_out, QuantizationPlanned(self.out, plan, None))
        plan = self._plan(context, recipe, headers_only=True)
        processes = self._processes() * read_world().size
        return Estimate(sum(unit.bytes_out for unit in plan.units), QuantizationPlanned(self.out, plan, processes))

    def precheck(self, context: Context) -> None:
        """Raise RecipeInvalid for a missing recipe, RequestInvalid for one without its scales."""
        self._recipe(context)

    def _recipe(self, context: Context) -> Recipe:
        from ..quantize.recipe import load_recipe

        recipe = load_recipe(str(context.path(self.recipe)))
        scaled, named = {"stream": (self.input_scale, "--input-scale"), "modelopt": (self.prompts, "--prompts")}[
            self.backend
        ]
        if recipe.weight_only and scaled:
            raise RequestInvalid(
                f"{named} has no effect: {recipe.name} does not quantize activations", fix=f"Remove {named}."
            )
        if not recipe.weight_only and not scaled:
            raise RequestInvalid(f"{named} is required", fix=f"Pass {SCALES[self.backend]}.")
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
        """Return the token ids of each prompt, [T] each, and their description; nothing without prompts."""
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

        # Prompts first: their errors show before anything large is downloaded.
        sequences, prompts = self._sequences(context)
        plan = self._plan(context, recipe, prompts)
        # ModelOpt prints its progress to stdout, which is for results.
        with context.status("quantizing") as say, quiet_stdout():
            quantize_in_memory(plan, Path(self.out), [ids.unsqueeze(0) for ids in sequences], say=say)
        return Quantized(self.out, plan)


def _check_model(context: Context, name: str) -> None:
    """Refuse a draft head, which has a command of its own.

    Raises:
        TargetInvalid: it is one, or no causal language model.
    """
    from ..targets.config import is_draft, read_target_config

    folder = context.source(name).fetch_config()
    if is_draft(folder):
        raise TargetInvalid(
            f"{name} is a draft head, and kconv quantize takes its target",
            where=folder / "config.json",
            fix="Pass the target, or quantize the head with kconv quantize-head.",
        )
    read_target_config(folder)


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class QuantizeHead(Reading):
    """Write HEAD with FP8 or NVFP4 linear layers into the new folder OUT, with a kconv.json manifest.

    Attention and MLP of a GQA or MHA head are quantized, and the MLP of an MLA head. fc, lm_head, the embedding and the
    norms keep their bytes. Linear layers that engines fuse share scales. OUT has HEAD's layout; kconv to-vllm OUT and
    the other conversions copy it unchanged.

    Nine in ten of the states' prompts give the input scales. On the rest kconv measures the acceptance length, with
    weights and inputs rounded as in an engine, before it writes anything. The whole head is in memory, in fp32.
    """

    EXAMPLES = (
        "kconv states my-target my-states --prompts prompts.jsonl --captured 1,29,57",
        "kconv quantize-head my-head my-head-fp8 --format fp8 --states my-states --target my-target",
        "kconv validate my-head-fp8 --source my-head",
    )

    head: Name = argument("The head: a folder or a Hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; it must not exist.", kind="output")
    format: Literal["fp8", "nvfp4"] = option(..., "Number format of the linear layers.")
    states: Name = option(..., "Output of kconv states, for calibration.", kind="file")
    target: Name = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        ..., "The target that the states come from.", kind="checkpoint"
    )
    min_retention: Share = option(
        0.97,
        "Smallest share of the acceptance length that may remain.",
        metavar="SHARE",
    )

    def run(self, context: Context) -> Converted:
        """Write the head.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            ConversionInaccurate: it retains less than --min-retention.
            KconvError: the head, the target or the states cannot be read.
        """
        from ..quantize.head.formats import FORMATS
        from ..quantize.head.plan import quantize_head

        refuse_existing_output(self.out, self.head)
        head, target = self.open(context, self.head), context.source(self.target)
        with context.status("quantizing") as say:
            manifest, kept = quantize_head(
                head, FORMATS[self.format], Path(self.out), target, context.path(self.states),
                min_retention=self.min_retention, say=say,
            )  # fmt: skip
        size = sum(file.size for file in manifest.files if file.name in manifest.weight_files)
        return Converted(self.out, manifest, kept, size)
