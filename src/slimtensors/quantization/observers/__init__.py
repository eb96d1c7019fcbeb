"""Observers: from the numbers that pass by to the range that codes should span."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, StatusError, nearest
from slimtensors.quantization.affine import (
    Params,
    check_weight,
    find_params,
    global_scale_of_range,
    params_of_range,
)
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.observers.gather import gather_activations, gather_weight
from slimtensors.quantization.observers.histogram import Histogram
from slimtensors.quantization.observers.minmax import MinMax, MovingAverage, Range, over_matrix
from slimtensors.quantization.observers.mse import Mse
from slimtensors.quantization.observers.percentile import Percentile

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
