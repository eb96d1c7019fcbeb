"""How checkpoints store the weights of a model: names, rows and orientation.

transformers renames, splits, merges and transposes weights when it saves them. Applied to tensors
that contain row and column numbers, the same conversion reports what it does to a weight.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from slimtensors.errors import group_names
from slimtensors.quantization.config import QuantizationStatus
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.state import LayerPlan, get_quantization

_NUMBER = torch.int32
_PARTS = ("_packed", "_scale", "_zero_point", "_shape")
"""Endings of the names of tensors that compressed-tensors stores for a weight."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that consists of rows of one or more weights."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Parameters that it consists of."""
    rows: Tensor | None = None
    """Row numbers `[..., outputs]`, counted over all sources; None if it is its only source."""
    transposed: bool = False
    """Whether it is stored as `[inputs, outputs]`."""


@dataclass(frozen=True)
class CheckpointLayout:
    """Where checkpoints of a model store some of its weights."""

    tensors: Mapping[str, StoredTensor]
    """Stored tensors that consist of these weights, by name."""
    untraceable: frozenset[str]
    """Parameters whose values checkpoints mix with others."""

    @cached_property
    def _by_source(self) -> dict[str, list[StoredTensor]]:
        found: dict[str, list[StoredTensor]] = {}
        for tensor in self.tensors.values():
            for source in tensor.sources:
                found.setdefault(source, []).append(tensor)
        return found

    def find(self, parameter: str) -> list[StoredTensor]:
        """Return the stored tensors that contain a parameter."""
        return self._by_source.get(parameter, [])


def find_layout(model: nn.Module, weights: Mapping[str, Weight]) -> CheckpointLayout:
    """Return where checkpoints store the given weights, by parameter name.

    The model may be on the meta device: only its shapes are used.
    """
    outline = outline_state(model)
    converted = convert_for_saving(model, outline)
    names = {id(x): name for name, x in converted.items()}  # renamed tensors are the same objects
    tensors = {
        names[id(x)]: StoredTensor(
            names[id(x)], tuple(x.shape), (parameter,), transposed=weights[parameter].transposed
        )
        for parameter, x in outline.items()
        if parameter in weights and id(x) in names
    }
    changed = {name: x for name, x in outline.items() if id(x) not in names}
    if not changed.keys() & weights.keys():
        return CheckpointLayout(tensors, frozenset())
    traced = _trace(model, changed, weights)
    mixed = {source for each in traced if each.rows is None for source in each.sources}
    tensors |= {each.name: each for each in traced if mixed.isdisjoint(each.sources)}
    return CheckpointLayout(tensors, frozenset(mixed))


def find_unstorable(model: nn.Module, plans: Iterable[LayerPlan]) -> dict[str, str]:
    """Return why the dialect compressed-tensors cannot store layers, by parameter.

    It stores a quantized weight in several tensors, which transformers only renames on load. So
    this concerns models of transformers whose checkpoints store a weight in another way.
    """
    weights = {plan.key(weight.parameter): weight for plan in plans for weight in plan.weights}
    if not is_from_transformers(model):
        return {}
    layout = find_layout(model, weights)
    reasons = {name: _find_obstacle(layout, name, weights[name]) for name in weights}
    renamed = [name for name, reason in reasons.items() if not reason and not weights[name].stacked]
    reasons |= _check_part_names(model, layout, renamed)
    return {name: reason for name, reason in reasons.items() if reason is not None}


def describe_unstorable(reasons: Mapping[str, str]) -> str:
    """Return a sentence with the results of `find_unstorable`, grouped by reason."""
    groups = group_names(reasons.items())
    found = "; ".join(f"{names} ({reason})" for reason, names in groups.items())
    return f"compressed-tensors cannot store {found}"


def _find_obstacle(layout: CheckpointLayout, name: str, weight: Weight) -> str | None:
    if name in layout.untraceable:
        return "checkpoints store its values in another order"
    stored = layout.find(name)
    if weight.stacked:
        if any(len(tensor.shape) != 2 for tensor in stored):
            return "checkpoints store its experts as one tensor"
        if any(tensor.transposed or not tensor.name.endswith(".weight") for tensor in stored):
            return "checkpoints store its experts transposed"
        return None
    if weight.transposed:
        return "Conv1D, which compressed-tensors does not support"
    if any(tensor.rows is not None for tensor in stored):
        return "checkpoints store it split, or merged with others"
    return None


def _check_part_names(
    model: nn.Module, layout: CheckpointLayout, names: Iterable[str]
) -> dict[str, str]:
    """Return why the parts of weights that are only renamed are not renamed in the same way."""
    parts = {
        f"{name}{part}": torch.empty(layout.find(name)[0].shape, device="meta")
        for name in names
        for part in _PARTS
    }
    found = {id(x): name for name, x in convert_for_saving(model, parts).items()}
    reason = "checkpoints store it under a name that its scales cannot have"
    return {
        name: reason
        for name in names
        for part in _PARTS
        if found.get(id(parts[f"{name}{part}"])) != f"{layout.find(name)[0].name}{part}"
    }


def outline_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model as empty tensors, dense also where it is compressed."""
    state = {name: torch.empty_like(x, device="meta") for name, x in model.state_dict().items()}
    for module in model.modules():
        quantization = get_quantization(module)
        if quantization is None or quantization.status is not QuantizationStatus.COMPRESSED:
            continue
        for name in quantization.tensors():
            state.pop(quantization.plan.key(name), None)
        for parameter, (shape, dtype) in quantization.plan.dense.items():
            state[quantization.plan.key(parameter)] = torch.empty(shape, dtype=dtype, device="meta")
    return state


def is_from_transformers(model: nn.Module) -> bool:
    """Return True if a model is one of transformers, without importing it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def convert_for_saving(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict, or a part of one, as transformers saves it."""
    if not is_from_transformers(model):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


def _trace(
    model: nn.Module, changed: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> list[StoredTensor]:
    """Return the tensors that a conversion makes of weights; `rows` is None if it mixes values."""
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    spans: dict[str, range] = {}
    total = 0
    for name, x in changed.items():
        if name not in weights:
            rows[name] = columns[name] = torch.full((), -1, dtype=_NUMBER).expand(x.shape)
            continue
        *outer, width = weights[name].to_matrix(x).shape
        spans[name] = range(total, total := total + math.prod(outer))
        numbers = torch.arange(spans[name].start, total, dtype=_NUMBER).view(*outer, 1)
        rows[name] = weights[name].from_matrix(numbers.expand(*outer, width), x.shape)
        numbers = torch.arange(width, dtype=_NUMBER).expand(*outer, width)
        columns[name] = weights[name].from_matrix(numbers, x.shape)
    stored = []
    stored_columns = convert_for_saving(model, columns)
    for name, x in convert_for_saving(model, rows).items():
        if _has_equal_items(x, *range(x.dim())) and bool((x[(0,) * x.dim()] < 0).all()):
            continue  # not a weight
        found = _read_rows(x, stored_columns[name])
        sources = {
            source: spans[source]
            for source in _find_sources(x if found is None else found[0], spans)
        }
        tensor = StoredTensor(name, tuple(x.shape), tuple(sources))
        if found is not None:
            numbers, transposed = found
            numbers = _count_from_sources(numbers, sources.values())
            tensor = replace(tensor, rows=numbers, transposed=transposed)
        stored.append(tensor)
    return stored


def _find_sources(numbers: Tensor, spans: Mapping[str, range]) -> list[str]:
    """Return the weights that contain the given rows."""
    known = torch.unique(numbers)
    bounds = torch.tensor([span.start for span in spans.values()])
    indices = torch.searchsorted(bounds, known[known >= 0].long(), right=True) - 1
    return [list(spans)[i] for i in torch.unique(indices).tolist()]


def _read_rows(rows: Tensor, columns: Tensor) -> tuple[Tensor, bool] | None:
    """Return the row numbers of a stored tensor and whether it is transposed, or None if mixed."""
    if rows.dim() not in (2, 3):
        return None
    for transposed in (False, True):
        if transposed:
            rows, columns = rows.transpose(-1, -2), columns.transpose(-1, -2)
        if _has_equal_items(rows, -1) and _has_equal_items(columns, *range(columns.dim() - 1)):
            numbers, order = rows[..., 0], columns[(0,) * (columns.dim() - 1)]
            is_ordered = torch.equal(order, torch.arange(len(order), dtype=_NUMBER))
            return (numbers.long(), transposed) if is_ordered and not (numbers < 0).any() else None
    return None


def _has_equal_items(x: Tensor, *dims: int) -> bool:
    """Return True if a tensor is constant along some dimensions."""
    for dim in dims:
        # A stride of 0 repeats one item: nothing to compare.
        if x.stride(dim) and not bool((x == x.narrow(dim, 0, 1)).all()):
            return False
        x = x.narrow(dim, 0, 1)
    return True


def _count_from_sources(numbers: Tensor, spans: Iterable[range]) -> Tensor:
    """Return row numbers counted over the sources of one stored tensor only."""
    result = torch.empty_like(numbers)
    first = 0
    for span in spans:
        inside = (numbers >= span.start) & (numbers < span.stop)
        result[inside] = numbers[inside] - span.start + first
        first += len(span)
    return result
