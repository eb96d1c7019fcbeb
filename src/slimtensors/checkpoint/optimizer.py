"""Optimizer states: describe the parameters, match them by name, load without loss."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from slimtensors.errors import MismatchError
from slimtensors.tensor import Json, contiguous_strides, with_strides

_log = logging.getLogger(__name__)

_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that torch's schedulers add to the parameter groups of an optimizer."""
_STEP = "step"
"""The one state that torch does not cast to the parameter's dtype."""


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of an optimizer; what an earlier version did not record is None."""

    name: str
    """Empty if it is not a parameter of the model."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    """None if contiguous."""

    @classmethod
    def of(cls, parameter: Tensor, name: str) -> "ParameterInfo":
        """Describe a parameter."""
        shape, strides = tuple(parameter.shape), tuple(parameter.stride())
        is_plain = strides == contiguous_strides(shape)
        return cls(name, _dtype_name(parameter), shape, None if is_plain else strides)


def describe_optimizer(optimizer: Any, names: Mapping[int, str]) -> Json:
    """Return the class and the parameters of an optimizer; `names` are keyed by `id`."""
    found = [ParameterInfo.of(p, name) for p, name in _list_parameters(optimizer, names)]
    return {
        "optimizer": [info.name for info in found],
        "optimizer_class": _class_name(optimizer),
        "dtypes": [info.dtype for info in found],
        "shapes": [list(info.shape or ()) for info in found],
        "strides": [None if info.strides is None else list(info.strides) for info in found],
    }


@dataclass(frozen=True)
class OptimizerState:
    """A copy of a saved state that fits the optimizer."""

    state: dict[str, Any]
    has_moved_groups: bool = False
    """Whether parameter groups are in another order than in the checkpoint."""


def fit_optimizer_state(
    state: Mapping[str, Any], layout: Mapping[str, Any], optimizer: Any, names: Mapping[int, str]
) -> OptimizerState:
    """Return a copy of `state` in the parameter order of `optimizer`.

    `layout` is what `describe_optimizer` returned when the state was saved. Parameters are matched
    by name; those without a name by order. States in the dtype or memory format of their parameter
    get those of the current parameter. Raise `MismatchError` if the state does not fit.
    """
    is_same_class = _check_class(layout, optimizer)
    current = _list_parameters(optimizer, names)
    is_indexed = _is_indexed(state) and hasattr(optimizer, "param_groups")
    saved = _read_layout(layout, _count_parameters(state) if is_indexed else None)
    copy, has_moved_groups = _copy(state), False
    if is_indexed:
        _check_groups(state["param_groups"], optimizer, is_same_class)
        sources = _match_parameters(saved, current, state["param_groups"], optimizer.param_groups)
        if sources != list(range(len(sources))):
            copy, has_moved_groups = _reorder(copy, sources, optimizer)
            saved = [saved[source] for source in sources]
            _log.info("optimizer: parameters are in another order than when saved; matched by name")
    elif saved and [info.name for info in saved] != [name for _, name in current]:
        _raise_mismatch(["its parameters are in another order, and its state has no indices"])
    for part in (copy, *copy.values()):  # wrappers contain the states of other optimizers
        if isinstance(part, dict) and _is_indexed(part) and _count_parameters(part) == len(saved):
            _fit_tensors(part, saved, [parameter for parameter, _ in current])
    return OptimizerState(_restore_classes(copy, optimizer.state_dict()), has_moved_groups)


def _fit_tensors(
    state: dict[str, Any], saved: Sequence[ParameterInfo], parameters: Sequence[Tensor]
) -> None:
    """Adapt the states of parameters that have another dtype or memory format than before."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, info, parameter in zip(indices, saved, parameters, strict=True):
        if index in state["state"]:
            fit = _make_fit(info, parameter)
            state["state"][index] = _map_tensors(state["state"][index], fit)


def _count_parameters(state: Mapping[str, Any]) -> int:
    return sum(len(group["params"]) for group in state["param_groups"])


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a state, and undo what `torch.optim.Optimizer.load_state_dict` casts or converts.

    The optimizer may keep and change `state`.
    """
    expected = _map_tensors(state, lambda x, key: x)  # the containers may be changed
    optimizer.load_state_dict(state)
    _undo_casts(expected, optimizer.state_dict(), None)


def has_torch_loading(optimizer: Any) -> bool:
    """Return True if an optimizer has no code of its own that loads states, which may fail."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return False
    before = optimizer._optimizer_load_state_dict_pre_hooks
    return not before and not optimizer._optimizer_load_state_dict_post_hooks


def remember_optimizer(optimizer: Any) -> Callable[[], None]:
    """Return a function that restores the current state."""
    if has_torch_loading(optimizer):
        state, groups = optimizer.state, optimizer.param_groups  # replaced, never changed

        def put_back() -> None:
            optimizer.state, optimizer.param_groups = state, groups

        return put_back
    earlier = _copy(optimizer.state_dict())
    return lambda: load_optimizer(optimizer, earlier)


def _list_parameters(optimizer: Any, names: Mapping[int, str]) -> list[tuple[Tensor, str]]:
    """Return the parameters in the optimizer's order, with names as far as they are known."""
    found: list[tuple[Tensor, str]] = []
    for group in getattr(optimizer, "param_groups", ()):
        given = dict(enumerate(group.get("param_names", ())))
        pairs = enumerate(group["params"])
        found += [(p, names.get(id(p), str(given.get(i, "")))) for i, p in pairs]
    return found


def _class_name(optimizer: Any) -> str:
    """Return the qualified name of the class, and of those that it wraps."""
    attributes = getattr(optimizer, "__dict__", {}).values()
    wrapped = [x for x in attributes if isinstance(x, torch.optim.Optimizer)]
    classes = [type(x) for x in (optimizer, *wrapped)]
    return " of ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in classes)


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _is_indexed(state: Mapping[str, Any]) -> bool:
    """Return True if the state has the form of `torch.optim.Optimizer.state_dict()`."""
    groups = state.get("param_groups")
    return (
        isinstance(state.get("state"), dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and all(isinstance(group.get("params"), list) for group in groups)
    )


def _read_layout(layout: Mapping[str, Any], count: int | None) -> list[ParameterInfo]:
    """Return the saved parameters, without names if there are not `count` names."""
    names = layout.get("optimizer")
    if not isinstance(names, list) or (count is not None and len(names) != count):
        return [ParameterInfo("")] * (count or 0)
    infos = [ParameterInfo(str(name)) for name in names]
    columns = [layout.get(key) for key in ("dtypes", "shapes", "strides")]
    if not all(isinstance(column, list) and len(column) == len(infos) for column in columns):
        return infos  # saved by an earlier version
    rows = zip(*(column or () for column in columns), strict=True)
    return [_read_info(info, *row) for info, row in zip(infos, rows, strict=True)]


def _read_info(
    info: ParameterInfo, dtype: object = None, shape: object = None, strides: object = None
) -> ParameterInfo:
    return replace(
        info,
        dtype=dtype if isinstance(dtype, str) else None,
        shape=tuple(shape) if isinstance(shape, list) else None,
        strides=tuple(strides) if isinstance(strides, list) else None,
    )


def _check_class(layout: Mapping[str, Any], optimizer: Any) -> bool:
    """Raise if the optimizer has another class; return False if that cannot be decided by name."""
    saved, now = layout.get("optimizer_class"), _class_name(optimizer)
    if saved == now:
        return True
    # The module of a class may change: a script is `__main__`, and packages move their files.
    if not isinstance(saved, str) or _last_names(saved) == _last_names(now):
        return False
    raise MismatchError(
        f"the optimizer does not fit the checkpoint: another class: {saved} in the checkpoint,"
        f" {now} now; to load it anyway, call optimizer.load_state_dict(checkpoint['optimizer'])"
    )


def _last_names(classes: str) -> list[str]:
    return [name.rpartition(".")[2] for name in classes.split(" of ")]


def _check_groups(groups: Sequence[Mapping[str, Any]], optimizer: Any, is_same_class: bool) -> None:
    have = optimizer.param_groups
    if len(groups) != len(have):
        _raise_mismatch([f"{len(groups)} parameter groups in the checkpoint, {len(have)} now"])
    problems = []
    for i, (group, current) in enumerate(zip(groups, have, strict=True)):
        # A new release of an optimizer only adds options; another class also lacks some.
        extra = sorted(group.keys() - current.keys() - _SCHEDULER_KEYS)
        missing = sorted(getattr(optimizer, "defaults", {}).keys() - group.keys())
        if extra and missing and not is_same_class:
            options = f"{', '.join(extra)} in the checkpoint, {', '.join(missing)} now"
            problems.append(f"group {i}: another class of optimizer: {options}")
    _raise_mismatch(problems)


def _match_parameters(
    saved: Sequence[ParameterInfo],
    current: Sequence[tuple[Tensor, str]],
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> list[int]:
    """Return the position in `saved` of each current parameter."""
    counts = Counter(name for _, name in current)
    by_name = {info.name: i for i, info in enumerate(saved) if counts[info.name] == 1}
    by_name.pop("", None)
    found = [by_name.get(name) for _, name in current]
    rest = sorted(set(range(len(saved))).difference(found))
    unmatched = [name for i, (_, name) in zip(found, current, strict=True) if i is None]
    problems = []
    for i, (group, now) in enumerate(zip(saved_groups, groups, strict=True)):
        saved_size, size = len(group["params"]), len(now["params"])
        if saved_size != size and (rest or unmatched):
            problems.append(f"group {i}: {saved_size} parameters in the checkpoint, {size} now")
    if problems or (any(saved[i].name for i in rest) and any(unmatched)):
        problems += [f"{saved[i].name}: not in the optimizer" for i in rest if saved[i].name]
        problems += [f"{name}: not in the optimizer's checkpoint" for name in unmatched if name]
    _raise_mismatch(problems)
    by_order = iter(rest)
    sources = [next(by_order) if i is None else i for i in found]
    for position, (source, (p, name)) in enumerate(zip(sources, current, strict=True)):
        shape = saved[source].shape
        if shape is not None and shape != tuple(p.shape):
            shapes = f"{list(shape)} in the checkpoint, {list(p.shape)} now"
            problems.append(f"parameter {name or position}: {shapes}")
    _raise_mismatch(problems)
    return sources


def _reorder(
    state: dict[str, Any], sources: Sequence[int], optimizer: Any
) -> tuple[dict[str, Any], bool]:
    """Return the state with new indices, and whether groups were moved."""
    groups, entries = state["param_groups"], state["state"]
    indices = [index for group in groups for index in group["params"]]
    group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
    names = [name for group in groups for name in group.get("param_names", group["params"])]
    total = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    tensors: list[Tensor] = []
    _map_tensors(entries, lambda x, key: tensors.append(x) or x)  # type: ignore[func-returns-value]
    if any(x.dim() == 1 and x.numel() == total for x in tensors):
        _raise_mismatch(["parameters are in another order, and a state covers all in one vector"])
    ordered, moved, start = [], False, 0
    for i, current in enumerate(optimizer.param_groups):
        part = range(start, start + len(current["params"]))
        start = part.stop
        origins = sorted({group_of[sources[k]] for k in part}) or [i]
        options = [_options(groups[origin]) for origin in origins]
        if any(repr(other) != repr(options[0]) for other in options):
            _raise_mismatch([f"group {i}: its parameters had different options, in {origins}"])
        moved |= origins != [i]
        group = {**groups[origins[0]], "params": list(part)}
        if "param_names" in group:
            group["param_names"] = [names[sources[k]] for k in part]
        ordered.append(group)
    renumbered = {k: indices[source] for k, source in enumerate(sources)}
    own = {k: entries[index] for k, index in renumbered.items() if index in entries}
    others = {key: value for key, value in entries.items() if key not in indices}
    return {**state, "state": own | others, "param_groups": ordered}, moved


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _make_fit(saved: ParameterInfo, parameter: Tensor) -> Callable[[Tensor, object], Tensor]:
    """Return a function that adapts the states of a parameter if it has changed since."""
    dtype, now = saved.dtype, _dtype_name(parameter)
    # Earlier versions loaded everything contiguous.
    strides = saved.strides or contiguous_strides(parameter.shape)
    fitted: dict[int, tuple[Tensor, Tensor]] = {}  # keeps ties, and each tensor alive

    def fit(x: Tensor, key: object) -> Tensor:
        if id(x) in fitted:
            return fitted[id(x)][1]
        y = x
        if dtype is not None and dtype != now and _dtype_name(x) == dtype and key != _STEP:
            y = y.to(parameter.dtype)
        if x.shape == parameter.shape and tuple(x.stride()) == strides:
            y = with_strides(y, parameter.stride())
        fitted[id(x)] = (x, y)
        return y

    return fit


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy; a state that is not loaded may contain results of gradients."""
    results: dict[int, Any] = {}

    def add(x: Tensor, key: object) -> Tensor:
        if not x.is_leaf:
            results[id(x)] = x.detach().clone()
        return x

    _map_tensors(dict(state), add)
    return deepcopy(dict(state), results)


def _map_tensors(value: Any, change: Callable[[Tensor, object], Tensor], key: object = None) -> Any:
    """Return `value` with other tensors; containers are copied, the rest is not."""
    if isinstance(value, Tensor):
        return change(value, key)
    if type(value) in (dict, list, tuple, deque):
        if isinstance(value, dict):
            return {k: _map_tensors(v, change, k) for k, v in value.items()}
        items = (_map_tensors(v, change) for v in value)
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
    return value


def _restore_classes(saved: Any, current: Any) -> Any:
    """Return the saved value, as a member of an Enum or a named tuple if the current one is."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for key in saved.keys() & current.keys():
            saved[key] = _restore_classes(saved[key], current[key])
    elif isinstance(saved, list) and isinstance(current, list):
        pairs = zip(saved, current, strict=False)
        saved[: len(current)] = [_restore_classes(a, b) for a, b in pairs]
    elif isinstance(current, Enum) and not isinstance(saved, Enum):
        return _convert(saved, type(current))
    elif isinstance(current, tuple) and hasattr(current, "_make") and type(saved) is tuple:
        return _convert(saved, current._make)
    return saved


def _convert(saved: Any, make: Callable[[Any], Any]) -> Any:
    try:
        return make(saved)
    except (TypeError, ValueError) as error:
        _raise_mismatch([str(error)])


def _undo_casts(saved: Any, live: Any, key: object) -> Any:
    """Return the value to use for `live`: torch casts tensors and rebuilds strings and deques."""
    if isinstance(saved, Tensor) and isinstance(live, Tensor):
        if saved.dtype != live.dtype and saved.shape == live.shape and key != _STEP:
            live.data = saved.detach().to(live.device)
    elif isinstance(saved, dict) and isinstance(live, dict):
        for k in saved.keys() & live.keys():
            value = _undo_casts(saved[k], live[k], k)
            if value is not live[k]:
                live[k] = value
    elif isinstance(saved, list | tuple | deque) and type(saved) is type(live):
        items = [_undo_casts(a, b, None) for a, b in zip(saved, live, strict=False)]
        if isinstance(saved, deque) and isinstance(live, deque):
            return live if saved.maxlen == live.maxlen else deque(items, saved.maxlen)
        if isinstance(live, list):
            live[: len(items)] = items
    elif isinstance(saved, str) and isinstance(live, str):
        return saved
    return live


def _raise_mismatch(problems: Sequence[str]) -> None:
    raise_mismatch("optimizer", problems)


def raise_mismatch(part: str, problems: Sequence[str]) -> None:
    """Raise `MismatchError` with the first 20 problems, if there are any."""
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        lines = "".join(f"\n  {problem}" for problem in problems[:20])
        raise MismatchError(f"the {part} does not fit the checkpoint:{lines}{more}")
