import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors import _core
from slimtensors.codecs import Density
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import Spec

CHUNK = 1 << 18
DENSITIES = (0.0, 0.001, 0.01, 0.06, 0.3, 0.5, 0.94, 0.99, 1.0)
UNIT, LOWEST = 1 << 14, 1 << 16


def random_mask(seed, shape, density, spread=0.0):
    """Return a mask whose row and column densities vary by `spread`."""
    rng = np.random.default_rng(seed)
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    share = density * np.exp(spread * rng.standard_normal((rows, 1)))
    share = share * np.exp(spread * rng.standard_normal((1, 8 * width)))
    bits = rng.random((rows, 8 * width)) < share
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little")).view(shape)


# The slow twins: the format, as plainly as Python can say it.


def slow_chance(code):
    rare = ((8 + code % 8) << (code // 8 % 16)) >> 2
    return UNIT - rare if code & 128 else rare


def slow_vectors(size):
    return 1 if size < 1 << 15 else 2 if size < 1 << 17 else 4


def slow_order(size, rows, columns, chances, vectors):
    """Return the lane and the probability of a set bit, in the order of decoding."""
    width = len(columns) // 8
    for i in range(8 * size):
        row, column = i // (8 * width), i % (8 * width)
        code = chances[16 * rows[row] + columns[column]]
        yield i, column // 8 % vectors * 8 + column % 8, slow_chance(int(code))


def slow_encode(mask, rows, columns, chances):
    vectors = slow_vectors(len(mask))
    states, words = [LOWEST] * (8 * vectors), []
    bits = np.unpackbits(mask, bitorder="little").tolist()
    for i, lane, one in reversed(list(slow_order(len(mask), rows, columns, chances, vectors))):
        size, start = (one, 0) if bits[i] else (UNIT - one, one)
        state = states[lane]
        if state >= size << 18:
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = state // size * UNIT + state % size + start
    coded = struct.pack(f"<{len(states)}I", *states) + struct.pack(f"<{len(words)}H", *words[::-1])
    return coded if len(coded) < len(mask) else bytes(mask)


def slow_decode(coded, size, rows, columns, chances):
    if len(coded) == size:
        return np.frombuffer(coded, np.uint8)
    vectors = slow_vectors(size)
    states = list(struct.unpack_from(f"<{8 * vectors}I", coded))
    words = iter(np.frombuffer(coded[32 * vectors :], np.uint16).tolist())
    bits = np.zeros(8 * size, np.uint8)
    for i, lane, one in slow_order(size, rows, columns, chances, vectors):
        quotient, rest = divmod(states[lane], UNIT)
        bits[i] = rest < one
        state = one * quotient + rest if bits[i] else (UNIT - one) * quotient + rest - one
        states[lane] = state << 16 | next(words) if state < LOWEST else state
    assert set(states) == {LOWEST}
    assert next(words, None) is None
    return np.packbits(bits, bitorder="little")


def slow_labels(data, sizes, counts):
    """Decode the labels of rows and columns from one rANS stream."""
    state = struct.unpack_from("<I", data)[0]
    rest = iter(data[4:])
    for size, count in zip(sizes, counts, strict=True):
        labels = []
        starts = np.cumsum([0, *count])
        while len(labels) < size and len(count) > 1:
            quotient, at = divmod(state, 256)
            labels.append(int(np.searchsorted(starts, at, side="right")) - 1)
            state = count[labels[-1]] * quotient + at - int(starts[labels[-1]])
            while state < 1 << 23:
                state = state << 8 | next(rest)
        yield labels or [0] * size
    assert state == 1 << 23
    assert next(rest, None) is None


def slow_model(model, rows, columns):
    sizes, at = model[:2], 2
    counts = []
    for classes in sizes:
        counts.append(list(model[at : at + classes]) if classes > 1 else [256])
        at += classes if classes > 1 else 0
    chances = np.zeros((16, 16), np.uint8)
    for k in range(sizes[0]):
        chances[k, : sizes[1]] = list(model[at : at + sizes[1]])
        at += sizes[1]
    if at == len(model):
        return [0] * rows, [0] * columns, chances.ravel()
    return *slow_labels(model[at:], (rows, columns), counts), chances.ravel()


def slow_width(spec):
    width = spec.shape[-1] * spec.dtype.itemsize if len(spec.shape) > 1 else 0
    return width if 16 <= width <= 1 << 15 else 128


def slow_read(stream, spec):
    width = slow_width(spec)
    rows = -(-spec.nbytes // width)
    per_chunk = -(-rows // max(-(-spec.nbytes // CHUNK), 1))
    size = struct.unpack_from("<I", stream)[0]
    row_labels, columns, chances = slow_model(stream[4 : 4 + size], rows, 8 * width)
    starts = range(0, rows, per_chunk) if rows else []
    at = 4 + size + 8 * len(starts)
    pieces = []
    for i, start in enumerate(starts):
        length, crc = struct.unpack_from("<II", stream, 4 + size + 8 * i)
        nbytes = min(per_chunk * width, spec.nbytes - start * width)
        labels = row_labels[start : start + per_chunk]
        pieces.append(slow_decode(stream[at : at + length], nbytes, labels, columns, chances))
        assert _core.crc32c(pieces[-1]) == crc
        at += length
    assert at == len(stream)
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)


def round_trip(x):
    stream = Density().encode(x)["stream"]
    again = Density().decode({"stream": stream}, Spec.of(x))
    assert again.dtype is x.dtype
    assert again.shape == x.shape
    assert torch.equal(again.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8))
    return stream


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 60),
    width=st.integers(1, 40),
    density=st.sampled_from(DENSITIES),
    spread=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_streams_are_read_by_the_definition(rows, width, density, spread, seed):
    mask = random_mask(seed, (rows, width), density, spread)
    stream = round_trip(mask)
    assert np.array_equal(slow_read(bytes(stream.numpy()), Spec.of(mask)), mask.numpy().ravel())


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(0, 600),
    width=st.integers(1, 40),
    density=st.sampled_from(DENSITIES),
    data=st.data(),
)
def test_chunks_are_coded_by_the_definition(size, width, density, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    mask = np.packbits(rng.random(8 * size) < density, bitorder="little")
    rows = rng.integers(0, 16, -(-size // width), dtype=np.uint8)
    columns = rng.integers(0, 16, 8 * width, dtype=np.uint8)
    chances = rng.choice([c for c in range(256) if c % 128 <= 96], 256).astype(np.uint8)
    coded = np.zeros(size, np.uint8)
    coded = coded[: _core.density_encode(mask, rows, columns, chances, coded)]
    assert bytes(coded) == slow_encode(mask, rows, columns, chances)
    again = np.zeros(size, np.uint8)
    _core.density_decode(coded, rows, columns, chances, again)
    assert np.array_equal(again, mask)
    assert np.array_equal(slow_decode(bytes(coded), size, rows, columns, chances), mask)


@settings(deadline=None)
@given(
    rows=st.integers(0, 90), columns=st.integers(0, 90), classes=st.integers(1, 16), data=st.data()
)
def test_models_are_packed_by_the_definition(rows, columns, classes, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    labels = [rng.integers(0, classes, n, dtype=np.uint8) for n in (rows, columns)]
    used = [max(part.max(initial=0) + 1, 1) for part in labels]
    chances = np.zeros((16, 16), np.uint8)
    chances[: used[0], : used[1]] = rng.integers(0, 97, used)
    model = np.zeros(_core.density_model_bound(rows + columns), np.uint8)
    model = model[: _core.density_pack(*labels, chances.ravel(), model)]
    again = [np.full(n, 0xEE, np.uint8) for n in (rows, columns, 256)]
    _core.density_unpack(model, *again)
    for got, slow, want in zip(
        again, slow_model(bytes(model), rows, columns), (*labels, chances.ravel()), strict=True
    ):
        assert np.array_equal(got, want)
        assert np.array_equal(slow, want)


@pytest.mark.parametrize("vectors", [1, 2, 4])
def test_every_number_of_states_agrees_with_the_definition(vectors):
    size = {1: (1 << 15) - 35, 2: 1 << 15, 4: 1 << 17}[vectors]
    mask = random_mask(vectors, (-(-size // 35), 35), 0.06, 0.7)
    stream = round_trip(mask)
    assert np.array_equal(slow_read(bytes(stream.numpy()), Spec.of(mask)), mask.numpy().ravel())


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(
    "shape",
    [
        (CHUNK - 1,),
        (CHUNK,),
        (CHUNK + 1,),
        (CHUNK // 64, 64),
        (CHUNK // 64 + 1, 64),
        (3, CHUNK // 8),
        (9, CHUNK // 8),
        (2, CHUNK // 8 + 1),
        (40_000, 15),
        (3, 700, 97),
    ],
)
def test_masks_around_the_size_of_a_chunk_round_trip(shape, density):
    round_trip(random_mask(1, shape, density, 0.3))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 6), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
def test_any_tensor_is_a_matrix_of_bits(shape, dtype):
    x = torch.arange(torch.empty(shape).numel()).to(dtype).view(shape)
    round_trip(x)
    if x.dim() > 1:
        round_trip(x.transpose(0, -1))


def entropy(share):
    share = np.clip(share, 1e-12, 1 - 1e-12)
    return -share * np.log2(share) - (1 - share) * np.log2(1 - share)


@pytest.mark.parametrize("density", [0.01, 0.06, 0.5])
def test_a_mask_without_structure_takes_its_entropy(density):
    mask = random_mask(3, (768, 96), density)
    bound = entropy(np.unpackbits(mask.numpy()).mean()) * mask.numel()
    assert len(round_trip(mask)) < bound * 1.001 + 100


def test_structure_of_rows_and_columns_saves_a_quarter():
    mask = random_mask(4, (768, 96), 0.04, 0.9)
    flat = entropy(np.unpackbits(mask.numpy()).mean()) * mask.numel()
    assert len(round_trip(mask)) < 0.8 * flat


def test_no_mask_grows_by_more_than_its_head():
    noise = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (4096, 256), np.uint8))
    assert len(round_trip(noise)) <= noise.numel() + 4 + 3 + 4 * 8


def test_every_flipped_byte_is_noticed():
    mask = random_mask(6, (64, 32), 0.1, 0.8)
    stream = round_trip(mask)
    for i in range(len(stream)):
        bad = stream.clone()
        bad[i] ^= 1 << i % 8
        with pytest.raises(CorruptFileError):
            Density().decode({"stream": bad}, Spec.of(mask))


def test_every_truncation_is_noticed():
    mask = random_mask(7, (64, 32), 0.1, 0.8)
    stream = round_trip(mask)
    for size in range(len(stream)):
        with pytest.raises(CorruptFileError):
            Density().decode({"stream": stream[:size]}, Spec.of(mask))


def test_other_shapes_and_types_are_refused():
    mask = random_mask(8, (64, 32), 0.1)
    stream = Density().encode(mask)["stream"]
    for like in (
        Spec(torch.uint8, (64, 33)),
        Spec(torch.uint8, (0,)),
        Spec(torch.int64, (1 << 40,)),
    ):
        with pytest.raises(CorruptFileError):
            Density().decode({"stream": stream}, like)
    for part in (stream.view(torch.int8), stream[None]):
        with pytest.raises(CorruptFileError):
            Density().decode({"stream": part}, Spec.of(mask))


def u8(*values):
    return bytes(values)


MODEL = u8(2, 1, 128, 128, 5, 6)
BAD_MODELS = {
    "empty": b"",
    "no classes": u8(0, 1, 5),
    "17 classes": u8(17, 1) + bytes(40),
    "counts short": u8(2, 1, 128),
    "counts not 256": u8(2, 1, 128, 127, 5, 6, 0, 0, 128, 0),
    "a count of zero": u8(3, 1, 0, 128, 128, 5, 6, 7, 0, 0, 128, 0),
    "chances short": u8(1, 1),
    "invalid probability": u8(1, 1, 97),
    "invalid probability, high": u8(1, 1, 255),
    "bytes behind": u8(1, 1, 5, 0),
    "no state": MODEL,
    "state short": MODEL + u8(0, 0, 128),
    "labels short": MODEL + u8(0, 0, 128, 0),
    "labels long": MODEL + bytes(100),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_invalid_models_are_refused(name):
    with pytest.raises(ValueError, match=r"\w"):
        _core.density_unpack(BAD_MODELS[name], bytearray(40), bytearray(8), bytearray(256))


CHANCES = bytes(256)
BAD_CALLS = {
    "fit: rows": lambda: _core.density_fit(bytes(9), bytearray(3), bytearray(64), bytearray(256)),
    "fit: columns": lambda: _core.density_fit(bytes(9), bytearray(9), bytearray(7), bytearray(256)),
    "fit: no columns": lambda: _core.density_fit(b"", bytearray(), bytearray(), bytearray(256)),
    "fit: wide": lambda: _core.density_fit(b"", b"", bytearray((1 << 18) + 8), bytearray(256)),
    "fit: chances": lambda: _core.density_fit(bytes(9), bytearray(9), bytearray(8), bytearray(99)),
    "pack: room": lambda: _core.density_pack(bytes(9), bytes(8), CHANCES, bytearray(99)),
    "pack: class": lambda: _core.density_pack(b"\x10", bytes(8), CHANCES, bytearray(999)),
    "pack: chances": lambda: _core.density_pack(bytes(9), bytes(8), bytes(9), bytearray(999)),
    "encode: room": lambda: _core.density_encode(
        bytes(9), bytes(9), bytes(8), CHANCES, bytearray(8)
    ),
    "encode: class": lambda: _core.density_encode(b"1", b"\x10", bytes(8), CHANCES, bytearray(1)),
    "encode: chance": lambda: _core.density_encode(
        b"1", b"\0", bytes(8), CHANCES[1:] + b"\x61", bytearray(1)
    ),
    "decode: class": lambda: _core.density_decode(b"1", b"\0", b"\x10" * 8, CHANCES, bytearray(1)),
    "decode: short": lambda: _core.density_decode(b"1", bytes(9), bytes(8), CHANCES, bytearray(9)),
    "decode: rows": lambda: _core.density_decode(b"1", bytes(2), bytes(8), CHANCES, bytearray(1)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_sizes_raise_value_error(name):
    with pytest.raises((ValueError, TypeError), match=r"\w"):
        BAD_CALLS[name]()


@settings(deadline=None)
@given(
    coded=st.binary(min_size=32, max_size=300), width=st.integers(1, 30), seed=st.integers(0, 99)
)
def test_decoding_anything_stays_in_its_buffer(coded, width, seed):
    rng = np.random.default_rng(seed)
    framed = np.full(2000 + 64, 0xA5, np.uint8)
    rows = rng.integers(0, 16, -(-2000 // width), dtype=np.uint8)
    columns = rng.integers(0, 16, 8 * width, dtype=np.uint8)
    chances = rng.integers(0, 97, 256).astype(np.uint8)
    with pytest.raises(ValueError, match="coded mask"):
        _core.density_decode(coded, rows, columns, chances, framed[32:-32])
    assert (framed[:32] == 0xA5).all()
    assert (framed[-32:] == 0xA5).all()


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="already runs the plain code")
def test_plain_code_passes_the_same_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "SLIMTENSORS_CPU": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
