"""What is measured about a run, and the reasons for what is not."""

import math

import numpy as np
import pytest
import torch

from orthoworld.experiments.build import build_world
from orthoworld.experiments.carry_out import carry_out
from orthoworld.identifiability.recovery import recovery
from orthoworld.streams import stream
from small_runs import small_spec


@pytest.fixture(scope="module")
def plain():
    return carry_out(small_spec())


@pytest.fixture(scope="module")
def matched():
    """A run whose encoder is near the inverse of its mixing: the identity world."""
    return carry_out(
        small_spec(
            "world.mixing=identity", "train.steps=200", "train.optimizer.lr=1e-2", "objective=whitened-alignment"
        )
    )


def test_latents_of_different_speed_have_no_bound_and_the_reason_is_told():
    metrics = carry_out(small_spec("world.transition.rho=[0.9, 0.5]", "train.steps=3")).metrics
    assert metrics["pair_correlation"] == [0.9, 0.5]
    assert math.isnan(metrics["bound"])
    assert "different correlations" in metrics["reasons"]["bound"]
    assert math.isfinite(metrics["r2_hz"])


@pytest.mark.parametrize("out_dim", [1, 3])
def test_embedding_of_another_size_is_measured(out_dim):
    metrics = carry_out(small_spec(f"out_dim={out_dim}", "train.steps=3")).metrics
    assert math.isfinite(metrics["r2_hz"])
    assert math.isfinite(metrics["orth_err"])
    assert math.isnan(metrics["bound"])
    assert "latents" in metrics["reasons"]["bound"]


def test_world_that_does_not_keep_its_law_says_so():
    assert carry_out(small_spec("world.source=laplace", "train.steps=3")).metrics["stationary"] is False


def test_bound_is_not_claimed_for_a_world_that_is_not_gaussian():
    outcome = carry_out(small_spec("world.source=uniform", "train.steps=3"))
    for key in ("bound", "bound_controlled", "nonlinear_energy"):
        assert math.isnan(outcome.metrics[key])
        assert outcome.metrics["reasons"][key] == "the theorem needs a Gaussian world: the source is Uniform(dim=2)"
        assert f"{key}_ci" not in outcome.metrics
    assert math.isfinite(outcome.metrics["delta"])
    assert math.isfinite(outcome.metrics["true_error"])
    assert all(math.isnan(row["bound"]) for row in outcome.run.curve)


def test_linear_oracle_solves_the_identity_world_and_not_the_spiral(plain):
    identity = carry_out(small_spec("world.mixing=identity", "train.steps=3")).metrics
    assert identity["linear_oracle_r2_hz"] > 0.999
    assert plain.metrics["linear_oracle_r2_hz"] < 0.2


def test_shrinkage_is_predicted_for_the_weighted_sum_only(plain):
    assert 0 < plain.metrics["predicted_orth_err"] <= 1
    hard = carry_out(small_spec("objective=vicreg", "train.steps=3")).metrics
    assert "predicted_orth_err" not in hard


def test_whitened_objective_is_measured_behind_its_whitener():
    outcome = carry_out(small_spec("objective={name: whitened-alignment}"))
    assert outcome.run.representation.whitener is not None
    assert outcome.metrics["epsilon"] < 0.5


def test_numbers_of_the_metrics_are_those_of_the_stored_encoder(plain):
    spec = small_spec()
    pairs = build_world(spec.world, spec.seed).sample_pairs(500, generator=stream(spec.seed, "measurement"))
    assert recovery(pairs.z, plain.run.encode(pairs.x), resamples=0).orth_err == plain.metrics["orth_err"]


def test_run_leaves_the_global_random_states_alone():
    states = np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    carry_out(small_spec("train.steps=2"))
    assert np.random.get_state()[1].tolist() == states[0]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[1])


def test_published_measures_are_in_sample_and_pooled(plain):
    spec = small_spec()
    world = build_world(spec.world, spec.seed)
    z = world.source.sample(500, generator=stream(spec.seed, "measurement", "published"))
    h = plain.run.encode(world.mixing(z))
    design = np.c_[h.double(), np.ones(500)]
    fitted = design @ np.linalg.lstsq(design, z.double().numpy(), rcond=None)[0]
    residual = ((z.double().numpy() - fitted) ** 2).sum() / ((z - z.mean(dim=0)).double().numpy() ** 2).sum()
    assert plain.metrics["published_r2_hz"] == pytest.approx(1 - residual)
    assert plain.metrics["published_align"] == pytest.approx(plain.run.curve[-1]["alignment"] / 8)
    assert plain.metrics["published_regulariser"] == plain.run.curve[-1]["regulariser"]


def test_the_published_grid_is_that_of_two_latents_only(plain):
    assert {"published_r2_hz_grid", "published_r2_zh_grid", "published_orth_err_grid"} <= set(plain.metrics)
    three = carry_out(small_spec("world.dim=3", "world.mixing=identity", "train.steps=3")).metrics
    assert "published_r2_hz_grid" not in three
    assert "published_r2_hz" in three


def test_infonce_publishes_its_loss_as_the_regulariser():
    outcome = carry_out(small_spec("objective=infonce", "train.steps=3"))
    assert outcome.metrics["published_regulariser"] == outcome.run.curve[-1]["loss"]


def test_the_chain_of_the_proof_is_kept_for_each_run(matched):
    chain = matched.metrics["chain"]
    assert chain["nonlinear_energy_true"] <= chain["nonlinear_energy"] + 0.2  # noise of D from 500 pairs
    assert chain["polar_error"] <= chain["polar_bound"] + 1e-9
    assert chain["procrustes"] == pytest.approx(chain["true_error"], abs=0.05)
    assert matched.metrics["bound_sharp"] <= matched.metrics["bound_debiased"]


def test_the_bound_has_pairs_of_its_own():
    metrics = carry_out(small_spec("train.bound_samples=3000", "train.steps=3")).metrics
    assert metrics["bound_pairs"] == 3000
    assert metrics["epsilon_floor"] == pytest.approx(math.sqrt(6 / 3000))


def test_energy_lies_in_degree_one_for_a_linear_encoder(matched):
    energy = matched.metrics["hermite_energy"]
    assert sum(energy) == pytest.approx(1)
    assert energy[0] > 0.95
    modes = matched.metrics["hermite_modes"]
    assert modes["He1(z0)"] + modes["He1(z1)"] == pytest.approx(energy[0])
    assert modes["He1(z0)"] == pytest.approx(0.5, abs=0.05)
    low, high = matched.metrics["hermite_modes_ci"]["He1(z0)"]
    assert low <= modes["He1(z0)"] <= high


def test_the_curve_follows_the_energy(plain):
    for row in plain.run.curve:
        assert sum(row[f"energy_{degree}"] for degree in range(1, 5)) + row["energy_rest"] == pytest.approx(1)


def test_what_the_theory_predicts_for_a_stationary_chain_stands_beside():
    metrics = carry_out(
        small_spec("world.source=uniform", "world.transition={name: langevin, rho: 0.9}", "train.steps=3")
    ).metrics
    assert metrics["predicted_r2_hz"] == pytest.approx(96 / math.pi**4, abs=1e-3)
    assert metrics["stationary"] is True
    assert "hermite_energy" not in metrics
