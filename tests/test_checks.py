"""Checks and errors: what is refused, and that the message repeats the input and states the rule."""

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld import errors
from orthoworld.checks import at_least_float32, points, real, views, whole
from orthoworld.errors import ArgumentError, OrthoworldError, ShapeError


@given(st.integers(-5, 5), st.integers(-3, 3))
def test_whole_numbers_start_at_the_least(value, least):
    if value >= least:
        assert whole("n", value, least=least) == value
    else:
        with pytest.raises(ArgumentError) as raised:
            whole("n", value, least=least)
        assert str(raised.value) == f"n={value}: expected a whole number >= {least}"


@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number(value):
    with pytest.raises(ArgumentError, match=f"n={value}: expected a whole number >= 0"):
        whole("n", value, least=0)
    with pytest.raises(ArgumentError, match=rf"x={value}: expected a number in \(-1, 2\)"):
        real("x", value, -1, 2)


@pytest.mark.parametrize(
    ("closed", "interval", "low_belongs", "high_belongs"),
    [
        ("", "(0, 1)", False, False),
        ("low", "[0, 1)", True, False),
        ("high", "(0, 1]", False, True),
        ("both", "[0, 1]", True, True),
    ],
)
def test_interval_has_the_ends_it_names(closed, interval, low_belongs, high_belongs):
    assert real("x", 0.5, 0, 1, closed=closed) == 0.5
    for end, belongs in ((0, low_belongs), (1, high_belongs)):
        if belongs:
            assert real("x", end, 0, 1, closed=closed) == end
        else:
            with pytest.raises(ArgumentError) as raised:
                real("x", end, 0, 1, closed=closed)
            assert str(raised.value) == f"x={end}: expected a number in {interval}"
    for outside in (-0.1, 1.1):
        with pytest.raises(ArgumentError):
            real("x", outside, 0, 1, closed=closed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite_even_in_an_infinite_interval(value):
    with pytest.raises(ArgumentError, match=rf"x={value}: expected a number in \[-inf, inf\]"):
        real("x", value, -math.inf, math.inf, closed="both")


def test_real_numbers_become_floats():
    assert isinstance(real("x", 1, 0, 2), float)


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(1, 3))
def test_points_have_their_dimension_last(leading, dim):
    tensor = torch.zeros(*leading, dim)
    assert points("x", tensor, dim) is tensor
    with pytest.raises(ShapeError) as raised:
        points("x", tensor, dim + 1)
    assert str(raised.value) == f"x has shape {(*leading, dim)}: expected (..., {dim + 1}), one row a point"


def test_a_number_is_no_point():
    with pytest.raises(ShapeError, match=r"x has shape \(\): expected \(..., 1\)"):
        points("x", torch.tensor(1.0), 1)


@given(st.lists(st.integers(0, 3), max_size=4))
def test_views_are_two_or_three_dimensional_and_not_empty(shape):
    h = torch.zeros(shape)
    if len(shape) in (2, 3) and all(shape):
        assert views(h).shape == (*([1] * (3 - len(shape))), *shape)
    else:
        with pytest.raises(ShapeError) as raised:
            views(h)
        assert str(tuple(shape)) in str(raised.value)
        assert "expected (batch, dim), read as one view, or (views, batch, dim)" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_embeddings_are_real_floating_point_numbers(dtype):
    with pytest.raises(TypeError, match=f"embeddings have dtype {dtype}: expected a floating-point type"):
        views(torch.zeros(2, 3, dtype=dtype))


def test_half_precision_is_widened_and_nothing_is_narrowed():
    for dtype in (torch.float16, torch.bfloat16):
        assert at_least_float32(torch.zeros(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        wide = torch.zeros(2, dtype=dtype)
        assert at_least_float32(wide) is wide


def test_errors_are_what_a_python_user_would_catch():
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, OrthoworldError) for kind in raised)
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.ShapeError, errors.ArgumentError)
    assert issubclass(errors.ConfigError, errors.ArgumentError)
    assert issubclass(errors.MissingExtraError, ImportError)


UNTYPED = """
import json
from orthoworld.checks import real, whole
from orthoworld.errors import ArgumentError

def message(check, *args):
    try:
        return f"returned {check(*args)!r}"
    except ArgumentError as error:
        return str(error)

values = [1.5, "3", None]
print(json.dumps([[message(whole, "n", v) for v in values], [message(real, "x", v, 0, 1) for v in values]]))
"""


def test_values_of_other_types_are_refused_without_the_annotations_being_checked():
    # In this process beartype is quicker than the check, so another one is asked.
    answer = subprocess.run([sys.executable, "-c", UNTYPED], capture_output=True, text=True, check=True)
    shown = ["1.5", "'3'", "None"]
    assert json.loads(answer.stdout) == [
        [f"n={value}: expected a whole number >= 1" for value in shown],
        [f"x={value}: expected a number in (0, 1)" for value in shown],
    ]
