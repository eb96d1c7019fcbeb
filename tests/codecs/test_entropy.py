"""Order-0 entropy of tensors."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import bits

from slimtensors import _core
from slimtensors.codecs import Huffman
from slimtensors.codecs.statistics import order0
from slimtensors.tensor import DTYPES, as_bytes


def slow_entropy(symbols):
    counts = Counter(symbols)
    return sum(n * math.log2(len(symbols) / n) for n in counts.values())


def slow_counts(raw, itemsize, rotated):
    """Count the bytes one by one."""
    counts = np.zeros((itemsize, 256), np.uint64)
    for i in range(0, len(raw), itemsize):
        word = int.from_bytes(raw[i : i + itemsize], "little")
        if rotated:
            word = (word << 1 | word >> 8 * itemsize - 1) & (1 << 8 * itemsize) - 1
        for j in range(itemsize):
            counts[j, word >> 8 * j & 255] += 1
    return counts


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.integers(0, 300),
    st.integers(0, 1 << 32),
)
def test_bytes_are_counted_as_the_slow_twin_counts_them(itemsize, rotated, items, seed):
    rotated = rotated and itemsize > 1
    raw = np.random.default_rng(seed).integers(0, 7, items * itemsize, np.uint8)
    counts = np.full((itemsize, 256), 99, np.uint64)
    _core.count_bytes(raw, itemsize, rotated, counts.view(np.uint8).reshape(-1))
    assert (counts == slow_counts(raw.tobytes(), itemsize, rotated)).all()


def test_more_bytes_than_a_block_are_counted():
    raw = np.random.default_rng(0).integers(0, 256, 100_002, np.uint8)
    counts = np.empty((2, 256), np.uint64)
    _core.count_bytes(raw, 2, False, counts.view(np.uint8).reshape(-1))
    assert (counts[0] == np.bincount(raw[::2], minlength=256)).all()
    assert (counts[1] == np.bincount(raw[1::2], minlength=256)).all()


@pytest.mark.parametrize(
    ("size", "itemsize", "rotated", "room"),
    [
        (6, 3, False, 6144),
        (16, 16, False, 1),
        (4, 1, True, 2048),
        (5, 2, False, 4096),
        (4, 2, False, 9),
    ],
)
def test_invalid_item_sizes_are_refused(size, itemsize, rotated, room):
    with pytest.raises(ValueError, match=r"."):
        _core.count_bytes(np.zeros(size, np.uint8), itemsize, rotated, np.zeros(room, np.uint8))


def test_integers_need_the_entropy_of_their_bytes():
    x = torch.randint(0, 9, (5000,), dtype=torch.uint8) + 1
    assert order0(x) == pytest.approx(slow_entropy(x.tolist()))


def test_floats_need_the_entropy_of_their_exponents_and_their_other_bits():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    exponents = (x.view(torch.int32) >> 23 & 255).tolist()
    assert order0(x) == pytest.approx(slow_entropy(exponents) + 24 * 20_000, rel=1e-9)
    half = x.bfloat16().float()  # whose low bytes are all zero
    assert order0(half) == pytest.approx(order0(x.bfloat16()), rel=0.01)


def test_zeros_need_a_mask():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    x[torch.rand(20_000, generator=torch.Generator().manual_seed(1)) < 0.9] = 0
    kept = x[x != 0]
    mask = slow_entropy((x != 0).tolist())
    assert order0(x) == pytest.approx(mask + order0(kept))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_has_a_bound_that_coding_respects(dtype):
    x = bits(3, 5000, dtype, 0.7)
    assert 0 <= order0(x) <= 8 * x.nbytes
    few = (as_bytes(x) & 3).view(dtype) if dtype is not torch.bool else x
    coded = sum(8 * part.nbytes for part in Huffman().encode(few).values())
    assert order0(few) <= coded


def test_empty_and_constant_tensors_need_no_bits():
    assert order0(torch.empty(0)) == 0
    assert order0(torch.ones(100)) == 0
