"""What cannot be read at all."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import (
    ConfigInvalid,
    ConfigUnsupported,
    CorruptHeader,
    CorruptIndex,
    KconvError,
    LayoutCannot,
    NotACheckpoint,
    TensorTwins,
    UnknownLayout,
)
from ..report import Finding
from .head import HeadSubject
from .rule import Found, Rule, rule


def _never(_: HeadSubject) -> Iterator[Found]:
    """Find nothing: such a checkpoint cannot be opened, and its fault is reported by `of_fault`."""
    return iter(())


NOT_A_CHECKPOINT = rule(
    "K001",
    "not-a-checkpoint",
    "error",
    "The folder has no config.json or no safetensors, so there is nothing to serve.",
    fix="A checkpoint is a folder with config.json and *.safetensors; check the path, or fetch what is missing.",
)(_never)
CORRUPT_HEADER = rule(
    "K002",
    "corrupt-header",
    "error",
    "A safetensors header contradicts its own file: a download that was cut short, or a file that was tampered with.",
    fix="Fetch or export the file again; compare its sha256 with the publisher's.",
)(_never)
CORRUPT_INDEX = rule(
    "K003",
    "corrupt-index",
    "error",
    "The index names files or tensors that are not there, or leaves tensors out; or two files hold the same ones.",
    fix="Fetch the missing shard; or export again, if the files are of different runs.",
)(_never)


def _fault(subject: HeadSubject, *classes: type[KconvError]) -> Iterator[Found]:
    fault = subject.fault
    if isinstance(fault, classes):
        yield Found(fault.where, fault.what, fault.fix)


@rule(
    "K004",
    "unknown-layout",
    "error",
    "Neither the config nor the tensor names are those of an Eagle3 head that an engine or kconv knows.",
    fix="If it is a head all the same, name its layout with --from.",
    seen_in="https://github.com/vllm-project/speculators/issues/1114",
)
def unknown_layout(subject: HeadSubject) -> Iterator[Found]:
    yield from _fault(subject, UnknownLayout)


@rule(
    "K005",
    "twins-differ",
    "error",
    "Two tensors hold one weight under two names, and differ; each engine loads another one.",
    fix="Find out which of them the head was trained with, and remove the other.",
)
def twins_differ(subject: HeadSubject) -> Iterator[Found]:
    yield from _fault(subject, TensorTwins)


@rule(
    "K006",
    "captured-undecided",
    "error",
    "The config does not settle which of the target's layers the head reads, and a wrong guess costs acceptance.",
    fix="Give --target, whose depth decides the default, or say --captured or --captured-are.",
    seen_in="https://github.com/vllm-project/vllm/pull/50170",
)
def captured_undecided(subject: HeadSubject) -> Iterator[Found]:
    if fault := subject.undecided:
        yield Found(fault.where, fault.what, fault.fix)


@rule(
    "K007",
    "no-place-in-layout",
    "error",
    "The layout that the head is in, or was said to be in, has no place for a part of it.",
    fix="Name the layout that the head is in with --from.",
)
def no_place(subject: HeadSubject) -> Iterator[Found]:
    if not subject.holds("*_scale*"):
        yield from _fault(subject, LayoutCannot)


@rule(
    "K008",
    "config-invalid",
    "error",
    "A key of the config has a value that cannot be, in a way that no other rule speaks of.",
    fix="Put the key right; the head's training config has it.",
)
def config_invalid(subject: HeadSubject) -> Iterator[Found]:
    yield from _fault(subject, ConfigInvalid)


@rule(
    "K009",
    "head-unproven",
    "error",
    "kconv cannot read the head for a reason that no other rule speaks of, and vouches for nothing about it.",
    fix="Do what the message says; a head that cannot be read cannot be proven.",
)
def head_unproven(subject: HeadSubject) -> Iterator[Found]:
    yield from _fault(subject, KconvError)


RULES = (unknown_layout, twins_differ, captured_undecided, no_place)
# Only where no other rule found an error: they have nothing to add to one that speaks of the same fault.
LAST = (config_invalid, head_unproven)
UNOPENED = (NOT_A_CHECKPOINT, CORRUPT_HEADER, CORRUPT_INDEX)
OF_FAULT: dict[type[KconvError], Rule[HeadSubject]] = {
    NotACheckpoint: NOT_A_CHECKPOINT,
    CorruptHeader: CORRUPT_HEADER,
    CorruptIndex: CORRUPT_INDEX,
    ConfigInvalid: config_invalid,
    ConfigUnsupported: config_invalid,
}


def of_fault(fault: KconvError) -> Finding:
    """Return the fault that kept a checkpoint from being opened as a finding.

    Raises:
        KconvError: the fault itself, where it is not about the checkpoint.
    """
    if type(fault) not in OF_FAULT:
        raise fault
    return OF_FAULT[type(fault)].finding(Found(fault.where, fault.what, fault.fix))
