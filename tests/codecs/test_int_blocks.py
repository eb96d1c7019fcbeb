"""The codec `int-blocks`: floats rounded to 8-bit integers in blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors.codecs import IntBlocks
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Workers
from slimtensors.tensor import Spec, relative_distance

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def expected(x, block):
    """Round item by item."""
    flat, out = x.float().flatten(), []
    for i in range(0, flat.numel(), block):
        some = flat[i : i + block]
        scale = some.abs().max() / 127
        q = (some / scale).round() + 0.0 if scale > 0 else torch.zeros_like(some)
        out.append(q * scale)
    return torch.cat(out).view(x.shape).to(x.dtype)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1,), (7, 9), (64, 3), (130,), (3, 5, 11)]),
    dtype=st.sampled_from(FLOATS),
    block=st.sampled_from([1, 16, 64]),
)
def test_items_are_the_nearest_multiples_of_their_block_s_scale(seed, shape, dtype, block):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * torch.rand(shape, generator=g)).to(dtype)
    x[x.abs() < 0.1] = 0
    codec = IntBlocks(block)
    back = codec.decode(codec.encode(x), Spec.of(x))
    assert same_bits(back, expected(x, block))
    assert (back[x == 0] == 0).all()


def test_threads_and_pieces_change_nothing():
    x = torch.randn(1 << 10, 1031)
    codec = IntBlocks()
    with Workers(3) as workers:
        parts = codec.encode(x, workers.each)
        back = codec.decode(parts, Spec.of(x), workers.each)
    assert same_bits(back, expected(x, 64))
    assert float((back - x).norm() / x.norm()) < 0.007


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_is_computed_without_decoding(dtype):
    x = torch.randn(70, 33).to(dtype)
    codec = IntBlocks(16)
    parts = codec.encode(x)
    decoded = codec.decode(parts, Spec.of(x))
    assert codec.relative_error(parts, x) == relative_distance(decoded, x) > 0
    turned = x.t()
    assert codec.relative_error(codec.encode(turned), turned) > 0
    nothing = torch.zeros(5, dtype=dtype)
    assert codec.relative_error(codec.encode(nothing), nothing) == 0.0
    empty = torch.empty(0, dtype=dtype)
    assert codec.relative_error(codec.encode(empty), empty) == 0.0


def test_tiny_numbers_and_empty_tensors():
    x = torch.tensor([1e-45, -1e-40, 0.0])
    assert IntBlocks().decode(IntBlocks().encode(x), Spec.of(x)).abs().max() < 1e-38
    empty = torch.empty(0, 3)
    assert same_bits(IntBlocks().decode(IntBlocks().encode(empty), Spec.of(empty)), empty)


def test_nan_infinity_and_integers_are_refused():
    for x in (torch.ones(3, dtype=torch.int32), torch.tensor([1.0, float("nan")])):
        with pytest.raises(ConfigError):
            IntBlocks().encode(x)
    with pytest.raises(ConfigError, match="block must be"):
        IntBlocks(3)


def test_parts_that_do_not_fit_are_corrupt():
    x = torch.randn(8, 16)
    parts = IntBlocks().encode(x)
    for wrong in (
        {**parts, "q": parts["q"][:4]},
        {**parts, "q": parts["q"].short()},
        {**parts, "scale": parts["scale"][:1]},
        {**parts, "scale": parts["scale"].double()},
    ):
        with pytest.raises(CorruptFileError):
            IntBlocks().decode(wrong, Spec.of(x))
