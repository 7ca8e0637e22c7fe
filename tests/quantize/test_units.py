"""The output cut into files: so even that ranks which share them have about the same to do."""

from dataclasses import replace

import pytest

from kconv.quantize.run import World


@pytest.mark.parametrize("shard", [60_000, 100_000, 250_000, 10_000_000])
def test_files_are_as_even_as_their_tensors_allow(shard, forms, plan):
    units = plan(forms("int4"), shard=shard).units
    sizes = [unit.bytes_out for unit in units]
    one = plan(forms("int4"), shard=1)  # each file a single tensor, or a fused group
    largest = max(unit.bytes_out for unit in one.units)
    assert len(units) <= -(-sum(sizes) // shard) and max(sizes) <= shard + largest
    assert min(sizes) >= sum(sizes) / len(units) - largest
    assert outputs(units) == outputs(one.units)


def outputs(units):
    return sorted(name for unit in units for name, _, _ in unit.outputs())


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_bytes_whatever_the_last_file_would_be(ranks, forms, plan):
    units = plan(forms("int4"), "nvfp4-experts", shard=60_000).units
    shares = [sum(unit.bytes_in for unit in World(rank, ranks).own(units)) for rank in range(ranks)]
    assert sum(shares) == sum(unit.bytes_in for unit in units)
    assert max(shares) - min(shares) <= max(unit.bytes_in for unit in units)


def test_another_cut_into_files_of_the_same_names_is_another_run(forms, plan):
    decided = plan(forms("int4"), shard=100_000)
    first, second, *rest = decided.units
    other = (replace(second, file=first.file), replace(first, file=second.file), *rest)
    assert [unit.file for unit in other] == [unit.file for unit in decided.units]
    assert decided.key == plan(forms("int4"), shard=100_000).key != replace(decided, units=other).key
