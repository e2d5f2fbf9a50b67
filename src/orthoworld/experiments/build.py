"""From the description of a run to its world, encoder and objective."""

from torch import nn

from orthoworld.experiments.config import RunSpec, WorldSpec
from orthoworld.objectives.objective import Objective
from orthoworld.streams import stream
from orthoworld.training.schedule import OptimizerRecipe, Schedule
from orthoworld.worlds.transitions import SharedParent
from orthoworld.worlds.world import World


def build_world(spec: WorldSpec, seed: int) -> World:
    """Return the world; a mixing with random weights takes them from the seed's stream `mixing`.

    Raises:
        ArgumentError: an option lies outside its range.
    """
    context = {"dim": spec.dim, "generator": stream(seed, "mixing")}
    transition = spec.transition.build()
    return World(
        spec.source.build(dim=spec.dim),
        SharedParent(transition) if spec.pairs == "shared-parent" else transition,
        spec.mixing.build(**context),
    )


REDRAWN_SEED = 1000
"""Added to a run's seed for each restart that draws its world anew, as published."""


def build_run_world(spec: RunSpec, restart: int = 0) -> World:
    """Return the world of a run's restart: the same for all of them, unless the run redraws it.

    Raises:
        ArgumentError: an option lies outside its range.
    """
    redrawn = spec.train.restart_worlds == "redrawn"
    return build_world(spec.world, spec.seed + REDRAWN_SEED * restart if redrawn else spec.seed)


def build_encoder(spec: RunSpec, world: World, restart: int = 0) -> nn.Module:
    """Return the untrained encoder; each restart has other initial weights.

    Raises:
        ArgumentError: an option lies outside its range.
    """
    encoder: nn.Module = spec.encoder.build(
        in_dim=world.mixing.obs_dim,
        out_dim=world.dim if spec.out_dim is None else spec.out_dim,
        generator=stream(spec.seed, "encoder", restart),
    )
    return encoder


def build_objective(spec: RunSpec) -> Objective:
    """Return the objective.

    Raises:
        ArgumentError: an option lies outside its range.
    """
    objective: Objective = spec.objective.build()
    return objective


def build_recipes(spec: RunSpec) -> tuple[OptimizerRecipe, Schedule]:
    """Return the recipes of the optimiser and of the schedule."""
    return spec.train.optimizer.build(), spec.train.schedule.build()
