"""The codec `int` agrees with its formula on every code path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors.codecs import Int
from slimtensors.errors import ConfigError
from slimtensors.tensor import Spec

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def slow(x, bits, per_row):
    """Compute codes and scales with plain torch."""
    top = 2 ** (bits - 1) - 1
    rows = x.float().reshape(x.shape[0] if per_row and x.dim() else 1, -1)
    scale = rows.abs().amax(1, keepdim=True) / top
    scale[scale == 0] = 1.0
    q = (rows / scale).round().clamp(-top, top).to(torch.int8)
    return q.view(x.shape), scale.view(-1), (q.float() * scale).to(x.dtype).view(x.shape)


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (70,), (7, 33), (3, 4, 5), (600, 2000)]),
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from([1.0, 0.0, 1e-4, 2e-43]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=60)
def test_items_are_rounded_by_the_formula(dtype, shape, bits, per_row, size, seed):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    codec = Int(bits, per_row)
    q, scale, back = slow(x, bits, per_row)
    parts = codec.encode(x)
    assert same_bits(parts["q"], q)
    assert same_bits(parts["scale"], scale)
    assert same_bits(codec.decode(parts, Spec.of(x)), back)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_infinity_and_empty_tensors_are_refused(bad):
    with pytest.raises(ConfigError, match="NaN and infinity"):
        Int().encode(torch.tensor([[1.0, bad]]))
    with pytest.raises(ConfigError, match="empty tensor"):
        Int().encode(torch.ones(0, 4))
