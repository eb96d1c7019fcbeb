"""Codec `bins`: bins by the scale of row and column, and offsets (docs/format-bins.md)."""

from dataclasses import dataclass

import numpy as np
from independent.reader.crc32c import crc32c
from independent.reader.tensor import ITEM_BYTES, check, from_words

_CHUNK = 131072
_ONE = 4096
"""The sum of all frequencies of a table."""


def decode(parts, dtype, shape, count):
    """Return the tensor of the part `stream`."""
    is_complex = dtype.startswith("complex")
    k = ITEM_BYTES.get(dtype, 1) // (2 if is_complex else 1)
    n = count * 2 if is_complex else count
    stream = parts["stream"].data
    size = int.from_bytes(stream[:4], "little")
    raw_model, at = stream[4 : 4 + size], 4 + size
    chunks = -(-n // _CHUNK)
    table = np.frombuffer(stream[at : at + 8 * chunks], "<u4").reshape(chunks, 2)
    at += 8 * chunks
    model = read_model(raw_model, 8 * k) if raw_model else None
    items = np.empty(n, f"<u{k}")
    for i, (length, checksum) in enumerate(table):
        data = stream[at : at + int(length)]
        at += int(length)
        check(crc32c(raw_model, data) == checksum, "chunk checksum")
        first = i * _CHUNK
        count = min(_CHUNK, n - first)
        if length == k * count:
            items[first : first + count] = np.frombuffer(data, f"<u{k}")
        else:
            check(model is not None and length < k * count, "invalid size of a chunk")
            items[first : first + count] = decode_chunk(data, model, first, count)
    check(at == len(stream), "bytes after the last chunk")
    return from_words(dtype, shape, items)


class BitReader:
    """Read numbers bit by bit, lowest bit first."""

    def __init__(self, data):
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        self._at = 0

    def read(self, count):
        """Return the next `count` bits as a number."""
        bits = self._bits[self._at : self._at + count]
        check(len(bits) == count, "a number beyond the end")
        self._at += count
        return sum(bit << i for i, bit in enumerate(bits))

    def skip_to_byte(self):
        """Skip zeros to a whole byte, and return the number of bytes read."""
        while self._at % 8:
            check(self.read(1) == 0, "padding is not zero")
        return self._at // 8


@dataclass
class Model:
    """Bins, frequencies and labels of a tensor."""

    bits: int
    mapping: int
    drop: int
    width: int
    low: np.ndarray
    """The lowest number of each bin."""
    widths: np.ndarray
    """The bits of an offset in each bin."""
    table_of_sum: np.ndarray
    bins: "Tables"
    rows: "Tables | None" = None
    column_labels: np.ndarray | None = None


def read_model(data, bits):
    """Parse the model for items of `bits` bits."""
    reader = BitReader(data)
    mapping, drop, tables, width = (reader.read(size) for size in (2, 6, 4, 20))
    tables += 1
    check(mapping < 3 and (width == 0 or width >= 8), "invalid model")
    low, widths = read_bins(reader, bits)
    table_of_sum = np.zeros(31, np.int64)
    rows = columns = None
    if width:
        table_of_sum[1:] = np.cumsum([reader.read(1) for _ in range(30)])
        check(table_of_sum[30] == tables - 1, "label sum 30 uses the last table")
        rows = Tables(read_frequencies(reader, 1, [0] * 32))
    else:
        check(tables == 1, "several tables without rows")
    bins = Tables(read_frequencies(reader, tables, [int(size) for size in widths]))
    if width:
        columns = Tables(read_frequencies(reader, 1, [0] * 16))
    at = reader.skip_to_byte()
    model = Model(bits, mapping, drop, width, low, widths, table_of_sum, bins, rows)
    if width:
        run = Rans(data[at : at + 32], data[at + 32 :])
        model.column_labels = run.decode(columns, np.zeros(width, np.int64))
        run.finish()
    else:
        check(at == len(data), "bytes after the model")
    return model


def read_bins(reader, bits):
    """Return the lowest numbers and the bits of all bins, from below."""
    found = []

    def split(low, size):
        if size and reader.read(1):
            split(low, size - 1)
            split(low + (1 << size - 1), size - 1)
        else:
            found.append((low, size))
            check(len(found) <= 256, "more than 256 bins")

    split(0, bits)
    low, sizes = zip(*found, strict=True)
    return np.array(low, np.uint64), np.array(sizes, np.int64)


def read_frequencies(reader, tables, bits):
    """Return the frequencies of all symbols; `bits` predicts those of wider bins to be larger."""
    codes = []
    for _ in range(tables):
        codes.append([])
        for s in range(len(bits)):
            code = predict(codes, s, bits) + read_difference(reader)
            check(0 <= code <= 80, "invalid code of a frequency")
            codes[-1].append(code)
    return np.array([expand_codes(row) for row in codes])


def predict(codes, s, bits):
    """Return the predicted code of symbol `s` of the last table."""
    *before, row = codes
    if not before:
        if s == 0 or row[s - 1] == 0:
            return 0
        code = row[s - 1] + 8 * (bits[s] - bits[s - 1])
    else:
        above = before[-1]
        if above[s] == 0:
            return 0
        code = above[s]
        if s and row[s - 1] and above[s - 1]:
            code += row[s - 1] - above[s - 1]
    return min(max(code, 0), 80)


def read_difference(reader):
    """Return a signed number: Elias gamma of its upper bits, then its lowest bit, in zigzag."""
    zeros = 0
    while not reader.read(1):
        zeros += 1
        check(zeros <= 7, "too many zeros in a gamma code")
    upper = (1 << zeros | reader.read(zeros)) - 1
    return unzigzag(2 * upper + reader.read(1))


def unzigzag(u):
    """Return 0, -1, 1, -2, … for 0, 1, 2, 3, …"""
    return -(u // 2) - 1 if u % 2 else u // 2


def expand_codes(codes):
    """Return the frequencies; the first symbol with the largest code gets the rest."""
    check(max(codes) > 0, "a table without symbols")
    found = [c if c < 8 else (8 + c % 8) << (c // 8 - 1) for c in codes]
    largest = codes.index(max(codes))
    found[largest] = 0
    found[largest] = _ONE - sum(found)
    check(found[largest] > 0, "frequencies above 4096")
    return found


class Tables:
    """Frequencies, sums, and the symbol of each number below 4096."""

    def __init__(self, frequencies):
        self.frequencies = frequencies
        self.sums = np.cumsum(frequencies, axis=1) - frequencies
        symbols = np.arange(frequencies.shape[1])
        self.symbols = np.stack([np.repeat(symbols, row) for row in frequencies])


class Rans:
    """A decoder of several runs of symbols."""

    def __init__(self, states, words):
        self._states = np.frombuffer(states, "<u4").astype(np.int64)
        self._words = np.frombuffer(words, "<u2").astype(np.int64)
        self._at = 0

    def decode(self, tables, which):
        """Return one symbol per element of `which`, the table to use."""
        out = np.empty(len(which), np.int64)
        step = len(self._states)
        for first in range(0, len(which), step):  # all states decode one symbol each
            table = which[first : first + step]
            x = self._states[: len(table)]
            slot = x % _ONE
            symbol = tables.symbols[table, slot]
            f, b = tables.frequencies[table, symbol], tables.sums[table, symbol]
            x[:] = f * (x // _ONE) + slot - b
            low = x < 1 << 16
            count = int(low.sum())
            check(self._at + count <= len(self._words), "words are missing")
            x[low] = (x[low] << 16) + self._words[self._at : self._at + count]
            self._at += count
            out[first : first + step] = symbol
        return out

    def finish(self):
        """Raise `DamagedError` unless everything was read."""
        check(self._at == len(self._words) and (self._states == 1 << 16).all(), "words are left")


def decode_chunk(data, model, first, count):
    """Return `count` items, of which the first is number `first` of the tensor."""
    words = int.from_bytes(data[:4], "little")
    states = 4 * (8 if count < 8192 else 32 if count < 65536 else 64)
    run = Rans(data[4 : 4 + states], data[4 + states : 4 + states + words])
    tables, is_marked = np.zeros(count, np.int64), np.ones(count, bool)
    if model.width:
        row, column = np.divmod(np.arange(first, first + count), model.width)
        labels = run.decode(model.rows, np.zeros(row[-1] - row[0] + 1, np.int64))[row - row[0]]
        tables = model.table_of_sum[model.column_labels[column] + labels % 16]
        is_marked = labels >= 16
    symbols = run.decode(model.bins, tables)
    run.finish()
    dropped = np.where(is_marked, model.drop, 0)
    widths = model.widths[symbols]
    check((widths >= dropped).all(), "more bits dropped than a bin has")
    offsets = read_offsets(data[4 + states + words :], widths - dropped)
    if model.mapping == 1:  # the sign stays at the bottom
        sign = (widths > 0) & (dropped > 0)
        low = offsets & np.uint64(1)
        high = offsets >> np.uint64(1) << (dropped + 1).astype(np.uint64)
        offsets = np.where(sign, high | low, offsets)
    else:
        offsets = offsets << dropped.astype(np.uint64)
    return unmap(model.low[symbols] + offsets, model.mapping, model.bits)


def read_offsets(data, sizes):
    """Return numbers of these sizes in bits; zeros fill the last byte."""
    total = int(sizes.sum())
    check(len(data) == -(-total // 8), "wrong number of raw bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.uint64)
    check(not bits[total:].any(), "padding is not zero")
    starts = np.cumsum(sizes) - sizes
    numbers = np.zeros(len(sizes), np.uint64)
    for bit in range(int(sizes.max(initial=0))):
        has = sizes > bit
        numbers[has] |= bits[starts[has] + bit] << np.uint64(bit)
    return numbers


def unmap(v, mapping, bits):
    """Return the items of the coded numbers."""
    if mapping == 1:
        v = v >> np.uint64(1) | (v & np.uint64(1)) << np.uint64(bits - 1)
    elif mapping == 2:
        v = v >> np.uint64(1) ^ np.where(v & np.uint64(1), np.uint64(2**64 - 1), np.uint64(0))
    return v.astype(f"<u{bits // 8}")
