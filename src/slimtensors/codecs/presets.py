"""Presets: named rules that choose a plan for each tensor."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from slimtensors import codecs
from slimtensors.codecs.bins import Bins
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.huffman import Huffman
from slimtensors.codecs.integer import Int
from slimtensors.codecs.plan import Plan, relative_error
from slimtensors.codecs.protocol import Codec
from slimtensors.codecs.statistics import Zeros, count_zeros, is_24
from slimtensors.errors import ConfigError, nearest
from slimtensors.tensor import Spec, ceil_div

Effort = Literal["fast", "max"]
"""Decode at the speed of memory, or in as few bits as we know how."""

_WORTHWHILE = 0.99
"""What a prefix code must save to be worth decoding it."""
_GAPS_WORTHWHILE = 0.9935
"""Gaps take three times as long as bytes to decode, and really save a percent more than estimated:
codes of bytes would have to be longer than Huffman's longest."""
_STRUCTURE = 0.97
"""What rows and columns of different density save at least, in every real model we measured."""
_DESCRIBED_MASK = {"huffman": 200, "gaps": 420, "density": 170}
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
    as_bytes = min(plain * _prefix_bytes(share), plain) + _DESCRIBED_MASK["huffman"]
    as_gaps = plain * _gap_bits(share) + _DESCRIBED_MASK["gaps"]
    as_classes = plain * _entropy([share, 1 - share]) * _STRUCTURE
    as_classes += _DESCRIBED_MASK["density"] + plain / _CHUNK_BYTES * _CHUNK_COST

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


@dataclass(frozen=True)
class Choice:
    """How to store a tensor, and what to tell the user about it."""

    plan: Plan | None
    """None: as it is."""
    note: str = ""


Chooser = Callable[[str, Tensor], Choice | Plan | None]
"""Decides how to store a tensor in main memory, by its name and content."""


@dataclass(frozen=True)
class Seen:
    """What a `Rule` knows of a tensor: no more than can be told from pieces of it."""

    spec: Spec
    zeros: Zeros
    is_24: Callable[[], bool]

    @classmethod
    def of(cls, x: Tensor) -> "Seen":
        """Look at a tensor in main memory."""
        return cls(Spec.of(x), count_zeros(x), lambda: is_24(x))


Rule = Callable[[Seen], Choice]
"""Decides how to store a tensor by its zeros alone."""


def dense(name: str, x: Tensor) -> Choice:
    """Store as it is."""
    return Choice(None)


def sparse(name: str, x: Tensor) -> Choice:
    """Store nonzero values and their positions, wherever that is smaller. Lossless."""
    return _sparse(Seen.of(x))


def bitmask(name: str, x: Tensor) -> Choice:
    """Store nonzero values and a bit per position, wherever that is smaller. Lossless."""
    return _masked(Seen.of(x))


def bitmask24(name: str, x: Tensor) -> Choice:
    """Store half of the values where two of every four are zero; others as they are. Lossless."""
    if x.numel() and is_24(x):
        return Choice(Plan(Bitmask24()))
    return Choice(None, "is not 2:4")


def lossless(name: str, x: Tensor) -> Choice:
    """Give frequent bytes short codes, and zeros a mask where there are many. Lossless."""
    return _coded(Seen.of(x))


def lossless_max(name: str, x: Tensor) -> Choice:
    """Do what `lossless` does in as few bits as we know how, but not as fast. Lossless."""
    return _coded(Seen.of(x), x)


def extreme(name: str, x: Tensor) -> Choice:
    """Round matrices of floats to 8-bit integers, and store these in as few bits as they allow.

    Lossy; vectors, integers and what float32 has no scale for stay exact. Zeros stay zero. There is
    one scale for all of a tensor, as in `torch.ao`'s dynamic quantization, or one per row where a
    few large weights would cost the others too much.
    """
    if x.dim() < 2 or not x.numel() or not x.is_floating_point() or x.element_size() == 1:
        return lossless_max(name, x)
    largest = float(x.abs().max())
    if largest != 0 and not _LEAST <= largest <= _MOST:
        note = f"has no scale in float32, its largest item is {largest:g}, and is kept exact"
        return replace(lossless_max(name, x), note=note)
    rounding = Int(8)
    if (relative_error(Plan(rounding), x) or 0.0) > _TOLERATED:
        rounding = Int(8, per_row=True)
    q = lossless_max(name, rounding.encode(x)["q"]).plan
    return Choice(Plan(rounding, {"q": q} if q else {}))


_TOLERATED = 0.03
"""Relative RMS error that one scale per tensor may cause."""
_LEAST, _MOST = 127 * torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""What the largest item of a tensor must lie between: scales below normal numbers are coarse."""


_SAMPLE = 1 << 15
"""Items that are coded to see which codec makes a tensor smaller."""
_DESCRIBED = 64
"""Bytes that a file takes to describe a part."""
_SMALL = 2 << 10
"""Bytes below which codes hardly ever save what a file takes to describe them."""


def _coded(seen: Seen, x: Tensor | None = None) -> Choice:
    """Return how to code a tensor: fast, or small, which takes the tensor to try codecs on."""
    zeros = seen.zeros
    effort: Effort = "fast" if x is None else "max"
    # Measured on real weights. All bytes of a zero are zeros, which codes of single bytes cannot
    # tell; of one byte, zero is a byte like others until it needs less than half a bit.
    many = 0.6 if seen.spec.dtype.itemsize == 1 else 1 / 32
    if zeros.zero < many * zeros.items:
        if x is None and seen.spec.nbytes < _SMALL:
            return Choice(None, _negative_zeros(zeros))
        codec = Huffman() if x is None else _smallest(x)
        return Choice(Plan(codec), _negative_zeros(zeros))
    if _is_24(seen):
        return Choice(Plan(Bitmask24(), {"values": Plan(Huffman())}), _negative_zeros(zeros))
    values = Huffman() if x is None else _smallest(Bitmask().encode(x)["values"])
    mask = mask_plan(zeros.items - zeros.zero, zeros.items, effort)
    plan = Plan(Bitmask(), {**({"mask": mask} if mask else {}), "values": Plan(values)})
    return Choice(plan, _negative_zeros(zeros))


def _smallest(x: Tensor) -> Codec:
    """Return the codec that takes the fewest bytes for some of `x`."""
    sample = _some(x)

    def size(codec: Codec) -> int:
        return sum(part.nbytes + _DESCRIBED for part in codec.encode(sample).values())

    codecs: tuple[Codec, ...] = (Huffman(), Bins())
    return min(codecs, key=size)


def _some(x: Tensor) -> Tensor:
    """Return a piece out of the middle of `x`, in whole rows, or all if it is small."""
    if x.numel() <= _SAMPLE:
        return x
    rows = min(ceil_div(_SAMPLE * len(x), x.numel()), len(x))
    begin = (len(x) - rows) // 2
    return x[begin : begin + rows]


def _sparse(seen: Seen) -> Choice:
    return Choice(Plan(Bitmask24())) if _is_24(seen) else _masked(seen)


def _masked(seen: Seen) -> Choice:
    note = _negative_zeros(seen.zeros)
    if _bits(seen) >= 8 * seen.spec.nbytes:
        return Choice(None, note or "too few zeros for a bitmask")
    return Choice(Plan(Bitmask()), note)


RULES: Mapping[str, Rule] = {"sparse": _sparse, "bitmask": _masked, "lossless": _coded}
"""Presets that look at nothing but zeros, so that pieces of a tensor tell what becomes of it."""

PRESETS: Mapping[str, Chooser] = {
    "dense": dense,
    "sparse": sparse,
    "bitmask": bitmask,
    "bitmask24": bitmask24,
    "lossless": lossless,
    "lossless-max": lossless_max,
    "extreme": extreme,
}


def default(dialect: str) -> str:
    """Return the preset that is used where none is named: the smallest exact one there is."""
    return "sparse" if dialect == "compressed-tensors" else "lossless"


def find(preset: "str | Plan | Chooser") -> Chooser:
    """Return the rule that a preset's name, a plan for every tensor, or a function stands for."""
    if isinstance(preset, Plan):
        plan = preset
        return lambda name, x: plan
    if callable(preset):
        return preset
    if not isinstance(preset, str):
        kind = type(preset).__name__
        raise ConfigError(f"a preset is a name, a Plan or a function, not a {kind}")
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; {nearest(preset, PRESETS)}")
    return PRESETS[preset]


def _negative_zeros(zeros: Zeros) -> str:
    if zeros.negative <= zeros.items // 100:
        return ""
    return f"{zeros.negative} items are -0.0 and kept as values; x + 0.0 would free them"


def _is_24(seen: Seen) -> bool:
    """Tell whether a tensor is 2:4, and better stored so than with a mask for fewer values."""
    zeros = seen.zeros
    as_24 = zeros.items * (seen.spec.dtype.itemsize * 4 + 2 / 3)
    return as_24 < _bits(seen) and 2 * zeros.zero >= zeros.items and seen.is_24()


def _bits(seen: Seen) -> int:
    zeros = seen.zeros
    return (zeros.items - zeros.zero) * 8 * seen.spec.dtype.itemsize + zeros.items
