"""A range that leaves out the most extreme numbers."""

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.observers.minmax import Range


class Percentile:
    """Spans the given percentage of each batch, exactly; batches are averaged."""

    def __init__(self, args: QuantizationArgs, percentile: float = 99.99) -> None:
        if not 50 < percentile <= 100:
            raise ConfigError(f"percentile is in (50, 100], got {percentile}")
        self._share = percentile / 100
        self._batches = 0
        self._mean: Range | None = None

    def see(self, x: Tensor) -> None:
        """Average in the range of one more batch."""
        count = x.shape[-1]
        kept = max(1, min(count, round(self._share * count)))
        low = torch.kthvalue(x, count - kept + 1, dim=-1).values
        high = torch.kthvalue(x, kept, dim=-1).values
        self._batches += 1
        if self._mean is not None:
            share = 1 / self._batches
            low, high = self._mean[0].lerp(low, share), self._mean[1].lerp(high, share)
        self._mean = low, high

    def range(self) -> Range | None:
        """Return the mean of the batches."""
        return self._mean
