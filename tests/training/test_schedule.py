import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from orthoworld.encoders import MLP, InverseCoupling
from orthoworld.training.schedule import AdamW, HalfCosine, Muon, WarmupCosine

STEPS = st.integers(1, 500)


def factors(schedule, steps):
    return [schedule.factor(step, steps) for step in range(steps)]


def held(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def identities(parameters):
    return sorted(id(parameter) for parameter in parameters)


@given(steps=STEPS)
def test_the_published_schedule_is_constant_for_half_the_run_then_falls(steps):
    found = factors(HalfCosine(), steps)
    half = (steps + 1) // 2
    assert found[:half] == [1.0] * half
    assert all(0 <= later < earlier for earlier, later in itertools.pairwise(found[half:]))


def test_the_published_schedule_is_half_a_cosine():
    assert HalfCosine().factor(75, 100) == pytest.approx(0.5)
    assert HalfCosine().factor(99, 100) == pytest.approx(0, abs=1e-3)
    assert HalfCosine().factor(20_000, 20_000) == pytest.approx(0, abs=1e-12)


@given(steps=STEPS, warmup=st.integers(0, 200))
def test_the_warm_up_rises_and_the_rest_falls(steps, warmup):
    found = factors(WarmupCosine(warmup), steps)
    top = min(warmup, steps // 10)
    assert found[top] == 1
    assert all(0 < earlier < later <= 1 for earlier, later in itertools.pairwise(found[: top + 1]))
    assert all(0 <= later < earlier <= 1 for earlier, later in itertools.pairwise(found[top:]))


def test_the_warm_up_takes_a_tenth_of_a_short_run_at_most():
    found = factors(WarmupCosine(warmup=100), 50)
    assert found[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert found[-1] == pytest.approx(0, abs=2e-3)


def test_adamw_holds_every_trainable_parameter_once():
    model = MLP(2, 3, width=16, depth=2)
    (optimizer,) = AdamW(lr=0.1, weight_decay=0.2).build(model)
    assert type(optimizer) is torch.optim.AdamW
    assert identities(held(optimizer)) == identities(model.parameters())
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.2)]


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest():
    model = MLP(2, 3, width=16, depth=3)
    first, _, second, _, third, _, last = model.layers
    muon, adamw = Muon(lr=0.1, adamw_lr=0.2, weight_decay=0.3).build(model)
    assert type(muon) is torch.optim.Muon
    assert type(adamw) is torch.optim.AdamW
    assert identities(held(muon)) == identities([second.weight, third.weight])
    rest = [first.weight, last.weight, first.bias, second.bias, third.bias, last.bias]
    assert identities(held(adamw)) == identities(rest)
    assert [(group["lr"], group["weight_decay"]) for group in muon.param_groups] == [(0.1, 0.3)]
    assert [(group["lr"], group["weight_decay"]) for group in adamw.param_groups] == [(0.2, 0.0)]


class Odd(nn.Module):
    """Parameters of every number of dimensions, one of them frozen, one shared."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.kernel = nn.Parameter(torch.zeros(8, 8, 3, 3))
        self.frozen = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
        self.square = nn.Linear(16, 16)
        self.again = self.square


@pytest.mark.parametrize(
    "model",
    [MLP(2, 2, width=16, depth=1), MLP(1, 1, width=4, depth=2), InverseCoupling(20), InverseCoupling(3), Odd()],
    ids=["shallow", "narrow", "coupling", "small-coupling", "odd"],
)
@pytest.mark.parametrize("recipe", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_every_trainable_parameter_is_in_exactly_one_optimiser(recipe, model):
    together = [parameter for optimizer in recipe.build(model) for parameter in held(optimizer)]
    assert identities(together) == identities(p for p in model.parameters() if p.requires_grad)


def test_couplings_of_many_latents_have_hidden_matrices_only():
    (optimizer,) = Muon().build(InverseCoupling(20))
    assert type(optimizer) is torch.optim.Muon


@pytest.mark.parametrize("recipe", [AdamW(lr=0.01, weight_decay=0.0), Muon(lr=0.01, adamw_lr=0.01)])
def test_optimisers_of_either_recipe_move_every_weight_about_as_far(recipe):
    model = MLP(2, 2, width=32, depth=2, generator=torch.Generator().manual_seed(0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.randn(64, 2, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    for optimizer in recipe.build(model):
        optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert 0.05 < (new - old).square().mean().sqrt() / 0.01 < 2
