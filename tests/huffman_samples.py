"""Bytes of many kinds for the Huffman coder, and calls of its kernels."""

import numpy as np

from slimtensors import _core

CHUNK = _core.HUFFMAN_CHUNK
KINDS = [(1, False), (2, False), (2, True), (4, False), (4, True), (8, False), (8, True)]
CONTENTS = ["random", "constant", "two", "gaussian", "steep", "floats"]


def survey(items, itemsize, rotated):
    """Return the codes and the rows of sizes that the core chooses."""
    chunks = -(-items.size // itemsize // CHUNK)
    codes = np.zeros(chunks * itemsize * 256, dtype=np.uint8)
    rows = np.zeros(chunks * (1 + itemsize) * 4, dtype=np.uint8)
    _core.huffman_survey(items, itemsize, rotated, codes, rows)
    return codes, rows


def encode(items, itemsize, rotated):
    """Return the rows and the data of encoded items."""
    codes, rows = survey(items, itemsize, rotated)
    data = np.full(rows.view("<u4").reshape(-1, 1 + itemsize)[:, 1:].sum(), 0xA5, dtype=np.uint8)
    _core.huffman_encode(items, itemsize, rotated, codes, rows, data)
    return rows, data


def make_bytes(rng, kind, size):
    """Return random bytes of one kind of content."""
    match kind:
        case "random":
            return rng.integers(0, 256, size, dtype=np.uint8)
        case "constant":
            return np.full(size, rng.integers(256), dtype=np.uint8)
        case "two":
            return rng.choice(np.array([3, 200], np.uint8), size, p=[0.97, 0.03])
        case "gaussian":
            return rng.normal(0, 20, size).astype(np.int8).view(np.uint8)
        case "steep":  # optimal codes exceed the length limit
            return np.minimum(rng.geometric(0.6, size) + 7 * (rng.random(size) < 1e-3), 255).astype(
                np.uint8
            )
        case "floats":
            return rng.normal(0, 0.02, -(-size // 4)).astype(np.float32).view(np.uint8)[:size]
