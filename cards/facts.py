"""Facts that no file of a head states.

Every field is optional; without it a card says so, and `kconv card --missing` asks for it. Nothing is made up.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ..checkpoint.schema import load_yaml
from ..engines.registry import engines
from ..errors import FactsInvalid
from ..strict import StrictModel
from .licenses import NAMES, find


def _known_engine(value: str) -> str:
    known = [engine.name for engine in engines()]
    if value not in known:
        raise ValueError(f"there is no engine {value!r}; choose one of {', '.join(known)}")
    return value


EngineName = Annotated[str, AfterValidator(_known_engine)]
# YAML reads 2.0 and 2026-06-03 as a number and a date; on a card they keep the text as written.
Words = Annotated[str, BeforeValidator(lambda value: value if isinstance(value, str | None) else str(value))]

EXPLAINABILITY = {
    "intended_task": "Intended Task/Domain", "model_type": "Model Type", "intended_users": "Intended Users",
    "output": "Output", "how_it_works": "Describe how the model works",
    "impacted_groups": "Name the adversely impacted groups this has been tested to deliver comparable outcomes "
    "regardless of",
    "limitations": "Technical Limitations & Mitigation",
    "quality_standards": "Verified to have met prescribed NVIDIA quality standards",
    "performance_metrics": "Performance Metrics", "known_risks": "Potential Known Risk", "licensing": "Licensing",
}  # fmt: skip
BIAS = {
    "participation": "Participation considerations from adversely impacted groups protected classes in model design "
    "and testing",
    "measures": "Measures taken to mitigate against unwanted bias",
}
SAFETY = {
    "application_fields": "Model Application Field(s)", "life_critical": "Describe the life critical impact "
    "(if present)", "use_restrictions": "Use Case Restrictions",
    "dataset_restrictions": "Model and Dataset Restrictions",
}  # fmt: skip
PRIVACY = {
    "personal_data_generatable": "Generatable or reverse engineerable personal data?",
    "consent": "Was consent obtained for any personal data used?",
    "personal_data_used": "Personal data used to create this model?",
    "dataset_reviews": "How often is dataset reviewed?",
    "user_interactions": "Was data from user interactions with the AI model (e.g. user input and prompts) used to "
    "train the model?",
    "provenance": "Is there provenance for all datasets used in training?",
    "labeling_law": "Does data labeling (annotation, metadata) comply with privacy laws?",
    "subject_requests": "Is data compliant with data subject requests for data correction or removal, if such a "
    "request was made?",
    "policy": "Applicable NVIDIA Privacy Policy",
}
SUBCARDS = {"explainability": EXPLAINABILITY, "bias": BIAS, "safety": SAFETY, "privacy": PRIVACY}
# Statements that only NVIDIA can make about a head, whoever writes the card.
NOT_OURS = {"quality_standards"}
# The sections to which a publisher can add paragraphs.
NOTED = ("overview", "license", "input", "output", "software", "training", "inference", "usage", "performance",
         "ethics")  # fmt: skip


class Link(StrictModel):
    """A title and an optional URL."""

    title: Words
    url: Words | None = None


class LicenseFacts(StrictModel):
    """The head's license terms."""

    id: Words | None = Field(default=None, description="its license")
    target: Words | None = Field(
        default=None, description="the target's license, since a head may contain the target's weights"
    )
    attribution: Words | None = Field(
        default=None, description="the name that the target's license requires products to show"
    )
    as_published: Words | None = Field(default=None, description="the license as the publisher states it")
    acknowledged: bool = Field(default=False, description="whether you accept a license without a name")

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"it must be a mapping; write license: {{id: {value}}}")
        return value

    @field_validator("id", "target")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if (found := find(value)) is None:
            raise ValueError(f"{value!r} is not a license that kconv knows; use {NAMES}")
        return found.id


class Architecture(StrictModel):
    """What the head is, if its files are not available."""

    type: Words | None = Field(default=None, description="e.g. Transformers")
    network: Words | None = Field(default=None, description="whose decoder layer it is, e.g. DeepSeek V3")
    attention: Words | None = Field(default=None, description="MLA, GQA or MHA")
    parameters: Words | None = Field(default=None, description="the number of parameters, as published")
    tensor_type: Words | None = Field(default=None, description="e.g. BF16")


class Channel(StrictModel):
    """An input or output of the head."""

    types: Words | None = Field(default=None, description="e.g. Text")
    formats: Words | None = Field(default=None, description="e.g. String")
    parameters: Words | None = Field(default=None, description="e.g. One-Dimensional (1D)")
    other: Words | None = Field(default=None, description="e.g. the context length")


class Runtime(StrictModel):
    """What it runs on."""

    engines: Words | None = Field(default=None, description="engines that it was published for")
    hardware: Words | None = Field(default=None, description="e.g. NVIDIA Blackwell")
    systems: Words | None = Field(default=None, description="e.g. Linux")
    tested_on: Words | None = Field(default=None, description="hardware that it was tested on")


class Dataset(StrictModel):
    """A dataset, for training or for evaluation."""

    name: Words
    id: Words | None = Field(default=None, description="hub id")
    url: Words | None = None
    size: Words | None = None
    modality: Words | None = None
    collection: Words | None = None
    labeling: Words | None = None
    properties: Words | None = None


class Training(StrictModel):
    """How it was trained."""

    framework: Words | None = Field(default=None, description="the training framework, with its version")
    method: Words | None = Field(default=None, description="in a sentence")
    datasets: tuple[Dataset, ...] = Field(default=(), description="its training data")
    samples: Words | None = Field(default=None, description="how many")
    tokens: Words | None = Field(default=None, description="how many")
    partition: Words | None = Field(default=None, description="e.g. training 100 %")
    context: Words | None = Field(default=None, description="longest training sequence")
    cluster: Words | None = Field(default=None, description="machines in all")
    trainer: Words | None = Field(default=None, description="machines that trained")
    inference: Words | None = Field(default=None, description="machines that ran the target")
    initialized_from: Words | None = Field(default=None, description="the checkpoint that training started from")
    iterations: Words | None = Field(default=None, description="steps")
    learning_rate: Words | None = Field(default=None, description="with its schedule")
    duration: Words | None = Field(default=None, description="how long")


class Serve(StrictModel):
    """How to serve it in an engine, besides what every head needs."""

    requires: Words | None = Field(default=None, description="the engine's version, e.g. vLLM >= 0.32")
    target: Words | None = Field(default=None, description="the checkpoint to serve, if it is not base_model itself")
    arguments: tuple[Words, ...] = Field(default=(), description="further command line arguments, e.g. --tp_size 4")
    config: Words | None = Field(default=None, description="the YAML for its command, if no file of the head has it")
    note: Words | None = Field(default=None, description="anything else to know")
    unsupported: Words | None = Field(default=None, description="why it cannot be served there")

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its arguments, which stand there as their owner would type them."""
        return tuple(word for argument in self.arguments for word in shlex.split(argument))

    @field_validator("arguments")
    @classmethod
    def _are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            try:
                shlex.split(argument)
            except ValueError as fault:
                raise ValueError(f"a shell cannot read {argument!r}: {str(fault).lower()}") from fault
        return value


class Facts(StrictModel):
    """A facts file.

    Attributes:
        expected: tables of acceptance expected in a complete source; a missing one counts as "not published".
        subcards: keys as in `SUBCARDS`.
        notes: the publisher's own paragraphs, by their section in `NOTED`.
    """

    name: Words | None = Field(default=None, description="hub id of the head")
    publisher: Words | None = Field(default=None, description="who publishes it")
    summary: Words | None = Field(default=None, description="what it is, in your own words")
    base_model: Words | None = Field(default=None, description="hub id of the target")
    source_head: Words | None = Field(default=None, description="hub id of the head it was made from")
    use: Words | None = Field(default=None, description="whether commercial use is allowed, as published")
    license: LicenseFacts = Field(default=LicenseFacts(), description="its terms")
    geography: Words | None = Field(default=None, description="where it may be deployed")
    use_case: Words | None = Field(default=None, description="who would use it, and for what")
    released: Words | None = Field(default=None, description="when and where")
    references: tuple[Link, ...] = Field(default=(), description="what to read about it")
    architecture: Architecture = Architecture()
    input: Channel = Channel()
    output: Channel = Channel()
    runtime: Runtime = Runtime()
    version: Words | None = Field(default=None, description="its version")
    training: Training = Training()
    evaluation: tuple[Dataset, ...] = Field(default=(), description="its evaluation data")
    why: tuple[Words, ...] = Field(default=(), description="why this kind of head for this target")
    performance_note: Words | None = Field(default=None, description="how its published figures were measured")
    requirements: tuple[Words, ...] = Field(default=(), description="what serving it requires")
    serve: dict[EngineName, Serve] = Field(default={}, description="how to start an engine, by the engine's name")
    benchmark_command: Words | None = Field(default=None, description="how to repeat its benchmark")
    ethics: Words | None = Field(default=None, description="your own ethical considerations")
    citation: Words | None = Field(default=None, description="BibTeX")
    languages: tuple[Words, ...] = Field(default=(), description="for the Hub, e.g. [en, zh]")
    tags: tuple[Words, ...] = Field(default=(), description="for the Hub, in addition to kconv's own")
    library: Words | None = Field(default=None, description="the library that loads it, from the Hub's list")
    pipeline_tag: Words = Field(default="text-generation", description="the Hub's task")
    draft_tokens: tuple[int, ...] = Field(
        default=(), description="the K whose acceptance the card shows; the others are folded"
    )
    expected: dict[str, tuple[Words, ...]] = Field(
        default={}, description="categories that a complete source should have"
    )
    subcards: dict[str, dict[str, Words]] = Field(default={}, description="NVIDIA's four tables, row by row")
    notes: dict[str, tuple[Words, ...]] = Field(default={}, description="your own paragraphs, by section")
    sources: tuple[Link, ...] = Field(default=(), description="where these facts were read")

    @field_validator("base_model", "source_head")
    @classmethod
    def _on_the_hub(cls, value: str | None) -> str | None:
        # A card links to it.
        if value and value.startswith(("./", "../", "/")):
            raise ValueError(f"{value} is a path, and must be a Hub id (org/name)")
        return value

    @field_validator("notes")
    @classmethod
    def _sections_exist(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        if unknown := value.keys() - set(NOTED):
            raise ValueError(f"there is no section {', '.join(sorted(unknown))}; the sections are {', '.join(NOTED)}")
        return value

    @field_validator("subcards")
    @classmethod
    def _rows_exist(cls, value: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for card, rows in value.items():
            if card not in SUBCARDS:
                raise ValueError(f"there is no subcard {card!r}; the subcards are {', '.join(SUBCARDS)}")
            unknown = rows.keys() - SUBCARDS[card].keys()
            if unknown:
                raise ValueError(f"{card} has no {', '.join(sorted(unknown))}; it has {', '.join(SUBCARDS[card])}")
        return value


def read_facts(file: Path) -> Facts:
    """Read a facts file in YAML.

    Raises:
        FactsInvalid: it is missing, not YAML, or has an unknown key or an invalid value.
    """
    init = "kconv card HEAD --init FILE writes a facts file to fill in, with comments."
    return load_yaml(
        Facts,
        file,
        FactsInvalid,
        what="facts file",
        fix=f"Correct it there, in UTF-8. {init}",
        missing=FactsInvalid(f"there is no facts file {file}", where="--facts", fix=f"Check the path. {init}"),
    )


def question(facts: type[StrictModel], path: str) -> str:
    """Return the question that a field answers, by its dotted name, "" for a field without one."""
    model: Any = facts
    words = ""
    for name in path.split("."):
        field = model.model_fields.get(name) if isinstance(model, type) and issubclass(model, StrictModel) else None
        if field is None:
            return words
        words, model = field.description or "", field.annotation
    return words
