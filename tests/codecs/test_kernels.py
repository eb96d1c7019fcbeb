import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors import _core

ITEMSIZES = (1, 2, 4, 8, 16)
PATTERNS = (0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100)


def u8(values):
    return np.array(list(values), dtype=np.uint8)


def odd(array):
    """Return the same bytes at an odd address, between guard bytes that must not change."""
    framed = np.full(array.size + 64, 0xA5, dtype=np.uint8)
    start = 32 + (framed.ctypes.data + 1) % 2
    framed[start : start + array.size] = array
    return framed, framed[start : start + array.size]


def guards_are_untouched(framed, view):
    start = view.ctypes.data - framed.ctypes.data
    return (framed[:start] == 0xA5).all() and (framed[start + view.size :] == 0xA5).all()


# The slow twins: what each kernel must compute, as plainly as numpy and Python can say it.


def slow_find(items, itemsize, row):
    nonzero = items.reshape(-1, itemsize).any(axis=1)
    mask = np.packbits(nonzero.reshape(-1, row), axis=1, bitorder="little")
    return mask.ravel(), int(nonzero.sum())


def slow_bits(mask, row):
    bits = np.unpackbits(mask.reshape(-1, -(-row // 8)), axis=1, bitorder="little")
    return bits[:, :row].ravel().astype(bool)


def slow_gather(items, itemsize, row, mask):
    return items.reshape(-1, itemsize)[slow_bits(mask, row)].ravel()


def slow_scatter(mask, row, values, itemsize):
    bits = slow_bits(mask, row)
    items = np.zeros((bits.size, itemsize), dtype=np.uint8)
    items[bits] = values.reshape(-1, itemsize)
    return items.ravel()


def slow_nibbles(mask):
    return [n for byte in mask.tolist() for n in (byte & 15, byte >> 4)]


def slow_pack24(mask):
    digits = [PATTERNS.index(n) for n in slow_nibbles(mask)]
    digits += [0] * (-len(digits) % 3)
    triples = zip(digits[::3], digits[1::3], digits[2::3], strict=True)
    return u8(a + 6 * b + 36 * c for a, b, c in triples)


def slow_crc32c(data, seed=0):
    state = seed ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def slow_group_peaks(items, itemsize, signed_zero):
    table = items.reshape(-1, itemsize)
    nonzero = table.any(axis=1)
    if signed_zero:
        nonzero &= (table != u8([0] * (itemsize - 1) + [0x80])).any(axis=1)
    groups = ([nonzero[i : i + n].sum() for i in range(0, len(nonzero), n)] for n in (4, 8, 16, 32))
    return tuple(int(max(counts, default=0)) for counts in groups)


def sparse_items(rng, count, itemsize, density):
    """Return random items, some of them zero, and some with a single bit set."""
    items = rng.integers(0, 256, (count, itemsize), dtype=np.uint8)
    lonely = rng.random(count) < 0.3
    items[lonely] = 0
    items[lonely, rng.integers(0, itemsize, lonely.sum())] = 1 << rng.integers(0, 8, lonely.sum())
    items[rng.random(count) >= density] = 0
    return items.ravel()


def check_bitmask_round_trip(items, itemsize, row):
    want_mask, want_count = slow_find(items, itemsize, row)
    _, items = odd(items)
    framed_mask, mask = odd(np.full(want_mask.size, 0xFF, dtype=np.uint8))
    assert _core.bitmask_find(items, itemsize, row, mask) == want_count
    assert np.array_equal(mask, want_mask)
    assert guards_are_untouched(framed_mask, mask)

    framed_values, values = odd(np.full(want_count * itemsize, 0xEE, dtype=np.uint8))
    _core.bitmask_gather(items, itemsize, row, mask, values)
    assert np.array_equal(values, slow_gather(items, itemsize, row, mask))
    assert guards_are_untouched(framed_values, values)

    framed_items, again = odd(np.full(items.size, 0xEE, dtype=np.uint8))
    _core.bitmask_scatter(mask, row, values, itemsize, again)
    assert np.array_equal(again, items)
    assert np.array_equal(again, slow_scatter(mask, row, values, itemsize))
    assert guards_are_untouched(framed_items, again)


@settings(deadline=None, max_examples=400)
@given(
    itemsize=st.sampled_from(ITEMSIZES),
    rows=st.integers(0, 40),
    row=st.integers(1, 200),
    density=st.sampled_from((0.0, 0.02, 0.06, 0.5, 0.94, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_bitmask_kernels_agree_with_numpy(itemsize, rows, row, density, seed):
    items = sparse_items(np.random.default_rng(seed), rows * row, itemsize, density)
    check_bitmask_round_trip(items, itemsize, row)


@settings(deadline=None, max_examples=200)
@given(
    itemsize=st.sampled_from(ITEMSIZES),
    row=st.integers(1, 300),
    mask_bits=st.lists(st.booleans(), max_size=600),
    seed=st.integers(0, 2**32 - 1),
)
def test_gather_and_scatter_take_any_mask(itemsize, row, mask_bits, seed):
    rng = np.random.default_rng(seed)
    bits = np.array(mask_bits[: len(mask_bits) // row * row], dtype=bool).reshape(-1, row)
    mask = np.packbits(bits, axis=1, bitorder="little").ravel()
    items = rng.integers(0, 256, bits.size * itemsize, dtype=np.uint8)
    values = np.empty(int(bits.sum()) * itemsize, dtype=np.uint8)
    _core.bitmask_gather(items, itemsize, row, mask, values)
    assert np.array_equal(values, slow_gather(items, itemsize, row, mask))
    again = np.full(items.size, 0xEE, dtype=np.uint8)
    _core.bitmask_scatter(mask, row, values, itemsize, again)
    assert np.array_equal(again, slow_scatter(mask, row, values, itemsize))


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("row", [1, 7, 8, 9, 63, 64, 65, 1000, 4096])
def test_bitmask_handles_empty_zero_and_dense_items_and_a_long_zero_tail(itemsize, row):
    rows = max(3, 2000 // row)
    size = rows * row * itemsize
    tail = np.zeros(size, dtype=np.uint8)
    tail[: 5 * itemsize] = 7
    late = np.zeros(size, dtype=np.uint8)
    late[-itemsize:] = 9
    dense = np.full(size, 255, dtype=np.uint8)
    for items in (dense[:0], np.zeros_like(dense), dense, tail, late):
        check_bitmask_round_trip(items, itemsize, row)


def test_negative_zero_is_kept():
    items = torch.tensor([0.0, -0.0, 1.0, 0.0]).view(torch.uint8)
    mask = torch.zeros(1, dtype=torch.uint8)
    assert _core.bitmask_find(items, 4, 4, mask) == 2
    assert mask.tolist() == [0b0110]


def test_rows_that_are_whole_bytes_are_one_long_row():
    items = sparse_items(np.random.default_rng(0), 64 * 40, 2, 0.5)
    masks = [np.zeros(64 * 5, dtype=np.uint8) for _ in range(3)]
    for row, mask in zip((40, 8, 64 * 40), masks, strict=True):
        _core.bitmask_find(items, 2, row, mask)
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[0], masks[2])


@settings(deadline=None)
@given(
    itemsize=st.sampled_from(ITEMSIZES),
    count=st.integers(0, 700),
    density=st.sampled_from((0.0, 0.3, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_count_zeros_distinguishes_zero_and_negative_zero(itemsize, count, density, seed):
    rng = np.random.default_rng(seed)
    items = sparse_items(rng, count, itemsize, density).reshape(-1, itemsize)
    negative_zero = u8([0] * (itemsize - 1) + [0x80])
    items[rng.random(count) < 0.4] = negative_zero
    want = int((~items.any(axis=1)).sum()), int((items == negative_zero).all(axis=1).sum())
    assert _core.count_zeros(odd(items.ravel())[1], itemsize) == want


def test_count_zeros_of_many_items_does_not_overflow():
    for itemsize in ITEMSIZES:
        assert _core.count_zeros(np.zeros(300_000 * itemsize, np.uint8), itemsize) == (300_000, 0)


@given(
    itemsize=st.sampled_from(ITEMSIZES),
    count=st.integers(0, 300),
    density=st.sampled_from((0.0, 0.02, 0.3, 0.7, 1.0)),
    signed_zero=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_group_peaks_finds_the_fullest_groups(itemsize, count, density, signed_zero, seed):
    rng = np.random.default_rng(seed)
    items = sparse_items(rng, count, itemsize, density).reshape(-1, itemsize)
    items[rng.random(count) < 0.3] = u8([0] * (itemsize - 1) + [0x80])
    want = slow_group_peaks(items, itemsize, signed_zero)
    assert _core.group_peaks(odd(items.ravel())[1], itemsize, signed_zero) == want


@pytest.mark.parametrize("place", [0, 4095, 4096, 20_000, 20_479])
def test_group_peaks_counts_every_item(place):
    items = np.zeros(20_480, np.uint16)
    items[place - place % 4 : place - place % 4 + 4] = 1
    assert _core.group_peaks(items.view(np.uint8), 2, True) == (4, 4, 4, 4)


@given(st.binary(max_size=500))
def test_popcount_agrees_with_numpy(data):
    mask = np.frombuffer(data, np.uint8)
    assert _core.popcount(odd(mask)[1]) == int(np.unpackbits(mask).sum())


@given(st.lists(st.sampled_from([n for n in range(16) if n.bit_count() <= 2]), max_size=200))
def test_mask24_fill_sets_the_lowest_clear_bits(nibbles):
    nibbles = nibbles[: len(nibbles) // 2 * 2]
    want = []
    for nibble in nibbles:
        for k in range(4):
            if nibble.bit_count() < 2:
                nibble |= 1 << k
        want.append(nibble)
    framed, mask = odd(u8(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)))
    assert _core.mask24_fill(mask) == -1
    assert slow_nibbles(mask) == want
    assert guards_are_untouched(framed, mask)


@given(st.lists(st.sampled_from(PATTERNS), min_size=2, max_size=120), st.data())
def test_mask24_fill_names_the_first_crowded_group(nibbles, data):
    nibbles = nibbles[: len(nibbles) // 2 * 2]
    at = data.draw(st.integers(0, len(nibbles) - 1))
    for k in range(at, len(nibbles)):
        nibbles[k] = data.draw(st.sampled_from((0b0111, 0b1110, 0b1111, 0b1011)))
    mask = u8(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True))
    assert _core.mask24_fill(mask) == at


@given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS)), max_size=120))
def test_mask24_round_trips_in_base_6(pairs):
    _, mask = odd(u8(low | high << 4 for low, high in pairs))
    framed_codes, codes = odd(np.full(-(-2 * mask.size // 3), 0xFF, dtype=np.uint8))
    _core.mask24_pack(mask, codes)
    assert np.array_equal(codes, slow_pack24(mask))
    assert guards_are_untouched(framed_codes, codes)
    framed_again, again = odd(np.zeros_like(mask))
    _core.mask24_unpack(codes, again)
    assert np.array_equal(again, mask)
    assert guards_are_untouched(framed_again, again)


def test_mask24_digits_are_ranks_of_increasing_patterns():
    codes = np.zeros(2, dtype=np.uint8)
    _core.mask24_pack(u8([0x53, 0x96, 0xCA]), codes)
    assert codes.tolist() == [0 + 6 * 1 + 36 * 2, 3 + 6 * 4 + 36 * 5]


@given(st.binary(min_size=1, max_size=80), st.integers(0, 2))
def test_mask24_unpack_accepts_exactly_what_pack_writes(data, missing):
    codes = np.frombuffer(data, np.uint8)
    size = codes.size // 2 * 3 + codes.size % 2
    if codes.size % 2 == 0 and missing == 2:
        size -= 1
    mask = np.zeros(size, dtype=np.uint8)
    try:
        _core.mask24_unpack(codes, mask)
    except ValueError:
        digits = [int(c) // 6**k % 6 for c in codes for k in range(3)]
        assert (codes >= 216).any() or any(digits[2 * size :])
    else:
        assert np.array_equal(slow_pack24(mask), codes)


PUBLISHED_CRCS = [  # RFC 3720 B.4 and the check value of the CRC catalogue
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "want"), PUBLISHED_CRCS)
def test_crc32c_gives_the_published_values(data, want):
    assert _core.crc32c(data) == want


@settings(deadline=None)
@given(data=st.binary(max_size=1500), seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 1500))
def test_crc32c_agrees_with_the_bitwise_definition_continues_and_joins(data, seed, cut):
    array = odd(np.frombuffer(data, np.uint8))[1]
    assert _core.crc32c(array, seed) == slow_crc32c(data, seed)
    head, tail = array[:cut], array[cut:]
    whole = _core.crc32c(array)
    assert _core.crc32c(tail, _core.crc32c(head)) == whole
    assert _core.crc32c_join(_core.crc32c(head), _core.crc32c(tail), tail.size) == whole


@pytest.mark.parametrize("size", [767, 768, 769, 24575, 24576, 24577, 3 * 24576 + 768 + 9])
def test_crc32c_is_the_same_in_long_and_short_steps(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    in_steps = 0
    for start in range(0, size, 100):
        in_steps = _core.crc32c(data[start : start + 100], in_steps)
    assert _core.crc32c(data) == in_steps == slow_crc32c(data.tolist())


def test_crc32c_join_takes_lengths_beyond_memory():
    zeros = 0
    length = 0
    for k in range(62):  # a piece of 2^k zero bytes from two of half the length
        zeros = _core.crc32c(b"\0") if k == 0 else _core.crc32c_join(zeros, zeros, length)
        length = 1 << k
        if k == 10:
            assert zeros == _core.crc32c(bytes(1024))
    half = _core.crc32c_join(5, 0, 2**60)
    assert _core.crc32c_join(5, zeros, 2**61) == _core.crc32c_join(half, 0, 2**60) ^ zeros


def kinds_of_array(data):
    array = np.frombuffer(data, np.uint8)
    return [data, bytearray(data), memoryview(data), array, torch.from_numpy(array.copy())]


def test_every_kind_of_array_is_accepted():
    for data in kinds_of_array(b"123456789"):
        assert _core.crc32c(data) == 0xE3069283
    new_array, new_tensor = (
        partial(np.zeros, dtype=np.uint8),
        partial(torch.zeros, dtype=torch.uint8),
    )
    for zeros in (bytearray, new_array, new_tensor):
        mask, items = zeros(1), zeros(8)
        assert _core.bitmask_find(b"\0ab\0\0\0\0c", 1, 8, mask) == 3
        assert list(mask) == [0b10000110]
        _core.bitmask_scatter(mask, 8, b"abc", 1, items)
        assert bytes(list(items)) == b"\0ab\0\0\0\0c"


def test_slices_of_torch_tensors_are_used_in_place():
    whole = torch.arange(40, dtype=torch.uint8)
    assert _core.crc32c(whole[7:20]) == slow_crc32c(range(7, 20))
    _core.mask24_unpack(b"\0", whole[3:4])
    assert whole[2:5].tolist() == [2, 0x33, 4]


def test_a_parameter_and_other_subclasses_of_tensor_are_accepted():
    parameter = torch.nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)
    assert _core.crc32c(parameter) == slow_crc32c(range(9))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.int8),
        np.zeros((2, 2), np.uint8),
        np.zeros(8, np.uint8)[::2],
        torch.zeros(4),
        torch.zeros(4, dtype=torch.int8),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.zeros((), dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(4, dtype=torch.uint8, device="meta"),
        torch.zeros(4, requires_grad=True),
        "text",
        None,
        [0, 0, 0, 0],
    ],
)
def test_other_arrays_are_refused_not_converted(array):
    with pytest.raises(TypeError):
        _core.popcount(array)
    with pytest.raises(TypeError):
        _core.mask24_fill(array)


def test_read_only_memory_is_never_written():
    frozen = np.zeros(1, np.uint8)
    frozen.flags.writeable = False
    for array in (frozen, bytes(1), memoryview(bytes(1))):
        with pytest.raises(TypeError):
            _core.mask24_fill(array)


B = bytes
BAD_CALLS = {
    "find: itemsize": lambda: _core.bitmask_find(B(9), 3, 1, bytearray(1)),
    "find: itemsize zero": lambda: _core.bitmask_find(B(8), 0, 1, bytearray(1)),
    "find: itemsize large": lambda: _core.bitmask_find(B(32), 32, 1, bytearray(1)),
    "find: row zero": lambda: _core.bitmask_find(B(8), 1, 0, bytearray(1)),
    "find: half an item": lambda: _core.bitmask_find(B(9), 2, 1, bytearray(4)),
    "find: half a row": lambda: _core.bitmask_find(B(9), 1, 2, bytearray(4)),
    "find: row longer than items": lambda: _core.bitmask_find(B(8), 1, 2**63, bytearray(1)),
    "find: mask short": lambda: _core.bitmask_find(B(18), 1, 9, bytearray(3)),
    "find: mask long": lambda: _core.bitmask_find(B(18), 1, 9, bytearray(5)),
    "find: mask of nothing": lambda: _core.bitmask_find(B(0), 1, 9, bytearray(1)),
    "gather: values short": lambda: _core.bitmask_gather(B(8), 1, 8, b"\x03", bytearray(1)),
    "gather: values long": lambda: _core.bitmask_gather(B(8), 1, 8, b"\x03", bytearray(3)),
    "gather: half a value": lambda: _core.bitmask_gather(B(16), 2, 8, b"\x03", bytearray(5)),
    "gather: padding": lambda: _core.bitmask_gather(B(3), 1, 3, b"\x09", bytearray(2)),
    "gather: mask size": lambda: _core.bitmask_gather(B(8), 1, 8, B(2), bytearray(0)),
    "scatter: values short": lambda: _core.bitmask_scatter(b"\x03", 8, B(1), 1, bytearray(8)),
    "scatter: values long": lambda: _core.bitmask_scatter(b"\x03", 8, B(3), 1, bytearray(8)),
    "scatter: half a value": lambda: _core.bitmask_scatter(b"\x03", 8, B(5), 2, bytearray(16)),
    "scatter: padding": lambda: _core.bitmask_scatter(b"\x09", 3, B(2), 1, bytearray(3)),
    "scatter: inner padding": lambda: _core.bitmask_scatter(b"\x08\x01", 3, B(2), 1, bytearray(6)),
    "scatter: mask size": lambda: _core.bitmask_scatter(B(2), 8, B(0), 1, bytearray(8)),
    "scatter: itemsize": lambda: _core.bitmask_scatter(B(1), 8, B(0), 5, bytearray(40)),
    "count_zeros: itemsize": lambda: _core.count_zeros(B(6), 6),
    "count_zeros: half an item": lambda: _core.count_zeros(B(6), 4),
    "group_peaks: itemsize": lambda: _core.group_peaks(B(6), 3, False),
    "group_peaks: half an item": lambda: _core.group_peaks(B(6), 4, False),
    "pack: codes short": lambda: _core.mask24_pack(b"\x33" * 3, bytearray(1)),
    "pack: codes long": lambda: _core.mask24_pack(b"\x33" * 3, bytearray(3)),
    "pack: one bit": lambda: _core.mask24_pack(b"\x33\x13\x33", bytearray(2)),
    "pack: three bits": lambda: _core.mask24_pack(b"\x33\x37", bytearray(2)),
    "pack: last byte": lambda: _core.mask24_pack(b"\x33\x33\x33\x32", bytearray(3)),
    "unpack: mask short": lambda: _core.mask24_unpack(B(2), bytearray(1)),
    "unpack: mask long": lambda: _core.mask24_unpack(B(2), bytearray(4)),
    "unpack: code 216": lambda: _core.mask24_unpack(b"\xd8\x00", bytearray(3)),
    "unpack: code 255 last": lambda: _core.mask24_unpack(b"\x00\xff", bytearray(2)),
    "unpack: missing digit of three": lambda: _core.mask24_unpack(b"\x24", bytearray(1)),
    "unpack: missing digits of two": lambda: _core.mask24_unpack(b"\x00\x06", bytearray(2)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_sizes_and_bits_raise_value_error(name):
    with pytest.raises(ValueError, match=r"\w"):
        BAD_CALLS[name]()


@pytest.mark.parametrize(("mask", "values"), [(b"\xff\x01", 8), (b"\xff\x08", 9)])
def test_scatter_refuses_before_it_writes(mask, values):
    items = bytearray(b"x" * 11)
    with pytest.raises(ValueError, match="mask"):
        _core.bitmask_scatter(mask, 11, bytes(values), 1, items)
    assert items == b"x" * 11


def test_calls_from_several_threads_run_in_parallel():
    data = np.arange(1_000_000, dtype=np.uint32).view(np.uint8)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: _core.crc32c(data), range(16))) == {_core.crc32c(data)}


def best_cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if not {"avx2", "fma", "bmi1", "bmi2", "popcnt"} <= set(flags):
        return "plain"
    return "avx512" if "avx512f" in flags else "avx2"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
@pytest.mark.parametrize("forced", [None, "avx2", "plain"])
def test_cpu_is_the_best_of_the_machine_unless_the_environment_forces_a_lower_one(forced):
    levels = ["plain", "avx2", "avx512"]
    highest = levels.index(forced or "avx512")
    environment = {k: v for k, v in os.environ.items() if k != "SLIMTENSORS_CPU"}
    if forced:
        environment["SLIMTENSORS_CPU"] = forced
    command = [sys.executable, "-c", "from slimtensors import _core; print(_core.cpu())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == levels[min(highest, levels.index(best_cpu()))]


def run_python(cpu, *arguments):
    environment = {**os.environ, "SLIMTENSORS_CPU": cpu}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="already runs the plain code")
def test_plain_code_passes_the_same_tests():
    done = run_python("plain", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_cpu_stops_the_import():
    done = run_python("avx1024", "-c", "from slimtensors import _core")
    assert done.returncode != 0
    assert "SLIMTENSORS_CPU must be" in done.stderr
