import heapq
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from huffman_samples import CHUNK, CONTENTS, KINDS, encode, make_bytes, survey
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability_tools import ENVIRONMENT, run_program
from strategies import same_bits

from slimtensors import _core
from slimtensors.codecs import Huffman
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import DTYPES, Spec, as_bytes, view_as

ENCODE_HUFFMAN = Path(__file__).parent / "programs" / "encode_huffman.py"
STREAMS = 5


# A slow reference decoder, written from docs/format-huffman.md.


def slow_lengths(plane):
    """Return the code lengths at the start of a coded plane, and the rest."""
    nibbles = [n for byte in plane for n in (byte & 15, byte >> 4)]
    lengths, at = [], 0
    while len(lengths) < 256:
        mark = nibbles[at]
        if mark == 14:
            lengths += [0] * (nibbles[at + 1] + 16 * nibbles[at + 2] + 18)
            at += 3
        elif mark == 13:
            lengths += [0] * (nibbles[at + 1] + 2)
            at += 2
        else:
            assert mark <= 12
            lengths.append(mark)
            at += 1
    return lengths, plane[-(-at // 2) :]


def slow_words(lengths):
    """Return {(length, code word): byte}, the words numbered in the order of (length, byte)."""
    words, word, before = {}, 0, 0
    for length, byte in sorted((length, byte) for byte, length in enumerate(lengths) if length):
        word <<= length - before
        words[length, word] = byte
        word, before = word + 1, length
    assert word == 1 << before, "not complete"
    return words


def slow_stream(stream, words, count):
    bits = bin(int.from_bytes(stream, "little"))[3:]  # without "0b" and the one on top
    out, begin = [], 0
    for end in range(1, len(bits) + 1):
        byte = words.get((end - begin, int(bits[begin:end], 2)))
        if byte is not None:
            out.append(byte)
            begin = end
    assert len(out) == count
    assert begin == len(bits)
    return out[::-1]


def slow_plane(plane, count):
    if len(plane) == count:
        return list(plane)
    if len(plane) == 1:
        return list(plane) * count
    lengths, rest = slow_lengths(plane)
    words = slow_words(lengths)
    sizes = np.frombuffer(rest[: 2 * STREAMS], "<u2").tolist()
    out, at = [], 2 * STREAMS
    for k, size in enumerate(sizes):
        fifth = count // STREAMS
        symbols = fifth if k + 1 < STREAMS else count - fifth * (STREAMS - 1)
        out += slow_stream(rest[at : at + size], words, symbols)
        at += size
    assert rest[at:] == bytes(len(rest) - at)
    assert len(rest) - at < STREAMS
    return out


def slow_decode(rows, data, itemsize, rotated, count):
    planes = []
    rows = np.frombuffer(rows, "<u4").reshape(-1, 1 + itemsize)
    at = 0
    for row in range(len(rows)):
        checksum, *sizes = rows[row].tolist()
        body = data[at : at + sum(sizes)]
        assert checksum == _core.crc32c(rows[row, 1:].tobytes() + body)
        items = min(CHUNK, count - row * CHUNK)
        chunk = []
        for size in sizes:
            chunk.append(slow_plane(data[at : at + size], items))
            at += size
        planes.append(np.array(chunk, dtype=np.uint8))
    assert at == len(data)
    dtype = np.dtype(f"<u{itemsize}")
    words = np.hstack(planes).T.copy().view(dtype).ravel()
    if rotated:
        words = words >> dtype.type(1) | words << dtype.type(8 * itemsize - 1)
    return words.astype(dtype).tobytes()


def check_round_trip(items, itemsize, rotated):
    rows, data = encode(items, itemsize, rotated)
    framed = np.full(items.size + 65, 0xA5, dtype=np.uint8)
    again = framed[33 : 33 + items.size]
    _core.huffman_decode(rows, data, itemsize, rotated, again)
    assert np.array_equal(again, items)
    assert (framed[:33] == 0xA5).all()
    assert (framed[33 + items.size :] == 0xA5).all()
    assert data.size <= items.size
    return rows, data


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(0, 3000),
    content=st.sampled_from(CONTENTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernels_agree_with_the_definition(kind, count, content, seed):
    itemsize, rotated = kind
    items = make_bytes(np.random.default_rng(seed), content, count * itemsize)
    rows, data = check_round_trip(items, itemsize, rotated)
    if count:
        again = slow_decode(rows.tobytes(), data.tobytes(), itemsize, rotated, count)
        assert again == items.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
@pytest.mark.parametrize("content", CONTENTS)
def test_chunks_of_every_size_round_trip(kind, count, content):
    itemsize, rotated = kind
    rng = np.random.default_rng(count)
    check_round_trip(make_bytes(rng, content, count * itemsize), itemsize, rotated)


def test_a_whole_chunk_agrees_with_the_definition():
    items = make_bytes(np.random.default_rng(0), "floats", 4 * (CHUNK + 5))
    rows, data = check_round_trip(items, 4, True)
    assert slow_decode(rows.tobytes(), data.tobytes(), 4, True, CHUNK + 5) == items.tobytes()


def test_planes_are_stored_as_what_is_smallest():
    rng = np.random.default_rng(0)
    planes = [make_bytes(rng, kind, CHUNK) for kind in ("constant", "random", "two", "gaussian")]
    rows, _ = encode(np.stack(planes, axis=1).ravel(), 4, False)
    _, constant, raw, two, gaussian = rows.view("<u4").tolist()
    assert (constant, raw) == (1, CHUNK)
    assert two < CHUNK // 7
    assert gaussian < CHUNK * 7 // 8


def heap_cost(counts):
    """Return the bits of an optimal code without a length limit, and its longest word."""
    heap = [(n, k, 0) for k, n in enumerate(counts) if n]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        (a, _, deep), (b, k, deeper) = heapq.heappop(heap), heapq.heappop(heap)
        cost += a + b
        heapq.heappush(heap, (a + b, k, max(deep, deeper) + 1))
    return cost, heap[0][2]


@settings(deadline=None, max_examples=100)
@given(
    content=st.sampled_from(["two", "gaussian", "steep"]),
    count=st.integers(300, 20000),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_are_optimal_when_no_word_would_be_too_long(content, count, seed):
    items = make_bytes(np.random.default_rng(seed), content, count)
    codes, rows = survey(items, 1, False)
    if rows.view("<u4")[1] in (1, count):
        return
    counts = np.bincount(items, minlength=256)
    cost, longest = heap_cost(counts.tolist())
    bits = int((counts * codes).sum())
    assert codes.max() <= 12
    assert np.array_equal(codes > 0, counts > 0)
    assert bits == cost if longest <= 11 else cost <= bits < 1.02 * cost


def test_codes_of_twelve_bits_are_used_where_they_pay():
    x = (torch.randn(CHUNK, generator=torch.Generator().manual_seed(0)) * 100).to(
        torch.float8_e4m3fn
    )
    items = x.view(torch.uint8).numpy()
    codes, _ = survey(items, 1, False)
    assert codes.max() == 12
    rows, data = check_round_trip(items, 1, False)
    assert slow_decode(rows.tobytes(), data.tobytes(), 1, False, CHUNK) == items.tobytes()
    codes, _ = survey(make_bytes(np.random.default_rng(0), "floats", 4 * CHUNK), 4, True)
    assert codes.max() == 11


def test_both_kinds_of_code_write_the_same_bytes():
    outputs = [
        run_program(ENCODE_HUFFMAN, env={**ENVIRONMENT, "SLIMTENSORS_CPU": cpu})
        for cpu in ("plain", "")
    ]
    assert outputs[0] == outputs[1] != ""


# The codec.


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(deadline=None, max_examples=200)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.sampled_from([(), (0,), (1,), (3, 0, 2), (7,), (5, 9), (40, 30), (3000,)]),
    content=st.sampled_from(CONTENTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_bit_of_every_dtype_survives(dtype, shape, content, seed):
    spec = Spec(DTYPES[dtype], shape)
    raw = make_bytes(np.random.default_rng(seed), content, spec.nbytes)
    x = view_as(memoryview(bytearray(raw)), spec)
    parts = Huffman().encode(x)
    assert same_bits(Huffman().decode(parts, spec), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "int64", "uint8"])
def test_large_tensors_survive_on_several_threads(dtype):
    x = (torch.randn(9 * CHUNK + 11) * 100).to(DTYPES[dtype])

    def each(work, count):
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(work, range(count)))

    parts = Huffman().encode(x, each)
    alone = Huffman().encode(x)
    assert all(torch.equal(as_bytes(parts[k]), as_bytes(alone[k])) for k in parts)
    assert same_bits(Huffman().decode(parts, Spec.of(x), each), x)


def test_tensors_that_are_not_contiguous_survive():
    x = torch.randn(300, 200).t()
    assert same_bits(Huffman().decode(Huffman().encode(x), Spec.of(x)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int8])
def test_a_range_of_items_is_decoded_alone(dtype):
    x = (torch.randn(3 * CHUNK + 100) * 50).to(dtype)
    parts = Huffman().encode(x)
    total = x.numel()
    for begin, end in [(0, 0), (0, total), (5, 6), (CHUNK - 3, CHUNK + 3), (total - 1, total)]:
        assert same_bits(
            Huffman().decode_range(parts, Spec.of(x), begin, end).clone(), x[begin:end].clone()
        )
    for begin, end in [(-1, 3), (4, 3), (0, total + 1)]:
        with pytest.raises(IndexError):
            Huffman().decode_range(parts, Spec.of(x), begin, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int8])
def test_parts_of_slices_are_views_of_the_whole(dtype):
    x = (torch.randn(5 * CHUNK + 100) * 50).to(dtype)
    parts, step = Huffman().encode(x), Huffman().step(Spec.of(x))
    for every in (step, 2 * step, 100 * step):
        pieces = Huffman().split_parts(parts, Spec.of(x), every)
        for piece, wanted in zip(pieces, torch.split(x, every), strict=True):
            assert same_bits(Huffman().decode(piece, Spec.of(wanted)), wanted.clone())
            assert piece["data"].untyped_storage().data_ptr() == parts["data"].data_ptr()
    with pytest.raises(CorruptFileError):
        Huffman().split_parts({**parts, "data": parts["data"][1:]}, Spec.of(x), step)


def test_random_bytes_grow_by_the_chunk_table_only():
    x = torch.randint(0, 256, (5 * CHUNK,), dtype=torch.uint8)
    parts = Huffman().encode(x)
    assert parts["data"].numel() == x.numel()
    assert parts["chunks"].nbytes == 5 * 2 * 4


# Bad input.


def flip_bits(parts, seed):
    """Yield copies of the parts with one flipped bit."""
    rng = np.random.default_rng(seed)
    copies = {name: part.clone() for name, part in parts.items()}
    victim = as_bytes(copies[rng.choice(["chunks", "data"])])
    victim[int(rng.integers(victim.numel()))] ^= 1 << int(rng.integers(8))
    return copies


@settings(deadline=None, max_examples=300)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]), seed=st.integers(0, 2**31)
)
def test_a_flipped_bit_is_always_noticed(dtype, seed):
    x = (torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
    parts = flip_bits(Huffman().encode(x), seed)
    with pytest.raises(CorruptFileError):
        Huffman().decode(parts, Spec.of(x))
    with pytest.raises(CorruptFileError):
        Huffman().decode_range(parts, Spec.of(x), 10, 20)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_decoding_without_checksums_needs_no_checksums(threads):
    x = torch.randn(5 * CHUNK + 7).bfloat16()
    parts, out = Huffman().encode(x), torch.empty_like(x)
    Huffman().decode_unchecked(parts, out, threads)
    assert same_bits(out, x)
    parts["chunks"].view(torch.int32)[1, 0] ^= 1
    Huffman().decode_unchecked(parts, out, threads)
    assert same_bits(out, x)
    with pytest.raises(CorruptFileError, match="checksum"):
        Huffman().decode_into(parts, out)
    with pytest.raises(CorruptFileError):
        Huffman().decode_unchecked({**parts, "data": parts["data"][1:]}, out, threads)
    parts["data"][-1000:] = 0xFF  # of the last chunk, which is another thread's
    with pytest.raises(CorruptFileError):
        Huffman().decode_unchecked(parts, out, threads)


def test_parts_that_do_not_fit_are_refused():
    x = torch.randn(10 * CHUNK)
    parts, spec = Huffman().encode(x), Spec.of(x)
    chunks, data = parts["chunks"], parts["data"]
    for bad in [
        {"chunks": chunks[:-1], "data": data},
        {"chunks": chunks.view(torch.int32), "data": data},
        {"chunks": chunks.view(-1), "data": data},
        {"chunks": chunks, "data": data[:-1]},
        {"chunks": chunks, "data": torch.cat([data, data[:1]])},
        {"chunks": chunks, "data": data.view(torch.int8)},
        {"chunks": chunks, "data": data[:0]},
    ]:
        with pytest.raises(CorruptFileError):
            Huffman().decode(bad, spec)
    with pytest.raises(CorruptFileError):
        Huffman().decode(parts, Spec(torch.float32, (1 << 57,)))


def build_chunk(sizes, body, items):
    """Return rows for one chunk of `items` one-byte items, with a valid checksum."""
    sizes = np.array(sizes, dtype="<u4")
    checksum = _core.crc32c(sizes.tobytes() + body)
    rows = np.array([checksum, *sizes], dtype="<u4").view(np.uint8)
    return rows, body, len(sizes), False, np.zeros(items, dtype=np.uint8)


def nibbles(*values):
    values = [*values, 0] if len(values) % 2 else list(values)
    return bytes(a | b << 4 for a, b in zip(values[::2], values[1::2], strict=True))


TWO = nibbles(1, 1, 14, 12, 14)  # bytes 0 and 1 in a bit each, 254 zeros
SIZES = np.array([2, 2, 2, 2, 2], "<u2").tobytes()
STREAM = b"\x55\x01"  # eight codes of one bit
GOOD = TWO + SIZES + STREAM * 5
HOSTILE = {
    "empty plane": ([0], b"", 40),
    "plane larger than its items": ([41], bytes(41), 40),
    "table cut off": ([2], nibbles(1, 1, 14, 12), 40),
    "table unknown mark": ([25], nibbles(1, 1, 15) + bytes(23), 40),
    "table too long": ([25], nibbles(1, 1, 14, 13, 14) + GOOD[3:], 40),
    "table of nothing": ([25], nibbles(14, 14, 14, 0, 0) + GOOD[3:], 40),
    "table of one byte": ([25], nibbles(1, 0, 14, 12, 14) + GOOD[3:], 40),
    "table with room left": ([25], nibbles(1, 2, 14, 12, 14) + GOOD[3:], 40),
    "table too full": ([25], nibbles(1, 1, 1, 14, 11, 14) + GOOD[3:], 40),
    "table padding": ([23], TWO[:2] + bytes([TWO[2] | 0x10]) + GOOD[3:], 40),
    "sizes cut off": ([7], GOOD[:7], 40),
    "stream of no bytes": ([23], TWO + b"\0\0" + GOOD[5:], 40),
    "stream too long": ([23], TWO + b"\xff\xff" + GOOD[5:], 40),
    "streams leave bytes": ([29], GOOD + bytes(6), 40),
    "stream without a top": ([23], GOOD[:-1] + b"\0", 40),
    "stream with a code too many": ([23], GOOD[:-1] + b"\x02", 40),
    "stream with a code too few": ([22], TWO + SIZES[:-2] + b"\1\0" + STREAM * 4 + b"\x80", 40),
    "more items than codes": ([23], GOOD, 45),
    "far more items than codes": ([23], GOOD, 5000),
    "fewer items than codes": ([23], GOOD, 35),
}


def test_a_valid_chunk_next_to_the_hostile_ones_decodes():
    rows, data, itemsize, rotated, items = build_chunk([23], GOOD, 40)
    _core.huffman_decode(rows, data, itemsize, rotated, items)
    assert items.tolist() == [1, 0, 1, 0, 1, 0, 1, 0] * 5


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_chunks_with_a_right_checksum_are_refused(name):
    with pytest.raises(ValueError, match=r"\w"):
        _core.huffman_decode(*build_chunk(*HOSTILE[name]))


B = bytes
BAD_CALLS = {
    "itemsize": lambda: _core.huffman_decode(B(16), B(3), 3, False, bytearray(3)),
    "itemsize zero": lambda: _core.huffman_decode(B(4), B(0), 0, False, bytearray(3)),
    "itemsize 16": lambda: _core.huffman_decode(B(68), B(16), 16, False, bytearray(16)),
    "byte rotated": lambda: _core.huffman_decode(B(8), B(3), 1, True, bytearray(3)),
    "half an item": lambda: _core.huffman_decode(B(12), B(3), 2, False, bytearray(3)),
    "no rows": lambda: _core.huffman_decode(B(0), B(3), 1, False, bytearray(3)),
    "rows of nothing": lambda: _core.huffman_decode(B(8), B(0), 1, False, bytearray(0)),
    "survey: codes": lambda: _core.huffman_survey(B(8), 1, False, bytearray(255), bytearray(8)),
    "survey: rows": lambda: _core.huffman_survey(B(8), 1, False, bytearray(256), bytearray(7)),
    "encode: codes": lambda: _core.huffman_encode(B(8), 1, 0, B(255), bytearray(8), bytearray(8)),
    "encode: data": lambda: _core.huffman_encode(B(8), 1, 0, B(256), bytearray(8), bytearray(8)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_sizes_raise_value_error(name):
    with pytest.raises((ValueError, TypeError), match=r"\w"):
        BAD_CALLS[name]()


def test_items_that_change_between_survey_and_encoding_are_noticed():
    items = make_bytes(np.random.default_rng(0), "two", 5000)
    codes, rows = survey(items, 1, False)
    data = np.zeros(rows.view("<u4")[1], np.uint8)
    with pytest.raises(ValueError, match="modified"):
        _core.huffman_encode(np.full(5000, 77, np.uint8), 1, False, codes, rows, data)
    with pytest.raises(ValueError, match="survey"):
        _core.huffman_encode(items, 1, False, np.ones(256, np.uint8), rows, data)


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="already runs the plain code")
def test_plain_code_passes_the_same_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "SLIMTENSORS_CPU": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
