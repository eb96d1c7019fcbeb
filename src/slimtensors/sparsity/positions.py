"""How to store where the nonzero items are: which codec for the mask."""

import heapq
import math
from collections.abc import Iterable
from functools import cache
from typing import Literal

from slimtensors import codecs
from slimtensors.plan import Plan

Effort = Literal["fast", "max"]
"""Decode at the speed of memory, or in as few bits as we know how."""

_WORTHWHILE = 0.99
"""What a prefix code must save to be worth decoding it."""
_GAPS_WORTHWHILE = 0.9935
"""Gaps take three times as long as bytes to decode, and really save a percent more than estimated:
codes of bytes would have to be longer than Huffman's longest."""
_STRUCTURE = 0.97
"""What rows and columns of different density save at least, in every real model we measured."""
_DESCRIBED = {"huffman": 200, "gaps": 420, "density": 170}
"""Bytes that a file takes to describe a codec for a mask, with tables and directories."""
_CHUNK_BYTES, _CHUNK_COST = 1 << 18, 104
"""What `density` adds to each chunk."""


def mask_plan(ones: int, items: int, effort: Effort) -> Plan | None:
    """Return the plan for the mask of `items` items of which `ones` are nonzero; None: as it is.

    The counts are enough: sizes are estimated for nonzero items that lie anywhere.
    """
    if items == 0:
        return None
    share = round(ones / items * 4096) / 4096 or ones / items  # few different shares, to cache
    plain = items / 8
    as_bytes = min(plain * _prefix_bytes(share), plain) + _DESCRIBED["huffman"]
    as_gaps = plain * _gap_bits(share) + _DESCRIBED["gaps"]
    as_classes = plain * _entropy([share, 1 - share]) * _STRUCTURE
    as_classes += _DESCRIBED["density"] + plain / _CHUNK_BYTES * _CHUNK_COST

    huffman = codecs.find("huffman")()
    if effort == "max" and as_classes < min(plain, as_bytes, as_gaps):
        return Plan(codecs.find("density")())
    if as_gaps < _GAPS_WORTHWHILE * min(plain, as_bytes):
        return Plan(codecs.find("gaps")(), {"tokens": Plan(huffman)})
    return Plan(huffman) if as_bytes < _WORTHWHILE * plain else None


@cache
def _prefix_bytes(share: float) -> float:
    """Return bits per item of a mask whose bytes have a prefix code."""
    kinds = [share**k * (1 - share) ** (8 - k) for k in range(9)]
    return _prefix_bits(kinds[byte.bit_count()] for byte in range(256)) / 8


@cache
def _gap_bits(share: float) -> float:
    """Return bits per item of a mask whose gaps have a prefix code."""
    longer = (1 - share) ** 255
    if share == 0 or longer == 1:
        return 0.0
    tokens = [share * (1 - share) ** zeros for zeros in range(255)]
    return share / (1 - longer) * _prefix_bits([*tokens, longer])


def _prefix_bits(shares: Iterable[float]) -> float:
    """Return the mean length of the best prefix code for symbols that occur in these shares."""
    heap = list(shares)
    heapq.heapify(heap)
    bits = 0.0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heap[0]
        heapq.heapreplace(heap, pair)
        bits += pair
    return bits


def _entropy(shares: Iterable[float]) -> float:
    return -sum(share * math.log2(share) for share in shares if share > 0)
