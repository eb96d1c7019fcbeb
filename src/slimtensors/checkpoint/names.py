"""Names of parameters and buffers with and without the prefixes of wrapped models."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_log = logging.getLogger(__name__)

_COMPILED = "_orig_mod"
"""Added by `torch.compile`, at any level."""
_PARALLEL = "module"
"""Added by DataParallel and DistributedDataParallel, before all names of a model."""


def strip_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Return the names of one model without the prefixes of torch.compile and DataParallel."""
    found = list(names)
    depth = _count_parallel(found)
    stripped = {name: _strip(name, depth) for name in found}
    is_unique = len(set(stripped.values())) == len(found)
    return stripped if is_unique else {name: name for name in found}


def name_parameters(
    model: nn.Module | None, models: Mapping[str, nn.Module] | None = None
) -> dict[int, str]:
    """Return the first name of each parameter without wrappers, by its `id`.

    Those of `models` start with the name of their model.
    """
    found: dict[int, str] = {}
    for prefix, module in _with_prefixes(model, models):
        parameters = dict(module.named_parameters(remove_duplicate=True))
        stripped = strip_wrappers(parameters)
        for name, p in parameters.items():
            found.setdefault(id(p), f"{prefix}{stripped[name]}")
    return found


def strip_saved_names(model: object, models: object = None) -> dict[str, str]:
    """Return the names of saved models as `name_parameters` would return them, by saved name."""
    found: dict[str, str] = {}
    for prefix, state in _with_prefixes(model, models if isinstance(models, Mapping) else None):
        pairs = strip_wrappers(state).items() if isinstance(state, Mapping) else ()
        found |= {f"{prefix}{name}": f"{prefix}{stripped}" for name, stripped in pairs}
    return found


def fit_model_state(label: str, state: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return `state` under the names of `model`, which may be wrapped otherwise."""
    current = model.state_dict()
    if state.keys() == current.keys():
        return state
    targets = {stripped: name for name, stripped in strip_wrappers(current).items()}
    renamed = {name: targets.get(short, name) for name, short in strip_wrappers(state).items()}
    if all(name == target for name, target in renamed.items()):
        return state
    if len(set(renamed.values())) < len(renamed):
        return state
    first = next((name, target) for name, target in renamed.items() if name != target)
    _log.info(
        "%s: names matched without the prefixes of torch.compile and DataParallel (%s -> %s)",
        label,
        *first,
    )
    fitted: Any = OrderedDict((renamed[name], value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if isinstance(metadata, Mapping):
        fitted._metadata = _fit_metadata(metadata, state, model)
    return fitted  # type: ignore[no-any-return]


def _fit_metadata(
    metadata: Mapping[str, Any], state: Mapping[str, Any], model: nn.Module
) -> OrderedDict[str, Any]:
    """Return the metadata of modules under the paths of `model`."""
    saved_depth, depth = _count_parallel(state), _count_parallel(model.state_dict())
    saved = {_strip(str(path), saved_depth): value for path, value in metadata.items()}
    paths = [path for path, _ in model.named_modules()]
    return OrderedDict(
        (path, saved[_strip(path, depth)]) for path in paths if _strip(path, depth) in saved
    )


def _with_prefixes(single: Any, named: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    alone = [] if single is None else [("", single)]
    return alone + [(f"{name}.", value) for name, value in (named or {}).items()]


def _count_parallel(names: Iterable[str]) -> int:
    """Return the number of leading `module` parts of all names."""
    counts = []
    for name in names:
        parts = [part for part in name.split(".") if part != _COMPILED]
        own = [i for i, part in enumerate(parts[:-1]) if part != _PARALLEL]
        counts.append(own[0] if own else len(parts) - 1)
    return min(counts, default=0)


def _strip(name: str, depth: int) -> str:
    parts = [part for part in name.split(".") if part != _COMPILED]
    return ".".join(parts[depth:])
