"""Reduced precision of training states: mantissa bits, steps, int8 blocks."""

import hashlib
import math

import torch
from torch import Tensor

from slimtensors.codecs import Huffman, IntBlocks, presets
from slimtensors.codecs.integer import find_largest
from slimtensors.codecs.plan import chain
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import norm

MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""The dtypes that can be shortened, and the bits of their mantissas."""
_WORDS = {4: torch.int32, 2: torch.int16}

_SHORT = torch.bfloat16
"""Holds the exponents of `float32` and 7 bits of its mantissa."""


def seed_of(*key: object) -> int:
    """Return a seed that is the same for the same key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little") >> 1


def seeded_noise(items: int, seed: int) -> Tensor:
    """Return random 32-bit integers, one for each place."""
    x = torch.arange(items, dtype=torch.int32).add_(seed)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def round_mantissa(x: Tensor, bits: int, seed: int | None) -> Tensor:
    """Round floats to so many bits of mantissa: at random, or to nearest without a seed.

    `float32` is returned as `bfloat16` where that holds all that is left.
    """
    spare = MANTISSA[x.dtype] - bits
    if spare <= 0:
        return x
    words = x.contiguous().view(_WORDS[x.element_size()])
    if seed is None:
        # To even, as hardware does: half a step less one, and the last bit that stays.
        extra = ((words >> spare) & 1) + ((1 << (spare - 1)) - 1)
    else:
        extra = seeded_noise(x.numel(), seed).view(x.shape) >> (32 - spare)
        extra = (extra & ((1 << spare) - 1)).to(words.dtype)
    return ((words + extra) >> spare << spare).view(x.dtype).to(short_dtype(x.dtype, bits))


def short_dtype(dtype: torch.dtype, bits: int | None) -> torch.dtype:
    """Return the dtype that holds all that is left of another one with so many bits."""
    is_enough = bits is not None and bits <= MANTISSA[_SHORT]
    return _SHORT if dtype is torch.float32 and is_enough else dtype


def round_to_steps(x: Tensor, step: Tensor | float, seed: int | None) -> Tensor | None:
    """Return floats as integers, multiples of `step`, in the narrowest dtype; none if too large."""
    q = x / step
    if seed is None:
        q.round_()
    else:
        chance = (seeded_noise(x.numel(), seed).view(x.shape) >> 8).bitwise_and_(0xFFFFFF)
        q.add_(chance.float().mul_(2**-24)).floor_()
    largest = float(q.abs().amax())
    for dtype in (torch.int8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max // 2:
            return q.to(dtype)
    return None


def step_multiples(q: Tensor, step: Tensor | float) -> Tensor:
    """Undo `in_steps`. One operation at a time: all machines then round alike."""
    if q.dtype.is_floating_point or q.dtype.is_complex:
        raise CorruptFileError(f"multiples of a step are integers, not {q.dtype}")
    return q.float() * step


TOLERATED = 0.007
"""Relative RMS error that a rounded tensor may have."""
_BLOCKS = (64, 32, 16, 8)


def rounding(names: set[str]) -> Chooser:
    """Return a rule that rounds the tensors of these names, and keeps all others exact."""

    def choose(name: str, x: Tensor) -> Choice:
        if name not in names:
            return Choice(presets.lossless(name, x).plan)
        size = norm(x)
        if not math.isfinite(size):
            return _exact(x, "holds NaN or infinity and is kept exact")
        for block in _BLOCKS:
            if not size or _expected_error(x, block) < TOLERATED * size:
                return Choice(chain(IntBlocks(block), q=Huffman(), scale=Huffman()))
        return _exact(x, f"rounding it would cost an error above {TOLERATED}; it is kept exact")

    return choose


def _exact(x: Tensor, note: str) -> Choice:
    return Choice(presets.lossless("", x).plan, note)


def _expected_error(x: Tensor, block: int) -> float:
    """Return the norm of the error of rounding to steps that each block's largest item demands."""
    return norm(find_largest(x, block)) / 127 * math.sqrt(block / 12)
