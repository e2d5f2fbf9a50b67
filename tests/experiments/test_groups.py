"""Which runs are trained as one program, and that each is then the run it is alone."""

import itertools

import pytest
import torch

from orthoworld.experiments import groups as module
from orthoworld.experiments.build import build_encoder, build_run_world
from orthoworld.experiments.carry_out import carry_out
from orthoworld.experiments.config import load_experiment
from orthoworld.experiments.groups import groups_of, pays, rounds, train_together
from small_runs import MemoryCheckpoint, small_spec, small_specs


def sizes(groups):
    return [len(group) for group in groups]


def test_groups_hold_every_run_once_and_in_order():
    specs = small_specs("seeds=[0,1,2,3,4,5,6]", "objectives=[lejepa,whitened-lejepa]")
    groups = groups_of(specs, 2)
    assert sorted(spec.run_id for group in groups for spec in group) == sorted(spec.run_id for spec in specs)
    position = {spec.run_id: index for index, spec in enumerate(specs)}
    assert [position[group[0].run_id] for group in groups] == sorted(position[group[0].run_id] for group in groups)
    for group in groups:
        assert [position[spec.run_id] for spec in group] == sorted(position[spec.run_id] for spec in group)


@pytest.mark.parametrize(
    ("runs", "workers", "most", "expected"),
    [
        (12, 1, 32, [12]),
        (12, 2, 32, [6, 6]),
        (12, 5, 32, [3, 3, 3, 3]),
        (7, 2, 32, [3, 4]),
        (12, 1, 5, [4, 4, 4]),
        (3, 8, 32, [1, 1, 1]),
        (5, 1, 1, [1] * 5),
    ],
)
def test_groups_are_even_bounded_and_enough_for_all_workers(runs, workers, most, expected):
    assert sizes(groups_of(small_specs(f"seeds={list(range(runs))}"), workers, most)) == expected


def test_restarts_count_as_members_and_a_run_is_not_divided():
    specs = small_specs("seeds=[0,1,2,3,4,5]", "train.restarts=3")
    assert sizes(groups_of(specs, 1, 7)) == [2, 2, 2]
    assert sizes(groups_of(specs, 1, 2)) == [1] * 6


@pytest.mark.parametrize(
    ("change", "together"),
    [
        ("seeds=1", True),
        ("world.transition.rho=0.5", True),
        ("mixings=coupling", True),
        ("objective.lam=0.3", True),
        ("objective.pooled=false", False),
        ("objective={name: whitened-alignment}", False),
        ("encoder.width=17", False),
        ("out_dim=3", False),
        ("train.batch=33", False),
        ("train.restarts=2", False),
        ("train.optimizer.lr=1e-2", False),
        ("train.threads=2", False),
    ],
)
def test_runs_go_together_that_differ_in_world_seed_and_coefficients_only(change, together):
    (one,), (other,) = small_specs(), small_specs(change)
    assert sizes(groups_of([one, other], 1)) == ([2] if together else [1, 1])


def test_large_encoders_are_trained_alone():
    specs = load_experiment("two-d").overridden(["mixings=spiral", "objectives=lejepa", "seeds=[0,1]"]).runs()
    assert not pays(specs[0])
    assert sizes(groups_of(specs, 1)) == [1, 1]
    assert pays(small_spec())


def close(own, other, tolerance=1e-3):
    assert own.runs[-1].status == other.status
    for mine, theirs in zip(own.runs[-1].representation.parameters(), other.representation.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_run_of_a_group_is_the_run_it_is_alone():
    specs = small_specs("seeds=[0,1]", "mixings=[spiral,coupling]", "objective.lam=0.1")
    for trained in train_together(specs):
        alone = carry_out(trained.spec)
        close(trained, alone.run)
        outcome = trained.outcome()
        assert set(outcome.metrics) == set(alone.metrics)
        assert outcome.metrics["r2_hz"] == pytest.approx(alone.metrics["r2_hz"], abs=1e-3)
        assert [row["step"] for row in outcome.run.curve] == [5, 10, 15, 20]


@pytest.mark.parametrize("redraw", ["same", "redrawn"])
def test_restarts_of_a_group_are_those_a_run_has_alone(redraw):
    specs = small_specs("seeds=[0,1]", "mixings=coupling", "train.restarts=3", f"train.restart_worlds={redraw}")
    for trained in train_together(specs, most=4):  # four of six members first
        alone = carry_out(trained.spec).metrics
        losses = [run.held_out_loss for run in trained.runs]
        assert losses == pytest.approx(alone["restart_losses"], abs=1e-3)
        worlds = [run.world.mixing.fingerprint() for run in trained.runs]
        assert worlds == [build_run_world(trained.spec, restart).mixing.fingerprint() for restart in range(3)]


def test_single_run_of_one_restart_is_bitwise_the_run_carry_out_makes():
    (trained,) = train_together([small_spec()])
    for mine, theirs in zip(
        trained.runs[0].representation.parameters(),
        carry_out(small_spec()).run.representation.parameters(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("changes", "most", "expected"),
    [([], 32, 1), (["train.restarts=3"], 32, 1), (["train.restarts=3"], 1, 3), (["train.restarts=3"], 2, 2)],
)
def test_rounds_are_the_trainings_that_follow_one_another(monkeypatch, changes, most, expected):
    spec = small_spec(*changes, "train.steps=2", "train.evaluate_every=0")
    calls = []
    for name in ("train_ensemble", "train_restarts"):
        real = getattr(module, name)

        def counted(*given, real=real, name=name, **options):
            calls.append(name)
            return real(*given, **options)

        monkeypatch.setattr(module, name, counted)
    train_together([spec], most=most)
    assert rounds([spec], most) == expected
    assert calls == (["train_restarts"] if expected == spec.train.restarts else ["train_ensemble"] * expected)


def test_steps_of_a_run_are_told_over_its_restarts():
    specs = small_specs("seeds=[0,1]", "train.restarts=2", "train.steps=3", "train.evaluate_every=0")
    told = {spec.run_id: [] for spec in specs}
    train_together(specs, on_step=lambda spec, done: told[spec.run_id].append(done), most=3)
    for steps in told.values():
        assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("after", [3, 9])
def test_stopped_group_goes_on_from_its_checkpoints_bitwise(after):
    specs = small_specs("seeds=[0,1]", "train.restarts=2", "train.steps=6", "train.evaluate_every=0")
    kept = {(spec.run_id, restart): MemoryCheckpoint() for spec in specs for restart in range(2)}
    options = {"checkpoints": lambda spec: lambda restart: kept[spec.run_id, restart], "most": 2}
    asked = itertools.count(1)
    first = train_together(specs, stop=lambda: next(asked) == after, **options)
    assert [run.interrupted for run in first] == ([True, True] if after == 3 else [False, True])
    for resumed, whole in zip(train_together(specs, **options), train_together(specs, most=2), strict=True):
        assert not resumed.interrupted
        for own, other in zip(resumed.runs, whole.runs, strict=True):
            for mine, theirs in zip(own.representation.parameters(), other.representation.parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_checkpoint_of_a_group_is_taken_up_by_a_run_alone():
    specs = small_specs("seeds=[0,1]", "train.evaluate_every=0")
    kept = {spec.run_id: MemoryCheckpoint() for spec in specs}
    asked = itertools.count(1)
    train_together(
        specs,
        checkpoints=lambda spec: lambda restart: kept[spec.run_id],
        stop=lambda: next(asked) == 7,
    )
    told = []
    (alone,) = train_together(
        specs[:1],
        checkpoints=lambda spec: lambda restart: kept[spec.run_id],
        on_step=lambda spec, done: told.append(done),
    )
    assert told[0] == 8
    close(alone, carry_out(specs[0]).run)


def test_weights_are_those_of_the_encoder():
    spec = small_spec("train.batch=7")
    weights = sum(p.numel() for p in build_encoder(spec, build_run_world(spec)).parameters())
    assert module.encoder_weights(spec) == weights == 2 * 16 + 16 + 16 * 2 + 2
