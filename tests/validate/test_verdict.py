"""What measured figures say of a head: against its manifest, against what is asked for, and against no head at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.heads import MLA, random_slots, write_head
from support.weight_faults import FAULTS

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import ConversionRecord
from kconv.convert.read import read_head
from kconv.drafters.fingerprint import TOLERANCE, difference, fingerprint
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import HeadSpec, Mla
from kconv.engines import by_name
from kconv.errors import ConversionInaccurate, KconvError
from kconv.measure.drafting import Measured
from kconv.measure.figures import AcceptanceFigures, ParityFigures, TextFigures, TextKind
from kconv.measure.retention import Retention, check_retention
from kconv.validate.rules.table import find_rule
from kconv.validate.structure import check_source
from kconv.validate.verdict import Claim, judge_baselines, judge_fingerprint, judge_retention

CLAIM = Claim(0.975, 0.001)


def parity(kind: TextKind, kept: float, error: float | None) -> Measured:
    figures = ParityFigures(
        text=kind, steps=3, relative_error=0.1, rms_error=0.1, kl=0.1, top1=0.9, length_difference=0.0,
        length_difference_se=0.0, kept=kept, kept_se=error,
    )  # fmt: skip
    return Measured(TextFigures(kind=kind, sequences=8, tokens=800, distinct_4grams=0.9), (), figures)


def rules(*measured: Measured, claim: Claim | None = CLAIM, least: float | None = None) -> list[str]:
    return [finding.rule for finding in judge_retention(measured, claim, least)]


def test_a_head_at_73_percent_beside_a_claim_of_97_5_is_an_error():
    [finding] = judge_retention([parity("sampled", 0.73, 0.01)], CLAIM, None)
    assert (finding.rule, finding.severity) == ("K360", "error")
    assert "73.00% ± 1.00%" in finding.message and "97.50% ± 0.10%" in finding.message


@pytest.mark.parametrize("kept, error", [(0.977, 0.002), (0.968, 0.001), (0.94, 0.02), (1.01, 0.0)])
def test_a_claim_that_the_standard_error_or_another_text_explains_stands(kept, error):
    assert rules(parity("sampled", kept, error)) == []


def test_what_healing_gained_need_not_show_on_another_text():
    gained = Claim(1.10, 0.003)
    assert rules(parity("sampled", 1.01, 0.005), claim=gained) == []
    assert rules(parity("sampled", 0.97, 0.005), claim=gained) == ["K360"]


def test_no_claim_no_error_and_one_sequence_judge_nothing():
    assert rules(parity("sampled", 0.5, 0.01), claim=None) == []
    assert rules(parity("sampled", 0.5, None), least=0.97) == []
    assert Claim.of(None) is None


def test_what_is_no_number_is_no_agreement():
    assert rules(parity("sampled", float("nan"), 0.0), least=0.9) == ["K360", "K361"]


def test_greedy_is_judged_beside_sampled():
    """A head that keeps 97.5 % sampled and 91.5 % greedy."""
    both = parity("sampled", 0.975, 0.002), parity("greedy", 0.915, 0.012)
    [finding] = judge_retention(both, CLAIM, 0.97)
    assert (finding.rule, finding.where) == ("K361", "greedy")
    assert rules(*both, least=0.9) == []
    # A claim is of sampled acceptance, and judges no greedy one.
    assert rules(both[1]) == []
    # What the error leaves open is no loss.
    assert rules(parity("greedy", 0.915, 0.05), least=0.97) == []


def test_a_conversion_that_loses_greedy_acceptance_is_refused():
    figures = Retention(
        sequences=40, positions=4000, context=96, steps=3, before=2.8, after=2.73, kept=0.975, kept_error=0.001,
        kl=(0.1, 0.1, 0.1), attention_error=0.1, gained=0.975, greedy_before=2.485, greedy_after=2.273,
        greedy_kept=0.915, greedy_kept_error=0.01,
    )  # fmt: skip
    with pytest.raises(ConversionInaccurate, match=r"retains 91\.50% ± 1\.00% of the original's greedy") as refused:
        check_retention(figures, 0.97)
    assert "--min-retention 0.91" in refused.value.fix and "(2.273 of 2.485 at K=3)" in refused.value.what
    check_retention(figures, 0.91)
    check_retention(replace(figures, greedy_kept_error=0.03), 0.97)


def row(drafter: str, rates: tuple[float, ...], error: float = 0.01, text: TextKind = "sampled") -> AcceptanceFigures:
    return AcceptanceFigures(
        drafter=drafter, text=text, steps=len(rates), drafts=1000, length=1 + sum(rates), standard_error=error,
        rates=rates, note="", sequences=16, rate_errors=(error,) * len(rates),
    )  # fmt: skip


GOOD, PAIRS = row("output", (0.8, 0.6, 0.5)), row("bigram", (0.5, 0.3, 0.15))


def test_a_head_that_is_worse_than_a_bigram_is_an_error():
    broken = row("output", (0.2, 0.05, 0.01))
    [finding] = judge_baselines([broken, PAIRS])
    assert (finding.rule, finding.severity, finding.where) == ("K363", "error", "sampled")
    assert "worse than a bigram" in finding.message and "belongs to another target" in find_rule("K363").sentence
    assert [f.rule for f in judge_baselines([broken, row("prompt lookup", (0.5, 0.4, 0.3))])] == ["K363"]


def test_places_are_judged_one_by_one():
    """A head whose own state is fed back wrongly drafts the first token well and no other."""
    [finding] = judge_baselines([row("output", (0.8, 0.2, 0.1)), PAIRS])
    assert "from token 2 on" in finding.message and "20.0%" in finding.message


def test_a_good_head_a_head_within_the_error_and_greedy_text_are_not_found():
    assert list(judge_baselines([GOOD, PAIRS])) == []
    near = row("output", (0.48, 0.29, 0.14), error=0.02)
    assert list(judge_baselines([near, row("bigram", (0.5, 0.3, 0.15), error=0.02)])) == []
    # A small target's greedy text runs in circles, which prompt lookup drafts best.
    assert (
        list(
            judge_baselines(
                [row("output", (0.3, 0.1, 0.1), text="greedy"), row("bigram", (0.9, 0.9, 0.9), text="greedy")]
            )
        )
        == []
    )


@pytest.fixture(scope="module")
def slots() -> dict[str, torch.Tensor]:
    """Weights of a random head whose norms are near one and whose linears keep magnitudes."""
    found = {}
    for name, tensor in random_slots(SPEC, seed=1).items():
        if tensor.is_floating_point():
            tensor = 1 + 0.1 * tensor if tensor.ndim == 1 else tensor * tensor.shape[1] ** -0.5
        found[name] = tensor
    return found


# As many rotary pairs as published heads have: of fewer, YaRN's bounds move none.
SPEC: HeadSpec = replace(MLA, attention=Mla(4, 24, 32, 16, 64, 16), captured=(1, 3, 5), dtype="F32")


@pytest.fixture(scope="module")
def print_of(slots):
    return fingerprint(DraftHead(SPEC, slots))


@pytest.mark.parametrize("name", [name for name in FAULTS if "captured" not in name])
def test_a_fingerprint_tells_each_fault_that_the_captured_layers_are_not(name, slots, print_of):
    """Which layers are read is no matter of what is computed; the config says it, and is held against the source's."""
    apart = difference(print_of, fingerprint(DraftHead(*FAULTS[name](SPEC, slots))))
    assert apart > TOLERANCE
    assert [finding.rule for finding in judge_fingerprint(apart)] == ["K362"]


def test_a_fingerprint_is_the_same_however_it_is_summed_up(slots, print_of):
    exact = fingerprint(DraftHead(SPEC, {n: w.double().float() for n, w in slots.items()}))
    assert exact == print_of
    turned = slots | {n: slots[n].flip(0) for n in ("0.gate_proj", "0.up_proj")}
    turned["0.down_proj"] = slots["0.down_proj"].flip(1)
    # The same function, whose sums run the other way round.
    assert 0 < difference(print_of, fingerprint(DraftHead(SPEC, turned))) < TOLERANCE / 10
    assert list(judge_fingerprint(difference(print_of, print_of))) == []
    assert difference(print_of, print_of[:-1]) == float("inf")
    assert list(judge_fingerprint(None)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_with_its_source_each_of_the_26_faults_is_found(name, slots, tmp_path):
    layout = by_name("vllm")
    source = read_head(open_checkpoint(write_head(tmp_path / "source", layout, SPEC, slots)))
    faulty = write_head(tmp_path / "faulty", layout, *FAULTS[name](SPEC, slots))
    try:
        found = {finding.rule for finding in check_source(read_head(open_checkpoint(faulty)), source)}
    except KconvError:
        return  # refused by name
    assert found & {"K303", "K304"}


def test_there_are_26_faults():
    assert len(FAULTS) == 26
    assert ConversionRecord.model_fields["fingerprint"].default == ()
