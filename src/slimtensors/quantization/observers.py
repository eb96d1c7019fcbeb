"""Observers: from observed values to the range that codes cover.

An observer receives values whose last dimension shares a scale, and estimates their (min, max).
`observe_weight` and `ActivationObserver` arrange weights and activations that way.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, StatusError, suggest
from slimtensors.quantization.affine import (
    Params,
    check_weight,
    compute_global_scale,
    compute_params,
    fake_quantize,
    find_params,
    split_blocks,
)
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy

__all__ = ["OBSERVERS", "ActivationObserver", "Observer", "Range", "observe_weight"]

Range: TypeAlias = tuple[Tensor, Tensor]
"""Min and max of the values that share a scale."""


class Observer(Protocol):
    """Estimates a range from batches of values `[*shape of the scale, values]`."""

    def observe(self, x: Tensor) -> None:
        """Update the estimate with a batch."""
        ...

    def range(self) -> Range | None:
        """Return the estimated (min, max), or None before any data."""
        ...


def observe_weight(
    weight: Tensor, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> Params:
    """Return the params of a weight, found by the observer that `args` name.

    `global_scale` is that of several matrices, if this one shares it.
    """
    if _observer_name(args) in _EXACT_FOR_WEIGHTS:
        return find_params(weight, args, global_scale=global_scale)
    check_weight(weight, args)
    observer = _make_observer(args)
    observer.observe(_arrange_weight(weight, args))
    return _compute_static_params(observer.range(), args, global_scale)


class ActivationObserver:
    """Observes the activations of a layer."""

    def __init__(self, args: QuantizationArgs) -> None:
        self.args = args
        self._observer = _make_observer(args)

    def observe(self, x: Tensor) -> None:
        """Update the estimate with activations; empty tensors are ignored."""
        if x.numel():
            self._observer.observe(_arrange_activations(x.detach(), self.args))

    def range(self) -> Range | None:
        """Return the estimated (min, max), or None before any data."""
        return self._observer.range()

    def params(self) -> Params:
        """Return the params of the observed range; raise `StatusError` before any data."""
        return compute_activation_params(self.range(), self.args)


def compute_activation_params(observed: Range | None, args: QuantizationArgs) -> Params:
    """Return the static params of activations; only the global scale if `dynamic` is "local"."""
    if args.dynamic == "local" and observed is not None:
        global_scale = compute_global_scale(*observed)
        return Params(torch.ones_like(global_scale), global_scale=global_scale)
    return _compute_static_params(observed, args)


class MinMax:
    """Min and max of all data."""

    def __init__(self, args: QuantizationArgs) -> None:
        self._range: Range | None = None

    def observe(self, x: Tensor) -> None:
        """Extend the range to include `x`."""
        low, high = _find_range(x)
        if self._range is not None:
            low = torch.minimum(low, self._range[0])
            high = torch.maximum(high, self._range[1])
        self._range = low, high

    def range(self) -> Range | None:
        """Return the range of all data."""
        return self._range


class MovingAverage:
    """Exponential moving average of each batch's min and max, robust to a single outlier."""

    def __init__(self, args: QuantizationArgs, averaging_constant: float = 0.01) -> None:
        if not 0 < averaging_constant <= 1:
            raise ConfigError(f"averaging_constant must be in (0, 1], got {averaging_constant}")
        self._constant = averaging_constant
        self._range: Range | None = None

    def observe(self, x: Tensor) -> None:
        """Update the average with the range of `x`."""
        self.update(_find_range(x))

    def update(self, batch: Range) -> None:
        """Update the average with the range of a batch."""
        if self._range is not None:
            low, high = self._range
            batch = low.lerp(batch[0], self._constant), high.lerp(batch[1], self._constant)
        self._range = batch

    def range(self) -> Range | None:
        """Return the average."""
        return self._range


class Mse:
    """Grid search for the range with the smallest quantization error.

    The error is the sum of |difference|^norm. Batches are averaged as in `MovingAverage`.
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
                "mse needs 0 <= maxshrink < 1, grid >= 1 and norm > 0, "
                f"got {maxshrink}, {grid}, {norm}"
            )
        self._args = args
        self._factors = [1 - step / grid for step in range(int(maxshrink * grid) + 1)]
        self._norm = norm
        self._average = MovingAverage(args, averaging_constant)

    def observe(self, x: Tensor) -> None:
        """Find the best range for `x` and update the average with it."""
        full = _find_range(x)

        def error(quantized: Tensor) -> Tensor:
            return (quantized - x).abs_().float().pow_(self._norm).sum(-1)

        self._average.update(_search_range(x, full, self._factors, error, self._args))

    def range(self) -> Range | None:
        """Return the average of the best ranges."""
        return self._average.range()


class Percentile:
    """Range that covers an exact percentage of each batch, averaged over batches."""

    def __init__(self, args: QuantizationArgs, percentile: float = 99.99) -> None:
        if not 50 < percentile <= 100:
            raise ConfigError(f"percentile must be in (50, 100], got {percentile}")
        self._fraction = percentile / 100
        self._batches = 0
        self._mean: Range | None = None

    def observe(self, x: Tensor) -> None:
        """Update the mean with the range of `x`."""
        count = x.shape[-1]
        covered = max(1, min(count, round(self._fraction * count)))
        low = torch.kthvalue(x, count - covered + 1, dim=-1).values
        high = torch.kthvalue(x, covered, dim=-1).values
        self._batches += 1
        if self._mean is not None:
            weight = 1 / self._batches
            low, high = self._mean[0].lerp(low, weight), self._mean[1].lerp(high, weight)
        self._mean = low, high

    def range(self) -> Range | None:
        """Return the mean over batches."""
        return self._mean


_MAX_COUNTS = 1 << 26
"""Limit on the counts of one histogram."""


class Histogram:
    """Search over a histogram of all data for the range with the smallest squared error.

    Bins are symmetric around zero. A value beyond the last bin doubles their width: pairs of bins
    are merged.
    """

    def __init__(self, args: QuantizationArgs, bins: int = 2048, steps: int = 64) -> None:
        if bins < 4 or bins % 4 or steps < 1:
            raise ConfigError(
                f"histogram needs a multiple of 4 bins and steps >= 1, got {bins} and {steps}"
            )
        self._args, self._bins = args, bins
        self._factors = [step / steps for step in range(steps, 0, -1)]
        self._full = MinMax(args)
        self._counts: Tensor | None = None
        self._limit = 0.0

    def observe(self, x: Tensor) -> None:
        """Count the values of `x`."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if not torch.isfinite(rows).all():
            raise ConfigError(_NOT_FINITE)
        self._full.observe(x)
        counts = self._extend_counts(len(rows), float(rows.abs().amax()), rows.device)
        width = 2 * self._limit / self._bins
        bins = ((rows + self._limit) / width).long().clamp_(0, self._bins - 1)
        self._counts = counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=counts.dtype))

    def range(self) -> Range | None:
        """Return the range with the smallest expected error."""
        observed = self._full.range()
        if observed is None or self._counts is None:
            return None
        full = observed[0].float(), observed[1].float()
        shape = full[0].shape
        width = 2 * self._limit / self._bins
        centers = torch.arange(self._bins, device=full[0].device) * width + width / 2 - self._limit
        x = centers.expand(*shape, -1)
        counts = self._counts.view(*shape, -1)

        def error(quantized: Tensor) -> Tensor:
            return ((quantized - x) ** 2 * counts).sum(-1)

        low, high = _search_range(x, full, self._factors, error, self._args)
        return low.to(observed[0].dtype), high.to(observed[1].dtype)

    def _extend_counts(self, rows: int, largest: float, device: torch.device) -> Tensor:
        """Return the counts, with bins merged until the largest value is inside."""
        if self._counts is None:
            if rows * self._bins > _MAX_COUNTS:
                raise ConfigError(
                    f"histogram does not support {rows} scales; use observer mse or percentile"
                )
            self._limit = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
            return torch.zeros(rows, self._bins, device=device)
        counts = self._counts
        while largest > self._limit:
            pairs = counts.view(rows, -1, 2).sum(-1)
            counts = torch.zeros_like(counts)
            quarter = self._bins // 4
            counts[:, quarter : 3 * quarter] = pairs
            self._limit *= 2
        return counts


OBSERVERS: Mapping[str, Callable[..., Observer]] = {
    "minmax": MinMax,
    "static_minmax": MinMax,
    "memoryless_minmax": MinMax,
    "moving_average": MovingAverage,
    "mse": Mse,
    "percentile": Percentile,
    "histogram": Histogram,
}
"""Observers by the name in `QuantizationArgs.observer`; the default is `minmax`."""

_EXACT_FOR_WEIGHTS = {"minmax", "static_minmax", "memoryless_minmax", "moving_average"}
"""Observers whose range of a single batch is its min and max."""

_NOT_FINITE = "NaN or infinity was observed, which cannot be quantized; leave it unquantized"


def _observer_name(args: QuantizationArgs) -> str:
    name = args.observer or "minmax"
    if name not in OBSERVERS:
        raise ConfigError(f"unknown observer {name!r}; {suggest(name, OBSERVERS)}")
    return name


def _make_observer(args: QuantizationArgs) -> Observer:
    name = _observer_name(args)
    try:
        return OBSERVERS[name](args, **args.observer_kwargs)
    except TypeError as error:
        raise ConfigError(f"observer {name!r}: {error}") from error


def _compute_static_params(
    observed: Range | None, args: QuantizationArgs, global_scale: Tensor | None = None
) -> Params:
    if observed is None:
        raise StatusError("no data was observed in calibration; run the model on data, then freeze")
    low, high = observed
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ConfigError(_NOT_FINITE)
    if args.strategy is QuantizationStrategy.TENSOR_GROUP and global_scale is None:
        global_scale = compute_global_scale(low, high)
    if low.dim() == 1:  # compressed-tensors has no dimension here, and so rounds in float32
        low, high = low.reshape(()), high.reshape(())
    return compute_params(low, high, args, global_scale=global_scale)


def _find_range(x: Tensor) -> Range:
    """Return min and max along the last dimension."""
    low, high = torch.aminmax(x, dim=-1)
    return low, high


def _search_range(
    x: Tensor,
    full: Range,
    factors: Iterable[float],
    error: Callable[[Tensor], Tensor],
    args: QuantizationArgs,
) -> Range:
    """Return the range among `full` times each factor whose quantized values have least error."""
    low, high = full
    least = torch.full_like(low, torch.inf, dtype=torch.float32)
    for factor in factors:
        candidate = full[0] * factor, full[1] * factor
        found = error(_fake_quantize(x, candidate, full, args))
        better = found < least
        least = torch.where(better, found, least)
        low = torch.where(better, candidate[0], low)
        high = torch.where(better, candidate[1], high)
    return low, high


def _fake_quantize(x: Tensor, covered: Range, full: Range, args: QuantizationArgs) -> Tensor:
    """Return arranged values after quantization over the `covered` part of the `full` range."""
    global_scale = None
    if args.strategy is QuantizationStrategy.TENSOR_GROUP:
        global_scale = compute_global_scale(*full)
    params = compute_params(*covered, args, global_scale=global_scale)
    broadcast = Params(
        params.scale.unsqueeze(-1),
        None if params.zero_point is None else params.zero_point.unsqueeze(-1),
        None if global_scale is None else global_scale.unsqueeze(-1),
    )
    by_row = QuantizationArgs(
        args.num_bits,
        type=args.type,
        symmetric=args.symmetric,
        strategy=QuantizationStrategy.CHANNEL,
        scale_dtype=args.scale_dtype,
        zp_dtype=args.zp_dtype,
    )
    return fake_quantize(x, broadcast, by_row)


def _arrange_weight(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Return a weight as `[*shape of its scale, values]`; blocks are padded with zeros."""
    experts = weight.shape[:-2]
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            return weight.reshape(*experts, 1, 1, -1) if experts else weight.reshape(1, -1)
        case QuantizationStrategy.CHANNEL:
            return weight.unsqueeze(-2)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return weight.reshape(*weight.shape[:-1], -1, args.group_size or 1)
        case QuantizationStrategy.BLOCK:
            blocks = split_blocks(weight, *(args.block_structure or (1, 1)))
            return blocks.transpose(-2, -3).flatten(-2)
    raise ConfigError(f"strategy {args.strategy} is not supported for weights")


def _arrange_activations(x: Tensor, args: QuantizationArgs) -> Tensor:
    """Return activations as `[*shape of their scale, values]`.

    They are `[..., features]`, or `[batch, heads, tokens, features]` for scales per head.
    """
    match args.strategy:
        case QuantizationStrategy.TENSOR | QuantizationStrategy.TENSOR_GROUP:
            return x.reshape(1, -1)
        case QuantizationStrategy.ATTN_HEAD:
            return x.transpose(0, 1).reshape(x.shape[1], 1, 1, -1)
        case QuantizationStrategy.TOKEN:
            return x.unsqueeze(-2)
        case QuantizationStrategy.GROUP:
            return x.reshape(*x.shape[:-1], -1, args.group_size or 1)
    raise ConfigError(f"strategy {args.strategy} is not supported for activations")
