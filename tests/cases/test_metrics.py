import math

import numpy as np
import pytest
import torch

from orthoworld.errors import ArgumentError
from orthoworld.identifiability.bound import bound
from orthoworld.identifiability.recovery import recovery


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(found):
    return {name: value for name, value in vars(found).items() if isinstance(value, float) and not math.isnan(value)}


def test_m1_rotation():
    z = normal(0, 20_000, 2)
    q = torch.linalg.qr(normal(1, 2, 2))[0]
    found = recovery(z, z @ q.T, resamples=0)
    assert found.r2_hz == pytest.approx(1, abs=1e-6)
    assert found.r2_zh == pytest.approx(1, abs=1e-6)
    assert found.orth_err < 1e-3
    assert found.procrustes < 1e-3
    eighth = math.sqrt(0.5) * torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert recovery(z, z @ eighth, resamples=0).mcc == pytest.approx(0.7071, abs=0.01)


def test_m4_shift():
    z = normal(0, 5000, 2)
    found = recovery(z, z + 3, resamples=0)
    assert found.procrustes == pytest.approx(0, abs=1e-9)
    assert found.r2_hz == pytest.approx(1, abs=1e-9)
    epsilon = [bound(h, h, rho=0.5, resamples=0).epsilon for h in (z, z + 3)]
    assert epsilon[1] == pytest.approx(epsilon[0], abs=1e-6)


def test_m5_noise_scores_zero():
    found = recovery(normal(0, 2000, 2), normal(1, 2000, 512), resamples=0)
    assert found.r2_hz <= 0.02
    assert found.r2_hz_pooled <= 0.02
    assert found.n_fit + found.n_score == 2000
    assert f"2000 rows (fitted on {found.n_fit}, scored on {found.n_score})" in str(found)


def test_m6_fewer_samples_than_features():
    found = recovery(normal(0, 5, 2), normal(1, 5, 20))
    for name in ("r2_hz", "r2_hz_pooled", "orth_err", "procrustes", "mcc", "effective_rank"):
        assert math.isnan(getattr(found, name))
        assert "expected more" in found.reasons[name]
    assert np.isnan(found.r2_hz_per_dim).all()
    assert np.isnan(found.canonical_correlations).all()


def test_m7_scale_imbalance():
    z = normal(0, 20_000, 2) * torch.tensor([10, 0.1])
    found = recovery(z, torch.stack([z[:, 0], normal(1, 20_000)], dim=1), resamples=0)
    assert found.r2_hz == pytest.approx(0.5, abs=0.02)
    np.testing.assert_allclose(found.r2_hz_per_dim, [1, 0], atol=0.02)
    assert found.r2_hz_pooled == pytest.approx(1, abs=1e-3)


def test_m9_rank_deficient_representation():
    z = normal(0, 20_000, 2)
    found = recovery(z, z[:, [0, 0]], resamples=0)
    assert found.r2_hz == pytest.approx(0.5, abs=0.02)
    assert found.effective_rank == pytest.approx(1, abs=1e-9)


def test_m12_rows_that_are_not_finite():
    z, h = normal(0, 500, 2), normal(1, 500, 2)
    h[[5, 50, 499], [0, 1, 0]] = torch.nan
    with pytest.raises(ArgumentError, match="h has 3 non-finite rows of 500"):
        recovery(z, h)
    found = recovery(z, h, drop=True)
    assert (found.n, found.dropped) == (497, 3)
    assert "3 rows were not finite and are left out" in str(found)
    kept = torch.isfinite(h).all(dim=1)
    assert numbers(found) == numbers(recovery(z[kept], h[kept]))


def test_m13_effective_rank():
    h = normal(0, 20_000, 3) @ torch.linalg.qr(normal(1, 8, 8))[0][:3]
    assert recovery(normal(2, 20_000, 2), h, resamples=0).effective_rank == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_m15_mcc_with_a_dead_column(value):
    z = normal(0, 997, 2)
    h = torch.stack([z[:, 1], torch.full((997,), value)], dim=1)
    found = recovery(z, h)
    assert found.mcc == pytest.approx(0.5, abs=1e-6)  # one latent is matched perfectly, the other with nothing
    assert found.dead_columns == [1]
    assert "columns [1] of h are constant" in str(found)


def test_m16_angles():
    theta = (2 * torch.rand(50_000, 1, generator=torch.Generator().manual_seed(0)) - 1) * math.pi
    h = torch.cat([theta.cos(), theta.sin()], dim=1)
    found = recovery(theta, h, periodic=[0], resamples=0)
    assert found.r2_hz == pytest.approx(6 / math.pi**2, abs=0.01)
    assert found.r2_hz_angles == pytest.approx(1, abs=1e-9)
    assert found.periodic == [0]
    assert "periodic" in str(found)


def test_m17_precisions_agree():
    z = normal(0, 5000, 3)
    h = z @ normal(1, 3, 4) + 0.1 * normal(2, 5000, 4) + 100
    h_next = h + 0.1 * normal(3, 5000, 4)
    single = numbers(recovery(z, h)) | numbers(bound(h, h_next, rho=0.9))
    double = numbers(recovery(z.double(), h.double())) | numbers(bound(h.double(), h_next.double(), rho=0.9))
    assert single == double  # the statistics are computed in float64 whatever comes in
    exact = torch.from_numpy(np.random.default_rng(0).standard_normal((5000, 3)))
    doubled, rounded = (numbers(recovery(array, array @ torch.eye(3, 4).to(array))) for array in (exact, exact.float()))
    assert rounded == pytest.approx(doubled, abs=1e-5)


def test_m17_numbers_that_float32_would_lose_survive():
    z = normal(0, 5000, 2).double()
    far = z + 2.0**20  # in float32 the covariance about this mean would have no digits
    assert recovery(z, far, resamples=0).orth_err == pytest.approx(0, abs=1e-8)
    assert bound(far, far, rho=0.5, resamples=0).epsilon == pytest.approx(
        bound(z, z, rho=0.5, resamples=0).epsilon, abs=1e-8
    )
