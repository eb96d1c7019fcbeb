"""The range that loses least over everything that was seen, from a running histogram."""

import math

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.observers.minmax import MinMax, Range
from slimtensors.quantization.observers.mse import rounded

_MOST = 1 << 26
"""Counts that may be kept."""


class Histogram:
    """Counts numbers in bins around zero; when one is too large, pairs of bins become one.

    Of the ranges from the full one down to a part of it, the one with the smallest squared error
    over all counts is taken.
    """

    def __init__(self, args: QuantizationArgs, bins: int = 2048, steps: int = 64) -> None:
        if bins < 4 or bins % 4 or steps < 1:
            raise ConfigError(f"histogram: bins {bins} is no multiple of 4, or steps {steps} < 1")
        self._args, self._bins, self._steps = args, bins, steps
        self._ends = MinMax(args)
        self._counts: Tensor | None = None
        self._top = 0.0

    def see(self, x: Tensor) -> None:
        """Count the numbers of `x`."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if not torch.isfinite(rows).all():
            raise ConfigError("NaN or infinity was seen, which no code can say")
        self._ends.see(x)
        counts = self._widened(len(rows), float(rows.abs().amax()), rows.device)
        width = 2 * self._top / self._bins
        place = ((rows + self._top) / width).long().clamp_(0, self._bins - 1)
        ones = torch.ones_like(place, dtype=counts.dtype)
        self._counts = counts.scatter_add_(1, place, ones)

    def range(self) -> Range | None:
        """Return the range with the smallest expected error."""
        full = self._ends.range()
        if full is None or self._counts is None:
            return None
        shape = full[0].shape
        width = 2 * self._top / self._bins
        centers = torch.arange(self._bins, device=full[0].device) * width + width / 2 - self._top
        x = centers.expand(*shape, -1)
        weights = self._counts.view(*shape, -1)
        low, high = wide = full[0].float(), full[1].float()
        least = torch.full_like(low, torch.inf)
        for step in range(self._steps, 0, -1):
            tried = wide[0] * (step / self._steps), wide[1] * (step / self._steps)
            error = ((rounded(x, tried, wide, self._args) - x) ** 2 * weights).sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            low, high = torch.where(better, tried[0], low), torch.where(better, tried[1], high)
        return low.to(full[0].dtype), high.to(full[1].dtype)

    def _widened(self, rows: int, largest: float, device: torch.device) -> Tensor:
        """Return the counts, after merging bins until the largest number has its place."""
        if self._counts is None:
            if rows * self._bins > _MOST:
                raise ConfigError(f"histogram: {rows} scales are too many; take mse or percentile")
            self._top = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
            return torch.zeros(rows, self._bins, device=device)
        counts = self._counts
        while largest > self._top:
            pairs = counts.view(rows, -1, 2).sum(-1)
            counts = torch.zeros_like(counts)
            quarter = self._bins // 4
            counts[:, quarter : 3 * quarter] = pairs
            self._top *= 2
        return counts
