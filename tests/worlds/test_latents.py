"""Sources: unit-variance laws, compared with SciPy's."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.special import gammaln

from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal, Laplace, StudentT, Uniform


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def gennorm(alpha):
    return stats.gennorm(alpha, scale=math.exp((gammaln(1 / alpha) - gammaln(3 / alpha)) / 2))


LAWS = {
    "gaussian": (Gaussian, (), stats.norm()),
    "laplace": (Laplace, (), stats.laplace(scale=1 / math.sqrt(2))),
    "uniform": (Uniform, (), stats.uniform(-math.sqrt(3), 2 * math.sqrt(3))),
    "student-5": (StudentT, (5.0,), stats.t(5, scale=math.sqrt(3 / 5))),
    "student-12": (StudentT, (12.0,), stats.t(12, scale=math.sqrt(10 / 12))),
    **{f"gennorm-{alpha}": (GeneralizedNormal, (alpha,), gennorm(alpha)) for alpha in (0.5, 1.0, 2.0, 3.7, 8.0, 32.0)},
}
SOURCES = [kind(3, *args) for kind, args, _ in LAWS.values()]


@pytest.mark.parametrize("name", LAWS)
def test_source_has_its_law(name):
    kind, args, law = LAWS[name]
    z = kind(2, *args).sample(10_000, generator=gen())
    assert stats.kstest(z.flatten().numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", LAWS)
def test_source_has_mean_zero_and_variance_one(name):
    kind, args, law = LAWS[name]
    n = 200_000
    z = kind(2, *args).sample(n, generator=gen()).double()
    assert law.mean() == pytest.approx(0, abs=1e-9)
    assert law.var() == pytest.approx(1)
    # Five standard errors; that of the variance follows from the law's kurtosis.
    torch.testing.assert_close(z.mean(dim=0), torch.zeros(2).double(), atol=5 / math.sqrt(n), rtol=0)
    slack = 5 * math.sqrt((float(law.stats("k")) + 2) / n)
    torch.testing.assert_close(z.var(dim=0), torch.ones(2).double(), atol=slack, rtol=0)


@pytest.mark.parametrize("source", SOURCES, ids=list(LAWS))
def test_latents_are_independent(source):
    n = 20_000
    z = source.sample(n, generator=gen())
    # Bounded functions of the latents, so that heavy tails do not spoil the standard error 1 / sqrt n.
    features = torch.cat([z.tanh(), z.abs().tanh()], dim=1)
    correlations = torch.corrcoef(features.T)
    blocks = [correlations[i::3, j::3] for i in range(3) for j in range(i)]
    assert torch.cat(blocks).abs().max() < 5 / math.sqrt(n)


@given(leading=st.lists(st.integers(0, 4), max_size=3), dim=st.integers(1, 9), name=st.sampled_from(list(LAWS)))
def test_samples_have_the_asked_shape_in_float32(leading, dim, name):
    kind, args, _ = LAWS[name]
    z = kind(dim, *args).sample(*leading, generator=gen())
    assert z.shape == (*leading, dim)
    assert z.dtype == torch.float32


@pytest.mark.parametrize("source", SOURCES, ids=list(LAWS))
def test_generator_decides_the_draws(source):
    running = gen(3)
    first, second = (source.sample(50, generator=running) for _ in range(2))
    torch.testing.assert_close(source.sample(50, generator=gen(3)), first, atol=0, rtol=0)
    assert not (first == second).any()


@pytest.mark.parametrize("name", LAWS)
def test_functions_of_the_law_are_those_of_scipy(name):
    kind, args, law = LAWS[name]
    source = kind(1, *args)
    z = torch.tensor([-1.7, -0.6, -1e-3, 0.0, 0.3, 1.0, 1.7], dtype=torch.float64)
    torch.testing.assert_close(source.log_density(z), torch.as_tensor(law.logpdf(z)), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(source.survival(z), torch.as_tensor(law.sf(z)), atol=0, rtol=1e-12)
    torch.testing.assert_close(source.upper_quantile(source.survival(z)), z, atol=1e-9, rtol=1e-9)
    assert float(source.upper_quantile(torch.zeros(()))) == pytest.approx(law.support()[1])
    end = min(law.support()[1], float(law.isf(1e-300)))
    for low in z.tolist():
        parts = [low, *(x for x in (0.5, 2.0, 8.0) if low < x < end), end]
        pieces = [integrate.quad(lambda t: t * law.pdf(t), *part, epsabs=1e-12)[0] for part in pairwise(parts)]
        assert float(source.upper_mean(torch.tensor(low).double())) == pytest.approx(sum(pieces), abs=1e-7)


@pytest.mark.parametrize("source", SOURCES, ids=list(LAWS))
def test_functions_of_the_law_keep_type_and_tails(source):
    z = torch.tensor([0.5, 1.0])
    assert source.log_density(z).dtype == source.upper_mean(z).dtype == torch.float32
    tail = torch.tensor([1e-12, 1e-6], dtype=torch.float64)
    torch.testing.assert_close(source.survival(source.upper_quantile(tail)), tail, atol=2e-16, rtol=1e-8)


def test_large_alpha_is_uniform_and_never_zero():
    z = GeneralizedNormal(1, alpha=1e4).sample(10_000, generator=gen())
    assert stats.kstest(z.flatten().numpy(), LAWS["uniform"][2].cdf).pvalue > 1e-3
    assert (z != 0).all()


def test_generalised_normal_is_symmetric_and_its_sign_is_independent_of_its_size():
    z = GeneralizedNormal(1, alpha=0.7).sample(100_000, generator=gen()).flatten()
    assert z.sign().mean().abs() < 5 / math.sqrt(len(z))
    halves = z[z > 0].numpy(), -z[z < 0].numpy()
    assert stats.ks_2samp(*halves).pvalue > 1e-3


@pytest.mark.parametrize(
    ("source", "gaussian", "laplace"),
    [
        (Gaussian(1), True, False),
        (GeneralizedNormal(1, alpha=2), True, False),
        (GeneralizedNormal(1, alpha=1), False, True),
        (GeneralizedNormal(1, alpha=1.5), False, False),
        (Laplace(1), False, True),
        (StudentT(1, df=5), False, False),
        (Uniform(1), False, False),
    ],
    ids=repr,
)
def test_source_knows_whether_it_is_gaussian_or_laplace(source, gaussian, laplace):
    assert (source.is_gaussian, source.is_laplace) == (gaussian, laplace)


def test_repr_is_the_call():
    assert repr(GeneralizedNormal(3, alpha=0.5)) == "GeneralizedNormal(dim=3, alpha=0.5)"
    assert repr(Gaussian(2)) == "Gaussian(dim=2)"


@pytest.mark.parametrize("dim", [0, -1, True])
def test_dimension_is_a_whole_number(dim):
    with pytest.raises(ArgumentError, match=rf"dim={dim}: expected a whole number >= 1"):
        Gaussian(dim)


def test_sizes_are_not_negative():
    with pytest.raises(ArgumentError, match=r"shape=-1: expected a whole number >= 0"):
        Uniform(2).sample(3, -1, generator=gen())


@pytest.mark.parametrize("df", [2.0, 1.0, math.nan, math.inf])
def test_student_needs_a_variance(df):
    with pytest.raises(ArgumentError, match=rf"df={df}: expected a number in \(2, inf\)"):
        StudentT(2, df=df)
