"""Metrics, steps and epochs of a training loop: scalars of any library as plain numbers."""

import operator
from collections.abc import Mapping

import numpy as np
import torch
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


def read_count(name: str, value: object) -> int | None:
    """Return a step or epoch as an int, or None; raise `ConfigError` for anything else."""
    count = to_integer(value)
    if value is not None and (count is None or count < 0):
        raise ConfigError(f"{name} must be an integer >= 0, got {value!r}")
    return count


def to_integer(value: object) -> int | None:
    """Return an integer of any library as an int; None for anything else, also for bool."""
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return hasattr(value, "__float__") and not isinstance(value, str | np.complexfloating)
