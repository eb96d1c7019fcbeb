"""The range that loses least: a few outliers may be cut off if all others gain."""

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.affine import (
    Params,
    fake_quantize,
    global_scale_of_range,
    params_of_range,
)
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.observers.minmax import MovingAverage, Range, ends, over_matrix


class Mse:
    """Tries ranges from the full one downwards, and keeps the one with the smallest error.

    The error is the sum of |difference|^norm. Batches are averaged as `MovingAverage` does.
    """

    def __init__(
        self,
        args: QuantizationArgs,
        maxshrink: float = 0.2,
        grid: int = 100,
        norm: float = 2.4,
        averaging_constant: float = 0.01,
    ) -> None:
        if not 0 <= maxshrink < 1 or grid < 1 or norm <= 0:
            raise ConfigError(
                f"mse: 0 <= maxshrink < 1, grid >= 1 and norm > 0, got {maxshrink}, {grid}, {norm}"
            )
        self._args = args
        self._shares = [1 - step / grid for step in range(int(maxshrink * grid) + 1)]
        self._norm = norm
        self._average = MovingAverage(args, averaging_constant)

    def see(self, x: Tensor) -> None:
        """Find the best range for `x`, and follow it."""
        self._average.follow(self._best(x))

    def range(self) -> Range | None:
        """Return the average of the best ranges."""
        return self._average.range()

    def _best(self, x: Tensor) -> Range:
        full = low, high = ends(x)
        least = torch.full_like(low, torch.inf, dtype=torch.float32)
        for share in self._shares:
            tried = full[0] * share, full[1] * share
            error = (
                (rounded(x, tried, full, self._args) - x).abs_().float().pow_(self._norm).sum(-1)
            )
            better = error < least
            least = torch.where(better, error, least)
            low, high = torch.where(better, tried[0], low), torch.where(better, tried[1], high)
        return low, high


def rounded(x: Tensor, tried: Range, full: Range, args: QuantizationArgs) -> Tensor:
    """Return gathered numbers after quantization over a range that is not the `full` one."""
    whole = None
    if args.strategy is QuantizationStrategy.TENSOR_GROUP:
        whole = global_scale_of_range(*over_matrix(full))
    params = params_of_range(*tried, args, global_scale=whole)
    shares = Params(
        params.scale.unsqueeze(-1),
        None if params.zero_point is None else params.zero_point.unsqueeze(-1),
        None if whole is None else whole.unsqueeze(-1),
    )
    return fake_quantize(x, shares, _plain(args))


def _plain(args: QuantizationArgs) -> QuantizationArgs:
    """Return arguments for numbers that are gathered, whose scales spread over them as they are."""
    return QuantizationArgs(
        args.num_bits,
        type=args.type,
        symmetric=args.symmetric,
        strategy=QuantizationStrategy.CHANNEL,
        scale_dtype=args.scale_dtype,
        zp_dtype=args.zp_dtype,
    )
