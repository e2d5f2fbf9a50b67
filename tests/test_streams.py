"""Streams: one seed, many independent generators, the same everywhere."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.streams import stream

names = st.lists(st.one_of(st.text("abcxyz-_", min_size=1, max_size=8), st.integers(0, 99)), max_size=3)


@given(seed=st.integers(0, 2**31), path=names)
def test_the_same_name_gives_the_same_numbers(seed, path):
    first, second = (torch.randn(4, generator=stream(seed, *path)) for _ in range(2))
    assert torch.equal(first, second)


@given(seed=st.integers(0, 2**31), path=names, other=names)
def test_another_seed_or_name_gives_other_numbers(seed, path, other):
    own = stream(seed, *path).initial_seed()
    assert own != stream(seed + 1, *path).initial_seed()
    if [str(part) for part in path] != [str(part) for part in other]:
        assert own != stream(seed, *other).initial_seed()


def test_seeds_are_the_same_in_every_process_and_release():
    # The first 63 bits of the SHA-256 digest of the tuples as Python writes them.
    assert stream(0, "world").initial_seed() == 8_758_131_475_308_689_363
    assert stream(7, "evaluation", "slices").initial_seed() == 462_793_303_166_175_998


def test_streams_of_one_seed_are_uncorrelated():
    n = 20_000
    draws = torch.stack(
        [torch.randn(n, generator=stream(0, name)) for name in ("world", "slices", "batches", "encoder")]
    )
    off_diagonal = torch.corrcoef(draws) - torch.eye(4)
    assert off_diagonal.abs().max() < 5 / math.sqrt(n)


def test_drawing_from_one_stream_changes_nothing_in_another():
    slices = stream(0, "slices")
    expected = torch.randn(5, generator=stream(0, "slices"))
    torch.randn(1000, generator=stream(0, "world"))
    torch.randn(1000)
    assert torch.equal(torch.randn(5, generator=slices), expected)


def test_streams_are_on_the_cpu():
    assert stream(3, "world").device == torch.device("cpu")
