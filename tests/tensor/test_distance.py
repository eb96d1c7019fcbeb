"""Sums of squares agree with their definition, in fast and in plain code."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors import _core
from slimtensors.tensor import as_bytes, dtype_name, norm, relative_distance

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LANES = 16


def slow_sum(numbers):
    """Sum squares in interleaved lanes, then add these up by halves: the documented order."""
    sums = [0.0] * LANES
    for i, x in enumerate(numbers):
        sums[i % LANES] += x * x
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 70), st.sampled_from(FLOATS), st.integers(-20, 12), st.integers(0, 2**32))
def test_sums_are_those_of_the_slow_twin_to_the_last_bit(items, dtype, exponent, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = ((torch.randn(items, generator=g) * 2.0**exponent).to(dtype) for _ in range(2))
    kind = dtype_name(dtype)
    a, b = x.double().tolist(), y.double().tolist()
    assert _core.sum_of_squares(as_bytes(x), kind) == slow_sum(a)
    between = _core.squared_distance(as_bytes(x), as_bytes(y), kind)
    assert between == slow_sum([p - q for p, q in zip(a, b, strict=True)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 1700), st.sampled_from(FLOATS), st.integers(1, 90), st.integers(0, 2**32))
def test_rounding_loss_equals_the_measured_distance_to_the_last_bit(items, dtype, block, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(items, generator=g).to(dtype)
    codes = torch.randint(-128, 128, (items,), generator=g, dtype=torch.int8)
    scales = torch.rand(-(-items // block), generator=g)
    layout = _core.Scales(as_bytes(scales), "float32", (items, block, 1))
    rounded, kind = torch.empty_like(x), dtype_name(dtype)
    int8 = _core.CodeFormat("int", 8)
    _core.dequantize(as_bytes(codes), as_bytes(rounded), dtype=kind, scales=layout, format=int8)
    wanted = slow_sum((rounded.double() - x.double()).tolist()), slow_sum(x.double().tolist())
    found = _core.rounding_loss(
        as_bytes(x), as_bytes(codes), dtype=kind, scales=layout, format=int8
    )
    assert found == wanted


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_propagate(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(21, dtype=dtype)
        x[17] = bad
        assert not math.isfinite(norm(x))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_distances_are_relative_to_the_second(dtype):
    x = torch.linspace(-4, 4, 130).to(dtype).view(13, 10)
    y = x * 1.25
    wanted = float((y.double() - x.double()).norm() / x.double().norm())
    assert relative_distance(y, x) == pytest.approx(wanted)
    assert relative_distance(y.t(), x.t()) == pytest.approx(wanted)
    assert relative_distance(y.float(), x) == pytest.approx(wanted)
    assert relative_distance(x, x) == 0.0
    assert relative_distance(x, torch.zeros_like(x)) == 0.0


def test_numbers_whose_squares_overflow_float32():
    for size in (1e-30, 1e30):
        x = torch.full((100,), size)
        assert norm(x) == pytest.approx(10 * size)
        assert relative_distance(1.5 * x, x) == pytest.approx(0.5)


def test_sizes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="items must be"):
        _core.sum_of_squares(bytes(8), "float8_e4m3fn")
    with pytest.raises(ValueError, match="multiple"):
        _core.sum_of_squares(bytes(6), "float32")
    with pytest.raises(ValueError, match="as many"):
        _core.squared_distance(bytes(8), bytes(4), "float32")
    for sizes in ((8, 1, 4), (8, 2, 8), (6, 2, 4)):
        items, codes, scales = map(bytes, sizes)
        layout = _core.Scales(scales, "float32", (2, 2, 1))
        with pytest.raises(ValueError, match=r"whole rows|codes do not|one scale"):
            _core.rounding_loss(
                items, codes, dtype="float32", scales=layout, format=_core.CodeFormat("int", 8)
            )


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="this is the run with the other code")
def test_plain_code_passes_the_same_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "SLIMTENSORS_CPU": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
