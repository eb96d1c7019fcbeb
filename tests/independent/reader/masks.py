"""Codecs `gaps` and `density`: bits of masks (docs/format-masks.md)."""

from dataclasses import dataclass

import numpy as np
from independent.reader.crc32c import crc32c
from independent.reader.tensor import ITEM_BYTES, Tensor, check

_GAPS_CHUNK = 1 << 17
_ONE = 1 << 14
"""Probability one."""


def decode_gaps(parts, dtype, shape, count):
    """Return the tensor of the parts `tokens` and `counts`."""
    size = count * ITEM_BYTES.get(dtype, 1)
    tokens = parts["tokens"].words().astype(np.int64)
    chunks = -(-size // _GAPS_CHUNK)
    if chunks < 2:
        check("counts" not in parts, "counts of a single chunk")
        counts = [len(tokens)] * chunks
    else:
        counts = parts["counts"].numbers().tolist()
    check(len(counts) == chunks and sum(counts) == len(tokens), "wrong number of tokens")
    bits, at = np.zeros(8 * size, np.uint8), 0
    for i, number in enumerate(counts):
        chunk = tokens[at : at + number]
        at += number
        check(not number or chunk[-1] != 255, "the last token is 255")
        is_one = chunk < 255
        ends = np.cumsum(np.where(is_one, chunk + 1, 255))  # after each token
        first = 8 * _GAPS_CHUNK * i
        last = min(8 * size, first + 8 * _GAPS_CHUNK)
        check(not number or first + ends[-1] <= last, "tokens exceed the chunk")
        bits[first + ends[is_one] - 1] = 1
    return Tensor(dtype, tuple(shape), np.packbits(bits, bitorder="little").tobytes())


def decode_density(parts, dtype, shape, count):
    """Return the tensor of the part `stream`."""
    stream, item = parts["stream"].data, ITEM_BYTES.get(dtype, 1)
    size = count * item
    width = shape[-1] * item if len(shape) > 1 else 0
    width = width if 16 <= width <= 32768 else 128
    rows = -(-size // width)
    chunk_rows = -(-rows // -(-size // (1 << 18))) if size else 1
    chunks = -(-rows // chunk_rows)
    length = int.from_bytes(stream[:4], "little")
    at = 4 + length
    model = read_density_model(stream[4:at], rows, 8 * width)
    table = np.frombuffer(stream[at : at + 8 * chunks], "<u4").reshape(chunks, 2)
    at += 8 * chunks
    out = b""
    for i, (coded, checksum) in enumerate(table):
        data = stream[at : at + int(coded)]
        at += int(coded)
        first = i * chunk_rows
        n = min(chunk_rows * width, size - first * width)
        if len(data) != n:
            data = decode_density_chunk(data, model, first, width, n)
        check(crc32c(data) == checksum, "chunk checksum")
        out += data
    check(at == len(stream), "bytes after the last chunk")
    return Tensor(dtype, tuple(shape), out)


@dataclass
class DensityModel:
    """Classes of rows and columns, and the probability of a one for each pair."""

    ones: np.ndarray
    row_class: np.ndarray
    column_class: np.ndarray


def read_density_model(data, rows, columns):
    """Parse the model."""
    a, b = data[:2]
    check(1 <= a <= 16 and 1 <= b <= 16, "invalid number of classes")
    at, shares = 2, []
    for classes in (a, b):
        share = [256]
        if classes > 1:
            # A share of 256 cannot occur: every class has at least one.
            share = list(data[at : at + classes])
            at += classes
            check(min(share) >= 1 and sum(share) == 256, "invalid shares of classes")
        shares.append(share)
    codes = np.frombuffer(data[at : at + a * b], np.uint8).astype(np.int64)
    at += a * b
    check((codes & 127 <= 96).all(), "a probability above one half")
    rarer = (8 + (codes & 7) << (codes >> 3 & 15)) // 4
    ones = np.where(codes & 128, _ONE - rarer, rarer).reshape(a, b)
    labels = read_labels(data[at:], [(shares[0], rows), (shares[1], columns)])
    return DensityModel(ones, *labels)


def read_labels(data, sides):
    """Return the classes of rows and of columns."""
    if all(len(shares) == 1 for shares, _ in sides):
        check(not data, "labels of a single class")
        return [np.zeros(count, np.int64) for _, count in sides]
    x, at, found = int.from_bytes(data[:4], "little"), 4, []
    for shares, count in sides:
        labels = [0] * count
        if len(shares) > 1:
            sums = np.cumsum(shares) - shares
            class_of = np.repeat(np.arange(len(shares)), shares).tolist()
            for i in range(count):
                slot = x % 256
                k = labels[i] = class_of[slot]
                x = shares[k] * (x // 256) + slot - int(sums[k])
                while x < 1 << 23:
                    check(at < len(data), "labels are missing")
                    x = 256 * x + data[at]
                    at += 1
        found.append(np.array(labels, np.int64))
    check(x == 1 << 23 and at == len(data), "bytes after the labels")
    return found


def decode_density_chunk(data, model, first_row, width, n):
    """Return the `n` bytes of a coded chunk."""
    v = 1 if n < 1 << 15 else 2 if n < 1 << 17 else 4
    states = np.frombuffer(data[: 32 * v], "<u4").astype(np.int64)
    words = np.frombuffer(data[32 * v :], "<u2").astype(np.int64)
    at, bits = 0, np.empty(8 * n, np.uint8)
    for begin in range(0, n, width):
        ones = model.ones[model.row_class[first_row + begin // width]][model.column_class]
        row = ones[: 8 * min(width, n - begin)]
        for first in range(0, len(row), 8 * v):  # V bytes: all states decode one bit each
            f = row[first : first + 8 * v]
            x = states[: len(f)]
            q, r = x >> 14, x & _ONE - 1
            is_one = r < f
            x[:] = np.where(is_one, f * q + r, (_ONE - f) * q + r - f)
            low = x < 1 << 16
            if low.any():
                count = int(np.count_nonzero(low))
                check(at + count <= len(words), "words are missing")
                x[low] = (x[low] << 16) + words[at : at + count]
                at += count
            bits[8 * begin + first : 8 * begin + first + len(f)] = is_one
    check(at == len(words) and (states == 1 << 16).all(), "words are left")
    return np.packbits(bits, bitorder="little").tobytes()
