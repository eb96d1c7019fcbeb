"""The least and the greatest numbers of a weight."""

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.spec import Each, as_bytes, dtype_name, serially

_BY_CORE = (torch.float32, torch.float16, torch.bfloat16)

_PIECE = 1 << 20
"""Items per piece of work: enough to be worth a thread."""


def run_ranges(x: Tensor, columns: int, each: Each = serially) -> tuple[Tensor, Tensor]:
    """Return least and greatest of every `columns` neighbours of a row; the last may be fewer.

    Where there is infinity or NaN, one of the two is not finite.
    """
    row = x.shape[-1]
    shape = (*x.shape[:-1], -(-row // columns))
    if x.device.type != "cpu" or x.dtype not in _BY_CORE:
        runs = [part.aminmax(dim=-1) for part in torch.split(x, columns, -1)]
        return torch.stack([r.min for r in runs], -1), torch.stack([r.max for r in runs], -1)
    low, high = x.new_empty(shape), x.new_empty(shape)
    items, lows, highs = as_bytes(x), as_bytes(low), as_bytes(high)
    step = max(1, _PIECE // row)
    rows = x.numel() // row

    def work(i: int) -> None:
        def cut(of: Tensor) -> Tensor:
            size = of.numel() // rows
            return of[i * step * size : (i + 1) * step * size]

        _core.find_ranges(cut(items), dtype_name(x.dtype), row, columns, cut(lows), cut(highs))

    each(work, -(-rows // step))
    return low, high
