"""One training loop for every experiment."""

from collections.abc import Callable

from torch import nn

from orthoworld.checks import whole
from orthoworld.objectives.objective import Objective
from orthoworld.training.run import Run
from orthoworld.training.schedule import OptimizerRecipe, Schedule
from orthoworld.training.session import Checkpoint, Metrics, Plan, Progress, Session, check_kinds
from orthoworld.worlds.world import World


def train(
    world: World,
    encoder: nn.Module,
    objective: Objective,
    *,
    steps: int = 2000,
    batch: int = 512,
    seed: int = 0,
    optimizer: OptimizerRecipe | None = None,
    schedule: Schedule | None = None,
    evaluate_every: int = 0,
    evaluation_samples: int = 10_000,
    whitener_samples: int = 262_144,
    restart: int = 0,
    metrics: Metrics | None = None,
    checkpoint: Checkpoint | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train a copy of `encoder` on fresh pairs of `world`; the given encoder and objective stay as they are.

    The seed spawns one random stream for the batches, one for the slices and one for each evaluation, so watching a run
    more or less changes nothing in it. On a CPU the same arguments give bitwise the same weights, interrupted or not.

    Args:
        world: where pairs come from.
        encoder: maps observations `(n, world.mixing.obs_dim)` to embeddings; trained on the device it is on.
        objective: loss on the embeddings of both views.
        steps, batch, optimizer, schedule, evaluate_every, evaluation_samples, whitener_samples: see `Plan`. The
            default optimiser is `Muon()`, the default schedule `WarmupCosine()`.
        seed: seed of the run's streams.
        restart: number of a repeated attempt: other batches and slices, the same evaluation.
        metrics: further columns of the curve, computed from held-out pairs at each evaluation.
        checkpoint: where state is kept every few seconds and resumed from.
        stop: asked after every step; when it answers True the state is kept and the run ends as interrupted.
        progress: called after every step with the step, and with the new row when there is one.

    Returns:
        The run; look at its `status` before anything else.

    Raises:
        TypeError: the objective, the optimiser or the schedule is something else.
        ArgumentError: a number lies outside its range, or a checkpoint of another run was given.

    Example:
        >>> import orthoworld as ow
        >>> world = ow.World(ow.Gaussian(2), ow.OU(rho=0.95), ow.Banana())
        >>> encoder = ow.MLP(2, 2, width=16, depth=1)
        >>> run = train(world, encoder, ow.WhitenedAlignment(), steps=5, batch=64, whitener_samples=1000)
        >>> run.status, run.steps
        ('finished', 5)
    """
    whole("seed", seed, least=0), whole("restart", restart, least=0)
    check_kinds(world=world, encoder=encoder, objective=objective)
    plan = Plan.of(
        optimizer,
        schedule,
        steps=steps,
        batch=batch,
        evaluate_every=evaluate_every,
        evaluation_samples=evaluation_samples,
        whitener_samples=whitener_samples,
    )
    session = Session(world, encoder, objective, plan, seed, restart, metrics, checkpoint, progress)
    return session.run(stop if stop is not None else lambda: False)
