"""Encoders: weights from a generator, any size, and couplings that invert mixings exactly."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from orthoworld.encoders import MLP, InverseAffineCoupling, InverseCoupling
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.worlds.mixings import AffineCoupling, Coupling

PARTNERS = {"additive": (InverseCoupling, Coupling), "affine": (InverseAffineCoupling, AffineCoupling)}
partners = pytest.mark.parametrize(("encoder_kind", "mixing_kind"), PARTNERS.values(), ids=PARTNERS)
ENCODERS = [MLP, InverseCoupling, InverseAffineCoupling]
sizes = st.integers(1, 9)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def log_volume(encoder, x):
    """Return log|det J| at each row of `x`, by autograd."""
    jacobian = torch.autograd.functional.jacobian(lambda rows: encoder(rows).sum(dim=0), x)
    return torch.linalg.slogdet(jacobian.transpose(0, 1)).logabsdet


@pytest.mark.parametrize("make", ENCODERS)
@given(in_dim=sizes, out_dim=sizes, leading=st.lists(st.integers(1, 3), min_size=1, max_size=2))
def test_embedding_has_its_own_size(make, in_dim, out_dim, leading):
    options = {"width": 8, "depth": 2} if make is MLP else {}
    encoder = make(in_dim, out_dim, generator=gen(), **options)
    h = encoder(torch.randn(*leading, in_dim, generator=gen()))
    assert h.shape == (*leading, out_dim)
    assert torch.isfinite(h).all()


def test_published_perceptron_has_198658_parameters():
    assert sum(p.numel() for p in MLP(2, 2).parameters()) == 198_658


@given(in_dim=sizes, out_dim=sizes, width=st.integers(1, 12), depth=st.integers(1, 5))
def test_perceptron_has_depth_hidden_layers_of_its_width(in_dim, out_dim, width, depth):
    layers = list(MLP(in_dim, out_dim, width=width, depth=depth).layers)
    linear = [(layer.in_features, layer.out_features) for layer in layers[::2]]
    assert linear == list(pairwise([in_dim] + [width] * depth + [out_dim]))
    assert all(isinstance(layer, nn.GELU) for layer in layers[1::2])


def test_perceptron_weights_have_the_default_law_of_torch():
    first, *_, last = MLP(16, 9, width=256, depth=2, generator=gen()).layers
    for layer in (first, last):
        bound = 1 / math.sqrt(layer.in_features)
        law = stats.uniform(-bound, 2 * bound)
        for parameter in (layer.weight, layer.bias):
            assert stats.kstest(parameter.detach().flatten().numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("make", ENCODERS)
def test_initial_weights_come_from_the_generator_or_from_seed_zero(make):
    def weights(generator):
        return nn.utils.parameters_to_vector(make(3, 2, generator=generator).parameters())

    assert torch.equal(weights(gen(5)), weights(gen(5)))
    assert not torch.equal(weights(gen(5)), weights(gen(6)))
    assert torch.equal(weights(None), weights(gen(0)))


@partners
@given(dim=sizes, layers=st.integers(1, 6), seed=st.integers(0, 9))
def test_matched_encoder_inverts_the_mixing(encoder_kind, mixing_kind, dim, layers, seed):
    mixing = mixing_kind(dim, layers, generator=gen(seed))
    encoder = encoder_kind(dim, layers=layers, generator=gen(seed + 1)).match(mixing)
    z = normal(20, dim)
    h = encoder.double()(mixing.double()(z))
    torch.testing.assert_close(h, z, atol=1e-11, rtol=0)


@partners
def test_unmatched_encoder_does_not_invert_the_mixing(encoder_kind, mixing_kind):
    z = torch.randn(20, 4, generator=gen())
    assert not torch.allclose(encoder_kind(4)(mixing_kind(4, generator=gen())(z)), z, atol=0.1)


@partners
def test_training_a_matched_encoder_leaves_the_mixing_alone(encoder_kind, mixing_kind):
    mixing = mixing_kind(3, generator=gen())
    before = {name: weight.clone() for name, weight in mixing.state_dict().items()}
    encoder = encoder_kind(3).match(mixing)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], weight) for name, weight in mixing.state_dict().items())


@pytest.mark.parametrize("dim", range(1, 10))
def test_additive_encoder_preserves_volume_whatever_its_weights(dim):
    volumes = log_volume(InverseCoupling(dim, generator=gen(dim)).double(), normal(20, dim))
    torch.testing.assert_close(volumes, torch.zeros(20, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dim", range(2, 10))
def test_affine_encoder_changes_volume(dim):
    assert log_volume(InverseAffineCoupling(dim, generator=gen(dim)).double(), normal(200, dim)).std() > 0.1


@partners
def test_one_dimension_is_left_alone(encoder_kind, mixing_kind):
    x = normal(10, 1)
    assert torch.equal(encoder_kind(1).double()(x), x)


@partners
def test_another_embedding_size_adds_a_linear_map_without_bias(encoder_kind, mixing_kind):
    same, other = encoder_kind(5, generator=gen()), encoder_kind(5, 3, generator=gen())
    assert isinstance(same.output, nn.Identity)
    assert other.output.bias is None
    x = torch.randn(8, 5, generator=gen())
    other.load_state_dict(same.state_dict(), strict=False)
    torch.testing.assert_close(other(x), same(x) @ other.output.weight.T)


@partners
def test_free_matrices_are_normal_with_variance_one_over_their_inputs(encoder_kind, mixing_kind):
    for weight in encoder_kind(101, layers=2, generator=gen()).parameters():
        scaled = weight.detach() * math.sqrt(weight.shape[0])
        assert stats.kstest(scaled.flatten().numpy(), stats.norm.cdf).pvalue > 1e-3
    weights = list(encoder_kind(3, layers=1000, generator=gen()).parameters())
    for inputs in (1, 2):
        entries = torch.cat([weight.detach().flatten() for weight in weights if weight.shape[0] == inputs])
        assert entries.var().item() * inputs == pytest.approx(1, abs=5 * math.sqrt(2 / len(entries)))


@partners
def test_every_weight_is_trained(encoder_kind, mixing_kind):
    encoder = encoder_kind(5, 3, generator=gen())
    encoder(torch.randn(16, 5, generator=gen())).square().sum().backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in encoder.parameters())


@partners
def test_gradients_are_those_of_finite_differences(encoder_kind, mixing_kind):
    encoder = encoder_kind(3, 2, layers=3, generator=gen()).double()
    assert torch.autograd.gradcheck(encoder, normal(4, 3).requires_grad_())


@partners
@pytest.mark.parametrize(("dim", "layers"), [(4, 3), (5, 4)])
def test_only_a_mixing_of_the_same_form_can_be_matched(encoder_kind, mixing_kind, dim, layers):
    with pytest.raises(ArgumentError, match=rf"\({dim}, {layers}, .\): expected \(4, 4, .\), as the"):
        encoder_kind(4).match(mixing_kind(dim, layers, generator=gen()))


def test_only_a_mixing_of_the_same_kind_can_be_matched():
    with pytest.raises(ArgumentError, match=r"expected \(4, 4, 1\), as the encoder"):
        InverseCoupling(4).match(AffineCoupling(4, generator=gen()))


@partners
def test_wrong_observation_is_an_error_that_repeats_the_shape(encoder_kind, mixing_kind):
    with pytest.raises(ShapeError, match=r"x has shape \(2, 4\): expected \(..., 3\)"):
        encoder_kind(3)(torch.zeros(2, 4))


@pytest.mark.parametrize("name", ["in_dim", "out_dim", "width", "depth"])
def test_perceptron_sizes_are_whole_numbers(name):
    arguments = {"in_dim": 2, "out_dim": 2, name: 0}
    with pytest.raises(ArgumentError, match=f"{name}=0: expected a whole number >= 1"):
        MLP(**arguments)


@partners
@pytest.mark.parametrize("name", ["in_dim", "out_dim", "layers"])
def test_coupling_sizes_are_whole_numbers(encoder_kind, mixing_kind, name):
    arguments = {"in_dim": 2, "out_dim": 2, name: -1}
    with pytest.raises(ArgumentError, match=f"{name}=-1: expected a whole number >= 1"):
        encoder_kind(**arguments)
