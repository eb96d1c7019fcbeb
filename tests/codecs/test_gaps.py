import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors import _core
from slimtensors.codecs import Gaps
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import Spec

CHUNK = 1 << 17
DENSITIES = (0.0, 0.001, 0.01, 0.06, 0.3, 0.5, 0.94, 0.99, 1.0)


def random_mask(seed, size, density):
    bits = np.random.default_rng(seed).random(8 * size) < density
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def slow_tokens(mask):
    ones = np.flatnonzero(np.unpackbits(mask.numpy(), bitorder="little"))
    gaps = np.diff(ones, prepend=-1) - 1
    return [token for gap in gaps.tolist() for token in [255] * (gap // 255) + [gap % 255]]


def slow_mask(tokens, size):
    bits = np.zeros(8 * size, dtype=np.uint8)
    at = 0
    for token in tokens:
        at += token
        if token != 255:
            bits[at] = 1
            at += 1
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def round_trip(x):
    parts = Gaps().encode(x)
    again = Gaps().decode(parts, Spec.of(x))
    assert again.dtype is x.dtype
    assert torch.equal(again.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8))
    return parts


@settings(deadline=None)
@given(size=st.integers(0, 400), density=st.sampled_from(DENSITIES), seed=st.integers(0, 2**32 - 1))
def test_tokens_are_the_gaps_between_ones(size, density, seed):
    mask = random_mask(seed, size, density)
    parts = round_trip(mask)
    assert parts.keys() == {"tokens"}
    assert parts["tokens"].tolist() == slow_tokens(mask)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 9])
def test_gaps_restart_with_every_chunk(size, density):
    mask = random_mask(size, size, density)
    parts = round_trip(mask)
    pieces = [slow_tokens(mask[i : i + CHUNK]) for i in range(0, size, CHUNK)]
    assert parts["tokens"].tolist() == [token for piece in pieces for token in piece]
    if len(pieces) > 1:
        assert parts["counts"].tolist() == [len(piece) for piece in pieces]
        assert parts["counts"].dtype is torch.int32


@pytest.mark.parametrize("zeros", [254, 255, 256, 509, 510, 511, 765, 1020])
def test_long_gaps_are_coded_in_steps_of_255(zeros):
    bits = np.zeros(2048, dtype=np.uint8)
    bits[zeros] = bits[2 * zeros + 1] = 1
    mask = torch.from_numpy(np.packbits(bits, bitorder="little"))
    assert round_trip(mask)["tokens"].tolist() == 2 * ([255] * (zeros // 255) + [zeros % 255])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 6), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
def test_any_tensor_is_a_string_of_bits(shape, dtype):
    x = torch.arange(torch.empty(shape).numel()).to(dtype).view(shape)
    round_trip(x)
    if x.dim() > 1:
        round_trip(x.transpose(0, -1))


@settings(deadline=None)
@given(tokens=st.binary(max_size=40), size=st.integers(0, 200))
def test_any_tokens_are_decoded_as_defined_or_refused(tokens, size):
    framed = np.full(size + 32, 0xA5, dtype=np.uint8)
    mask = framed[16 : 16 + size]
    extent = sum(tokens) + sum(token != 255 for token in tokens)
    if extent > 8 * size or tokens.endswith(b"\xff"):
        with pytest.raises(ValueError, match="gap tokens"):
            _core.gaps_decode(tokens, mask)
        assert (framed == 0xA5).all()
    else:
        _core.gaps_decode(tokens, mask)
        assert np.array_equal(mask, slow_mask(tokens, size).numpy())
        assert (framed[:16] == 0xA5).all()
        assert (framed[16 + size :] == 0xA5).all()


def test_encode_refuses_too_little_room():
    with pytest.raises(ValueError, match="gaps_bound"):
        _core.gaps_encode(b"\xff" * 9, bytearray(72))


def damaged():
    mask = random_mask(1, 2 * CHUNK + 5, 0.06)
    parts = Gaps().encode(mask)
    tokens, counts = parts["tokens"], parts["counts"]
    yield "fewer tokens", {**parts, "tokens": tokens[:-1]}
    yield "more tokens", {**parts, "tokens": torch.cat([tokens, tokens[:1]])}
    yield "tokens of another type", {**parts, "tokens": tokens.view(torch.int8)}
    yield "tokens in rows", {**parts, "tokens": tokens[None]}
    yield "fewer chunks", {**parts, "counts": counts[:-1]}
    yield "counts of another type", {**parts, "counts": counts.to(torch.int64)}
    yield "a negative count", {**parts, "counts": counts + torch.tensor([1, -1, 0]) * (1 << 30)}
    yield "counts moved", {**parts, "counts": counts + torch.tensor([9000, -9000, 0])}
    yield "a longer gap", {**parts, "tokens": tokens.clone().fill_(254)}


@pytest.mark.parametrize(("name", "parts"), list(damaged()))
def test_damaged_parts_are_refused(name, parts):
    with pytest.raises(CorruptFileError):
        Gaps().decode(parts, Spec(torch.uint8, (2 * CHUNK + 5,)))
