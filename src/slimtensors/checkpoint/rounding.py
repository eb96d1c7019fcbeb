"""Weights as 8-bit integers: how fine the blocks must be for the error to stay small."""

import math

from torch import Tensor

from slimtensors import presets
from slimtensors.codecs import Huffman, IntBlocks
from slimtensors.codecs.int_blocks import largest_in_blocks
from slimtensors.distance import norm
from slimtensors.plan import chain
from slimtensors.presets import Choice, Chooser

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
    return norm(largest_in_blocks(x, block)) / 127 * math.sqrt(block / 12)
