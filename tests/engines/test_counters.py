"""Counters, read from what a vLLM 0.32.0 server printed (its other metrics left out, its paths shortened)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.engines import trtllm
from kconv.engines.counters import Totals
from kconv.engines.vllm import ACCEPTED, ACCEPTED_AT, DRAFTED, DRAFTS, ENGINE, read_counters
from kconv.errors import CountersMissing, CountersReset

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


def counted(drafts: int, drafted: int, accepted: int, places: tuple[int, ...]) -> Totals:
    """What a vLLM counted: verify steps, tokens drafted, tokens accepted, and those at each place."""
    by_place = {f"{ACCEPTED_AT} {place}": float(count) for place, count in enumerate(places)}
    return Totals({DRAFTS: float(drafts), DRAFTED: float(drafted), ACCEPTED: float(accepted)} | by_place, whole=True)


def counters(places: int = 3):
    count = st.integers(0, 10**9)
    return st.builds(counted, count, count, count, st.tuples(*[count] * places))


def printed(page: Totals, model: str = "tiny") -> str:
    label = f'engine="0",model_name="{model}"'
    lines = []
    for key, count in page.totals.items():
        name, _, place = key.partition(" ")
        at = f',position="{place}"' if place else ""
        lines.append(f"{name}{{{label}{at}}} {count}")
    return "\n".join(lines) + "\n"


BEFORE = counted(10, 30, 12, (7, 3, 2))


def test_reads_what_the_server_printed():
    assert read_counters(PRINTED) == counted(91, 273, 1, (1, 0, 0))


@given(counters(places=12))
def test_reads_counters_of_any_size_and_places_beyond_the_ninth(page):
    assert read_counters(printed(page)) == page


@pytest.mark.parametrize("model", ["a model", "{odd}", r"quote\"d", 'x",position="7'.replace('"', r"\"")])
def test_a_model_may_have_any_name(model):
    assert read_counters(printed(BEFORE, model)) == BEFORE


def test_several_engines_behind_one_server_are_added_up():
    other = PRINTED.replace('engine="0"', 'engine="1"')
    assert read_counters(PRINTED + other) == counted(182, 546, 2, (2, 0, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_that_is_absent_is_named(kind):
    lines = [line for line in PRINTED.splitlines() if f"num_{kind}{{" not in line]
    with pytest.raises(CountersMissing, match=rf"does not count vllm:spec_decode_num_{kind}\n"):
        read_counters("\n".join(lines))


def test_a_server_without_speculation_has_none():
    with pytest.raises(CountersMissing, match=r"drafts_total.*accepted_tokens_per_pos_total"):
        read_counters(PRINTED.split("# HELP vllm:spec")[0])


def test_a_page_that_is_no_metrics_has_none():
    with pytest.raises(CountersMissing):
        read_counters("<html><body>502 Bad Gateway</body></html>")


@given(counters(), counters())
def test_the_difference_is_what_was_counted_in_between(before, between):
    after = Totals({name: value + between.totals[name] for name, value in before.totals.items()}, whole=True)
    assert after.since(before, "/metrics") == between.totals


@pytest.mark.parametrize(
    "now",
    [
        counted(9, 60, 25, (15, 7, 3)),
        counted(20, 29, 25, (15, 7, 3)),
        counted(20, 60, 11, (15, 7, 3)),
        counted(20, 60, 25, (15, 2, 8)),
        counted(20, 60, 25, (15, 10)),
        counted(20, 60, 25, (15, 5, 3, 2)),
    ],
)
def test_counters_that_went_backwards_are_a_fault(now):
    with pytest.raises(CountersReset, match=r"went backwards|did not have before"):
        now.since(BEFORE, "/metrics")


def test_a_place_that_is_counted_for_the_first_time_is_no_other_server_where_that_can_be():
    """TensorRT-LLM shows no sample of a place before a token of it was accepted."""
    page = 'trtllm_spec_decode_accepted_tokens_total{{token_position="{}"}} 5.0\n'
    read = trtllm.ENGINE.counters.read
    assert read(page.format(0) + page.format(1)).since(read(page.format(0)), "")[f"{trtllm.ACCEPTED_AT} 1"] == 5.0


def test_places_are_counted_with_vllms_own_numbers():
    """Its log of one run read 618 of 400 drafts, acceptance length 2.545."""
    counts = ENGINE.counters.count(counted(400, 1200, 618, (278, 196, 144)).totals, 3, 5, 5)
    assert 1 + counts.accepted / counts.drafts == pytest.approx(2.545)
    assert counts.per_position == (278, 196, 144)


@pytest.mark.parametrize(
    "line",
    [
        f"{DRAFTS} NaN",
        f"{DRAFTS} +Inf",
        f"{DRAFTS} many",
        f'{DRAFTS}{{model="a"',
        f"{ACCEPTED_AT} 3.0",
        f'{ACCEPTED_AT}{{position="999999999999"}} 1.0',
        f'{ACCEPTED_AT}{{position="-1"}} 1.0',
        f'{ACCEPTED_AT}{{position="first"}} 1.0',
        # Beyond any float, and below any count.
        f"{DRAFTS} {'9' * 400}",
        f"{DRAFTS} -1.0",
    ],
)
def test_a_sample_that_no_counter_can_have_is_a_fault(line):
    with pytest.raises(CountersMissing, match="cannot be read"):
        read_counters(PRINTED + line + "\n")
