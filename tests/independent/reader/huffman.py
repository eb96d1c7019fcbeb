"""Codec `huffman`: byte planes in prefix codes (docs/format-huffman.md)."""

import re

import numpy as np
from independent.reader.crc32c import crc32c
from independent.reader.tensor import ITEM_BYTES, check, from_words

_CHUNK = 131072
_ROTATED = {"float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"}


def decode(parts, dtype, shape, count):
    """Return the tensor of the parts `chunks` and `data`."""
    is_complex = dtype.startswith("complex")
    k = ITEM_BYTES.get(dtype, 1) // (2 if is_complex else 1)
    items = count * 2 if is_complex else count
    chunks, data = parts["chunks"], parts["data"].data
    check(chunks.dtype == "uint32" and chunks.shape == (-(-items // _CHUNK), 1 + k), "chunks")
    planes, at = np.empty((k, items), np.uint8), 0
    for i, row in enumerate(chunks.words().reshape(chunks.shape)):
        n = min(_CHUNK, items - i * _CHUNK)
        sizes = [int(size) for size in row[1:]]
        check(crc32c(row[1:].tobytes(), data[at : at + sum(sizes)]) == row[0], "chunk checksum")
        for plane, size in zip(planes, sizes, strict=True):
            plane[i * _CHUNK : i * _CHUNK + n] = decode_plane(data[at : at + size], n)
            at += size
    check(at == len(data), "bytes after the last plane")
    words = np.ascontiguousarray(planes.T).view(f"<u{k}").reshape(-1)
    if dtype in _ROTATED:
        one, rest = np.array(1, words.dtype), np.array(8 * k - 1, words.dtype)
        words = words >> one | words << rest
    return from_words(dtype, shape, words)


def decode_plane(data, n):
    """Return the `n` bytes of a plane: raw, constant or coded."""
    check(0 < len(data) <= n, "invalid size of a plane")
    if len(data) == n:
        return np.frombuffer(data, np.uint8)
    if len(data) == 1:
        return np.full(n, data[0], np.uint8)
    return decode_coded_plane(data, n)


def decode_coded_plane(data, n):
    """Return the bytes of a plane of a code table and five streams."""
    lengths, at = read_code_table(data)
    symbols = make_code(lengths)
    sizes = np.frombuffer(data[at : at + 10], "<u2")
    check(min(sizes) >= 1, "empty stream")
    at += 10
    words = re.compile("|".join(symbols))
    items = bytearray()
    for s, size in enumerate(sizes):
        count = n // 5 if s < 4 else n - 4 * (n // 5)
        stream = data[at : at + size]
        check(stream[-1] != 0, "the final one is in the last byte")
        bits = f"{int.from_bytes(stream, 'little'):b}"[1:]  # from the final one downwards
        found = words.findall(bits)
        check(len(found) == count and sum(map(len, found)) == len(bits), "invalid stream")
        items += bytes(symbols[word] for word in reversed(found))
        at += size
    check(len(data) - at <= 4 and not any(data[at:]), "bytes after the streams")
    return np.frombuffer(bytes(items), np.uint8)


def read_code_table(data):
    """Return the code lengths of all bytes, and the number of bytes of the table."""
    nibbles = (half for byte in data for half in (byte & 15, byte >> 4))
    lengths, used = [], 0
    while len(lengths) < 256:
        nibble = next(nibbles)
        check(nibble < 15, "invalid nibble")
        used += 1
        if nibble < 13:
            lengths.append(nibble)
        elif nibble == 13:
            lengths += [0] * (next(nibbles) + 2)
            used += 1
        else:
            lengths += [0] * (next(nibbles) + 16 * next(nibbles) + 18)
            used += 2
    check(len(lengths) == 256, "code table of more than 256 lengths")
    if used % 2:
        check(next(nibbles) == 0, "the last nibble of the code table")
    return lengths, (used + 1) // 2


def make_code(lengths):
    """Return the byte of each code word, a text of zeros and ones."""
    order = sorted((length, byte) for byte, length in enumerate(lengths) if length)
    check(sum(1 << 12 - length for length, _ in order) == 1 << 12, "incomplete code")
    symbols, word, previous = {}, 0, order[0][0]
    for i, (length, byte) in enumerate(order):
        word = (word + (i > 0)) << length - previous
        symbols[f"{word:0{length}b}"] = byte
        previous = length
    return symbols
