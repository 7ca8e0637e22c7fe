"""ModelOpt's dumps, read as its own offline dataset reads them."""

from __future__ import annotations

import pytest
import torch
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset

from kconv.errors import StatesInvalid
from kconv.targets.config import read_target_config
from kconv.targets.modelopt_states import open_modelopt_states

CAPTURED = (1, 3, 5)


@pytest.fixture
def config(tiny_target):
    return read_target_config(tiny_target)


@pytest.fixture
def dump(tmp_path, config):
    generator = torch.Generator().manual_seed(0)
    for number, length in enumerate((7, 12)):
        values = {
            "input_ids": torch.randint(config.vocab, (length,), generator=generator),
            "hidden_states": torch.randn(length, config.hidden, generator=generator).bfloat16(),
            "aux_hidden_states": torch.randn(length, 3 * config.hidden, generator=generator).bfloat16(),
            "conversation_id": f"c{number}",
        }
        if number:
            values["loss_mask"] = torch.arange(length) > 4
        (tmp_path / "part").mkdir(exist_ok=True)
        torch.save(values, tmp_path / "part" / f"{number}.pt")
    return tmp_path


def test_reads_what_modelopts_own_dataset_reads(dump, config):
    states = open_modelopt_states(dump, config=config, captured=CAPTURED, allow_pickle=True)
    assert [s.length for s in states.sequences] == [7, 12]
    theirs = OfflineSupervisedDataset([str(file) for file in states.files])
    for index in range(2):
        found, expected = states.read(index), theirs[index]
        assert torch.equal(found.tokens, expected["input_ids"])
        assert torch.equal(found.hidden, expected["base_model_hidden_states"])
        assert torch.equal(found.captured, expected["aux_hidden_states"])
    assert states.read(0).loss_mask is None
    mask = states.read(1).loss_mask
    assert mask is not None
    assert mask.tolist() == [False] * 5 + [True] * 7


def test_no_pickle_is_read_unasked(dump, config):
    with pytest.raises(StatesInvalid, match="is a pickle") as fault:
        open_modelopt_states(dump, config=config, captured=CAPTURED, allow_pickle=False)
    assert "--allow-pickle" in fault.value.fix


@pytest.mark.parametrize("name", ["hidden_states", "aux_hidden_states"])
def test_a_hole_in_a_dump_is_told(dump, config, name):
    file = dump / "part" / "1.pt"
    values = torch.load(file)
    values[name][5] = 0
    torch.save(values, file)
    states = open_modelopt_states(dump, config=config, captured=CAPTURED, allow_pickle=True)
    states.read_span(1, 0, 5)
    for read in (states.read, lambda index: states.read_span(index, 4, 6)):
        with pytest.raises(StatesInvalid, match="states are all zero"):
            read(1)


class Evil:
    def __reduce__(self):
        return (print, ("run",))


class Grows:
    def __reduce__(self):
        return (bytearray, (1,))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"input_ids": None}, "holds no input_ids"),
        ({"hidden_states": Evil()}, "cannot be read"),
        ({"more": Grows()}, "it names .*bytearray"),
        ({"hidden_states_prenorm": True}, "before the final norm"),
        ({"hidden_states": torch.zeros(7, 3)}, "has shapes"),
        ({"aux_hidden_states": torch.zeros(7, 2 * 64)}, "has shapes"),
        ({"input_ids": torch.full((7,), 10**6)}, "token ids outside"),
        ({"loss_mask": torch.ones(3)}, "loss_mask with a different length"),
    ],
)
def test_what_is_not_of_the_schema_or_the_target_is_refused(dump, config, changes, what, capsys):
    file = dump / "part" / "0.pt"
    torch.save(torch.load(file) | changes, file)
    with pytest.raises(StatesInvalid, match=what):
        open_modelopt_states(dump, config=config, captured=CAPTURED, allow_pickle=True)
    assert "run" not in capsys.readouterr().out


def test_a_folder_without_dumps_is_refused(tmp_path, config):
    with pytest.raises(StatesInvalid, match=r"holds no \*\.pt"):
        open_modelopt_states(tmp_path, config=config, captured=CAPTURED, allow_pickle=True)
