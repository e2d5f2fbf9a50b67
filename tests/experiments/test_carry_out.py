"""One run from its description to its measurements."""

import math

import pytest
import torch

from orthoworld.experiments import carry_out as module
from orthoworld.experiments.build import build_encoder, build_objective, build_world
from orthoworld.experiments.carry_out import carry_out
from orthoworld.streams import stream
from small_runs import small_spec

KEYS = [
    "status",
    "r2_hz",
    "r2_zh",
    "r2_hz_per_dim",
    "r2_hz_pooled",
    "orth_err",
    "procrustes",
    "mcc",
    "effective_rank",
    "pair_correlation",
    "alignment",
    "regulariser",
    "delta",
    "epsilon",
    "epsilon_debiased",
    "epsilon_floor",
    "nonlinear_energy",
    "bound",
    "true_error",
    "steps",
    "wall_s",
    "peak_rss_mb",
]
OF_THE_MACHINE = ("wall_s", "peak_rss_mb")


@pytest.fixture(scope="module")
def plain():
    return carry_out(small_spec())


@pytest.fixture(scope="module")
def restarted():
    return carry_out(small_spec("train.restarts=3", "mixings=coupling"))


def test_outcome_has_every_measure(plain):
    assert set(KEYS) <= set(plain.metrics)
    assert plain.metrics["status"] == "finished"
    assert plain.metrics["steps"] == 20
    assert plain.metrics["pair_correlation"] == 0.95
    assert plain.metrics["reasons"] == {}


def test_interval_contains_its_estimate(plain):
    intervals = [key for key in plain.metrics if key.endswith("_ci")]
    assert {"r2_hz_ci", "orth_err_ci", "delta_ci", "true_error_ci"} <= set(intervals)
    for key in intervals:
        ends = plain.metrics[key]
        for low, high in ends.values() if isinstance(ends, dict) else [ends]:
            assert low <= high


def test_bound_is_not_below_the_true_error(plain):
    assert plain.metrics["bound_ci"][1] >= plain.metrics["true_error_ci"][0]


def test_curve_has_a_row_for_each_evaluation(plain):
    assert [row["step"] for row in plain.run.curve] == [5, 10, 15, 20]
    for row in plain.run.curve:
        assert {"loss", "r2_hz", "r2_zh", "orth_err", "bound", "bound_controlled", "true_error"} <= set(row)


def test_same_spec_gives_the_same_weights_and_metrics(plain):
    again = carry_out(small_spec())
    for mine, theirs in zip(again.run.representation.parameters(), plain.run.representation.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for key, value in again.metrics.items():
        if key not in OF_THE_MACHINE:
            assert value == plain.metrics[key]


def test_another_seed_gives_other_weights(plain):
    other = carry_out(small_spec("seeds=1"))
    assert other.metrics["loss"] != plain.metrics["loss"]


def test_measuring_more_often_changes_no_weight(plain):
    watched = carry_out(small_spec("train.evaluate_every=1", "train.evaluation_samples=300"))
    for mine, theirs in zip(
        watched.run.representation.parameters(), plain.run.representation.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_restarts_share_the_world_and_the_best_is_kept(restarted):
    losses = restarted.metrics["restart_losses"]
    spec = small_spec("mixings=coupling")
    assert len(set(losses)) == 3
    assert losses[restarted.metrics["restart"]] == min(losses) == restarted.metrics["loss"]
    assert restarted.metrics["mixing_hash"] == build_world(spec.world, spec.seed).mixing.fingerprint()


def test_every_restart_is_scored(restarted):
    scores = restarted.metrics["restart_r2_hz"]
    assert len(set(scores)) == 3
    assert scores[restarted.metrics["restart"]] == restarted.run.curve[-1]["r2_hz"]


def test_redrawn_restarts_choose_among_worlds():
    spec = small_spec("mixings=coupling", "train.restarts=3", "train.restart_worlds=redrawn", "train.steps=3")
    worlds = [build_world(spec.world, spec.seed + 1000 * restart).mixing.fingerprint() for restart in range(3)]
    outcome = carry_out(spec)
    assert len(set(worlds)) == 3
    assert outcome.metrics["mixing_hash"] == worlds[outcome.metrics["restart"]]


def test_one_batch_may_choose_another_restart_than_many(restarted):
    """The choice by one batch is that of the objective on this batch alone."""
    spec = small_spec("train.restarts=3", "mixings=coupling", "train.selection=one-batch")
    metrics = carry_out(spec).metrics
    assert metrics["restart_losses"] == restarted.metrics["restart_losses"]
    world, objective = build_world(spec.world, spec.seed), build_objective(spec)
    pairs = world.sample_pairs(32, generator=stream(spec.seed, "selection"))
    losses = []
    for restart in range(3):
        run = module.train_restart(spec, world, objective, restart)
        h = torch.stack([run.encode(pairs.x), run.encode(pairs.x_next)])
        losses.append(objective(h, generator=stream(spec.seed, "selection", "slices")).total.item())
    assert metrics["restart"] == losses.index(min(losses))


def test_restart_that_diverged_is_not_kept(monkeypatch):
    def broken_first(spec, world, restart=0):
        encoder = build_encoder(spec, world, restart)
        if restart == 0:
            torch.nn.init.constant_(encoder.layers[-1].weight, torch.nan)
        return encoder

    monkeypatch.setattr(module, "build_encoder", broken_first)
    metrics = carry_out(small_spec("train.restarts=2", "train.steps=3")).metrics
    assert metrics["restart"] == 1
    assert metrics["status"] == "finished"
    assert math.isnan(metrics["restart_losses"][0])


def test_steps_are_told_over_all_restarts():
    told = []
    carry_out(small_spec("train.restarts=2", "train.steps=4", "train.evaluate_every=0"), on_step=told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]


def test_stopped_run_is_interrupted_and_not_measured():
    told = []
    outcome = carry_out(small_spec(), stop=lambda: len(told) == 7, on_step=told.append)
    assert outcome.run.status == "interrupted"
    assert outcome.run.steps == 7
    assert outcome.metrics == {}


def test_diverged_run_says_so_and_why_nothing_is_measured():
    metrics = carry_out(small_spec("train.optimizer.lr=1e30")).metrics
    assert metrics["status"] == "diverged"
    assert "step 2" in metrics["status_reason"]
    for key in ("r2_hz", "orth_err", "bound", "true_error"):
        assert math.isnan(metrics[key])
        assert metrics["reasons"][key]
