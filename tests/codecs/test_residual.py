"""Residuals of a tensor against its base."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import bits, same_bits

from slimtensors import _core
from slimtensors.codecs.residual import (
    KINDS,
    applicable_kinds,
    apply_residual,
    choose_residual,
    group_bytes,
    residual,
    ungroup_bytes,
)
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import DTYPES, Spec, as_bytes

FLOATS = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def words(x):
    """Return the items of a tensor as Python integers."""
    return as_bytes(x).numpy().view(UNSIGNED[x.element_size()]).tolist()


def slow_exponent(word, dtype):
    exponent, mantissa = FLOATS[dtype]
    return word >> mantissa & (1 << exponent) - 1


def slow_grouped(items, by, dtype):
    """Sort stably by exponent."""
    order = sorted(range(len(by)), key=lambda i: slow_exponent(by[i], dtype))
    return [items[i] for i in order]


def slow_outward(x, base, width):
    """Return the steps from one float to another, positive if away from zero."""

    def place(word):
        negative, magnitude = word >> width - 1, word & (1 << width - 1) - 1
        return -magnitude - 1 if negative else magnitude

    def one(a, b):
        step = place(b) - place(a)
        step = -step if a >> width - 1 else step
        step = (step + (1 << width - 1)) % (1 << width) - (1 << width - 1)
        return 2 * step if step >= 0 else -2 * step - 1

    return [one(a, b) for a, b in zip(base, x, strict=True)]


def pair(dtype, count, seed):
    """Return random bits, and a second tensor with about half of them equal."""
    base, other = bits(seed, count, dtype, 0.9), bits(seed + 1, count, dtype, 0.9)
    same = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    raw = [as_bytes(x).view(count, -1) for x in (base, other)]
    return torch.where(same, *raw).view(-1).view(dtype), base


pairs = st.builds(pair, st.sampled_from(list(FLOATS)), st.integers(1, 600), st.integers(0, 1 << 32))


@given(pairs)
def test_the_core_agrees_with_the_definition_of_residuals(drawn):
    x, base = drawn
    outward = slow_outward(words(x), words(base), 8 * x.element_size())
    r = residual("by-exponent", x, base)
    assert words(r) == slow_grouped(outward, words(base), x.dtype)
    assert words(group_bytes(x, base)) == slow_grouped(words(x), words(base), x.dtype)


@given(pairs, st.sampled_from(KINDS))
def test_every_kind_of_residual_is_reversible(drawn, kind):
    x, base = drawn
    assert same_bits(apply_residual(kind, residual(kind, x, base), base), x)
    assert same_bits(apply_residual(kind, residual(kind, x, base, by=x), base, by=x), x)
    assert same_bits(ungroup_bytes(group_bytes(x, base), base), x)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_residuals_of_every_dtype_are_reversible(dtype):
    x, base = pair(dtype, 64, 5)
    x, base = x.view(8, 8), base.view(8, 8)
    offered = list(applicable_kinds(Spec.of(x)))
    assert ("by-exponent" in offered) == (dtype in FLOATS)
    assert ("difference" in offered) == (not dtype.is_complex)
    for kind in offered:
        assert same_bits(apply_residual(kind, residual(kind, x, base), base), x)


def test_the_cheapest_kind_is_taken():
    x, base = torch.randn(1000), torch.randn(1000)
    for kind in KINDS:
        wanted = residual(kind, x, base)
        found, r = choose_residual(x, base, lambda r, w=wanted: float(not same_bits(r, w)))
        assert found == kind
        assert same_bits(r, wanted)


def test_a_residual_that_does_not_fit_its_base_is_corrupt():
    base = torch.zeros(4).bfloat16()
    for r in (torch.zeros(3, dtype=torch.uint16), torch.zeros(4, dtype=torch.uint32)):
        for kind in ("difference", "by-exponent"):
            with pytest.raises(CorruptFileError, match="fit"):
                apply_residual(kind, r, base)
    with pytest.raises(CorruptFileError, match="fit"):
        apply_residual(
            "by-exponent", torch.zeros(4, dtype=torch.int8), torch.zeros(4, dtype=torch.int8)
        )


@pytest.mark.parametrize("work", [_core.group, _core.ungroup])
def test_the_core_refuses_items_that_are_not_floats(work):
    for itemsize, mantissa, sizes in [
        (0, 0, (8, 8, 8)),
        (3, 10, (9, 9, 9)),
        (16, 100, (16, 16, 16)),
        (4, 19, (8, 8, 8)),
        (4, 32, (8, 8, 8)),
        (4, 23, (8, 4, 8)),
        (4, 23, (8, 8, 4)),
        (4, 23, (6, 6, 6)),
    ]:
        a, b, out = (np.zeros(size, np.uint8) for size in sizes)
        with pytest.raises(ValueError, match=r"."):
            work(a, b, itemsize, mantissa, out)
