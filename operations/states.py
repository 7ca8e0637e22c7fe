"""`kconv states`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from ..lines import Part, Result
from ..options import Name, argument
from ..targets.options import StatesOptions
from .base import Context, Operation
from .reading import check_data, check_prompts, check_target, check_trusted, refuse_existing_output, serving

if TYPE_CHECKING:
    from ..targets.states import StatesRecord


@dataclass(frozen=True, repr=False)
class StatesWritten(Result):
    """Written hidden states: their folder, and their record."""

    out: str
    record: StatesRecord

    def to_json(self) -> Any:
        """Return the record as plain values."""
        return self.record.model_dump(mode="json", by_alias=True)

    def lines(self) -> Iterable[Part]:
        record = self.record
        counts = ", ".join(f"{count} {kind}" for kind, count in record.sequences.items())
        size = f"{record.size / 1e6:,.1f} MB {record.dtype}"
        return (
            f"{self.out}: {record.count} sequences ({counts}), {record.tokens:,} tokens, {size}",
            f"captured: outputs of layers {list(record.captured)} of {record.target.source}",
        )


class States(Operation, StatesOptions):
    """Run TARGET on prompts and write the hidden states that an Eagle3 head reads into the new folder OUT.

    Each sequence has its token ids, the captured layers' outputs, the state after the final norm, and, for answers and
    continuations, a mask of the target's own tokens. The same command resumes a killed run.

    --data takes dialogues with answers, as kconv generate writes them, for kconv train --states. --prompts takes
    prompts, and the target continues them.

    The index lays out training rows of --seq tokens. kconv train with this seq then reads only its own rows, however
    many there are; with another one it also reads the whole index at the start.

    A target that fits only into a server runs there: in vLLM 0.32 or later with hidden-state extraction. Its layer ids
    are those of --captured plus one, followed by the number of layers. kconv cannot query them, so set them correctly.
    For 61 layers and --captured 1,29,57:

    \b
      --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
        {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/shared"}}'
    """

    EXAMPLES = (
        "kconv states my-target my-states --prompts held-out.jsonl --prompt-tokens 32 --sampled 64 --greedy 64",
        "kconv states my-target my-states --data dialogues.jsonl --url http://host:8000 --shared /shared",
    )
    HEAVY = True
    RESUMES = True

    target: Name = argument("The target: a folder or a Hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; it must not exist.", kind="output")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.url) != bool(self.shared):
            raise ValueError("--url and --shared need each other: the server writes states as files")
        if not self.url:
            self.refuse("concurrency", unless="with --url")
        if (self.prompts is None) == (self.data is None):
            raise ValueError("pass either --prompts or --data")
        if self.data:
            self.refuse(
                *("prompt_tokens", "sampled", "greedy", "chat", "held_out", "seed"),
                unless="with --prompts; dialogues already have answers",
            )
            return self
        self.refuse("split", "revision", unless="with --data")
        if self.url and self.sampled:
            raise ValueError(
                "--sampled needs the target in memory; with --url, write sampled answers with kconv generate and pass "
                "them with --data"
            )
        if not self.held_out and not self.sampled and not self.greedy:
            raise ValueError("--no-held-out leaves nothing to write; add --sampled or --greedy")
        return self

    def run(self, context: Context) -> StatesWritten:
        """Write the states.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            KconvError: the target or the prompts cannot be read, or the server fails.
        """
        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out)
        if self.prompts:
            check_prompts(context.path(self.prompts))
        check_data(context, self.data, chosen=self.given("split", "revision"))
        config = check_target(context, self.target, tokenizer=True)
        from ..drafters.captured import default_outputs
        from ..targets.config import check_captured

        if self.captured and config:
            check_captured(self.captured, config.layers)
        from ..targets.write_states import capture_states

        with (
            serving(context, self.target, self.url, self.shared, self.concurrency) as reach,
            context.status("states") as say,
        ):
            record = capture_states(
                context.source(self.target),
                self.located(context),
                Path(self.out),
                lambda config: self.captured or default_outputs(config.layers),
                connect=reach,
                log=say,
            )
        return StatesWritten(self.out, record)
