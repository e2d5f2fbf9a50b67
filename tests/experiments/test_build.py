"""From a description to the world, the encoder and the objective."""

import numpy as np
import pytest
import torch

from orthoworld.errors import ArgumentError
from orthoworld.experiments.build import build_encoder, build_objective, build_recipes, build_world
from orthoworld.experiments.config import load_experiment


def one_run(*assignments, preset="quick"):
    return load_experiment("two-d", preset).overridden(["objectives=lejepa", *assignments]).runs()[0]


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("preset", ["quick", "paper", "best"])
def test_every_run_of_a_preset_can_be_built(preset):
    for spec in load_experiment("two-d", preset).runs():
        world = build_world(spec.world, spec.seed)
        encoder = build_encoder(spec, world)
        x = world.sample_pairs(3, generator=torch.Generator().manual_seed(0)).x
        assert encoder(x).shape == (3, 2)
        assert build_objective(spec).__class__.__name__.lower() == spec.objective.name.replace("-", "")
        assert len(build_recipes(spec)) == 2


@pytest.mark.parametrize(("pairs", "expected"), [("direct", 0.95), ("shared-parent", 0.95**2)])
def test_pairs_of_a_world_correlate_as_declared(pairs, expected):
    spec = one_run(f"world.pairs={pairs}", "mixings=spiral")
    assert build_world(spec.world, spec.seed).r == pytest.approx(expected)


def test_paper_worlds_record_the_correlation_of_their_pairs():
    spec = one_run(preset="paper")
    assert build_world(spec.world, spec.seed).r == pytest.approx(0.9025)


def test_options_reach_what_is_built():
    spec = one_run("mixings=spiral", "world.mixing.rate=2", "encoder.width=12", "objective.lam=0.25", "out_dim=5")
    world = build_world(spec.world, spec.seed)
    encoder = build_encoder(spec, world)
    assert world.mixing.rate == 2.0
    assert (encoder.layers[0].out_features, encoder.layers[-1].out_features) == (12, 5)
    assert build_objective(spec).lam == 0.25


def test_embedding_has_as_many_dimensions_as_the_world_has_latents():
    spec = one_run("mixings=coupling", "world.dim=3")
    assert build_encoder(spec, build_world(spec.world, spec.seed)).layers[-1].out_features == 3


def test_seed_decides_the_mixing():
    spec = one_run("mixings=coupling")
    first, again, other = (build_world(spec.world, seed).mixing.fingerprint() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["mixings=spiral"], ["mixings=spiral", "world.mixing.rate=3"]),
        (["mixings=banana"], ["mixings=banana", "world.mixing.curvature=2"]),
        (["mixings=coupling"], ["mixings=coupling", "world.mixing.layers=7"]),
        (["mixings=spiral"], ["mixings=spiral", "world.mixing=identity"]),
        (["world.mixing=identity"], ["world.mixing=identity", "world.dim=3"]),
    ],
)
def test_different_mixings_have_different_hashes(one, other):
    specs = [one_run(*assignments) for assignments in (one, other)]
    first, second = (build_world(spec.world, spec.seed).mixing.fingerprint() for spec in specs)
    assert first != second


def test_restarts_begin_at_different_weights_in_the_same_world():
    spec = one_run("mixings=coupling")
    world = build_world(spec.world, spec.seed)
    first, again, second = (weights(build_encoder(spec, world, restart)) for restart in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_building_leaves_the_global_random_states_alone():
    spec = one_run("mixings=coupling")
    states = np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    world = build_world(spec.world, spec.seed)
    build_encoder(spec, world)
    build_objective(spec)
    assert np.random.get_state()[1].tolist() == states[0]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("world.transition.rho=1", "rho=1"),
        ("world.transition.rho=-1.5", "rho=-1.5"),
        ("world.transition.rho=.nan", "rho=nan"),
        ("world.transition.rho=[0.9, 0.8, 0.7]", "rho has 3"),
        ("world.source={name: generalized-normal, alpha: 0}", "alpha=0"),
        ("world.dim=3", "3"),
        ("encoder.width=0", "width=0"),
        ("encoder.depth=0", "depth=0"),
        ("objective.lam=1.5", "lam=1.5"),
        ("objective.slices=0", "slices=0"),
        ("train.optimizer.lr=-1", "lr=-1"),
        ("train.optimizer.lr=.nan", "lr=nan"),
        ("train.optimizer.weight_decay=-0.1", "weight_decay=-0.1"),
        ("train.schedule={name: warmup-cosine, warmup: -5}", "warmup=-5"),
    ],
)
def test_option_out_of_range_is_refused_by_name_before_training(assignment, named):
    spec = one_run("mixings=spiral", assignment)
    with pytest.raises(ArgumentError) as caught:  # noqa: PT012
        build_encoder(spec, build_world(spec.world, spec.seed))
        build_objective(spec)
        build_recipes(spec)
    assert named in str(caught.value)
