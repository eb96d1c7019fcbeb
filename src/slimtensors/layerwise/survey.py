"""Observe a model once: in which order it uses its layers, and which depend on which."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from slimtensors.layerwise.inputs import Layer, MatrixTable
from slimtensors.layerwise.passes import Function, intercept_calls
from slimtensors.layerwise.products import TRANSPARENT

_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
}
"""Functions that turn tensors into values on which the code of the model may depend."""


@dataclass
class UnitUse:
    """How a forward pass uses a unit: a block, or a layer outside of the blocks."""

    calls: int = 0
    """Calls per batch, at most."""
    is_used_elsewhere: bool = False
    """Whether its weights are also used outside of its own calls."""
    changes_inputs: bool = False
    """Whether calls change the tensors that are passed to them."""
    levels: dict[str, int] = field(default_factory=dict)
    """Layers in the order of their use, with the length of the longest chain of layers of the
    block that their inputs depend on."""
    uses: dict[str, int] = field(default_factory=dict)
    """Uses of each layer per call of the block, at most."""
    last_used: set[int] | None = None
    """Positions of those tensors among the arguments of a call that nothing uses afterwards."""

    @property
    def runs_once(self) -> bool:
        """Whether the inputs of one call are all the inputs of its layers."""
        return self.calls == 1 and not self.is_used_elsewhere


@dataclass
class Survey:
    """How forward passes use the layers of a model."""

    units: dict[str, UnitUse] = field(default_factory=dict)
    orders: list[dict[str, int]] = field(default_factory=list)
    """Position of the first use of each unit, for each forward pass."""
    observed: set[str] = field(default_factory=set)
    """Layers whose products were observed."""
    other_uses: dict[str, set[str]] = field(default_factory=dict)
    """Functions that used the weight of a layer without being a known product."""

    def choose_first(self, units: Iterable[str]) -> str:
        """Return a unit at which some passes have paused, and which no other will reach later."""
        candidates = sorted(units)
        return next(
            (a for a in candidates if not any(self._may_follow(a, b) for b in candidates)),
            candidates[0],
        )

    def _may_follow(self, unit: str, other: str) -> bool:
        return any(
            order[other] < order[unit] for order in self.orders if unit in order and other in order
        )

    def group_layers(self, unit: str, layers: Sequence[Layer]) -> list[list[Layer]]:
        """Return the layers of a unit in groups; each depends only on the groups before it.

        A layer that was not used, such as an expert without tokens, is grouped with those whose
        names differ in numbers only.
        """
        levels = self._levels(unit)
        similar = {_replace_numbers(name): level for name, level in levels.items()}
        last = max(levels.values(), default=0)
        groups: dict[int, list[Layer]] = {}
        for layer in layers:
            level = levels.get(layer.name, similar.get(_replace_numbers(layer.name), last))
            groups.setdefault(level, []).append(layer)
        return [groups[level] for level in sorted(groups)]

    def count_uses(self, unit: str, layer: Layer) -> int:
        """Return how often a call of a unit uses a layer, at most."""
        return self.units[unit].uses.get(layer.name, 0) if unit in self.units else 0

    def count_levels(self, unit: str) -> int:
        """Return the number of groups of a unit."""
        return len({*self._levels(unit).values()})

    def _levels(self, unit: str) -> dict[str, int]:
        return self.units[unit].levels if unit in self.units else {}


def survey_model(
    model: nn.Module,
    layers: Mapping[str, Layer],
    units: Mapping[str, str],
    blocks: Mapping[str, nn.Module],
    runs: Iterable[Callable[[], object]],
) -> Survey:
    """Run a model and return how it uses its layers; `units` contains the unit of each layer."""
    survey = Survey()
    known = {*map(_storage, model.parameters()), *map(_storage, model.buffers())}
    with intercept_calls(blocks) as handlers:
        for run in runs:
            survey.orders.append({})
            observer = _Observer(survey, MatrixTable(layers.values()), units, known)
            handlers[threading.get_ident()] = observer.run_block
            with observer:
                run()
            for unit, calls in observer.calls.items():
                use = survey.units[unit]
                use.calls = max(use.calls, calls)
    return survey


class _Observer(TorchFunctionMode):
    """Observes one forward pass.

    Within a block, each tensor has a level: the number of layers of the block that it depends on,
    one after the other. A tensor of unknown origin gets the highest level so far.
    """

    def __init__(
        self,
        survey: Survey,
        matrices: MatrixTable,
        units: Mapping[str, str],
        known: set[int],
    ) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._passed: dict[int, list[tuple[UnitUse, int]]] = {}
        """Positions of tensors in earlier calls of blocks, by storage."""
        self._survey = survey
        self._matrices = matrices
        self._units = units
        self._known = known
        self._block: str | None = None
        self._levels: dict[int, int] = {}
        self._floor = 0
        self._highest = 0

    def run_block(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a block; its arguments have level 0."""
        self._note_call(name)
        before = self._block, self._levels, self._floor, self._highest, self._uses
        self._block, self._floor, self._highest, self._uses = name, 0, 0, {}
        tensors = [*iterate_tensors((args, kwargs))]
        self._note_later_use(tensors)
        versions = [_version(x) for x in tensors]
        self._levels = dict.fromkeys(map(_storage, tensors), 0)
        result = function(*args, **kwargs)
        use = self._survey.units[name]
        use.changes_inputs |= [_version(x) for x in tensors] != versions
        for layer, count in self._uses.items():
            use.uses[layer] = max(count, use.uses.get(layer, 0))
        self._block, self._levels, self._floor, self._highest, self._uses = before
        outputs = {*map(_storage, iterate_tensors(result))}
        kept = {i for i, x in enumerate(tensors) if _storage(x) not in outputs}
        use.last_used = kept if use.last_used is None else use.last_used & kept
        for i in use.last_used:
            self._passed.setdefault(_storage(tensors[i]), []).append((use, i))
        return result

    def _note_later_use(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors if self._passed else ():
            for use, i in self._passed.pop(_storage(x), ()):
                use.last_used = (use.last_used or set()) - {i}

    def _note_call(self, unit: str) -> None:
        self._add_unit(unit)
        self.calls[unit] = self.calls.get(unit, 0) + 1

    def _add_unit(self, unit: str) -> UnitUse:
        order = self._survey.orders[-1]
        order.setdefault(unit, len(order))
        return self._survey.units.setdefault(unit, UnitUse())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note products, propagate levels, and call the function unchanged."""
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            with self:
                return TRANSPARENT[func](*args, **kwargs)
        tensors = [*iterate_tensors((args, kwargs))]
        self._note_later_use(tensors)
        names = [name for (name, _), _ in self._matrices.find_products(func, args, kwargs)]
        versions = [_version(x) for x in tensors]
        result = func(*args, **kwargs)
        if not tensors and self._block is None:
            return result
        outputs = [*iterate_tensors(result)]
        if not names:
            self._note_other_use(func, tensors, outputs)
        for name in dict.fromkeys(names):
            self._survey.observed.add(name)
            self._note_product(name, max(map(self._level, tensors), default=0))
        if self._block is not None:
            level = max([self._floor, *map(self._level, tensors)])
            if any(self._units[name] == self._block for name in names):
                level += 1
            if func in _READS:
                self._floor = level
            self._set_levels(level, tensors, versions, outputs)
        return result

    def _note_product(self, name: str, level: int) -> None:
        unit = self._units[name]
        if unit == self._block:
            self._survey.units[unit].levels.setdefault(name, max(level, self._floor))
            self._uses[name] = self._uses.get(name, 0) + 1
        elif unit == name and self._block is None:
            self._note_call(unit)
        else:
            self._add_unit(unit).is_used_elsewhere = True

    def _note_other_use(
        self, function: Function, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        inputs = {*map(_storage, tensors)}
        if all(_storage(x) in inputs for x in outputs):  # a view, or an attribute
            return
        for name in self._matrices.find_weights(tensors):
            self._survey.other_uses.setdefault(name, set()).add(_name_function(function))

    def _level(self, x: Tensor) -> int:
        storage = _storage(x)
        if storage in self._known:
            return 0
        return self._levels.get(storage, self._highest) if self._block is not None else 0

    def _set_levels(
        self,
        level: int,
        tensors: Sequence[Tensor],
        versions: Sequence[int],
        outputs: Sequence[Tensor],
    ) -> None:
        self._highest = max(self._highest, level)
        inputs = {*map(_storage, tensors)}
        for x in outputs:
            if (storage := _storage(x)) not in inputs:
                self._levels[storage] = level
        changed = [
            x for x, version in zip(tensors, versions, strict=True) if _version(x) != version
        ]
        for x in changed:
            self._levels[_storage(x)] = max(level, self._level(x))


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, within containers of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_tensors(item)
    elif isinstance(value, tuple | list | set):
        for item in value:
            yield from iterate_tensors(item)


def _storage(x: Tensor) -> int:
    """Return a number that identifies the memory of a tensor."""
    try:
        address = x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or within torch.vmap
        address = 0
    return address or id(x)  # empty tensors have no memory


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _name_function(function: Function) -> str:
    return str(resolve_name(function) or getattr(function, "__name__", function))


def _replace_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)
