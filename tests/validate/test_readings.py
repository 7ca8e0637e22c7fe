"""Which reading of a head the target's states confirm: what is measured, and what is said of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.heads import GQA, MLA, TARGET, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.read import read_head, read_weights
from kconv.drafters.chain import Acceptance
from kconv.drafters.eagle3 import FACTS
from kconv.drafters.facts import Candidate, Fact, find_undecided
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, Rope
from kconv.engines import BY_NAME
from kconv.errors import Problem
from kconv.measure.texts import Batch, Text
from kconv.rule import Rule
from kconv.targets.config import parse_target_config
from kconv.targets.forward import States
from kconv.validate.readings import (
    Gain,
    Reading,
    ReadingsMeasured,
    decide_readings,
    find_readings,
    judge_mistakes,
    judge_readings,
    known_mistakes,
    measure_readings,
)

CONFIG = parse_target_config(TARGET)
OUTPUTS, EARLY = Reading(MLA), Reading(replace(MLA, captured=(0, 2, 4)))
OTHER_BASE = Reading(replace(MLA, rope=replace(MLA.rope, theta=1e6)))


def accepted(*counts, drafts=100):
    return tuple(Acceptance(3, drafts, (count, count // 2, count // 4), "") for count in counts)


def measured(*readings):
    return ReadingsMeasured(tuple(one for one, _ in readings), "held-out", tuple(parts for _, parts in readings))


def judged(found, still_open):
    return judge_readings(found, decide_readings(found, still_open))


RIGHT = accepted(80, 78, 82, 81, 79, 80, 77, 83)
WORSE = accepted(70, 69, 72, 70, 70, 69, 68, 72)


def test_a_reading_that_another_one_beats_is_an_error_that_names_both_figures():
    found = measured((EARLY, WORSE), (OUTPUTS, RIGHT))
    (finding,) = judged(found, {"captured"})
    taken, best = found.lengths
    assert (finding.rule, finding.severity) == ("K312", "error")
    assert f"{taken:.3f}" in finding.message and f"{best:.3f}" in finding.message and "[0, 2, 4]" in finding.message
    assert "--captured 1,3,5" in finding.fix
    assert found.figures()[0].taken and found.figures()[0].behind_best == pytest.approx(best - taken)


def test_a_fact_that_does_not_move_the_figure_is_not_advised_to_be_changed():
    other_base_too = accepted(81, 78, 82, 81, 79, 80, 77, 83)
    early_and_base = Reading(replace(MLA, captured=(0, 2, 4), rope=replace(MLA.rope, theta=1e6)))
    found = measured((EARLY, WORSE), (OUTPUTS, RIGHT), (OTHER_BASE, other_base_too), (early_and_base, WORSE))
    assert found.best == 2
    (finding,) = judged(found, ())
    assert finding.rule == "K312" and "--captured 1,3,5" in finding.fix and "rope-theta" not in finding.fix


def test_what_the_files_state_is_not_doubted_for_a_trifle():
    """Of a right head that was hardly trained other layers gained 0.007 of 3.428, of 17 standard errors."""
    trifle = accepted(*(1000 + 10 * i for i in range(8)), drafts=1000)
    more = accepted(*(1006 + 10 * i for i in range(8)), drafts=1000)
    found = measured((OUTPUTS, trifle), (EARLY, more))
    assert found.beats(1, 0) and 0 < found.lengths[1] - found.lengths[0] < 0.01 * found.lengths[0]
    assert not list(judged(found, ()))
    # Where a user's word says it, or nothing does, the measurement decides.
    (finding,) = judged(found, {"captured"})
    assert finding.rule == "K312"


def test_the_best_reading_is_no_error_and_decides_what_is_open():
    found = measured((OUTPUTS, RIGHT), (EARLY, WORSE))
    assert list(judged(found, ())) == []
    (finding,) = judged(found, {"captured"})
    assert (finding.rule, finding.severity) == ("K313", "note") and "[1, 3, 5]" in finding.message


NOISE = accepted(79, 80, 81, 80, 80, 79, 78, 83)
CANNOT = {
    "within the noise": ((OUTPUTS, RIGHT), (EARLY, NOISE)),
    "one sequence": ((OUTPUTS, RIGHT[:1]), (EARLY, WORSE[:1])),
    "three sequences": ((OUTPUTS, RIGHT[:3]), (EARLY, WORSE[:3])),
    "equal to the last token": ((OUTPUTS, RIGHT), (EARLY, RIGHT)),
}


@pytest.mark.parametrize("readings", CANNOT.values(), ids=CANNOT)
def test_what_is_within_the_noise_cannot_be_told(readings):
    (finding,) = judged(measured(*readings), {"captured"})
    assert finding.rule == "K314" and "cannot decide it" in finding.message
    assert not list(judged(measured(*readings[::-1]), ()))


def test_of_few_sequences_each_one_must_say_the_same():
    agree, apart = accepted(80, 81, 80, 79), accepted(70, 70, 82, 70)
    assert measured((EARLY, accepted(70, 71, 70, 69)), (OUTPUTS, agree)).beats(1, 0)
    assert not measured((EARLY, apart), (OUTPUTS, agree)).beats(1, 0)


def test_each_open_fact_is_told_on_its_own():
    found = measured((OUTPUTS, RIGHT), (EARLY, WORSE), (OTHER_BASE, NOISE))
    told = {finding.where: finding.rule for finding in judged(found, {"captured", "rope_theta"})}
    assert told == {"config.json: captured": "K313", "config.json: rope_theta": "K314"}


def test_what_is_decided_is_there_as_values():
    found = measured((OUTPUTS, RIGHT), (EARLY, WORSE), (OTHER_BASE, NOISE))
    decided = decide_readings(found, {"captured", "rope_theta"})
    assert (decided.beaten, decided.confirmed, decided.undecided) == ((), ("captured",), ("rope_theta",))
    right = found.figures()[decided.winner].facts
    assert right == {"captured": (1, 3, 5), "rope_theta": MLA.rope.theta, "norm_before_residual": False}
    beaten = decide_readings(measured((EARLY, WORSE), (OUTPUTS, RIGHT)), ())
    assert beaten.beaten == ("captured",) and beaten.winner == 1


@given(st.floats(min_value=8, max_value=1e30))
def test_the_base_in_a_fix_is_the_measured_one_to_the_last_digit(theta):
    other, right = Reading(replace(GQA, rope=Rope(7.0))), Reading(replace(GQA, rope=Rope(theta)))
    for readings in (((other, WORSE), (right, RIGHT)), ((right, RIGHT), (other, WORSE))):
        (finding,) = judged(measured(*readings), {"rope_theta"})
        words = finding.fix.removesuffix(".").split()
        assert float(words[words.index("--rope-theta") + 1]) == theta


def test_a_new_open_fact_is_one_row(tmp_path, monkeypatch):
    fact = Fact(
        "rms_norm_eps", Rule("K999", "eps-unstated", "undecided", "No epsilon.", "Say it."),
        hint="eps", line="norms", path="eps",
        candidates=lambda *_: [Candidate(1e-5, "Llama"), Candidate(2.5e-6, "nobody")],
        put=lambda spec, value: replace(spec, eps=value),
    )  # fmt: skip
    monkeypatch.setitem(FACTS, fact.name, fact)
    (undecided,) = find_undecided(
        FACTS, [Problem("K999", "error", "config.json", "no epsilon", "Pass --eps.")], {}, Hints(), {}
    )
    assert undecided.phrases == ["1e-05: Llama", "2.5e-06: nobody"]
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], MLA, random_slots(MLA))))
    first, other = [one for one in find_readings(head, CONFIG, {fact.name}) if one.spec.captured == MLA.captured][:2]
    assert (first.spec.eps, other.spec.eps) == (MLA.eps, 2.5e-6)
    found = measured((first, WORSE), (other, RIGHT))
    (finding,) = judged(found, {fact.name})
    assert "rms_norm_eps: 2.5e-06" in finding.message and "--eps 2.5e-06" in finding.fix
    assert found.figures()[1].facts[fact.name] == 2.5e-6


def test_layers_one_early_and_one_late_are_always_measured(tmp_path):
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], MLA, random_slots(MLA))))
    found = find_readings(head, CONFIG, ())
    assert [one.spec.captured for one in found] == [(1, 3, 5), (0, 2, 4), (2, 4, 6)]
    assert [one.spec.captured for one in find_readings(head, CONFIG, (), (1, 2, 3, 4, 5, 6))] == [(1, 3, 5), (2, 4, 6)]
    bases = {one.spec.rope.theta for one in find_readings(head, CONFIG, {"rope_theta"})}
    assert bases >= {MLA.rope.theta, 10000.0, 1000000.0}
    normed = {one.spec.norms.before_residual for one in find_readings(head, CONFIG, {"norm_before_residual"})}
    assert normed == {False, True}


def test_each_reading_runs_over_its_own_layers(tmp_path):
    """A head whose fc sees one state alone drafts from that state; told another, it drafts something else."""
    slots = random_slots(GQA)
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], GQA, slots)))
    draft = DraftHead(head.spec, {name: w.float() for name, w in read_weights(head).items() if w.is_floating_point()})
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (4, 12), generator=generator)
    states = States(torch.randn(4, 12, 7 * 48, generator=generator), torch.randn(4, 12, 48), torch.randn(4, 12, 64))
    text = Text("held-out", (Batch(tokens, 1),))
    found = find_readings(head, CONFIG, ())
    both = measure_readings(text, lambda batch: states, tuple(range(7)), 2, draft, found)
    alone = measure_readings(text, lambda batch: states, tuple(range(7)), 2, draft, found[1:2])
    assert len(both.parts) == 3 and both.sequences == 4
    assert both.parts[1] == alone.parts[0] and both.parts[0] != both.parts[1]


# What undoing a mistake gained, of heads whose faults are known: name, kind, acceptance length before, gain, its error,
# and the gain beyond that of the strength alone. The right ones are byte-exact heads after 20 to 200 steps.
RIGHT_GAINS = {
    "norms swapped": Gain("hidden_norm and norm swapped", "strength", 1.638, 0.042, 0.010, beyond=(-0.02, 0.01)),
    "a norm plus one": Gain("input_layernorm plus one", "strength", 1.431, 0.071, 0.0035, beyond=(0.0, 0.00002)),
    "a state fed back normed": Gain("a state fed back after the final norm", "strength", 2.300, 0.068, 0.006),
    "the target's YaRN": Gain("the target's own RoPE", "target's", 1.770, 0.016, 0.003, beyond=(0.001, 0.001)),
    "a norm scaled": Gain("norm times 1.1", "scale", 2.0, 0.03, 0.007),
    "the target's RoPE, of a head with another": Gain("the target's own RoPE", "target's", 2.223, 0.008, 0.002),
}
FAULTY_GAINS = {
    "an order": replace(RIGHT_GAINS["norms swapped"], name="gate_proj and up_proj swapped", kind="structure"),
    "a norm's own values": Gain("norms swapped", "strength", 2.748, 0.119, 0.01, beyond=(0.11, 0.01)),
    "another RoPE": Gain("the target's own RoPE", "target's", 1.770, 0.016, 0.003, beyond=(0.015, 0.003)),
    "no norm at all": Gain("a state fed back after the final norm", "strength", 2.07, 0.8, 0.03),
    "a large scale": Gain("norm times 0.8", "scale", 2.0, 0.5, 0.02),
}


@pytest.mark.parametrize("gain", RIGHT_GAINS.values(), ids=RIGHT_GAINS)
def test_what_an_undertrained_head_gains_from_another_strength_is_a_note(gain):
    (finding,) = judge_mistakes([gain])
    assert (finding.rule, finding.severity) == ("K365", "note") and gain.name in finding.message


@pytest.mark.parametrize("gain", FAULTY_GAINS.values(), ids=FAULTY_GAINS)
def test_what_a_fault_costs_is_an_error_beside_whatever_training_lacks(gain):
    (finding,) = judge_mistakes(sorted([gain, *RIGHT_GAINS.values()], key=lambda one: -one.gained))
    assert (finding.rule, finding.severity) == ("K364", "error") and gain.name in finding.message


def test_a_fault_is_named_though_an_undertrained_head_gains_more_from_a_strength():
    fault = Gain("the states before fc in the order [5, 3, 1]", "structure", 1.6, 0.03, 0.004)
    (finding,) = judge_mistakes([RIGHT_GAINS["norms swapped"], fault])
    assert finding.rule == "K364" and fault.name in finding.message


def test_a_mistake_that_only_comes_close_to_another_reading_is_not_named_beside_it():
    fault = FAULTY_GAINS["an order"]
    assert list(judge_mistakes([fault], fault.gained)) == []
    (finding,) = judge_mistakes([fault], fault.gained / 2)
    assert finding.rule == "K364"


@pytest.mark.parametrize(("near", "rule"), [((-0.002, 0.002), "K365"), ((0.2, 0.02), "K364")])
def test_a_rope_that_gains_in_long_text_alone_is_no_error(near, rule):
    """A right head trained on rows of 96 tokens, on texts of 350, as it was measured; and one whose base was lost."""
    gain = Gain("the target's own RoPE", "target's", 2.352, 0.273, 0.082, near=near)
    (finding,) = judge_mistakes([gain])
    assert (finding.rule, finding.severity) == (rule, "warning" if rule == "K365" else "error")
    assert ("in the first 96 tokens" in finding.message) == (rule == "K365")


def test_a_cure_that_drafts_no_better_than_a_bigram_is_not_named():
    fault = Gain("fc times 100", "scale", 1.12, 0.14, 0.02)
    (finding,) = judge_mistakes([fault], least=1.25)
    assert finding.rule == "K364"
    assert list(judge_mistakes([fault], least=1.3)) == []


def test_norms_without_values_of_their_own_are_held_against_their_strength():
    """A norm of equal weights that is swapped or moved by one is only stronger or weaker."""
    slots = random_slots(MLA)
    norms = [name for name in slots if name.endswith("norm")]
    even = {name: torch.full_like(slots[name], 1 + place / 4) for place, name in enumerate(norms)}
    head = DraftHead(MLA, {name: w.float() for name, w in (slots | even).items() if w.is_floating_point()})
    found = [one for one in known_mistakes(head, range(7)) if one.scaled is not None]
    assert len(found) > 2 * len(norms)
    for mistake in found:
        assert mistake.kind == "strength" and mistake.scaled is not None
        for name in norms:
            close = torch.allclose(mistake.head.weights[name].abs(), mistake.scaled.weights[name].abs(), atol=1e-4)
            assert close, (mistake.name, name)


def by_halves(gate, up):
    """What a split in the middle makes of a fused matrix of two shards, each with its own gate and up."""
    fused = torch.cat([part for pair in zip(gate.chunk(2), up.chunk(2), strict=True) for part in pair])
    return fused.chunk(2)


def in_groups(rows, heads, groups, dim=0):
    """Take heads that stand one of each group in turn as if they stood group by group."""
    return rows.unflatten(dim, (-1, groups, rows.shape[dim] // heads)).transpose(dim, dim + 1).flatten(dim, dim + 2)


QUERY = {"gqa": "0.q_proj", "mla": "0.q_b_proj"}
MISPLACED = {
    "halves of gate": lambda s, _: {"0.gate_proj": torch.cat(s["0.gate_proj"].chunk(2)[::-1])},
    "halves of down": lambda s, _: {"0.down_proj": torch.cat(s["0.down_proj"].chunk(2, 1)[::-1], 1)},
    "shards": lambda s, _: dict(
        zip(("0.gate_proj", "0.up_proj"), by_halves(s["0.gate_proj"], s["0.up_proj"]), strict=True)
    ),
    "rows in turn": lambda s, _: dict(
        zip(
            ("0.gate_proj", "0.up_proj"),
            torch.stack([s["0.gate_proj"], s["0.up_proj"]], 1).flatten(0, 1).chunk(2),
            strict=True,
        )
    ),
    "query heads": lambda s, spec: {QUERY[spec.kind]: in_groups(s[QUERY[spec.kind]], spec.attention.heads, 2)},
    "query heads and o": lambda s, spec: {
        QUERY[spec.kind]: in_groups(s[QUERY[spec.kind]], spec.attention.heads, 2),
        "0.o_proj": in_groups(s["0.o_proj"], spec.attention.heads, 2, dim=1),
    },
}


@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("name", MISPLACED)
def test_a_block_in_another_place_is_put_back(spec, name):
    slots = {slot: w.float() for slot, w in random_slots(spec).items() if w.is_floating_point()}
    broken = DraftHead(spec, slots | MISPLACED[name](slots, spec))
    wrong = [slot for slot, w in slots.items() if not torch.equal(w, broken.weights[slot])]
    undone = [one for one in known_mistakes(broken, range(7)) if one.kind == "structure"]
    right = [one.name for one in undone if all(torch.equal(one.head.weights[slot], slots[slot]) for slot in slots)]
    assert wrong and right, wrong


@pytest.mark.parametrize("times", [2, 1 / 2])
def test_another_number_of_heads_for_the_same_shapes_is_tried(times):
    own = replace(GQA, attention=Gqa(4, 2, 8))
    other = replace(own, attention=Gqa(int(4 * times), int(2 * times), int(8 / times)))
    slots = {slot: w.float() for slot, w in random_slots(own).items() if w.is_floating_point()}
    tried = [one for one in known_mistakes(DraftHead(other, slots), range(7)) if one.head.spec == own]
    assert [(one.name, one.kind) for one in tried] == [("4 attention heads of 8 dims", "strength")]


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_an_fc_whose_scale_was_lost_is_put_back(factor):
    slots = {slot: w.float() for slot, w in random_slots(GQA).items() if w.is_floating_point()}
    broken = DraftHead(GQA, slots | {"fc": slots["fc"] * factor})
    tried = [one for one in known_mistakes(broken, range(7)) if one.name == f"fc times {1 / factor:g}"]
    assert [one.kind for one in tried] == ["scale"]
    torch.testing.assert_close(tried[0].head.weights["fc"], slots["fc"])
