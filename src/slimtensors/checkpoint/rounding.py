"""Weights as 8-bit integers: how fine the blocks must be for the error to stay small."""

import math

import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.codecs import Huffman, IntBlocks
from slimtensors.plan import chain, norm
from slimtensors.presets import Choice, Chooser

TOLERATED = 0.007
"""Relative RMS error that a rounded tensor may have."""
_BLOCKS = (64, 32, 16, 8)


def rounding(names: set[str]) -> Chooser:
    """Return a rule that rounds the tensors of these names, and keeps all others exact."""

    def choose(name: str, x: Tensor) -> Choice:
        if name not in names:
            return Choice(presets.lossless(name, x).plan)
        if not torch.isfinite(x.abs().amax()):
            return _exact(x, "holds NaN or infinity and is kept exact")
        for block in _BLOCKS:
            if _expected_error(x, block) < TOLERATED:
                return Choice(chain(IntBlocks(block), q=Huffman(), scale=Huffman()))
        return _exact(x, f"rounding it would cost an error above {TOLERATED}; it is kept exact")

    return choose


def _exact(x: Tensor, note: str) -> Choice:
    return Choice(presets.lossless("", x).plan, note)


def _expected_error(x: Tensor, block: int) -> float:
    """Return the relative error of rounding to steps that each block's largest item demands."""
    flat = x.reshape(-1).float()
    rows = flat[: len(flat) // block * block].view(-1, block)
    largest = rows.abs().amax(dim=1)
    size = norm(flat)
    return norm(largest) / 127 * math.sqrt(block / 12) / size if size else 0.0
