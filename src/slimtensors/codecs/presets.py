"""Presets: named rules that choose a plan for each tensor."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from slimtensors.codecs.bins import Bins
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24, is_24
from slimtensors.codecs.density import Density
from slimtensors.codecs.gaps import Gaps
from slimtensors.codecs.huffman import Huffman
from slimtensors.codecs.integer import Int
from slimtensors.codecs.plan import Plan, relative_error
from slimtensors.codecs.protocol import Codec
from slimtensors.errors import ConfigError, suggest
from slimtensors.tensor import Spec, Zeros, ceil_div, count_zeros

Effort = Literal["fast", "max"]
"""Fast decoding, or the smallest size."""


@dataclass(frozen=True)
class Choice:
    """The plan for a tensor, or None to store it unchanged, and a note for the user."""

    plan: Plan | None
    note: str = ""


Chooser = Callable[[str, Tensor], Choice | Plan | None]
"""Chooses the plan for a tensor in main memory by its name and content."""


@dataclass(frozen=True)
class TensorStats:
    """The statistics that a `StatsRule` uses; those of slices of a tensor can be combined."""

    spec: Spec
    zeros: Zeros
    is_24: Callable[[], bool]

    @classmethod
    def of(cls, x: Tensor) -> "TensorStats":
        """Return the statistics of a tensor in main memory."""
        return cls(Spec.of(x), count_zeros(x), lambda: is_24(x))


StatsRule = Callable[[TensorStats], Choice]
"""Chooses the plan for a tensor by its statistics alone."""


def dense(name: str, x: Tensor) -> Choice:
    """Store every tensor unchanged."""
    return Choice(None)


def sparse(name: str, x: Tensor) -> Choice:
    """Store nonzero values and their positions if that is smaller. Lossless."""
    return _choose_sparse(TensorStats.of(x))


def bitmask(name: str, x: Tensor) -> Choice:
    """Store nonzero values and a bit per position if that is smaller. Lossless."""
    return _choose_bitmask(TensorStats.of(x))


def bitmask24(name: str, x: Tensor) -> Choice:
    """Store half of the values of 2:4 sparse tensors, and others unchanged. Lossless."""
    if x.numel() and is_24(x):
        return Choice(Plan(Bitmask24()))
    return Choice(None, "not 2:4 sparse")


def lossless(name: str, x: Tensor) -> Choice:
    """Give frequent bytes short codes; use a mask for many zeros. Lossless."""
    return _choose_coded(TensorStats.of(x))


def lossless_max(name: str, x: Tensor) -> Choice:
    """Compress more than `lossless`, but slower. Lossless."""
    return _choose_coded(TensorStats.of(x), x)


def extreme(name: str, x: Tensor) -> Choice:
    """Round float matrices to 8-bit integers, and entropy-code these.

    Lossy; vectors, integers and tensors out of the range of float32 scales stay exact. Zeros stay
    zero. There is one scale per tensor, as in the dynamic quantization of `torch.ao`, or one per
    row if the error of a single scale is too large.
    """
    if x.dim() < 2 or not x.numel() or not x.is_floating_point() or x.element_size() == 1:
        return lossless_max(name, x)
    largest = float(x.abs().max())
    if largest != 0 and not _MIN_LARGEST <= largest <= _MAX_LARGEST:
        note = f"kept exact: its largest item, {largest:g}, is out of the range of float32 scales"
        return replace(lossless_max(name, x), note=note)
    rounding = Int(8)
    if (relative_error(Plan(rounding), x) or 0.0) > _MAX_ERROR:
        rounding = Int(8, per_row=True)
    q = lossless_max(name, rounding.encode(x)["q"]).plan
    return Choice(Plan(rounding, {"q": q} if q else {}))


_MAX_ERROR = 0.03
"""Relative RMS error above which one scale per tensor is replaced by one per row."""
_MIN_LARGEST, _MAX_LARGEST = 127 * torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Range of the largest item of a tensor: subnormal scales would be too coarse."""

_SAMPLE = 1 << 15
"""Items that are encoded to compare codecs."""
_PART_OVERHEAD = 64
"""Bytes of the description of a part."""
_SMALL = 2 << 10
"""Bytes below which codes rarely save more than their description takes."""


def _choose_coded(stats: TensorStats, x: Tensor | None = None) -> Choice:
    """Choose between entropy coders: fast ones, or, given the tensor itself, the smallest."""
    zeros = stats.zeros
    effort: Effort = "fast" if x is None else "max"
    # Measured on real weights. Byte codes cannot exploit that all bytes of a zero are zero;
    # for one-byte items, a mask is smaller only once a zero takes less than half a bit.
    min_share = 0.6 if stats.spec.dtype.itemsize == 1 else 1 / 32
    if zeros.zero < min_share * zeros.items:
        if x is None and stats.spec.nbytes < _SMALL:
            return Choice(None, _note_negative_zeros(zeros))
        codec = Huffman() if x is None else _choose_smallest(x)
        return Choice(Plan(codec), _note_negative_zeros(zeros))
    if _prefers_24(stats):
        return Choice(Plan(Bitmask24(), {"values": Plan(Huffman())}), _note_negative_zeros(zeros))
    values = Huffman() if x is None else _choose_smallest(Bitmask().encode(x)["values"])
    mask = choose_mask_plan(zeros.items - zeros.zero, zeros.items, effort)
    plan = Plan(Bitmask(), {**({"mask": mask} if mask else {}), "values": Plan(values)})
    return Choice(plan, _note_negative_zeros(zeros))


def _choose_smallest(x: Tensor) -> Codec:
    """Return the codec with the smallest output for a sample of `x`."""
    sample = _sample(x)

    def size(codec: Codec) -> int:
        return sum(part.nbytes + _PART_OVERHEAD for part in codec.encode(sample).values())

    candidates: tuple[Codec, ...] = (Huffman(), Bins())
    return min(candidates, key=size)


def _sample(x: Tensor) -> Tensor:
    """Return rows from the middle of `x`, or all of it if it is small."""
    if x.numel() <= _SAMPLE:
        return x
    rows = min(ceil_div(_SAMPLE * len(x), x.numel()), len(x))
    begin = (len(x) - rows) // 2
    return x[begin : begin + rows]


def _choose_sparse(stats: TensorStats) -> Choice:
    return Choice(Plan(Bitmask24())) if _prefers_24(stats) else _choose_bitmask(stats)


def _choose_bitmask(stats: TensorStats) -> Choice:
    note = _note_negative_zeros(stats.zeros)
    if _bitmask_bits(stats) >= 8 * stats.spec.nbytes:
        return Choice(None, note or "too few zeros for a bitmask")
    return Choice(Plan(Bitmask()), note)


STATS_RULES: Mapping[str, StatsRule] = {
    "sparse": _choose_sparse,
    "bitmask": _choose_bitmask,
    "lossless": _choose_coded,
}
"""Presets that depend on statistics alone, so that slices of a tensor can be encoded separately."""

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
    """Return the default preset of a dialect, the smallest lossless one."""
    return "sparse" if dialect == "compressed-tensors" else "lossless"


def is_lossy(preset: "str | Plan | Chooser") -> bool:
    """Return True if a preset or plan rounds; False also for functions, which may."""
    return preset.is_lossy if isinstance(preset, Plan) else preset == "extreme"


def find(preset: "str | Plan | Chooser") -> Chooser:
    """Return the chooser for the name of a preset, a plan for every tensor, or a function."""
    if isinstance(preset, Plan):
        plan = preset
        return lambda name, x: plan
    if callable(preset):
        return preset
    if not isinstance(preset, str):
        kind = type(preset).__name__
        raise ConfigError(f"a preset is a name, a Plan or a function, got {kind}")
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; {suggest(preset, PRESETS)}")
    return PRESETS[preset]


def _note_negative_zeros(zeros: Zeros) -> str:
    if zeros.negative <= zeros.items // 100:
        return ""
    return f"{zeros.negative} items are -0.0 and stored as values; x + 0.0 makes them zeros"


def _prefers_24(stats: TensorStats) -> bool:
    """Return True if a tensor is 2:4 sparse, and smaller in that form than with a bitmask."""
    zeros = stats.zeros
    as_24 = zeros.items * (stats.spec.dtype.itemsize * 4 + 2 / 3)
    return as_24 < _bitmask_bits(stats) and 2 * zeros.zero >= zeros.items and stats.is_24()


def _bitmask_bits(stats: TensorStats) -> int:
    """Return the size in bits of a tensor stored with a bitmask."""
    zeros = stats.zeros
    return (zeros.items - zeros.zero) * 8 * stats.spec.dtype.itemsize + zeros.items


_WORTHWHILE = 0.99
"""Relative size below which a prefix code is used."""
_GAPS_WORTHWHILE = 0.9935
"""Relative size below which gaps are used. They take three times as long to decode as bytes, and
save a percent more than estimated: byte codes would exceed the maximum length of Huffman codes."""
_STRUCTURE = 0.97
"""Relative size of `density`, at most: it models the rows and columns of real masks."""
_MASK_OVERHEAD = {"huffman": 200, "gaps": 420, "density": 170}
"""Bytes of the description of a mask codec, including its tables."""
_CHUNK_BYTES, _CHUNK_COST = 1 << 18, 104
"""Bytes that `density` adds to each chunk."""


def choose_mask_plan(ones: int, items: int, effort: Effort) -> Plan | None:
    """Return the plan for a mask of `items` bits with `ones` set, or None to store it unchanged.

    Sizes are estimated from the counts, for randomly distributed bits.
    """
    if items == 0:
        return None
    share = round(ones / items * 4096) / 4096 or ones / items  # few distinct values, for the cache
    plain = items / 8
    as_bytes = min(plain * _byte_code_bits(share), plain) + _MASK_OVERHEAD["huffman"]
    as_gaps = plain * _gap_code_bits(share) + _MASK_OVERHEAD["gaps"]
    as_classes = plain * _entropy([share, 1 - share]) * _STRUCTURE
    as_classes += _MASK_OVERHEAD["density"] + plain / _CHUNK_BYTES * _CHUNK_COST

    if effort == "max" and as_classes < min(plain, as_bytes, as_gaps):
        return Plan(Density())
    if as_gaps < _GAPS_WORTHWHILE * min(plain, as_bytes):
        return Plan(Gaps(), {"tokens": Plan(Huffman())})
    return Plan(Huffman()) if as_bytes < _WORTHWHILE * plain else None


@cache
def _byte_code_bits(share: float) -> float:
    """Return the bits per item of a mask with prefix-coded bytes."""
    kinds = [share**k * (1 - share) ** (8 - k) for k in range(9)]
    return _mean_code_length(kinds[byte.bit_count()] for byte in range(256)) / 8


@cache
def _gap_code_bits(share: float) -> float:
    """Return the bits per item of a mask with prefix-coded gaps."""
    longer = (1 - share) ** 255
    if share == 0 or longer == 1:
        return 0.0
    tokens = [share * (1 - share) ** zeros for zeros in range(255)]
    return share / (1 - longer) * _mean_code_length([*tokens, longer])


def _mean_code_length(shares: Iterable[float]) -> float:
    """Return the mean length of the optimal prefix code for symbols with these frequencies."""
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
