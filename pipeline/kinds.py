"""The kinds of steps."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayoutName = Literal["vllm", "trtllm", "sglang", "portable"]


class StepBase(BaseModel):
    """What every kind has.

    Attributes:
        INPUTS: the fields that name a file, a folder, a hub id, or another step's output.
        WORDS: values of these that are none.
        CHECKPOINTS: those of them that may be a hub id.
        HEAVY: whether it needs more than a hosted CI machine has.
        RESUMES: whether it goes on where a killed run of it stopped, and so keeps its workplace.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    INPUTS: ClassVar[tuple[str, ...]] = ()
    WORDS: ClassVar[tuple[str, ...]] = ()
    CHECKPOINTS: ClassVar[tuple[str, ...]] = ("head", "target", "source", "start")
    HEAVY: ClassVar[bool] = False
    RESUMES: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The kind's name, as a recipe's `do` says it."""
        return type(self).__name__.lower()


class Reading(BaseModel):
    """What a head's config leaves open, as the options of `kconv inspect`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layout: str | None = None
    captured: tuple[int, ...] | None = None
    captured_are: Literal["outputs", "inputs"] | None = None
    max_positions: int | None = Field(default=None, ge=1)
    norm_before_residual: bool | None = None


class Tiny(StepBase):
    """A tiny Kimi-K2 and texts for it: `target/`, `train.jsonl`, `eval.jsonl` and `held-out.jsonl`."""

    do: Literal["tiny"]
    target: Literal["demo", "test"] = "test"
    documents: int = Field(default=400, ge=1)
    prompts: int = Field(default=8, ge=1)
    prompt_tokens: int = Field(default=96, ge=8)


class Train(StepBase):
    """A head, as `kconv train` makes it."""

    INPUTS = ("target", "recipe", "data", "held_out", "states", "start")
    HEAVY = True
    RESUMES = True

    do: Literal["train"]
    target: str
    recipe: str
    set: dict[str, Any] = {}
    data: str | None = None
    held_out: str | None = None
    states: str | None = None
    start: str | None = None
    save_every: int = Field(default=200, ge=1)
    look_every: int = Field(default=200, ge=1)
    trust_remote_code: bool = False  # for the tokenizer of a target at a commit

    @model_validator(mode="after")
    def _on_something(self) -> Self:
        if (self.data is None) == (self.states is None):
            raise ValueError("a head is trained on either data or states")
        return self


class Quantize(StepBase):
    """A target in NVFP4, as `kconv quantize` makes it."""

    INPUTS = ("target", "recipe", "input_scale")
    WORDS = ("data-free",)
    HEAVY = True
    RESUMES = True

    do: Literal["quantize"]
    target: str
    recipe: str
    input_scale: str | None = None
    kv_cache: Literal["fp8", "none"] | None = None
    jobs: int = Field(default=1, ge=1)


class Convert(StepBase):
    """A head in an engine's layout, as `kconv to-vllm` and its siblings make it."""

    INPUTS = ("head", "target")

    do: Literal["convert"]
    head: str
    layout: LayoutName
    target: str | None = None
    drop_shared: bool = False
    dtype: Literal["bfloat16"] | None = None
    reading: Reading = Reading()


class Validate(StepBase):
    """A report on a head or a target, as `kconv validate` makes it; an error in it stops the run."""

    INPUTS = ("head", "source", "target", "prompts")

    do: Literal["validate"]
    head: str
    source: str | None = None
    target: str | None = None
    prompts: str | None = None
    steps: int = Field(default=3, ge=1, le=16)
    prompt_tokens: int = Field(default=32, ge=1)
    new_tokens: int = Field(default=64, ge=1)
    engines: str | None = None
    trust_remote_code: bool = False  # for the tokenizer of a target at a commit
    reading: Reading = Reading()


class Bench(StepBase):
    """acceptance.json, as `kconv bench` makes it: on a server, or by kconv's own forward where there is no url."""

    INPUTS = ("head", "target", "suite")
    WORDS = ("mt-bench", "speed-bench")
    # What the other way of measuring would pass over.
    OF_SERVERS: ClassVar[frozenset[str]] = frozenset(("concurrency", "precision"))
    OFFLINE: ClassVar[frozenset[str]] = frozenset(("target", "trust_remote_code", "reading"))

    do: Literal["bench"]
    head: str
    suite: str
    target: str | None = None
    url: str | None = None
    draft_tokens: int = Field(default=3, ge=1, le=16)
    max_tokens: int = Field(default=1024, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    concurrency: int = Field(default=1, ge=1)
    limit: int | None = Field(default=None, ge=1)
    target_name: str | None = None
    precision: str | None = None
    trust_remote_code: bool = False  # for the tokenizer of a target at a commit
    reading: Reading = Reading()

    @model_validator(mode="after")
    def _by_something(self) -> Self:
        if not self.url and not self.target:
            raise ValueError("acceptance is measured on a server (url), or with a target")
        idle = sorted(self.model_fields_set & (self.OFFLINE if self.url else self.OF_SERVERS))
        if idle:
            raise ValueError(f"{', '.join(idle)}: only {'without' if self.url else 'with'} url")
        return self


class Card(StepBase):
    """The folder that is published: a converted head with card, licenses and evidence, as `kconv card` writes them."""

    INPUTS = ("head", "report", "acceptance", "license_files", "target", "source")

    do: Literal["card"]
    head: str
    report: str | None = None
    acceptance: tuple[str, ...] = ()
    style: Literal["short", "compact", "nvidia"] = "short"
    license_files: tuple[str, ...] = ()
    target: str | None = None
    source: str | None = None
    model_index: bool = False
    chart: bool = True


class Allowed(BaseModel):
    """A check of the gate that is let pass, and the reason that the card states."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str
    why: str = Field(min_length=1)


class Publish(StepBase):
    """A repository on the Hub, as `kconv publish` makes it."""

    INPUTS = ("folder",)

    do: Literal["publish"]
    folder: str
    repo: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
    tag: str = ""
    private: bool = False
    public: bool = False
    revision: str = "main"
    create_pr: bool = False
    expect_parent: str = ""
    allow: tuple[Allowed, ...] = ()
