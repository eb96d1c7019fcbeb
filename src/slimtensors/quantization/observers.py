"""Observers: from observed values to the range that codes should span."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, StatusError, nearest
from slimtensors.quantization.affine import (
    Params,
    check_weight,
    fake_quantize,
    find_params,
    global_scale_of_range,
    params_of_range,
)
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.tensor import ceil_div


def gather_weight(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Return a weight as `[*shape of its scale, numbers]`; blocks are filled up with zeros."""
    experts = weight.shape[:-2]
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            return weight.reshape(*experts, 1, 1, -1) if experts else weight.reshape(1, -1)
        case QuantizationStrategy.CHANNEL:
            return weight.unsqueeze(-2)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return weight.reshape(*weight.shape[:-1], -1, args.group_size or 1)
        case QuantizationStrategy.BLOCK:
            return _blocks(weight, args)
    raise ConfigError(f"weights have no scales per {args.strategy}")


def gather_activations(x: Tensor, args: QuantizationArgs) -> Tensor:
    """Return activations `[..., features]`, for heads `[batch, heads, tokens, features]`."""
    match args.strategy:
        case QuantizationStrategy.TENSOR | QuantizationStrategy.TENSOR_GROUP:
            return x.reshape(1, -1)
        case QuantizationStrategy.ATTN_HEAD:
            return x.transpose(0, 1).reshape(x.shape[1], 1, 1, -1)
        case QuantizationStrategy.TOKEN:
            return x.unsqueeze(-2)
        case QuantizationStrategy.GROUP:
            return x.reshape(*x.shape[:-1], -1, args.group_size or 1)
    raise ConfigError(f"activations have no scales per {args.strategy}")


def _blocks(weight: Tensor, args: QuantizationArgs) -> Tensor:
    height, width = args.block_structure or (1, 1)
    *experts, rows, columns = weight.shape
    down, across = ceil_div(rows, height), ceil_div(columns, width)
    whole = weight.new_zeros((*experts, down * height, across * width))
    whole[..., :rows, :columns] = weight
    cut = whole.reshape(*experts, down, height, across, width)
    return cut.transpose(-2, -3).flatten(-2)


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


__all__ = ["OBSERVERS", "ActivationObserver", "Observer", "Range", "observe_weight"]


class Observer(Protocol):
    """Watches numbers; those that share a scale lie along the last dimension."""

    def see(self, x: Tensor) -> None:
        """Take note of some numbers."""
        ...

    def range(self) -> Range | None:
        """Return the least and greatest number to tell apart; none if nothing was seen."""
        ...


OBSERVERS: Mapping[str, Callable[..., Observer]] = {
    "minmax": MinMax,
    "static_minmax": MinMax,
    "memoryless_minmax": MinMax,
    "moving_average": MovingAverage,
    "mse": Mse,
    "percentile": Percentile,
    "histogram": Histogram,
}
"""By the name that `QuantizationArgs.observer` gives; `minmax` if it gives none."""


def observe_weight(weight: Tensor, args: QuantizationArgs) -> Params:
    """Return the params of a weight, by the observer that `args` name."""
    if _name(args) in _PLAIN:
        return find_params(weight, args)
    check_weight(weight, args)
    observer = _make(args)
    observer.see(gather_weight(weight, args))
    return _params(observer.range(), args)


class ActivationObserver:
    """Watches what flows in or out of a layer."""

    def __init__(self, args: QuantizationArgs) -> None:
        self.args = args
        self._observer = _make(args)

    def see(self, x: Tensor) -> None:
        """Take note of activations; of none, if there are none."""
        if x.numel():
            self._observer.see(gather_activations(x.detach(), self.args))

    def range(self) -> Range | None:
        """Return what was seen so far, or none."""
        return self._observer.range()

    def params(self) -> Params:
        """Return params for what was seen; raise `StatusError` if that is nothing."""
        return activation_params(self.range(), self.args)


def activation_params(seen: Range | None, args: QuantizationArgs) -> Params:
    """Return the static params of activations: all of them, or the global scale if local."""
    if args.dynamic == "local" and seen is not None:
        whole = global_scale_of_range(*over_matrix(seen))
        return Params(torch.ones_like(whole), global_scale=whole)
    return _params(seen, args)


def _params(seen: Range | None, args: QuantizationArgs) -> Params:
    if seen is None:
        raise StatusError("nothing was seen in calibration; run the model on data, then freeze")
    low, high = seen
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ConfigError("NaN or infinity was seen, which no code can say; leave it unquantized")
    whole = None
    if args.strategy is QuantizationStrategy.TENSOR_GROUP:
        whole = global_scale_of_range(*over_matrix(seen))
    if low.dim() == 1:  # compressed-tensors has no dimension here, and so rounds in float32
        low, high = low.reshape(()), high.reshape(())
    return params_of_range(low, high, args, global_scale=whole)


_PLAIN = {"minmax", "static_minmax", "memoryless_minmax", "moving_average"}
"""Observers that see nothing but the least and greatest number in a weight."""


def _name(args: QuantizationArgs) -> str:
    name = args.observer or "minmax"
    if name not in OBSERVERS:
        raise ConfigError(f"there is no observer {name!r}; {nearest(name, OBSERVERS)}")
    return name


def _make(args: QuantizationArgs) -> Observer:
    options: Mapping[str, Any] = args.observer_kwargs
    kind = OBSERVERS[_name(args)]
    try:
        return kind(args, **options)
    except TypeError as error:
        raise ConfigError(f"observer {_name(args)!r}: {error}") from error
