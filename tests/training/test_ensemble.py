"""An ensemble trains each run as it would be trained alone, whatever the others do."""

import math

import pytest
import torch

from orthoworld.encoders import MLP, InverseCoupling
from orthoworld.errors import ArgumentError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.lejepa import (
    ConstrainedLeJEPA,
    InfoNCE,
    LeJEPA,
    WhitenedAlignment,
    WhitenedLeJEPA,
    Whitening,
)
from orthoworld.objectives.objective import Losses, Objective
from orthoworld.objectives.vicreg import VICReg
from orthoworld.training import session
from orthoworld.training.ensemble import Member, train_ensemble
from orthoworld.training.schedule import AdamW, HalfCosine, Muon
from orthoworld.training.trainer import train
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal
from orthoworld.worlds.mixings import Banana, Coupling, Linear, Spiral
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World
from small_runs import MemoryCheckpoint


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


class Plain(Objective):
    """Somebody's own objective, which knows nothing of ensembles."""

    def forward(self, h, *, generator):
        aligned = alignment(h)
        spread = (h.var(dim=(0, 1)) - 1).square().sum()
        return Losses(total=aligned + spread, alignment=aligned, regulariser=spread)


def coupling(seed):
    return Coupling(2, 4, generator=gen(seed))


WORLDS = [
    World(Gaussian(2), SharedParent(OU(0.95)), coupling(0)),
    World(Gaussian(2), OU(0.5), coupling(1)),
    World(GeneralizedNormal(2, alpha=1.3), OU((0.9, 0.3)), coupling(2)),
    World(Gaussian(2), OU(0.8), Spiral(1.0)),
    World(Gaussian(2), OU(0.8), Spiral(2.0)),
    World(Gaussian(2), OU(0.8), Banana()),
]
ALIKE = WORLDS[:3]

OBJECTIVES = {
    "lejepa": [LeJEPA(lam, slices=8, pooled=True) for lam in (1e-3, 0.1, 0.5)],
    "whitened-lejepa": [WhitenedLeJEPA(shape, slices=8) for shape in (0.0, 0.1, 1.0)],
    "all-directions": [WhitenedLeJEPA(shape, slices=None) for shape in (0.0, 0.1, 1.0)],
    "whitened-alignment": [WhitenedAlignment() for _ in range(3)],
    "whitening": [Whitening(lam) for lam in (0.1, 0.5, 0.9)],
    "vicreg": [VICReg(invariance, 25, 1) for invariance in (1, 5, 25)],
    "infonce": [InfoNCE(sigma) for sigma in (0.5, 1.0, 2.0)],
    "constrained": [ConstrainedLeJEPA(tolerance, slices=8) for tolerance in (1e-4, 1e-3, 1e-2)],
    "own": [Plain() for _ in range(3)],
}

SHORT = {"steps": 200, "batch": 32, "schedule": HalfCosine(), "evaluation_samples": 100, "whitener_samples": 100}


def perceptron(seed):
    return MLP(2, 2, width=12, depth=2, generator=gen(seed))


def members(worlds=ALIKE, objectives=OBJECTIVES["lejepa"], encoder=perceptron, **options):
    several = [objectives[index % len(objectives)] for index in range(len(worlds))]
    return [Member(w, encoder(i), o, seed=i, **options) for i, (w, o) in enumerate(zip(worlds, several, strict=True))]


def alone(member, **options):
    options = {**SHORT, **options}
    return train(
        member.world,
        member.encoder,
        member.objective,
        seed=member.seed,
        restart=member.restart,
        checkpoint=member.checkpoint,
        **options,
    )


def together(runs, **options):
    return train_ensemble(runs, **{**SHORT, **options})


def weights(run):
    return torch.cat([tensor.flatten() for tensor in run.representation.state_dict().values()])


def centred(run):
    h = run.encode(WORLDS[0].sample_pairs(100, generator=gen(9)).x)
    return h - h.mean(dim=0)


def assert_same_run(own, expected, tolerance=2e-3, compared=weights):
    assert (own.status, own.reason, own.steps) == (expected.status, expected.reason, expected.steps)
    torch.testing.assert_close(compared(own), compared(expected), atol=tolerance, rtol=tolerance)
    for row, other in zip(own.curve, expected.curve, strict=True):
        for key, value in other.items():
            assert row[key] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), key


@pytest.fixture(autouse=True)
def _few_samples_for_the_whitener_of_a_curve(monkeypatch):
    monkeypatch.setattr(session, "CURVE_WHITENER_SAMPLES", 100)


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=["adamw", "muon"])
@pytest.mark.parametrize("objectives", OBJECTIVES.values(), ids=OBJECTIVES)
def test_each_run_is_the_one_that_is_trained_alone(objectives, optimizer):
    runs = members(objectives=objectives)
    found = together(runs, optimizer=optimizer, evaluate_every=100)
    assert len({round(run.held_out_loss, 6) for run in found}) == 3
    # Where the mean of the embedding is free, its gradient is rounding, which AdamW blows up to steps of full size.
    mean_is_free = isinstance(objectives[0], Whitening)
    for member, own in zip(runs, found, strict=True):
        expected = alone(member, optimizer=optimizer, evaluate_every=100)
        assert_same_run(own, expected, tolerance=1e-2, compared=centred) if mean_is_free else assert_same_run(
            own, expected
        )


def test_matched_encoders_recover_as_they_do_alone():
    runs = members(encoder=lambda seed: InverseCoupling(2, layers=4, generator=gen(seed)))
    for member, own in zip(runs, together(runs, optimizer=AdamW()), strict=True):
        assert_same_run(own, alone(member, optimizer=AdamW()), tolerance=1e-5)


@pytest.mark.parametrize(
    "worlds", [WORLDS, WORLDS[3:5], [WORLDS[3], WORLDS[3]]], ids=["all", "other rates", "the same"]
)
def test_worlds_may_differ_in_everything_but_their_size(worlds):
    runs = members(worlds)
    for member, own in zip(runs, together(runs, steps=50), strict=True):
        assert_same_run(own, alone(member, steps=50))


def test_neighbours_and_order_do_not_matter():
    first, second, third = members()
    one, two = together([first, second, third])[1], together([second, first])[0]
    assert_same_run(one, two, tolerance=1e-4)


def overflowing(step_of_overflow):
    """A world whose observations are no numbers any more from some step on."""

    class Exploding(Linear):
        def _mix(self, z):
            self.count = getattr(self, "count", 0) + 1
            return super()._mix(z) * (math.inf if self.count > step_of_overflow else 1)

    return World(Gaussian(2), OU(0.9), Exploding(torch.eye(2)))


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_diverges_is_told_and_leaves_the_others_alone(step):
    checkpoint = MemoryCheckpoint()
    runs = members([WORLDS[0], overflowing(step), WORLDS[1]])
    found = together(runs, steps=20)
    assert [run.status for run in found] == ["finished", "diverged", "finished"]
    assert found[1].steps == step
    assert found[1].reason.startswith(f"step {step + 1}: total is nan")
    assert torch.isfinite(weights(found[1])).all()
    assert checkpoint.content is None
    for index in (0, 2):
        assert_same_run(found[index], alone(runs[index], steps=20))


def test_all_runs_may_diverge():
    found = together(members([overflowing(1), overflowing(2)]), steps=20)
    assert [(run.status, run.steps) for run in found] == [("diverged", 1), ("diverged", 2)]


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=["adamw", "muon"])
@pytest.mark.parametrize("kind", ["lejepa", "constrained", "own"])
@pytest.mark.parametrize("resumed_by", ["ensemble", "single runs"])
def test_a_stopped_ensemble_resumes_where_it_was(kind, optimizer, resumed_by):
    options = {"steps": 20, "optimizer": optimizer, "evaluate_every": 4}
    undisturbed = together(members(objectives=OBJECTIVES[kind]), **options)
    runs = [
        Member(m.world, m.encoder, m.objective, seed=m.seed, checkpoint=MemoryCheckpoint())
        for m in members(objectives=OBJECTIVES[kind])
    ]
    asked = iter(range(1, 100))
    stopped = together(runs, stop=lambda: next(asked) == 9, **options)
    assert {(run.status, run.steps) for run in stopped} == {("interrupted", 9)}
    resumed = together(runs, **options) if resumed_by == "ensemble" else [alone(m, **options) for m in runs]
    for own, expected in zip(resumed, undisturbed, strict=True):
        assert_same_run(own, expected, tolerance=1e-4)
        if resumed_by == "ensemble":
            assert torch.equal(weights(own), weights(expected))


def test_runs_at_different_steps_go_on_together(monkeypatch):
    monkeypatch.setattr(session, "CHECKPOINT_SECONDS", -1)  # after every step
    runs = [Member(m.world, m.encoder, m.objective, seed=m.seed, checkpoint=MemoryCheckpoint()) for m in members()]
    for member, steps in zip(runs, (0, 5, 20), strict=True):
        asked = iter(range(1, 100))
        if steps:
            alone(member, steps=20, stop=lambda asked=asked, steps=steps: next(asked) == steps)
    seen = []
    found = together(runs, steps=20, progress=lambda index, step, row: seen.append((index, step)))
    assert seen[:5] == [(0, step) for step in range(1, 6)]
    assert seen[5:7] == [(0, 6), (1, 6)]
    assert {step for index, step in seen if index == 2} == set()
    for own, member in zip(found, members(), strict=True):
        assert_same_run(own, alone(member, steps=20), tolerance=1e-4)


def test_stop_holds_for_those_that_are_ahead_too():
    runs = [Member(m.world, m.encoder, m.objective, seed=m.seed, checkpoint=MemoryCheckpoint()) for m in members()]
    for member, steps in zip(runs, (0, 9, 20), strict=True):
        asked = iter(range(1, 100))
        if steps:
            alone(member, steps=20, stop=lambda asked=asked, steps=steps: next(asked) == steps)
    asked = iter(range(1, 100))
    found = together(runs, steps=20, stop=lambda: next(asked) == 4)
    assert [(run.status, run.steps) for run in found] == [("interrupted", 4), ("interrupted", 9), ("finished", 20)]


def test_progress_and_curves_are_those_of_each_run():
    seen = []
    found = together(members(), steps=6, evaluate_every=3, progress=lambda *event: seen.append(event))
    assert [(index, step) for index, step, _ in seen] == [(i, s) for s in range(1, 7) for i in range(3)]
    for index, run in enumerate(found):
        assert [row for i, _, row in seen if i == index and row] == run.curve
    assert len({row["loss"] for run in found for row in run.curve}) == 6


def test_given_encoders_and_objectives_stay_as_they_are():
    runs = members(objectives=OBJECTIVES["constrained"])
    before = [torch.cat([p.flatten() for p in m.encoder.parameters()]).clone() for m in runs]
    together(runs, steps=5)
    for member, expected in zip(runs, before, strict=True):
        assert torch.equal(torch.cat([p.flatten() for p in member.encoder.parameters()]), expected)
        assert member.objective.multiplier == 1


def test_members_that_do_not_go_together_are_refused():
    one = members()[0]

    def refused(message, *others):
        with pytest.raises(ArgumentError, match=message):
            together([one, *others])

    with pytest.raises(ArgumentError, match="members=\\[\\]: expected one run or more"):
        together([])
    refused(
        r"run 1 has weights layers.0.weight of shape \(13, 2\) and run 0 has \(12, 2\)",
        Member(one.world, MLP(2, 2, width=13, depth=2), one.objective),
    )
    refused("run 1 has an encoder of class InverseCoupling", Member(one.world, InverseCoupling(2), one.objective))
    three = World(Gaussian(1), OU(0.5), Linear(torch.ones(2, 1)))
    refused("run 1 has a number of latents of 1 and run 0 has 2", Member(three, one.encoder, one.objective))
    refused("an objective of class VICReg", Member(one.world, one.encoder, VICReg()))
    fewer = LeJEPA(0.1, slices=4, pooled=True)
    refused(
        "objectives differ in sigreg.slices: expected runs that differ in lam", Member(one.world, one.encoder, fewer)
    )
    with pytest.raises(TypeError, match="world"):
        Member("spiral", one.encoder, one.objective)
    with pytest.raises(ArgumentError, match="seed=-1"):
        Member(one.world, one.encoder, one.objective, seed=-1)
