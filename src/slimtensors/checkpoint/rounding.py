"""Weights as 8-bit integers: how fine the blocks must be for the error to stay small."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimtensors import presets
from slimtensors.codecs import Huffman, IntBlocks
from slimtensors.plan import chain, norm
from slimtensors.presets import Choice, Chooser

TOLERATED = 0.007
"""Relative RMS error that a rounded tensor may have."""
_BLOCKS = (64, 32, 16, 8)
_PIECE = 1 << 16


def rounding(names: set[str]) -> Chooser:
    """Return a rule that rounds the tensors of these names, and keeps all others exact."""

    def choose(name: str, x: Tensor) -> Choice:
        if name not in names:
            return Choice(presets.lossless(name, x).plan)
        flat = x.reshape(-1).float()
        largest = _largest_in_blocks(flat)
        if not torch.isfinite(largest).all():
            return _exact(x, "holds NaN or infinity and is kept exact")
        for block in _BLOCKS:
            if _expected_error(flat, largest, block) < TOLERATED:
                return Choice(chain(IntBlocks(block), q=Huffman(), scale=Huffman()))
        return _exact(x, f"rounding it would cost an error above {TOLERATED}; it is kept exact")

    return choose


def _exact(x: Tensor, note: str) -> Choice:
    return Choice(presets.lossless("", x).plan, note)


def _largest_in_blocks(flat: Tensor) -> Tensor:
    """Return the largest magnitude in each of the smallest blocks, of which the last may be short.

    Piece by piece, because fresh memory for all of them would take longer than the work.
    """
    size = _BLOCKS[-1]

    def one(start: int) -> Tensor:
        piece = flat[start : start + _PIECE]
        return pad(piece, (0, -len(piece) % size)).view(-1, size).abs().amax(dim=1)

    return torch.cat([one(start) for start in range(0, len(flat), _PIECE)])


def _expected_error(flat: Tensor, largest: Tensor, block: int) -> float:
    """Return the relative error of rounding to steps that each block's largest item demands."""
    merged = block // _BLOCKS[-1]
    whole = largest[: len(largest) // merged * merged].view(-1, merged)
    size = norm(flat)
    return norm(whole.amax(dim=1)) / 127 * math.sqrt(block / 12) / size if size else 0.0
