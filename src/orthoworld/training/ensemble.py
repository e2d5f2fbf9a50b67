"""Many runs of one architecture as one batched program: they share the cost of a step, and nothing else.

Each run keeps its own world, weights, coefficients of the objective, random streams, checkpoint and status, in the same
`Session` that a single run has. Only the step is common: the weights are stacked, the encoder is mapped over them, and
one backward pass serves all. What a run computes does not depend on its neighbours beyond the rounding of batched sums.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError
from orthoworld.objectives.objective import Losses, Objective, options, stack
from orthoworld.objectives.processes import this_process_only
from orthoworld.training.health import not_finite
from orthoworld.training.run import CurveRow, Run
from orthoworld.training.schedule import OptimizerRecipe, Schedule
from orthoworld.training.session import Checkpoint, Metrics, Plan, Session, Timer, check_kinds, set_rates
from orthoworld.worlds.mixings import Mixing
from orthoworld.worlds.world import World


@dataclass(frozen=True)
class Member:
    """One run of an ensemble, with what may differ between its runs; the fields are those of `train`."""

    world: World
    encoder: nn.Module
    objective: Objective
    seed: int = 0
    restart: int = 0
    checkpoint: Checkpoint | None = None

    def __post_init__(self) -> None:
        whole("seed", self.seed, least=0), whole("restart", self.restart, least=0)
        check_kinds(world=self.world, encoder=self.encoder, objective=self.objective)


MemberProgress = Callable[[int, int, CurveRow | None], None]
"""Told the index of a run, its step, and the new row of its curve when there is one."""


@this_process_only()
def train_ensemble(
    members: Sequence[Member],
    *,
    steps: int = 2000,
    batch: int = 512,
    optimizer: OptimizerRecipe | None = None,
    schedule: Schedule | None = None,
    evaluate_every: int = 0,
    evaluation_samples: int = 10_000,
    whitener_samples: int = 262_144,
    metrics: Metrics | None = None,
    stop: Callable[[], bool] | None = None,
    progress: MemberProgress | None = None,
) -> list[Run]:
    """Train copies of many encoders of one architecture together; each run is the one that `train` would give.

    A run draws from its own streams what it would draw alone, and its result agrees with that of `train` but for the
    rounding of batched operations, which grows along a run as rounding does. A checkpoint may be resumed by either, and
    members may resume from different steps. A run that diverges leaves the others as they are.

    Args:
        members: the runs. Their encoders share an architecture, their worlds the numbers of latents and of observed
            numbers, their objectives a class and all settings but the class's `coefficients`.
        steps, batch, optimizer, schedule, evaluate_every, evaluation_samples, whitener_samples, metrics: as in `train`,
            for all runs.
        stop: asked after every common step; when it answers True all states are kept and the runs end as interrupted.
        progress: called for each run after every step.

    Returns:
        The runs in the order of `members`. The time of a common step is shared out equally in their `wall_s`.

    Raises:
        TypeError: a world, an encoder, an objective, the optimiser or the schedule is something else.
        ArgumentError: there is no member, members do not go together, a number lies outside its range, or a checkpoint
            of another run was given.

    Example:
        >>> import orthoworld as ow
        >>> encoder = ow.MLP(2, 2, width=16, depth=1)
        >>> worlds = [ow.World(ow.Gaussian(2), ow.OU(rho=rho), ow.Banana()) for rho in (0.5, 0.9)]
        >>> members = [Member(world, encoder, ow.LeJEPA(lam)) for world in worlds for lam in (0.01, 0.1)]
        >>> [run.status for run in train_ensemble(members, steps=5, batch=64)]
        ['finished', 'finished', 'finished', 'finished']
    """
    plan = Plan.of(
        optimizer,
        schedule,
        steps=steps,
        batch=batch,
        evaluate_every=evaluate_every,
        evaluation_samples=evaluation_samples,
        whitener_samples=whitener_samples,
    )
    _check_members(members)
    sessions = [
        Session(
            member.world,
            member.encoder,
            member.objective,
            plan,
            member.seed,
            member.restart,
            metrics,
            member.checkpoint,
            None if progress is None else functools.partial(progress, index),
        )
        for index, member in enumerate(members)
    ]
    for session in sessions:
        session.resume()
    runs: dict[Session, Run] = {}
    while running := [session for session in sessions if session not in runs]:
        # Those behind catch up with the next ones first.
        positions = sorted({session.step for session in running})
        behind = [session for session in running if session.step == positions[0]]
        if positions[0] < plan.steps and any(run.status == "interrupted" for run in runs.values()):
            runs |= {session: session.interrupted() for session in behind}  # those before them were told to stop
            continue
        runs |= _advance(behind, [*positions, plan.steps][1], stop if stop is not None else lambda: False)
    return [runs[session] for session in sessions]


def _check_members(members: Sequence[Member]) -> None:
    if not members:
        raise ArgumentError("members=[]: expected one run or more")
    expected = _facts(members[0])
    for index, member in enumerate(members):
        found = _facts(member)
        for name in [*expected, *found]:
            own, first = found.get(name, "none"), expected.get(name, "none")
            if own != first:
                raise ArgumentError(
                    f"run {index} has {name} {own} and run 0 has {first}: expected the same in all runs"
                )
    if members[0].objective.coefficients is not None:
        stack([member.objective for member in members])


def _facts(member: Member) -> dict[str, Any]:
    """Return what all members of an ensemble share."""
    device = next((p.device for p in member.encoder.parameters()), torch.device("cpu"))
    return {
        "an encoder of class": type(member.encoder).__name__,
        **{f"weights {name} of shape": tuple(value.shape) for name, value in member.encoder.state_dict().items()},
        **{f"an encoder with {name}": value for name, value in options(member.encoder).items()},
        "an encoder on": str(device),
        "a number of latents of": member.world.dim,
        "a number of observed values of": member.world.mixing.obs_dim,
        "an objective of class": type(member.objective).__name__,
    }


def _advance(sessions: list[Session], until: int, stop: Callable[[], bool]) -> dict[Session, Run]:
    """Train sessions that are at the same step up to step `until`; return the runs that ended on the way."""
    ended: dict[Session, Run] = {}
    timer = Timer()
    common = _Stack(sessions)
    while sessions and sessions[0].step < until:
        broken = common.train_step()
        stopping, saving, done = stop(), timer.checkpoint_is_due(), common.step == until
        if stopping or saving or done or broken or sessions[0].evaluation_is_due:
            common.write_back()
        for session in sessions:
            reason = broken.get(session) or session.evaluate_when_due()
            if reason:
                ended[session] = session.diverged(reason)
            elif saving:
                session.save()
        lap = timer.lap() / len(sessions)
        for session in sessions:
            session.wall_s += lap
        if any(session in ended for session in sessions):
            sessions = [session for session in sessions if session not in ended]
            common = _Stack(sessions) if sessions else common
        if stopping:
            ended |= {session: session.interrupted() for session in sessions if session.step < session.plan.steps}
            break
    return ended | {session: session.finished() for session in sessions if session.step == session.plan.steps}


class _Stack:
    """The weights, optimisers and objectives of several sessions as one of each, and the step they take together."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = sessions
        self.kept: Sequence[int] = range(len(sessions))
        """Sessions whose state is that of this stack; a broken one keeps what it had before."""
        first = sessions[0]
        self.plan, self.device, self.step = first.plan, first.device, first.step
        self.parameters, self.buffers = stack_module_state([session.encoder for session in sessions])
        self.optimizers = [
            _StackedOptimizer(sessions, number, self.parameters) for number in range(len(first.optimizers))
        ]
        objectives = [session.objective for session in sessions]
        self.objective = stack(objectives) if first.objective.coefficients is not None else None
        self.mixings = _StackedMixing([session.world.mixing for session in sessions])

    def train_step(self) -> dict[Session, str]:
        """Take one step in every session; return what was not finite, by session, whose state is then as before."""
        rates = [optimizer.base_rates for optimizer in self.optimizers]
        factor = self.plan.schedule.factor(self.step, self.plan.steps)
        set_rates([optimizer.optimizer for optimizer in self.optimizers], rates, factor)
        h = self._embed(self._observations().to(self.device))
        losses = self._losses(h)
        broken = self._not_finite(h, losses)
        if broken:
            self.write_back()
            self.kept = [index for index, session in enumerate(self.sessions) if session not in broken]
        for parameter in self.parameters.values():
            parameter.grad = None
        losses.total.sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._after_step(losses)
        self.step += 1
        for index in self.kept:
            self.sessions[index].step += 1
        return broken

    @torch.no_grad()
    def _observations(self) -> Float[Tensor, "runs views batch obs_dim"]:
        latents = [
            torch.stack(
                session.world.transition.pair(
                    self.plan.batch, session.world.source, generator=session.streams["batches"]
                )
            )
            for session in self.sessions
        ]
        return self.mixings(torch.stack(latents))

    def _embed(self, x: Float[Tensor, "runs views batch obs_dim"]) -> Float[Tensor, "runs views batch dim"]:
        encoder = self.sessions[0].encoder

        def encode(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            h: Tensor = functional_call(encoder, (parameters, buffers), (x,))
            return h

        h: Tensor = vmap(encode)(self.parameters, self.buffers, x.flatten(1, 2))
        return h.unflatten(1, x.shape[1:3])

    def _losses(self, h: Float[Tensor, "runs views batch dim"]) -> Losses:
        generators = [session.streams["slices"] for session in self.sessions]
        if self.objective is not None:
            losses: Losses = self.objective(h, generator=generators)
            return losses
        each = [
            session.objective(own, generator=generator)
            for session, own, generator in zip(self.sessions, h, generators, strict=True)
        ]
        regularisers = [losses.regulariser for losses in each if losses.regulariser is not None]
        return Losses(
            total=torch.stack([losses.total for losses in each]),
            alignment=torch.stack([losses.alignment for losses in each]),
            regulariser=torch.stack(regularisers) if regularisers else None,
        )

    def _not_finite(self, h: Tensor, losses: Losses) -> dict[Session, str]:
        finite = torch.isfinite(losses.total)
        if finite.all():
            return {}
        rows = zip(self.sessions, finite.tolist(), h, _each(losses), strict=True)
        return {
            session: f"step {self.step + 1}: {not_finite(own, own_losses)}"
            for session, good, own, own_losses in rows
            if not good
        }

    def _after_step(self, losses: Losses) -> None:
        if self.objective is not None:
            self.objective.after_step(losses)
            return
        for session, own in zip(self.sessions, _each(losses), strict=True):
            session.objective.after_step(own)

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every session its weights, its optimisers' state and its objective's, as they are now."""
        for index in self.kept:
            session = self.sessions[index]
            for name, tensor in (*session.encoder.named_parameters(), *session.encoder.named_buffers()):
                tensor.copy_((self.parameters | self.buffers)[name][index])
            if self.objective is not None:
                state = {name: tensor[index] for name, tensor in self.objective.state_dict().items()}
                session.objective.load_state_dict(state)
        for optimizer in self.optimizers:
            optimizer.write_back(self.kept)


def _each(losses: Losses) -> list[Losses]:
    """Return the losses of each run."""
    regularisers = losses.regulariser if losses.regulariser is not None else [None] * len(losses.total)
    return [Losses(*own) for own in zip(losses.total, losses.alignment, regularisers, strict=True)]


class _StackedMixing:
    """The mixings of several worlds, as one map where they differ in their weights only."""

    def __init__(self, mixings: Sequence[Mixing]) -> None:
        self.mixings = mixings
        first = mixings[0]
        self.alike = all(type(other) is type(first) and options(other) == options(first) for other in mixings)
        if self.alike:
            names = dict(first.named_buffers())
            self.buffers = {name: torch.stack([mixing.get_buffer(name) for mixing in mixings]) for name in names}

    def __call__(self, z: Float[Tensor, "runs views batch dim"]) -> Float[Tensor, "runs views batch obs_dim"]:
        if not self.alike:
            return torch.stack([mixing(own) for mixing, own in zip(self.mixings, z, strict=True)])
        if not self.buffers:
            x: Tensor = self.mixings[0](z)
            return x

        def mix(buffers: dict[str, Tensor], z: Tensor) -> Tensor:
            x: Tensor = functional_call(self.mixings[0], buffers, (z,))
            return x

        mapped: Tensor = vmap(mix)(self.buffers, z)
        return mapped


class _StackedOptimizer:
    """One optimiser for the same parameters of several sessions.

    AdamW works on each entry by itself, so it takes stacked weights whole. Another optimiser gets each run's part as a
    parameter of its own, a view of the stacked one.
    """

    def __init__(self, sessions: Sequence[Session], number: int, stacked: Mapping[str, Tensor]) -> None:
        self.owners = [session.optimizers[number] for session in sessions]
        self.own = [dict(session.encoder.named_parameters()) for session in sessions]
        self.base_rates = sessions[0].base_rates[number]
        self.stacked = stacked
        names = {id(parameter): name for name, parameter in self.own[0].items()}
        whole_weights = isinstance(self.owners[0], torch.optim.AdamW)
        self.parts: dict[tuple[str, int | None], Tensor] = {}
        groups = []
        for group in self.owners[0].param_groups:
            keys = [
                (names[id(parameter)], run)
                for parameter in group["params"]
                for run in ([None] if whole_weights else range(len(sessions)))
            ]
            for name, run in keys:
                self.parts[name, run] = stacked[name] if run is None else stacked[name].detach()[run]
            groups.append({**group, "params": [self.parts[key] for key in keys]})
        kind: Callable[..., torch.optim.Optimizer] = type(self.owners[0])
        self.optimizer = kind(groups)
        self._read()

    def step(self) -> None:
        """Update the weights from their gradients."""
        for (name, run), part in self.parts.items():
            if run is not None:
                gradient = self.stacked[name].grad
                part.grad = None if gradient is None else gradient[run]
        self.optimizer.step()

    def _read(self) -> None:
        """Take over the state of the sessions' own optimisers."""
        for (name, run), part in self.parts.items():
            states = [owner.state.get(own[name], {}) for owner, own in zip(self.owners, self.own, strict=True)]
            if not states[0]:
                continue
            if run is not None:
                self.optimizer.state[part] = copy.deepcopy(states[run])
                continue
            self.optimizer.state[part] = {
                key: torch.stack([state[key] for state in states]) if _is_entrywise(value, self.own[0][name]) else value
                for key, value in copy.deepcopy(states[0]).items()
            }

    def write_back(self, indices: Sequence[int]) -> None:
        """Give the sessions' own optimisers their state, those of the sessions `indices`."""
        for (name, run), part in self.parts.items():
            state = self.optimizer.state.get(part, {})
            for index in indices if run is None else {run}.intersection(indices):
                self.owners[index].state[self.own[index][name]] = {
                    key: value[index].clone() if run is None and _is_entrywise(value, part) else copy.deepcopy(value)
                    for key, value in state.items()
                }


def _is_entrywise(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
