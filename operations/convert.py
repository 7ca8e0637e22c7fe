"""`kconv to-vllm`, `to-trtllm`, `to-sglang`, `to-portable`: one operation, whose `to` names the layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from ..convert.options import AttentionOptions
from ..errors import ReadingBeaten, RequestInvalid
from ..lines import Line, Part, Result, Styled, Table, filename, next_command
from ..options import Name, argument, option
from .base import Context, Estimate
from .reading import Reading, check_prompts, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest
    from ..convert.attention.swap import Kind
    from ..convert.plan import Plan
    from ..convert.read import Head
    from ..measure.retention import Retention

# Options that only an attention conversion reads.
OF_ATTENTION = ("context", "heal", "head_dim", "latent", "min_retention", "device")


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """A written head: its folder, its manifest, what an approximation retained, and the bytes if they became fewer."""

    out: str
    manifest: Manifest
    retention: Retention | None = None
    size: int | None = None
    target: str | None = None

    def to_json(self) -> Any:
        """Return the manifest as plain values."""
        return self.manifest.model_dump(mode="json", by_alias=True)

    def lines(self) -> Iterator[Part]:
        """Yield what became of the tensors, what is not verified, and how much an approximation retains."""
        manifest = self.manifest
        actions = [step.action for step in manifest.tensors]
        counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
        shown = filename(self.out)
        yield f"{shown}: {manifest.source_layout} -> {manifest.layout}, {len(actions)} tensors ({counts})"
        yield from changes(manifest)
        if manifest.config_copied:
            yield f"config keys copied unchanged: {', '.join(manifest.config_copied)}"
        yield f"captured layers: {manifest.captured_by}"
        yield from _unverified(manifest)
        owners = "the source" + (" and, where added, to the target" if "added" in actions else "")
        yield "weights: " + (f"byte-identical to {owners}" if manifest.exact else "differ from the source, see above")
        beside = ("--target", self.target) if self.target else ()
        yield next_command("validate", self.out, "--source", manifest.source, *beside)
        if self.size is not None:
            yield f"bytes: {self.size:,}"
        if (figures := self.retention) is not None:
            against = f"{figures.trained or figures.before:.3f} to {figures.after:.3f}"
            yield (
                f"approximate: retains {figures.kept:.2%} ± {figures.kept_error:.2%} of {figures.against} acceptance "
                f"length ({against}, K={figures.steps}, sampled, bonus included) on {figures.sequences} held-out "
                f"sequences of up to {figures.context} tokens"
            )
            if figures.trained:
                yield f"the original has {figures.before:.3f} without the steps that healed this head"


def changes(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each way in which tensors were computed, and for each tensor that was dropped."""
    alike: dict[tuple[str, str], list[str]] = {}
    for step in manifest.tensors:
        if step.reason:
            alike.setdefault((step.action, step.reason), []).append(step.output.name)
    for (action, reason), (first, *more) in alike.items():
        yield f"{first}{f' and {len(more)} more' * bool(more)} {action}: {reason}"
    yield from (f"{record.name} dropped: {record.reason}" for record in manifest.dropped)


def _unverified(manifest: Manifest) -> Iterator[Line]:
    """Yield facts about a head that rest on the user's word or on a default, loudly if its files contradict them."""
    from ..drafters.facts import phrase

    for one in manifest.unverified:
        said = f" {one.fact}: {phrase(one.fact, one.value)} ({one.word})"
        yield Line((Styled("not verified:", "yellow"), said))
        if one.against:
            said = f" {one.against}. Measure it: kconv validate OUT --target TARGET --prompts PROMPTS"
            yield Line((Styled("WARNING", "bold red"), said))


@dataclass(frozen=True, repr=False)
class ConversionPlanned(Result):
    """What a conversion would do; no plan for another attention, which is fitted and measured first."""

    plan: Plan | None

    def to_json(self) -> Any:
        """Return the plan as plain values."""
        if (plan := self.plan) is None:
            return {"layout": None, "steps": None, "dropped": None, "config": None}
        steps = [{"tensor": s.name, "action": s.action, "from": [x.info.name for x in s.sources]} for s in plan.steps]
        return {"layout": plan.layout.name, "steps": steps, "dropped": plan.dropped, "config": plan.config}

    def lines(self) -> Iterator[Part]:
        """Yield what would become of each tensor."""
        if (plan := self.plan) is None:
            yield "no plan for --attention: the head is fitted, measured, and written if it retains enough"
            return
        steps = [
            (
                ", ".join(one.info.name for one in step.sources),
                step.name,
                step.action + (f": {step.computed.reason}" if step.computed else ""),
            )
            for step in plan.steps
        ]
        yield Table(
            ("from", "to", "action"), steps + [(name, "", f"dropped: {why}") for name, why in plan.dropped.items()]
        )
        yield f"captured layers: {plan.source.read.captured.how}"
        yield "dry run: nothing was written"


class Convert(Reading, AttentionOptions):
    """Write HEAD in an engine's layout into the new folder OUT, with a kconv.json manifest.

    The conversion is exact unless you give --dtype or --attention: every weight keeps its bytes, and the manifest
    records every source tensor.

    --attention changes the attention. That is an approximation: it is fitted to --target's states, healed
    (fine-tuned), measured on held-out text, and refused if it retains too little.

    Without it, --prompts or --states measure on --target what the head's files leave open. The conversion uses what
    this decides, and refuses your reading if another one beats it.
    """

    EXAMPLES = (
        "kconv to-vllm my-head my-head-vllm",
        "kconv to-vllm my-head my-head-vllm --target my-target --drop-shared",
        "kconv to-vllm my-head my-head-mla --attention mla --target my-target --states my-states",
    )
    PLANS = True

    head: Name = argument("The head to convert: a folder or a hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; it must not exist.", kind="output")
    to: str = option(..., "The layout to write.", metavar="LAYOUT")
    drop_shared: bool = option(False, "Omit tensors that are byte-identical to --target's.")
    dtype: Literal["bfloat16"] | None = option(None, "Cast the weights to this dtype; not exact.")
    attention: Literal["mha", "mla"] | None = option(None, "Change the attention; not exact.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        from ..engines import writable

        if self.to not in writable():
            raise ValueError(f"--to {self.to!r} is not one of {', '.join(writable())}")
        if self.attention is None:
            self.refuse(*OF_ATTENTION, unless="with --attention")
            if self.drop_shared and self.target is None:
                raise ValueError("--drop-shared needs --target, for the comparison")
            if (self.states or self.prompts) and (self.target is None or (self.states and self.prompts)):
                raise ValueError("to measure how HEAD should be read, pass --target and one of --states and --prompts")
            return self
        if self.target is None or self.given("drop_shared", "dtype"):
            raise ValueError("--attention needs --target, and excludes --drop-shared and --dtype")
        if (self.states is None) == (self.prompts is None):
            raise ValueError("--attention needs --states or --prompts, for calibration")
        if self.states:
            self.refuse("context", "trust_remote_code", unless="with --prompts")
        if self.attention == "mla" and self.head_dim != "auto":
            raise ValueError("--head-dim applies only to --attention mha")
        if self.attention == "mha" and self.given("latent"):
            raise ValueError("--latent applies only to --attention mla")
        return self

    def run(self, context: Context) -> Converted:
        """Write the head.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            LayoutCannot: the layout or its engine does not support a part of this head.
            ConversionInaccurate: another attention retains less than --min-retention.
            KconvError: the head or the target cannot be read.
        """
        refuse_existing_output(self.out, self.head)
        return self._convert_attention(context, self.attention) if self.attention else self._convert(context)

    def estimate(self, context: Context) -> Estimate:
        """Return the plan, made from headers alone; it does not estimate the work of another attention."""
        refuse_existing_output(self.out, self.head)
        if self.attention:
            return Estimate(None, ConversionPlanned(None))
        planned = self._plan(context)
        return Estimate(sum(step.size for step in planned.steps), ConversionPlanned(planned))

    def _plan(self, context: Context) -> Plan:
        from ..convert.plan import WriteOptions, plan
        from ..convert.shared import find_shapes
        from ..engines.registry import layout_for

        target = context.maybe(self.target)
        options = WriteOptions(find_shapes(target) if target else None, self.drop_shared, self._rounded())
        head = self.open_headers(context, self.head)
        planned = plan(head, layout_for(self.to, head.drafter), options)
        self._compare_positions(context, head)
        return planned

    def _compare_positions(self, context: Context, head: Head) -> None:
        """Say how the head's context differs from what it could be served with."""
        if self.max_positions is not None:
            stated = head.checkpoint.config.get("max_position_embeddings")
            if isinstance(stated, int) and self.max_positions < stated:
                context.log(f"max_position_embeddings: {self.max_positions}, as given; the head states {stated}")
            return
        target = self.target_config(context)
        if target is None:
            return
        spec = head.spec
        if (within := spec.rope.within(target.max_positions)) > spec.max_positions:
            context.log(
                f"max_position_embeddings: {spec.max_positions}, as the head states, but the target has"
                f" {target.max_positions}. To serve longer context, pass --max-positions {within}"
            )

    def _rounded(self) -> str:
        from ..checkpoint.header import FLOAT_DTYPES

        return FLOAT_DTYPES[self.dtype] if self.dtype else ""

    def _measured(self, context: Context) -> tuple[Self, frozenset[str]]:
        """Return the request as confirmed by the target's states, and the facts that they confirm.

        Raises:
            ReadingBeaten: the head accepts less with its reading than with another one.
        """
        from ..drafters.facts import find_fact
        from .validate import Validate

        shared = {"head", "prompts", "states", "trust_remote_code", *Reading.model_fields}
        report = Validate(**self.model_dump(include=shared, exclude_unset=True)).run(context)
        for finding in report.findings:
            if finding.rule == "K312":
                raise ReadingBeaten(finding.message, where=self.head, fix=finding.fix)
            if finding.rule in ("K313", "K314"):
                context.log(f"{finding.where}: {finding.message}")
        decided = report.figures.decided
        if decided is None:
            return self, frozenset()
        right = report.figures.readings[decided.winner].facts
        known = {name: fact for name in decided.confirmed if (fact := find_fact(name)) is not None}
        hints = {key: value for name, fact in known.items() for key, value in fact.hints(right[name]).items()}
        meant = {self.captured, tuple(i - 1 for i in self.captured or ())}
        if self.captured and "captured" in hints and hints["captured"] not in meant:
            ids, better = (",".join(map(str, one)) for one in (self.captured, hints["captured"]))
            raise ReadingBeaten(
                f"--captured {ids}: of outputs or inputs, outputs of layers {better} are accepted more often",
                where=self.head,
                fix="Only lists near that one were measured, so look the layers up in the training's config. If it has"
                f" none, pass --captured {better} --captured-are outputs.",
            )
        return self.model_copy(update=hints), frozenset(decided.confirmed)

    def _convert(self, context: Context) -> Converted:
        if not (self.states or self.prompts):
            return self._write(context, frozenset())
        request, told = self._measured(context)
        return request._write(context, told)

    def _write(self, context: Context, measured: frozenset[str]) -> Converted:
        from ..convert.execute import execute
        from ..convert.plan import WriteOptions, plan
        from ..convert.shared import find_for_layout, find_shapes
        from ..engines.registry import layout_for

        target = context.maybe(self.target)
        # From headers first, so that a head that cannot be converted is refused before its download.
        headers = self.open_headers(context, self.head)
        layout = layout_for(self.to, headers.drafter)
        plan(headers, layout, WriteOptions(find_shapes(target) if target else None, False, self._rounded()))
        shared = find_for_layout(target, headers, layout, drop_shared=self.drop_shared) if target else None
        head = self.open(context, self.head)
        head = replace(head, read=replace(head.read, measured=measured))
        decided = plan(head, layout, WriteOptions(shared, self.drop_shared, self._rounded()))
        if self.drop_shared and not decided.left:
            context.log("--drop-shared leaves nothing out: no tensor that engines share is equal to the target's")
        self._compare_positions(context, head)
        with context.bytes("converting", sum(step.size for step in decided.steps)) as advance:
            return Converted(self.out, execute(decided, Path(self.out), advance), target=self.target)

    def _convert_attention(self, context: Context, kind: Kind) -> Converted:
        # What names, configs and headers already show is refused before torch is loaded or a weight is downloaded.
        from ..convert.attention.swap import check_convertible
        from ..targets.states import open_states

        request, target = self.located(context), context.source(self.target or "")
        check_trusted(context, self.trust_remote_code, self.target)
        if request.prompts:
            check_prompts(Path(request.prompts))
        spec = self.open_headers(context, self.head).spec
        check_convertible(spec, kind)
        states = None
        if request.states:
            states = open_states(Path(request.states), config=self.target_config(context), captured=spec.captured)
        import torch

        from ..convert.attention.convert import convert_attention
        from ..engines.registry import layout_for

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RequestInvalid("--device cuda: torch finds no CUDA device here", fix="Remove --device.")
        head = self.open(context, self.head)
        layout = layout_for(self.to, head.drafter)
        self._compare_positions(context, head)
        with (Context() if self.heal == 0 else context).steps("healing") as healed:
            manifest, kept = convert_attention(
                head, layout, Path(self.out), kind, request, target, states, say=context.log, progress=healed
            )
        return Converted(self.out, manifest, kept, target=self.target)
