"""The least and greatest number: of all that was seen, or their moving average."""

from typing import TypeAlias

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.args import QuantizationArgs

Range: TypeAlias = tuple[Tensor, Tensor]
"""The least and the greatest number of everything that shares a scale."""


def ends(x: Tensor) -> Range:
    """Return the least and greatest number along the last dimension."""
    low, high = torch.aminmax(x, dim=-1)
    return low, high


def over_matrix(seen: Range) -> Range:
    """Return the ends of a whole matrix from those of its parts, or of each in a stack of them."""
    low, high = seen
    over = (-1, -2) if low.dim() == 3 else tuple(range(low.dim()))
    return low.amin(over, keepdim=low.dim() == 3), high.amax(over, keepdim=low.dim() == 3)


class MinMax:
    """Spans everything that was ever seen."""

    def __init__(self, args: QuantizationArgs) -> None:
        self._seen: Range | None = None

    def see(self, x: Tensor) -> None:
        """Widen the range to hold `x`."""
        low, high = ends(x)
        if self._seen is not None:
            low = torch.minimum(low, self._seen[0])
            high = torch.maximum(high, self._seen[1])
        self._seen = low, high

    def range(self) -> Range | None:
        """Return the widest range."""
        return self._seen


class MovingAverage:
    """Follows the ends of each batch slowly, so that one outlier does not decide."""

    def __init__(self, args: QuantizationArgs, averaging_constant: float = 0.01) -> None:
        if not 0 < averaging_constant <= 1:
            raise ConfigError(f"averaging_constant is in (0, 1], got {averaging_constant}")
        self._share = averaging_constant
        self._seen: Range | None = None

    def see(self, x: Tensor) -> None:
        """Move a little towards the ends of `x`."""
        self.follow(ends(x))

    def follow(self, seen: Range) -> None:
        """Move a little towards a range."""
        if self._seen is not None:
            low, high = self._seen
            seen = low.lerp(seen[0], self._share), high.lerp(seen[1], self._share)
        self._seen = seen

    def range(self) -> Range | None:
        """Return the average."""
        return self._seen
