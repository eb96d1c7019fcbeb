"""Metrics of a training loop: scalars of any library, as floats."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from slimtensors.errors import ConfigError


def check_metrics(metrics: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a metric that is not a scalar; do not wait for a device."""
    for name, value in metrics.items():
        is_deferred = isinstance(value, Tensor) and not value.is_cpu
        if not _is_scalar(value) or not (is_deferred or to_number(value) is not None):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            kind = type(value).__name__
            raise ConfigError(f"metric {name!r} must be a number, got {kind}{shape}")


def read_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return all metrics that are scalars as floats."""
    numbers = {str(name): to_number(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def to_number(value: object) -> float | None:
    """Return a scalar as a float: a number, a tensor or an array of one item; else None."""
    if not _is_scalar(value):
        return None
    item = value.item() if isinstance(value, Tensor | np.ndarray) else value
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return hasattr(value, "__float__") and not isinstance(value, str | np.complexfloating)
