import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.identifiability.published import grid, in_sample_r2, orthogonality_error
from orthoworld.identifiability.recovery import recovery


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_in_sample_r2_of_noise_is_the_share_of_regressors():
    n, dim = 2000, 500
    assert in_sample_r2(normal(0, n, dim), normal(1, n, dim)) == pytest.approx(dim / (n - 1), abs=0.01)


@given(seed=st.integers(0, 2**31))
def test_r2_is_pooled_over_dimensions(seed):
    z = normal(seed, 500, 2) * torch.tensor([10.0, 0.1])
    assert in_sample_r2(z[:, :1], z) == pytest.approx(1, abs=1e-3)


def test_a_target_that_does_not_vary_has_no_r2():
    assert math.isnan(in_sample_r2(normal(0, 50, 2), torch.ones(50, 2)))


def test_orthogonality_is_that_of_recovery():
    z = normal(0, 3000, 3)
    h = torch.tanh(z) @ normal(1, 3, 3) + 2
    assert orthogonality_error(z, h) == pytest.approx(recovery(z, h, resamples=0).orth_err, rel=1e-9)


def test_the_grid_is_a_square():
    points = grid()
    assert points.shape == (10_000, 2)
    assert points.abs().max() == 3
    torch.testing.assert_close(
        points.double().T @ points.double() / 10_000, torch.eye(2, dtype=torch.float64) * 3.0606, atol=1e-3, rtol=0
    )
