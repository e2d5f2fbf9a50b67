import pytest
import torch
from torch import nn

from orthoworld.encoders import MLP
from orthoworld.objectives.whitening import Whitener
from orthoworld.training import run as run_module
from orthoworld.training.run import Representation, Run, encode
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Banana
from orthoworld.worlds.transitions import OU
from orthoworld.worlds.world import World


@pytest.fixture
def x(generator):
    return torch.randn(100, 2, generator=generator)


@pytest.fixture
def whitener(generator):
    whitener = Whitener(2)
    whitener.mean.copy_(torch.tensor([1.0, -2.0]))
    whitener.matrix.copy_(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    return whitener


def test_a_representation_without_whitener_is_its_encoder(x):
    encoder = MLP(2, 2, width=8, depth=1)
    assert torch.equal(Representation(encoder, None)(x), encoder(x))


def test_a_representation_whitens_what_the_encoder_gives(x, whitener):
    encoder = MLP(2, 2, width=8, depth=1)
    expected = (encoder(x) - torch.tensor([1.0, -2.0])) @ torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    torch.testing.assert_close(Representation(encoder, whitener)(x), expected)


def test_a_representation_survives_its_state_dict(x, whitener):
    original = Representation(MLP(2, 2, width=8, depth=1), whitener)
    other = MLP(2, 2, width=8, depth=1, generator=torch.Generator().manual_seed(5))
    copy = Representation(other, Whitener(2))
    assert not torch.equal(copy(x), original(x))
    copy.load_state_dict(original.state_dict())
    assert torch.equal(copy(x), original(x))


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 8, 100])
def test_encoding_in_parts_is_encoding_at_once(x, rows, monkeypatch):
    monkeypatch.setattr(run_module, "ENCODE_BATCH", 7)
    encoder = MLP(2, 3, width=8, depth=1)
    with torch.no_grad():
        torch.testing.assert_close(encode(encoder, x[:rows]), encoder(x[:rows]))


def test_no_more_rows_than_a_batch_are_encoded_at_a_time(monkeypatch):
    model, seen = nn.Identity(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(run_module, "ENCODE_BATCH", 40)
    encode(model, torch.zeros(100, 2))
    assert seen == [40, 40, 20]


@pytest.mark.parametrize("training", [True, False])
def test_encoding_is_in_evaluation_mode_and_leaves_the_mode_alone(x, training):
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(encode(model, x), x, rtol=1e-4, atol=1e-4)  # untouched running statistics: no change
    assert model.training is training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_mode_is_restored_after_an_error():
    model = MLP(2, 2, width=8, depth=1).train()
    with pytest.raises(RuntimeError):
        encode(model, torch.zeros(5, 3))
    assert model.training


def test_encoding_keeps_no_gradient(x):
    assert not encode(MLP(2, 2, width=8, depth=1), x).requires_grad


def test_a_run_encodes_with_its_representation(x, whitener):
    representation = Representation(MLP(2, 2, width=8, depth=1), whitener)
    world = World(Gaussian(2), OU(0.9), Banana())
    run = Run(representation, world, "finished", "", 1, 0.0, [], 0.0, 0.0)
    torch.testing.assert_close(run.encode(x), representation(x).detach())
