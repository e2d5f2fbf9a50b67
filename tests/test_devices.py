"""Where a run is trained: named, resolved once, refused where it is not there."""

import pytest
import torch

from orthoworld import cli, devices
from orthoworld.errors import ArgumentError, ConfigError
from orthoworld.experiments.carry_out import carry_out
from orthoworld.results.execute import provenance
from small_runs import small_spec


@pytest.fixture
def card(monkeypatch):
    """A machine that says it has a graphics card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setitem(devices.AVAILABLE, "cuda", lambda: True)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(devices.AVAILABLE, "cuda", lambda: False)


def test_auto_is_the_card_where_there_is_one(card):
    assert small_spec("train.device=auto").train.device == "cuda"
    assert small_spec("train.device=cpu").train.device == "cpu"


def test_auto_is_the_cpu_elsewhere(no_card):
    assert small_spec("train.device=auto").train.device == "cpu"


def test_another_device_is_another_run(card):
    assert small_spec("train.device=auto").run_id != small_spec("train.device=cpu").run_id


def test_spec_of_a_run_on_another_machine_is_still_read(no_card):
    assert small_spec("train.device=cuda").train.device == "cuda"


def test_run_is_refused_without_its_device(no_card):
    with pytest.raises(ArgumentError, match="device='cuda': this machine has cpu"):
        carry_out(small_spec("train.device=cuda"))


def test_command_line_refuses_a_device_that_is_not_there_before_the_first_step(no_card, monkeypatch, capsys, tmp_path):
    arguments = ["orthoworld", "run", "two-d", "train.device=cuda", "--out", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "orthoworld: device='cuda': this machine has cpu\n"
    assert not (tmp_path / "runs").exists()


def test_unknown_device_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"train\.device='gpu'.*'auto', 'cpu', 'cuda' or 'mps'"):
        small_spec("train.device=gpu")


def test_results_say_where_they_were_made(card):
    assert provenance("cuda")["device"] == "cuda (a card)"
    assert provenance("cpu")["device"] == "cpu"
