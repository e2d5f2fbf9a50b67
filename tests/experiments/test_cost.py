"""What a sweep will cost."""

import pytest
import torch

from orthoworld.errors import ArgumentError
from orthoworld.experiments import cost as module
from orthoworld.experiments.cost import estimate, step_seconds
from orthoworld.experiments.groups import groups_of
from small_runs import small_specs


@pytest.fixture
def seconds_a_step(monkeypatch):
    """Steps of a group take as many seconds as it has runs, and the kinds that were measured are listed."""
    measured = []

    def measure(group, seconds, most):
        measured.append(group)
        return float(len(group))

    monkeypatch.setattr(module, "step_seconds", measure)
    return measured


def test_cost_is_steps_times_their_time(seconds_a_step):
    specs = small_specs("seeds=[0,1,2,3]", "objectives=[lejepa,whitened-lejepa]", "train.steps=10")
    groups = groups_of(specs, 2)
    assert [len(group) for group in groups] == [4, 4]
    found = estimate(groups, 2)
    assert (found.compute_s, found.wall_s) == (80, 40)
    assert (found.measured, found.kinds) == (2, 2) == (len(seconds_a_step), 2)
    assert estimate(groups, 1).wall_s == 80


def test_restarts_of_a_run_cost_as_often_as_they_follow_one_another(seconds_a_step):
    specs = small_specs("train.restarts=4", "train.steps=10")
    assert estimate([specs], 1).compute_s == 10
    assert estimate([specs], 1, most=2).compute_s == 20
    assert estimate([specs], 1, most=1).compute_s == 40


def test_kinds_beyond_the_budget_are_taken_to_cost_what_the_nearest_does(monkeypatch):
    sizes = []
    monkeypatch.setattr(module, "BUDGET_SECONDS", -1.0)
    monkeypatch.setattr(module, "step_seconds", lambda group, seconds, most: sizes.append(len(group)) or 0.5)
    specs = small_specs("seeds=[0,1,2]", "train.steps=10")
    found = estimate([specs[:2], specs[2:]], 2)
    assert sizes == [2]  # the most expensive one is always measured
    assert (found.measured, found.kinds, found.compute_s, found.wall_s) == (1, 2, 10.0, 5.0)


def test_steps_are_timed_and_nothing_is_left_changed():
    specs = small_specs("seeds=[0,1]", "train.threads=2", "train.steps=1")
    assert 0 < step_seconds(specs, 0.0, 32) < 5
    assert torch.get_num_threads() == 1


def test_device_of_another_machine_cannot_be_measured():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ArgumentError, match="cuda"):
        estimate([small_specs("train.device=cuda")], 1)
