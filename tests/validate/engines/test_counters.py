"""Counters, read from what a vLLM 0.32.0 server printed (its other metrics left out, its paths shortened)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.errors import CountersMissing, CountersReset
from kconv.validate.engines.counters import SpecCounters, parse_counters

PRINTED = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/tiny"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/tiny"} 91.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="/models/tiny"} 1.7951818169455671e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="/models/tiny"} 273.0
# HELP vllm:spec_decode_num_draft_tokens_created Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="/models/tiny"} 1.795181816945593e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="/models/tiny"} 1.0
# HELP vllm:spec_decode_num_accepted_tokens_created Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_created gauge
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="/models/tiny"} 1.7951818169456213e+09
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/tiny",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/tiny",position="1"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/tiny",position="2"} 0.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_created Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="/models/tiny",position="0"} 1.7951818e+09
"""

KINDS = ("drafts_total", "draft_tokens_total", "accepted_tokens_total", "accepted_tokens_per_pos_total")


def counters(places: int = 3):
    count = st.integers(0, 10**9)
    return st.builds(SpecCounters, count, count, count, st.tuples(*[count] * places))


def printed(counted: SpecCounters, model: str = "tiny") -> str:
    prefix, label = "vllm:spec_decode_num_", f'engine="0",model_name="{model}"'
    lines = [
        f"{prefix}drafts_total{{{label}}} {float(counted.drafts)}",
        f"{prefix}draft_tokens_total{{{label}}} {float(counted.draft_tokens)}",
        f"{prefix}accepted_tokens_total{{{label}}} {float(counted.accepted)}",
    ]
    for place, count in enumerate(counted.accepted_per_position):
        lines.append(f'{prefix}accepted_tokens_per_pos_total{{{label},position="{place}"}} {float(count)}')
    return "\n".join(lines) + "\n"


def test_reads_what_the_server_printed():
    assert parse_counters(PRINTED) == SpecCounters(91, 273, 1, (1, 0, 0))


@given(counters(places=12))
def test_reads_counters_of_any_size_and_places_beyond_the_ninth(counted):
    assert parse_counters(printed(counted)) == counted


@pytest.mark.parametrize("model", ["a model", "{odd}", r"quote\"d", 'x",position="7'.replace('"', r"\"")])
def test_a_model_may_have_any_name(model):
    counted = SpecCounters(10, 30, 12, (7, 3, 2))
    assert parse_counters(printed(counted, model)) == counted


def test_several_engines_behind_one_server_are_added_up():
    other = PRINTED.replace('engine="0"', 'engine="1"')
    assert parse_counters(PRINTED + other) == SpecCounters(182, 546, 2, (2, 0, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_that_is_absent_is_named(kind):
    lines = [line for line in PRINTED.splitlines() if f"num_{kind}{{" not in line]
    with pytest.raises(CountersMissing, match=rf"does not count vllm:spec_decode_num_{kind}\n"):
        parse_counters("\n".join(lines))


def test_a_server_without_speculation_has_none():
    with pytest.raises(CountersMissing, match=r"drafts_total.*accepted_tokens_per_pos_total"):
        parse_counters(PRINTED.split("# HELP vllm:spec")[0])


def test_a_page_that_is_no_metrics_has_none():
    with pytest.raises(CountersMissing):
        parse_counters("<html><body>502 Bad Gateway</body></html>")


@given(counters(), counters())
def test_the_difference_is_what_was_counted_in_between(before, between):
    after = SpecCounters(
        before.drafts + between.drafts,
        before.draft_tokens + between.draft_tokens,
        before.accepted + between.accepted,
        tuple(map(sum, zip(before.accepted_per_position, between.accepted_per_position, strict=True))),
    )
    assert after.since(before) == between


@pytest.mark.parametrize(
    "now",
    [
        SpecCounters(9, 60, 25, (15, 7, 3)),
        SpecCounters(20, 29, 25, (15, 7, 3)),
        SpecCounters(20, 60, 11, (15, 7, 3)),
        SpecCounters(20, 60, 25, (15, 2, 8)),
        SpecCounters(20, 60, 25, (15, 10)),
        SpecCounters(20, 60, 25, (15, 5, 3, 2)),
    ],
)
def test_counters_that_went_backwards_are_a_fault(now):
    with pytest.raises(CountersReset, match="10 drafts of 3 tokens before"):
        now.since(SpecCounters(10, 30, 12, (7, 3, 2)))


def test_acceptance_length_counts_the_bonus_token():
    """By vLLM's own formula; its log of one run read 618 of 400 drafts, acceptance length 2.545."""
    assert SpecCounters(400, 1200, 618, (278, 196, 144)).acceptance_length == pytest.approx(2.545)
    assert SpecCounters(7, 21, 0, (0, 0, 0)).acceptance_length == 1.0
    assert SpecCounters(7, 21, 21, (7, 7, 7)).acceptance_length == 4.0


def test_no_draft_has_no_acceptance_length():
    with pytest.raises(CountersMissing, match="drafted nothing"):
        _ = SpecCounters(0, 0, 0, (0, 0, 0)).acceptance_length
