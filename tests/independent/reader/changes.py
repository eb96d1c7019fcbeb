"""Residuals `sparse-change` and `expected-change` (docs/format-residuals.md)."""

import math
from functools import cache

import numpy as np
from independent.reader.tensor import check, from_words
from independent.reader.trellis import read_list

_MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}
_CHUNK = {"sparse-change": 131072, "expected-change": 262144}
_LANES = 32
_LOG2 = [0, *(round(4096 * math.log2(n)) for n in range(1, 100))]
_POWER = [round(2 ** (30 - i / 4096)) for i in range(4096)]


def apply(kind, stored, base):
    """Return the tensor with these changes since its base."""
    check(base.dtype in _MANTISSA and stored.dtype == "uint8", "changes of another dtype")
    stream, count = stored.data, base.count
    size = int.from_bytes(stream[:4], "little")
    model, at = stream[4 : 4 + size], 4 + size
    chunks = -(-count // _CHUNK[kind])
    sizes = np.frombuffer(stream[at : at + 4 * chunks], "<u4").tolist()
    at += 4 * chunks
    words, found = base.words(), base.words().copy()
    coder = (Sparse if kind == "sparse-change" else Expected)(model, base)
    for i, length in enumerate(sizes):
        part = slice(i * _CHUNK[kind], min((i + 1) * _CHUNK[kind], count))
        chunk = stream[at : at + length]
        check(len(chunk) == length, "chunk is truncated")
        found[part] = coder.decode(part.start, chunk, words[part].tolist())
        at += length
    check(at == len(stream), "bytes after the last chunk")
    return from_words(base.dtype, base.shape, found)


class Bits:
    """A stream of bits, lowest first."""

    def __init__(self, data):
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        self.at = 0

    def read(self, count):
        """Return the next `count` bits as a number."""
        bits = self.bits[self.at : self.at + count]
        check(len(bits) == count, "bits are missing")
        self.at += count
        return sum(bit << i for i, bit in enumerate(bits))

    def ones(self, limit):
        """Return the number of ones before a zero, which is skipped; or `limit`."""
        count = 0
        while count < limit and self.read(1):
            count += 1
        return count


def move(base, steps, bits):
    """Return the item `steps` away from zero."""
    sign = 1 << bits - 1
    size = (base & sign - 1) + steps
    return size | (base & sign) if size >= 0 else (-size - 1) | (base & sign ^ sign)


class Sparse:
    """Few changes."""

    def __init__(self, model, base):
        self.top, self.classes = model[:2]
        self.bits, self.mantissa = 8 * base.item_bytes, _MANTISSA[base.dtype]
        check(1 <= self.classes <= 16 and len(model) == 2 + 3 * self.classes, "invalid model")
        self.codes = [model[2 + 3 * c : 5 + 3 * c] for c in range(self.classes)]
        for g, r, w in self.codes:
            check(max(g, r) <= 34 and w <= 32, "invalid codes")

    def decode(self, first, chunk, base):
        """Return the items of a chunk."""
        found = list(base)
        if not chunk:
            return found
        members = [[] for _ in range(self.classes)]
        for i, item in enumerate(base):
            exponent = (item & (1 << self.bits - 1) - 1) >> self.mantissa
            members[min(max(self.top - exponent, 0), self.classes - 1)].append(i)
        stream = Bits(chunk)
        for places, codes in zip(members, self.codes, strict=True):
            if places:
                self.decode_class(stream, codes, places, found)
        check(not any(stream.bits[stream.at :]) and len(stream.bits) - stream.at < 8, "more bits")
        return found

    def decode_class(self, stream, codes, places, found):
        """Decode the changes of the items at `places`."""
        state = {"gap": 0, "run": 0}
        for name, code in zip(state, codes, strict=False):
            state[name] = 16 * (2 + code % 2) << code // 2
        width = 16 * codes[2]

        def number(name):
            low = max(0, (state[name] // 32).bit_length() - 1)
            quotient = stream.ones(24)
            value = stream.read(18) if quotient == 24 else (quotient << low) + stream.read(low)
            state[name] += value - state[name] // 32
            return value

        rank, run = 0, None
        while True:
            rank += number("gap")
            if rank >= len(places):
                check(rank == len(places), "gap beyond the last item")
                return
            negative = stream.read(1)
            run = number("run") if run is None else run
            steps = 1
            if run:
                run -= 1
            else:
                low = max(0, width // 16 - 1)
                more = stream.ones(33)
                check(more + low <= 32, "size out of range")
                high = (1 << more) + stream.read(more) - 1
                value = (high << low) + stream.read(low)
                width += value.bit_length() - width // 16
                steps, run = value + 2, None
            at = places[rank]
            found[at] = move(found[at], -steps if negative else steps, self.bits)
            rank += 1


class Expected:
    """Many changes."""

    def __init__(self, model, base):
        self.bits, self.mantissa = 8 * base.item_bytes, _MANTISSA[base.dtype]
        self.width = int.from_bytes(model[:4], "little")
        used, shape = int.from_bytes(model[4:12], "little"), model[12]
        check(1 <= self.width <= base.count and used and shape, "invalid model")
        at, tables = 13, {}
        for c in range(64):
            if used >> c & 1:
                z, a = np.frombuffer(model[at : at + 2], np.int8).tolist()
                tables[c] = (c, *make_table(c, shape, z, a, self.mantissa))
                at += 2
        self.rows, length = read_list(model[at:], -(-base.count // self.width))
        at += length
        self.columns, length = read_list(model[at:], self.width)
        check(at + length == len(model), "bytes after the model")
        self.table_of = [
            tables[max((t for t in tables if t <= c), default=min(tables))] for c in range(64)
        ]

    def decode(self, first, chunk, base):
        """Return the items of a chunk."""
        used = min(len(base), _LANES)
        escapes = int.from_bytes(chunk[:4], "little")
        states = np.frombuffer(chunk[4 : 4 + 4 * used], "<u4").tolist()
        check(len(states) == used and all(x >= 65536 for x in states), "state out of range")
        at = 4 + 4 * used
        end = at + escapes * self.bits // 8
        escaped = iter(np.frombuffer(chunk[at:end], f"<u{self.bits // 8}").tolist())
        words = iter(np.frombuffer(chunk[end:], "<u2").tolist())

        def refill(lane):
            if states[lane] < 65536:
                word = next(words, None)
                check(word is not None, "words are missing")
                states[lane] = states[lane] << 16 | word

        found, sign = [], 1 << self.bits - 1
        for begin in range(0, len(base), 8):
            group = []
            for i in range(begin, min(begin + 8, len(base))):
                row, column = divmod(first + i, self.width)
                label = self.rows[row] + self.columns[column]
                exponent = (base[i] & sign - 1) >> self.mantissa
                context = label // 2 - 2 * max(exponent, 1) + 55
                table, low_bits, slots = self.table_of[min(max(context, 0), 63)]
                x = states[i % _LANES]
                symbol, frequency, offset = slots[x % 2048]
                x = frequency * (x // 2048) + offset
                low_bits = low_bits if symbol else 0
                bits = min(low_bits, 5)
                states[i % _LANES] = x >> bits
                refill(i % _LANES)
                group.append([i, symbol, low_bits, x % (1 << bits), table, label])
            for item in group:
                i, _, low_bits = item[:3]
                if low_bits > 5:
                    item[3] += states[i % _LANES] % (1 << low_bits - 5) << 5
                    states[i % _LANES] >>= low_bits - 5
                    refill(i % _LANES)
            for i, symbol, low_bits, low, table, label in group:
                if symbol == 0:
                    word = next(escaped, None)
                    check(word is not None, "escapes are missing")
                    found.append(word)
                    continue
                q = symbol - 32
                if table < 53:
                    found.append(self.add(base[i], (q << low_bits) + low))
                    continue
                size = (abs(q) - 1 << low_bits) + low + (max(label // 4 - 5, 0) << self.mantissa)
                flipped = base[i] ^ sign if q < 0 else base[i]
                found.append(size & sign - 1 | flipped & sign)
        is_finished = next(words, None) is None and next(escaped, None) is None
        check(is_finished and all(x == 65536 for x in states), "data after the last item")
        return found

    def add(self, base, steps):
        """Return an item some steps away, modulo 2^32."""
        sign = 1 << self.bits - 1
        size = ((base & sign - 1) + steps + (1 << 31)) % (1 << 32) - (1 << 31)
        if size < 0:
            return (-size - 1) & sign - 1 | base & sign ^ sign
        return size & sign - 1 | base & sign


def cost(distance, shape):
    """Return the cost of a distance from the scale."""
    product = distance * shape
    u = product // 16 if product >= 0 else -(-product // 16)
    if u >= 20480:
        return 122880
    if u < -53248:
        return 0
    p = 2 * _POWER[4096 - u % 4096] if u % 4096 else 1 << 30
    return min(122880, p >> 18 - u // 4096)


def weight(c):
    """Return the weight of a cost."""
    return 0 if c >= 41 * 4096 else (_POWER[c % 4096] << 10) >> c // 4096


def odds(z):
    """Return the part of 2047 that odds give."""
    c = 512 * abs(z)
    f = _POWER[c % 4096] >> c // 4096
    o = 2**30 + f
    smaller = (2047 * f + o // 2) // o
    return min(max(smaller if z < 0 else 2047 - smaller, 1), 2046)


def share(weights, total):
    """Return the frequencies of symbols by their weights."""
    s = sum(weights.values())
    if s == 0:
        return {}
    found = {q: (w * total + s // 2) // s for q, w in weights.items()}
    return {q: f or int(4 * weights[q] * total >= s) for q, f in found.items()}


@cache
def make_table(context, shape, z, a, mantissa):
    """Return the number of low bits, and the symbol, frequency and offset of 2048 slots."""
    if context < 53:
        scale = 2048 * (context - 55 + 2 * mantissa) + 512 * a
        low_bits = min(max(scale // 4096 - 2, 0), mantissa - 2)
        if low_bits == 0:
            weights = {q: weight(cost(_LOG2[abs(q)] - scale, shape)) for q in range(-31, 32) if q}
            found = {0: odds(z)} | share(weights, 2047 - odds(z))
        else:
            middles = {q: _LOG2[abs(2 * q + 1)] + 4096 * (low_bits - 1) for q in range(-31, 32)}
            weights = {q: weight(cost(at - scale, shape)) for q, at in middles.items()}
            found = share(weights, 2047)
    else:
        low_bits = mantissa - 2
        weights = {}
        for j in range(31):
            distance = _LOG2[9 + 2 * (j % 4)] + 4096 * (j // 4 - 8) - 512 * a
            weights[j + 1] = weight(cost(distance, shape)) >> 7 - j // 4
        found = share(weights, odds(z))
        found |= share({-q: w for q, w in weights.items()}, 2047 - odds(z))
    frequencies = [found.get(symbol - 32, 0) for symbol in range(1, 64)]
    largest = frequencies.index(max(frequencies))
    frequencies[largest] += 2047 - sum(frequencies)
    check(1 <= frequencies[largest] <= 2047, "invalid distribution")
    slots = [(s, f, i) for s, f in enumerate([1, *frequencies]) for i in range(f)]
    return low_bits, slots
