"""The state of one run while it is trained, and what watches it."""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError
from orthoworld.objectives.objective import Objective, options
from orthoworld.objectives.processes import this_process_only
from orthoworld.objectives.whitening import Whitener, covariance
from orthoworld.streams import stream
from orthoworld.training.health import collapse, not_finite, peak_rss_mb
from orthoworld.training.run import ENCODE_BATCH, CurveRow, Representation, Run, Status, encode
from orthoworld.training.schedule import Muon, OptimizerRecipe, Schedule, WarmupCosine
from orthoworld.worlds.world import Pairs, World

CHECKPOINT_SECONDS = 10.0
"""Time between checkpoints; a killed run loses at most this much work."""

LOSS_BATCHES = 8
"""Held-out batches the objective is averaged over, each of the training size, on which its value may depend."""

CURVE_WHITENER_SAMPLES = 65_536
"""Fresh observations the whitener is fitted to for a row of the curve before the last."""


@runtime_checkable
class Checkpoint(Protocol):
    """Where a run keeps its state; the training loop knows nothing about files."""

    def load(self) -> dict[str, Any] | None:
        """Return the last state saved, or None."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Keep `state` in the place of the last one, atomically."""
        ...


@dataclass(frozen=True)
class HeldOut:
    """What evaluation sees: the world, held-out pairs from it, and their embeddings, `(n, dim)` each."""

    world: World
    pairs: Pairs
    h: Float[Tensor, "n dim"]
    h_next: Float[Tensor, "n dim"]


Metrics = Callable[[HeldOut], Mapping[str, float]]
Progress = Callable[[int, CurveRow | None], None]


@dataclass(frozen=True)
class Plan:
    """How a run is trained and watched.

    Attributes:
        steps: optimiser steps.
        batch: pairs of a step, fresh at each.
        optimizer, schedule: recipes of the optimiser and of the learning rate's factor.
        evaluate_every: steps between rows of the curve; 0 evaluates only at the end.
        evaluation_samples: held-out pairs of an evaluation.
        whitener_samples: fresh observations the final whitener is fitted to; its sampling error, about
            `sqrt(dim (dim + 1) / whitener_samples)` in Frobenius norm, is the floor of the orthogonality error.
    """

    steps: int
    batch: int
    optimizer: OptimizerRecipe
    schedule: Schedule
    evaluate_every: int
    evaluation_samples: int
    whitener_samples: int

    @classmethod
    def of(cls, optimizer: OptimizerRecipe | None, schedule: Schedule | None, **numbers: int) -> "Plan":
        """Return a plan whose optimiser and schedule are the default ones where none is given.

        Raises:
            TypeError: the optimiser or the schedule is something else.
            ArgumentError: a number lies outside its range.
        """
        check_kinds(optimizer=optimizer, schedule=schedule)
        return cls(
            optimizer=Muon() if optimizer is None else optimizer,
            schedule=WarmupCosine() if schedule is None else schedule,
            **numbers,
        )

    def __post_init__(self) -> None:
        whole("steps", self.steps)
        whole("batch", self.batch, least=2)
        whole("evaluate_every", self.evaluate_every, least=0)
        whole("evaluation_samples", self.evaluation_samples, least=2)
        whole("whitener_samples", self.whitener_samples, least=2)


def check_kinds(**arguments: Any) -> None:
    """Refuse what is of another kind, such as a class or a name where an instance is needed.

    Raises:
        TypeError: an argument is no instance of what its name says.
    """
    kinds = {"world": World, "encoder": nn.Module, "objective": Objective}
    recipes = {"optimizer": OptimizerRecipe, "schedule": Schedule}
    for name, value in arguments.items():
        optional = name in recipes and value is None
        if not optional and (isinstance(value, type) or not isinstance(value, (kinds | recipes)[name])):
            raise TypeError(f"{name}={value!r}: expected an instance of {(kinds | recipes)[name].__name__}")


class Timer:
    """The time since the last look, and since the last checkpoint."""

    def __init__(self) -> None:
        self.last = self.saved = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last call."""
        last, self.last = self.last, time.monotonic()
        return self.last - last

    def checkpoint_is_due(self) -> bool:
        """Return True once every `CHECKPOINT_SECONDS`."""
        due = self.last - self.saved > CHECKPOINT_SECONDS
        if due:
            self.saved = self.last
        return due


def set_rates(
    optimizers: Sequence[torch.optim.Optimizer], base_rates: Sequence[Sequence[float]], factor: float
) -> None:
    """Set the learning rate of each group of parameters to its base rate times `factor`."""
    for optimizer, rates in zip(optimizers, base_rates, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor


class Session:
    """The state of one run while it is trained."""

    def __init__(
        self,
        world: World,
        encoder: nn.Module,
        objective: Objective,
        plan: Plan,
        seed: int,
        restart: int,
        metrics: Metrics | None,
        checkpoint: Checkpoint | None,
        progress: Progress | None,
    ) -> None:
        self.world = world
        self.encoder = copy.deepcopy(encoder).train()
        self.device = next((p.device for p in self.encoder.parameters()), torch.device("cpu"))
        self.objective = copy.deepcopy(objective).to(self.device)
        self.plan = plan
        self.seed = seed
        self.restart = restart
        self.optimizers = plan.optimizer.build(self.encoder)
        self.base_rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.streams = {name: stream(seed, name, restart) for name in ("batches", "slices")}
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.progress = progress
        self.whitener: Whitener | None = None
        self.fitted_at = -1
        self.step = 0
        self.curve: list[CurveRow] = []
        self.wall_s = 0.0

    @this_process_only()
    def run(self, stop: Callable[[], bool]) -> Run:
        """Train to the end, or until `stop` answers True."""
        self.resume()
        timer = Timer()
        while self.step < self.plan.steps:
            broken = self._train_step() or self.evaluate_when_due()
            self.wall_s += timer.lap()
            if broken:
                return self.diverged(broken)
            if self.step < self.plan.steps and stop():
                return self.interrupted()
            if timer.checkpoint_is_due():
                self.save()
        return self.finished()

    def diverged(self, reason: str) -> Run:
        """Return the run of which something was not finite."""
        return self._result("diverged", reason)

    def interrupted(self) -> Run:
        """Keep the state and return the run as far as it has come."""
        self.save()
        return self._result("interrupted", f"stopped after step {self.step} of {self.plan.steps}")

    def finished(self) -> Run:
        """Keep the state and return the run that has taken its last step."""
        self.save()
        collapsed = collapse(self.curve[-1])
        return self._result("collapsed" if collapsed else "finished", collapsed)

    def _train_step(self) -> str:
        """Take one step; return what was not finite, or nothing."""
        set_rates(self.optimizers, self.base_rates, self.plan.schedule.factor(self.step, self.plan.steps))
        pairs = self.world.sample_pairs(self.plan.batch, generator=self.streams["batches"])
        h = self._embed_views(pairs)
        losses = self.objective(h, generator=self.streams["slices"])
        broken = not_finite(h, losses)
        if broken:
            return f"step {self.step + 1}: {broken}"
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses.total.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.objective.after_step(losses)
        self.step += 1
        return ""

    def _embed_views(self, pairs: Pairs) -> Float[Tensor, "views batch dim"]:
        both = torch.cat([pairs.x, pairs.x_next]).to(self.device)
        return self.encoder(both).unflatten(0, (2, -1))

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the curve has a row at this step."""
        every = self.plan.evaluate_every
        return self.step == self.plan.steps or (every > 0 and self.step % every == 0)

    def evaluate_when_due(self) -> str:
        """Add a row to the curve at the steps that have one; return what was not finite there, or nothing."""
        row = None
        if self.evaluation_is_due:
            if not self._finite():
                return f"step {self.step}: weights are not finite after the update, as its gradient was not"
            held_out = self._hold_out()
            if not (torch.isfinite(held_out.h).all() and torch.isfinite(held_out.h_next).all()):
                return f"step {self.step}: the held-out embedding h has non-finite rows"
            row = self._evaluate(held_out)
            self.curve.append(row)
        if self.progress is not None:
            self.progress(self.step, row)
        return ""

    def _hold_out(self) -> HeldOut:
        """Return the same held-out pairs at every call, with their embeddings as the encoder is now."""
        model = self._representation()
        pairs = self.world.sample_pairs(self.plan.evaluation_samples, generator=stream(self.seed, "evaluation"))
        return HeldOut(self.world, pairs, encode(model, pairs.x), encode(model, pairs.x_next))

    def _evaluate(self, held_out: HeldOut) -> CurveRow:
        stds = torch.linalg.eigvalsh(covariance(held_out.h.cpu().double())).clamp(min=0).sqrt().tolist()
        row = {"step": float(self.step), **self._held_out_losses(), "smallest_std": stds[0], "largest_std": stds[-1]}
        return {**row, **(self.metrics(held_out) if self.metrics is not None else {})}

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, float]:
        """Return the objective's terms, averaged over held-out batches of the training size."""
        pairs_stream = stream(self.seed, "evaluation", "losses")
        slices_stream = stream(self.seed, "evaluation", "slices")
        self.encoder.eval()
        rows = []
        for _ in range(LOSS_BATCHES):
            h = self._embed_views(self.world.sample_pairs(self.plan.batch, generator=pairs_stream))
            losses = self.objective(h, generator=slices_stream)
            absent = torch.full_like(losses.total, torch.nan)
            regulariser = absent if losses.regulariser is None else losses.regulariser
            rows.append(torch.stack([losses.total, losses.alignment, regulariser]))
        self.encoder.train()
        total, aligned, regulariser = torch.stack(rows).mean(dim=0).tolist()
        return {"loss": total, "alignment": aligned, "regulariser": regulariser}

    def _representation(self) -> Representation:
        """Return the encoder as it is now, and behind it a freshly fitted whitener where the objective asks for one."""
        if not self.objective.whitens or not self._finite():
            return Representation(self.encoder, None)
        if self.fitted_at != self.step:
            last = self.step == self.plan.steps
            samples = self.plan.whitener_samples
            self.whitener = self._fit_whitener(samples if last else min(samples, CURVE_WHITENER_SAMPLES))
            self.fitted_at = self.step
        return Representation(self.encoder, self.whitener)

    def _fit_whitener(self, samples: int) -> Whitener:
        generator = stream(self.seed, "whitener")
        sizes = [min(ENCODE_BATCH, samples - done) for done in range(0, samples, ENCODE_BATCH)]
        observations = (self.world.sample_pairs(n, generator=generator).x for n in sizes)
        embeddings = (encode(self.encoder, x) for x in observations)
        first = next(embeddings)
        whitener = Whitener(first.shape[1]).to(self.device)
        return whitener.fit(itertools.chain([first], embeddings))

    def _finite(self) -> bool:
        # Buffers too: running statistics can be lost while the weights are still good.
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.encoder.state_dict().values())

    def _result(self, status: Status, reason: str) -> Run:
        done = status in ("finished", "collapsed")
        return Run(
            representation=self._representation().eval(),
            world=self.world,
            status=status,
            reason=reason,
            steps=self.step,
            held_out_loss=self.curve[-1]["loss"] if done else float("nan"),
            curve=self.curve,
            wall_s=self.wall_s,
            peak_rss_mb=peak_rss_mb(),
        )

    def _identity(self) -> dict[str, str]:
        """Return what a state must agree on with the run that resumes from it."""
        return {
            "seed": str(self.seed),
            "restart": str(self.restart),
            "steps": str(self.plan.steps),
            "batch": str(self.plan.batch),
            "optimizer": _described(self.plan.optimizer),
            "schedule": _described(self.plan.schedule),
            "world": f"{self.world!r} {self.world.mixing.fingerprint()}",
            "objective": f"{type(self.objective).__name__} {options(self.objective)}",
            "encoder": ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.encoder.named_parameters()),
        }

    def save(self) -> None:
        """Keep the state."""
        # A finite loss can have an infinite gradient: then the last good state is kept, and the next step diverges.
        if self.checkpoint is None or not self._finite():
            return
        self.checkpoint.save(
            {
                "run": self._identity(),
                "step": self.step,
                "encoder": self.encoder.state_dict(),
                "objective": self.objective.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "streams": {name: generator.get_state() for name, generator in self.streams.items()},
                "curve": [dict(row) for row in self.curve],
                "wall_s": self.wall_s,
            }
        )

    def resume(self) -> None:
        """Take up the state that was kept, if there is one."""
        state = self.checkpoint.load() if self.checkpoint is not None else None
        if state is None:
            return
        for name, own in self._identity().items():
            if state["run"][name] != own:
                raise ArgumentError(f"the checkpoint is of a run with {name} {state['run'][name]}: expected {own}")
        self.step = state["step"]
        self.encoder.load_state_dict(state["encoder"])
        self.objective.load_state_dict(state["objective"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, generator in self.streams.items():
            generator.set_state(state["streams"][name])
        self.curve = list(state["curve"])
        self.wall_s = state["wall_s"]


def _described(recipe: object) -> str:
    """Return a recipe's settings, or its class where it has no description of its own that every process repeats."""
    return repr(recipe) if dataclasses.is_dataclass(recipe) else type(recipe).__qualname__
