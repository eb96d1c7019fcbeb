"""Modifiers by the names that recipes have for them and for their fields, ours and others'."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from typing import Any

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization import QuantizationArgs, QuantizationScheme
from slimtensors.recipe.modifiers.pruning import (
    ConstantPruning,
    MagnitudePruning,
    SparseGPT,
    Wanda,
)
from slimtensors.recipe.modifiers.quantizing import AWQ, GPTQ, Quantize, SmoothQuant
from slimtensors.recipe.modifiers.training import (
    Distillation,
    GradualMagnitudePruning,
    MovementPruning,
)
from slimtensors.spec import Json

MODIFIERS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        MagnitudePruning,
        Wanda,
        SparseGPT,
        ConstantPruning,
        Quantize,
        GPTQ,
        AWQ,
        SmoothQuant,
        GradualMagnitudePruning,
        MovementPruning,
        Distillation,
    )
}

_SUFFIX = "Modifier"
_OTHERS: Mapping[str, tuple[type[Any], ...]] = {
    # There, pruning by magnitude is gradual if it is said when it begins and ends.
    "MagnitudePruning": (MagnitudePruning, GradualMagnitudePruning),
    "Quantization": (Quantize,),
    "WandaPruning": (Wanda,),
    "GMPruning": (GradualMagnitudePruning,),
    "OutputDistillation": (Distillation,),
    "Distillation": (Distillation,),
}
"""What SparseML and llm-compressor call them, without the suffix."""

_FIELDS: Mapping[type[Any], Mapping[str, str]] = {
    MagnitudePruning: {"final_sparsity": "sparsity", "params": "targets"},
    AWQ: {"n_grid": "steps"},
    ConstantPruning: {"params": "targets"},
    Distillation: {"distillation_teacher": "teacher"},
} | {
    kind: {
        "start_epoch": "start",
        "end_epoch": "end",
        "inter_func": "schedule",
        "update_scheduler": "schedule",
        "mask_type": "mask_structure",
        "params": "targets",
    }
    for kind in (GradualMagnitudePruning, MovementPruning)
}
"""What they call the fields."""

_ALWAYS: Mapping[str, object] = {
    "sequential_update": True,
    "preserve_sparsity_mask": True,
    "leave_enabled": True,
    "start": 0.0,
    "start_epoch": 0.0,
    "end_epoch": -1.0,
    "block_size": 128,
    "offload_hessians": False,
}
"""Fields of theirs that ask for what happens anyway, where a modifier has none of that name."""

_EVERYTHING = ("__ALL_PRUNABLE__", "__ALL__")


def make(name: str, given: Mapping[str, Any] | None) -> Any:
    """Return the modifier that a recipe describes; raise with the nearest name if there is none."""
    kinds = _kinds(name)
    values = dict(given or {})
    for key, always in _ALWAYS.items():
        is_field = any(key in _known(kind) | _FIELDS.get(kind, {}).keys() for kind in kinds)
        if is_field or key not in values:
            continue
        if values.pop(key) != always:
            raise ConfigError(f"{name}: {key} is always {always} here")
    named = [_named(kind, values) for kind in kinds]
    fitting = [i for i, known in enumerate(named) if not known.keys() - _known(kinds[i])]
    if not fitting:
        unknown = next(iter(named[0].keys() - _known(kinds[0])))
        said = set().union(*(_known(kind) | _FIELDS.get(kind, {}).keys() for kind in kinds))
        raise ConfigError(f"{name} has no field {unknown!r}; {nearest(unknown, said)}")
    best = fitting[0]
    try:
        return kinds[best](**named[best])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{name}: a field has a value that it cannot have: {error}") from error


def name_of(modifier: object) -> str:
    """Return what a recipe calls a modifier; raise if it is none."""
    if type(modifier) not in MODIFIERS.values():
        raise ConfigError(f"{modifier!r} is no modifier; known: {', '.join(MODIFIERS)}")
    return type(modifier).__name__


def written(modifier: Any) -> Json:
    """Return the fields that are not as by default, as YAML and JSON have them."""
    return {
        each.name: _plain(value)
        for each in fields(modifier)
        if (value := getattr(modifier, each.name)) != _default(each)
    }


def _kinds(name: str) -> tuple[type[Any], ...]:
    if name in MODIFIERS:
        return (MODIFIERS[name],)
    stem = name.removesuffix(_SUFFIX)
    if stem in _OTHERS:
        return _OTHERS[stem]
    if stem in MODIFIERS and name != stem:
        return (MODIFIERS[stem],)
    known = {*MODIFIERS, *(f"{each}{_SUFFIX}" for each in (*MODIFIERS, *_OTHERS))}
    raise ConfigError(f"there is no modifier {name!r}; {nearest(name, known)}")


def _named(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the names of our fields."""
    others = _FIELDS.get(kind, {})
    named = {others.get(key, key): value for key, value in values.items()}
    if named.get("targets") in _EVERYTHING:
        del named["targets"]
    return {key: value for key, value in named.items() if value is not None}


def _known(kind: type[Any]) -> set[str]:
    return {each.name for each in fields(kind)}


def _default(each: Any) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _plain(value: Any) -> Any:
    match value:
        case QuantizationScheme() | QuantizationArgs():
            return value.to_dict()
        case StrEnum():
            return str(value)
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return _plain(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value
