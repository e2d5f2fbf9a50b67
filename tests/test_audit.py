"""The audit: every rule of its docstring, on embeddings whose truth is known."""

import inspect
import math

import pytest
import torch

from orthoworld.audit import ROWS_PER_DIMENSION, audit
from orthoworld.errors import ArgumentError, ShapeError

RHO = 0.9
FEW = {"resamples": 40}


def pairs(n, dim, rho=RHO, seed=0):
    """Latents of both states of `n` pairs of a Gaussian world."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=g)
    return z, rho * z + math.sqrt(1 - rho**2) * torch.randn(n, dim, generator=g)


def second_degree(z):
    """The second Hermite polynomial of each latent, of unit variance."""
    return (z.square() - 1) / math.sqrt(2)


def rotated(z):
    turn = torch.linalg.qr(torch.randn(z.shape[1], z.shape[1], generator=torch.Generator().manual_seed(5))).Q
    return z @ turn.T


def shrunk(z):
    return 0.7 * z


def sheared(z):
    return z @ torch.tensor([[1.0, 0.0], [0.5, 1.2]])


def bent(z):
    """The first latent gives half of its energy to the second degree of the other one."""
    first = (z[:, 0] + second_degree(z[:, 1])) / math.sqrt(2)
    return torch.stack([first, z[:, 1]], dim=1)


def doubled(z):
    """The first latent twice: as it is, and its second degree. The other one is lost."""
    return torch.stack([z[:, 0], second_degree(z[:, 0])], dim=1)


def flat(z):
    return z * torch.tensor([1.0, 1e-5])


def constant(z):
    return torch.ones_like(z)


@pytest.fixture(scope="module")
def world():
    return pairs(8000, 2)


@pytest.mark.parametrize(
    ("encoder", "without", "with_rho", "with_latents"),
    [
        (rotated, "undecided", "identifies the state", "identifies the state"),
        (
            shrunk,
            "does not identify the state",
            "does not identify the state",
            "identifies the state up to a linear map",
        ),
        (
            sheared,
            "does not identify the state",
            "does not identify the state",
            "identifies the state up to a linear map",
        ),
        (bent, "does not identify the state", "does not identify the state", "partial"),
        (doubled, "does not identify the state", "does not identify the state", "partial"),
        (second_degree, "does not identify the state", "nonlinear", "does not identify the state linearly"),
        (flat, "collapsed", "collapsed", "collapsed"),
        (constant, "collapsed", "collapsed", "collapsed"),
    ],
)
def test_verdict_on_an_encoder_follows_from_what_is_known(world, encoder, without, with_rho, with_latents):
    z, z_next = world
    h, h_next = encoder(z), encoder(z_next)
    assert audit(h, h_next, **FEW).verdict == without
    assert audit(h, h_next, rho=RHO, **FEW).verdict == with_rho
    assert audit(h, h_next, z=z, **FEW).verdict == with_latents
    assert audit(h, h_next, z=z, rho=RHO, **FEW).verdict == with_latents


def test_reasons_name_what_was_found(world):
    z, z_next = world

    def reasons(encoder, **known):
        return " ".join(audit(encoder(z), encoder(z_next), **known, **FEW).reasons)

    assert "||Cov(h) - I||_F" in reasons(shrunk)
    assert "skewness" in reasons(bent)
    assert "excess kurtosis" in reasons(bent)
    assert "rho = 0.9" in reasons(rotated, rho=RHO)
    assert "skewness" in reasons(bent, rho=RHO)
    assert "not linear in the state" in reasons(second_degree, rho=RHO)
    assert "latents [1] are recovered" in reasons(bent, z=z)
    assert "latents [0] are recovered" in reasons(doubled, z=z)
    assert "1e-05" in reasons(flat)
    assert "pass rho, or the latents" in reasons(rotated)


def test_shift_changes_nothing(world):
    z, z_next = world
    assert audit(z + 100, z_next + 100, rho=RHO, **FEW).verdict == "identifies the state"


@pytest.mark.parametrize(
    ("dim", "rows"), [(1, ROWS_PER_DIMENSION - 1), (2, 2 * ROWS_PER_DIMENSION - 1), (2, 2), (2, 1)]
)
@pytest.mark.parametrize("known", [{}, {"rho": RHO}, {"z": None}])
def test_too_few_rows_are_not_enough(dim, rows, known):
    z, z_next = pairs(rows, dim)
    found = audit(z, z_next, **({"z": z} if "z" in known else known), **FEW)
    assert found.verdict == "not enough data"
    assert f"{rows} rows for {dim} dimensions" in found.reasons[0]


def test_enough_rows_are_enough():
    z, z_next = pairs(2 * ROWS_PER_DIMENSION, 2)
    assert audit(z, z_next, z=z, **FEW).verdict == "identifies the state"


@pytest.mark.parametrize("rows", [40, 100, 200, 400])
@pytest.mark.parametrize("known", [{}, {"rho": RHO}])
def test_perfect_encoder_is_never_refused_for_want_of_data(rows, known):
    refused = [
        seed
        for seed in range(5)
        if audit(*pairs(rows, 2, seed=seed), **known, resamples=20).verdict
        not in ("identifies the state", "undecided", "not enough data")
    ]
    assert refused == []


def test_sum_with_a_small_nonlinear_part_is_still_the_state(world):
    z, z_next = world

    def slightly_bent(z):
        return torch.stack([math.sqrt(1 - 0.03**2) * z[:, 0] + 0.03 * second_degree(z[:, 1]), z[:, 1]], dim=1)

    assert audit(slightly_bent(z), slightly_bent(z_next), rho=RHO, **FEW).verdict == "identifies the state"
    assert audit(slightly_bent(z), slightly_bent(z_next), z=z, **FEW).verdict == "identifies the state"


def test_latents_more_or_fewer_than_the_embedding(world):
    z, z_next = world
    noise = torch.randn(len(z), 1, generator=torch.Generator().manual_seed(9))
    wider, wider_next = torch.cat([z, noise], dim=1), torch.cat([z_next, noise.roll(1)], dim=1)
    assert audit(wider, wider_next, z=z, **FEW).verdict == "identifies the state"
    assert audit(z, z_next, z=wider, **FEW).verdict == "partial"


def test_one_dimension_and_arrays_of_numpy(world):
    z, z_next = (states[:, 0].numpy() for states in world)
    found = audit(z, z_next, z=z, **FEW)
    assert (found.verdict, found.dim) == ("identifies the state", 1)


def test_numbers_beside_the_verdict(world):
    z, z_next = world
    found = audit(rotated(z), rotated(z_next), rho=RHO, z=z, **FEW)
    assert (found.n, found.dim, found.rho) == (8000, 2, RHO)
    assert found.pair_correlations == pytest.approx([RHO, RHO], abs=0.01)
    assert found.effective_rank == pytest.approx(2, abs=0.01)
    assert abs(found.skewness) < 0.1
    assert abs(found.excess_kurtosis) < 0.2
    assert found.bound.nonlinear_energy < 0.05
    assert found.recovery.r2_hz > 0.999


def test_second_degree_shows_in_correlations_and_cumulants(world):
    h, h_next = (second_degree(states[:, :1]) for states in world)
    found = audit(h, h_next, **FEW)
    # Its pair correlation is rho squared; its law is a shifted chi-squared, of skewness 2 sqrt(2) and kurtosis 12.
    assert found.pair_correlations == pytest.approx([RHO**2], abs=0.02)
    assert abs(found.skewness) == pytest.approx(2 * math.sqrt(2), abs=0.4)
    assert found.excess_kurtosis == pytest.approx(12, abs=4)


def test_bound_and_recovery_are_there_only_when_asked_for(world):
    z, z_next = world
    found = audit(z, z_next, **FEW)
    assert (found.bound, found.recovery, found.rho) == (None, None, None)


def test_collapsed_embedding_has_no_invented_numbers(world):
    z, z_next = world
    found = audit(constant(z), constant(z_next), **FEW)
    assert found.pair_correlations == []
    assert all(math.isnan(value) for value in (found.effective_rank, found.skewness, found.excess_kurtosis))


def test_rho_above_the_true_one_calls_a_perfect_encoder_nonlinear(world):
    z, z_next = world
    assert audit(z, z_next, rho=0.98, **FEW).verdict == "nonlinear"


def test_rho_below_what_the_embedding_shows_certifies_nothing(world):
    # No function of Gaussian latents of correlation rho has pairs that correlate at more than rho.
    z, z_next = world
    found = audit(second_degree(z), second_degree(z_next), rho=0.5, **FEW)
    assert min(found.pair_correlations) > 0.75
    assert found.verdict != "identifies the state"


@pytest.mark.parametrize("rho", [0.0, 1.0, 1.5, -0.5, math.nan, math.inf])
def test_rho_outside_its_interval_is_refused(world, rho):
    with pytest.raises(ArgumentError, match=r"rho=.*\(0, 1\)"):
        audit(*world, rho=rho)


@pytest.mark.parametrize("name", ["h", "h_next", "z"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_refused_by_array_and_count(name, value):
    z, z_next = pairs(100, 2)
    arrays = {"h": z.clone(), "h_next": z_next.clone(), "z": z.clone()}
    arrays[name][3:6] = value
    with pytest.raises(ArgumentError, match=rf"^{name} has 3 non-finite rows of 100"):
        audit(arrays["h"], arrays["h_next"], z=arrays["z"])


def test_refusal_advises_nothing_that_the_audit_does_not_take():
    z, z_next = pairs(100, 2)
    z[3] = math.nan
    with pytest.raises(ArgumentError) as caught:
        audit(z, z_next)
    assert "drop" in inspect.signature(audit).parameters or "drop=True" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda z: {"h": z, "h_next": z[:50]}, "(50, 2)"),
        (lambda z: {"h": z, "h_next": z[:, :1]}, "(100, 1)"),
        (lambda z: {"h": z, "h_next": z, "z": z[:4]}, "(4, 2)"),
        (lambda z: {"h": z.reshape(2, 50, 2), "h_next": z}, "(2, 50, 2)"),
        (lambda z: {"h": z[:0], "h_next": z[:0]}, "(0, 2)"),
    ],
)
def test_wrong_shapes_are_refused_with_the_shapes(change, told):
    with pytest.raises(ShapeError) as caught:
        audit(**change(pairs(100, 2)[0]))
    assert told in str(caught.value)


@pytest.mark.parametrize("convert", [lambda z: z > 0, lambda z: z.to(torch.complex64)])
def test_arrays_that_are_not_real_are_refused(convert):
    z, z_next = pairs(100, 2)
    with pytest.raises(TypeError, match="h has dtype"):
        audit(convert(z), z_next)


def test_audit_can_be_repeated_and_leaves_the_global_random_state_alone(world):
    state = torch.get_rng_state()
    first, again = (audit(*world, rho=RHO, **FEW) for _ in range(2))
    assert first == again
    assert torch.equal(torch.get_rng_state(), state)


def test_printed_audit_begins_with_the_verdict(world):
    lines = str(audit(*world, rho=RHO, **FEW)).splitlines()
    assert lines[0] == "verdict: identifies the state"
    assert "8000 pairs of 2 dimensions" in lines[2]
