"""Codec `trellis`: integers along a trellis, times steps (docs/format-trellis.md)."""

import math
from functools import cache

import numpy as np
from independent.reader.crc32c import crc32c
from independent.reader.tensor import check, from_numbers

_EVEN, _ODD = (0, 3, 5, 6, 1, 2, 4, 7), (1, 2, 4, 7, 0, 3, 5, 6)
_LANES = 32
_LOG2 = [0, *(round(4096 * math.log2(n)) for n in range(1, 2100))]
_POWER = [round(2 ** (30 - i / 4096)) for i in range(4096)]


def decode(parts, dtype, shape, count, *, row_dims=1, transposed=False):
    """Return the tensor of the parts `steps` and `stream`."""
    coded = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    rows = math.prod(coded[:row_dims]) if len(coded) > row_dims else 1
    columns = count // rows
    steps, stream = parts["steps"].data, parts["stream"].data
    parameters = tuple(np.frombuffer(steps[:8], np.int8).tolist())
    fineness = parameters[6]
    check(parameters[1] > 0 and 0 <= fineness <= 3 and parameters[7] == 0, "invalid parameters")
    chunk_rows = int.from_bytes(steps[8:12], "little")
    check(0 < chunk_rows <= rows, "invalid number of rows")
    lists, at = [], 12
    for size in (rows, columns, rows, columns):
        values, used = read_list(steps[at:], size)
        lists.append(values)
        at += used
    check(at == len(steps), "bytes after the last list")
    row_steps, column_steps = step_sizes(lists[0], 1 << fineness), step_sizes(lists[1], 1)
    chunks = -(-rows // chunk_rows)
    table = np.frombuffer(stream[: 8 * chunks], "<u4").reshape(chunks, 2).tolist()
    at = 8 * chunks
    found = []
    for i, (size, checksum) in enumerate(table):
        data = stream[at : at + size]
        at += size
        check(len(data) == size and crc32c(steps, data) == checksum, "chunk checksum")
        chunk = slice(i * chunk_rows, (i + 1) * chunk_rows)
        multiples = decode_chunk(data, parameters, lists[2][chunk], lists[3])
        with np.errstate(over="ignore"):
            found.append(multiples.astype(np.float32) * row_steps[chunk, None] * column_steps)
    check(at == len(stream), "bytes after the last chunk")
    numbers = np.concatenate(found).reshape(coded)
    numbers = numbers.swapaxes(-1, -2) if transposed else numbers
    return from_numbers(dtype, shape, numbers.reshape(-1))


def step_sizes(codes, divisor):
    """Return steps of eighths of an octave, divided further."""
    unit = 8 * divisor
    check(all(-126 * unit <= e <= 127 * unit for e in codes), "step out of range")
    sizes = [np.ldexp(np.float32(2 ** (e % unit / unit)), e // unit) for e in codes]
    return np.array(sizes, np.float32)


def read_list(data, size):
    """Return the numbers of a list, and its bytes."""
    least = int.from_bytes(data[:2], "little", signed=True)
    bits, length = data[2], int.from_bytes(data[3:7], "little")
    code = data[7 : 7 + length]
    check(bits <= 12 and len(code) == length, "malformed list")
    stream = iter(code + bytes(8 * size + 8))
    low, high, value = 0, 2**32 - 1, 0
    if bits:
        for _ in range(4):
            value = value << 8 | next(stream)
    models = [[32768, 0] for _ in range(1 << bits)]
    numbers = []
    for _ in range(size):
        node = 1
        for _ in range(bits):
            model = models[node]
            middle = low + ((high - low) * model[0] >> 16)
            bit = int(value <= middle)
            low, high = (low, middle) if bit else (middle + 1, high)
            change = abs((65535 if bit else 0) - model[0]) // (model[1] + 2)
            model[0] = min(max(model[0] + (change if bit else -change), 64), 65472)
            model[1] = min(model[1] + 1, 60)
            node = node * 2 + bit
            while low >> 24 == high >> 24:
                low, high = (low << 8) % 2**32, (high << 8) % 2**32 + 255
                value = (value << 8) % 2**32 + next(stream)
        numbers.append(least + node - (1 << bits))
    return numbers, 7 + length


@cache
def make_table(parameters, weight_class, odd):
    """Return the number of low bits, and the symbol, frequency and offset of 2048 slots."""
    scale, shape = parameters[:2]
    zero, one = parameters[2 + odd], parameters[4 + odd]
    log_scale = 1024 * (weight_class - 12) + 256 * scale
    low_bits = min(max(log_scale - 13312 >> 12, 0), 5)

    def weight(k):
        distance = abs(2 * k - odd * ((k > 0) - (k < 0)))
        cost = 0
        if distance:
            product = (_LOG2[distance] - log_scale) * shape
            t = product // 16 if product >= 0 else -(-product // 16)
            if t >= 20480:
                cost = 122880
            elif t >= -53248:
                mantissa = 2 * _POWER[4096 - t % 4096] if t % 4096 else 1 << 30
                cost = min(mantissa >> (18 - (t >> 12)), 122880)
        cost += 32768 - 256 * (zero if k == 0 else one if abs(k) == 1 else 0)
        return 0 if cost >= 41 * 4096 else (_POWER[cost % 4096] << 8) >> (cost >> 12)

    width = 1 << low_bits
    weights = [sum(weight((s - 32) * width + i) for i in range(width)) for s in range(1, 64)]
    total = sum(weights)
    frequencies = [(2047 * w + total // 2) // total or int(8188 * w >= total) for w in weights]
    frequencies[frequencies.index(max(frequencies))] += 2047 - sum(frequencies)
    slots = [(s, f, i) for s, f in enumerate([1, *frequencies]) for i in range(f)]
    return low_bits, slots


def decode_chunk(data, parameters, row_classes, column_classes):
    """Return the integers of a chunk as multiples of the steps, [rows][columns]."""
    rows, columns = len(row_classes), len(column_classes)
    used = min(columns, _LANES)
    escapes = int.from_bytes(data[:4], "little")
    states = np.frombuffer(data[4 : 4 + 4 * used], "<u4").tolist()
    check(all(x >= 65536 for x in states), "state out of range")
    at = 4 + 4 * used
    escaped = iter(np.frombuffer(data[at : at + 4 * escapes], "<i4").tolist())
    words = iter(np.frombuffer(data[at + 4 * escapes :], "<u2").tolist())
    multiples = np.empty((rows, columns), np.int64)
    for first in range(0, columns, _LANES):
        lanes = range(first, min(first + _LANES, columns))
        trellis = [0] * len(lanes)
        for i in range(rows):
            for lane, j in enumerate(lanes):
                weight_class = min(max(row_classes[i] + column_classes[j], 0), 63)
                low_bits, slots = make_table(parameters, weight_class, trellis[lane] & 1)
                x = states[lane]
                symbol, frequency, offset = slots[x % 2048]
                x = frequency * (x // 2048) + offset
                low = 0
                if symbol:
                    low, x = x % (1 << low_bits), x >> low_bits
                if x < 65536:
                    x = 65536 * x + next(words)
                k = ((symbol - 32) << low_bits) + low if symbol else next(escaped)
                states[lane] = x
                multiples[i, j] = 2 * k - (trellis[lane] & 1) * ((k > 0) - (k < 0))
                trellis[lane] = (_ODD if k & 1 else _EVEN)[trellis[lane]]
    is_finished = next(words, None) is None and next(escaped, None) is None
    check(is_finished and all(x == 65536 for x in states), "data after the last weight")
    return multiples
