"""How the numbers of a tensor are spread."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SAMPLE = 1 << 16
"""Items that are looked at; more would not change the picture."""
_WIDTH = 4.0
"""Standard deviations that are shown on either side; what lies outside counts in the last bins."""

_REAL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SMALL = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_WHOLE = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}


@dataclass(frozen=True)
class Histogram:
    """How many of the sampled items lie in each of the bins, all as wide."""

    low: float
    high: float
    counts: tuple[int, ...]


def sample(x: Tensor) -> Tensor | None:
    """Return some items of `x`, always the same places, as float64; none if they are no numbers."""
    if x.is_quantized:
        x = x.dequantize()
    if x.dtype not in _REAL | _SMALL | _WHOLE or not x.numel():
        return None
    flat = x.reshape(-1)
    if len(flat) > _SAMPLE:
        random = torch.Generator().manual_seed(0)
        at = torch.randint(len(flat), (_SAMPLE,), generator=random)
        # Small floats cannot be indexed; their bytes can.
        flat = flat.view(torch.uint8)[at].view(x.dtype) if x.dtype in _SMALL else flat[at]
    return flat.double()


def histogram(values: Tensor | None, bins: int) -> Histogram | None:
    """Count values that are finite and not zero; none if there are too few to make a picture."""
    if values is None:
        return None
    kept = values[torch.isfinite(values) & (values != 0)].numpy()
    if len(kept) < 2:
        return None
    middle, spread = float(kept.mean()), float(kept.std())
    low = max(float(kept.min()), middle - _WIDTH * spread)
    high = min(float(kept.max()), middle + _WIDTH * spread)
    if not np.isfinite(high - low) or not high - low > abs(middle) * 1e-12:
        return None
    counts, _ = np.histogram(kept.clip(low, high), bins, (low, high))
    return Histogram(low, high, tuple(counts.tolist()))
