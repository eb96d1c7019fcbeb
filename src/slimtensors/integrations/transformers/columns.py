"""Which columns of data a model takes."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from slimtensors.errors import ConfigError


def columns_for(model: nn.Module, row: Any) -> Any:
    """Return what of a row or a batch the model can be called with; raise if that is nothing."""
    unused = unused_columns(model, row)
    if not unused:
        return row
    if len(unused) == len(row):
        kind, names = type(model).__name__, list(_arguments(model))[:4]
        have = ", ".join(map(str, row))
        raise ConfigError(f"{kind} takes {', '.join(names)}, ...; the data has {have}")
    return {name: x for name, x in row.items() if name not in unused}


def unused_columns(model: nn.Module, row: Any) -> set[str]:
    """Return the names in a row or a batch that are no arguments of the model.

    A model that names none takes whatever comes. One that names some takes those only: its
    `**kwargs` are settings for its layers, and no data.
    """
    if not isinstance(row, Mapping):
        return set()
    known = _arguments(model)
    return {*row} - {*known} if known else set()


def _arguments(model: nn.Module) -> list[str]:
    """Return the arguments that a model names, without `*args` and `**kwargs`."""
    return [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
