"""The weights of a model as the tensors of its checkpoint, for rounding."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from slimtensors.archive.write import TensorSource
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import decode
from slimtensors.codecs.trellis import ROUNDED_DTYPES
from slimtensors.errors import ConfigError, shorten_list
from slimtensors.layerwise.fisher import find_matrix_keys
from slimtensors.layerwise.fit import FitTensor, Solution
from slimtensors.layerwise.inputs import Layer, collect_layers
from slimtensors.layerwise.statistics import Statistics
from slimtensors.parallel import Each
from slimtensors.quantization.checkpoint_layout import StoredTensor, find_layout
from slimtensors.quantization.layers import list_class_names
from slimtensors.quantization.targets import matches_any

_MIN_ITEMS = 4096
"""Smaller weights are stored exactly: their steps and headers would take as much."""
_MIN_TOKENS = 128
"""Inputs below which statistics of an expert are ignored."""
_OUTPUT_SMOOTHING = 0.2
"""Share of the mean that is added to the sensitivity of tokens, most of which are rare."""


class StoredWeights:
    """The layers of a model that can be rounded, and the tensors that checkpoints store for them.

    Args:
        model: the model, whose weights will be changed.
        sources: all tensors of its checkpoint.
        read: returns an original tensor of the checkpoint by name.
        ignore: layers to store exactly: names, classes, or `re:` patterns.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Sequence[TensorSource],
        read: Callable[[str], Tensor],
        ignore: Sequence[str],
    ) -> None:
        self.sources, self.read = sources, read
        found = collect_layers(model)
        unknown = [x for x in ignore if not any(_matches(x, layer) for layer in found.values())]
        if unknown:
            raise ConfigError(
                f"ignore: {unknown[0]!r} matches no layer; layers are {shorten_list(list(found))}"
            )
        # By parameter: a tied weight is exact if one of its layers is ignored.
        exact = {
            id(layer.parameter)
            for layer in found.values()
            if any(_matches(x, layer) for x in ignore)
        }
        self.layers = {
            name: layer
            for name, layer in found.items()
            if id(layer.parameter) not in exact
            and layer.parameter.numel() >= _MIN_ITEMS
            and layer.parameter.dtype in ROUNDED_DTYPES
        }
        owners = {id(layer.parameter): layer for layer in self.layers.values()}
        self.parameters = {
            name: owners[id(x)]
            for name, x in model.named_parameters(remove_duplicate=False)
            if id(x) in owners
        }
        weights = {name: layer.weight for name, layer in self.parameters.items()}
        layout = find_layout(model, weights)
        names = {source.name for source in sources}
        self.stored = {name: x for name, x in layout.tensors.items() if name in names}
        stored = {name for x in self.stored.values() for name in x.sources}
        used = {id(self.parameters[name].parameter) for name in stored}
        self.mixed = sorted(
            name for name, layer in self.layers.items() if id(layer.parameter) not in used
        )
        """Layers whose weights checkpoints mix with others, which therefore stay exact."""
        self.layers = {name: x for name, x in self.layers.items() if name not in self.mixed}
        self.keys = find_matrix_keys(self.layers.values())

    @property
    def pooled(self) -> set[str]:
        """Layers whose experts are rounded as one matrix."""
        return {
            self.parameters[tensor.sources[0]].name
            for tensor in self.stored.values()
            if tensor.rows is None and self.parameters[tensor.sources[0]].weight.stacked
        }

    def make_tensors(self, statistics: Statistics) -> list[FitTensor]:
        """Return the tensors to round, with what is known about each."""
        return [
            self._make_tensor(self.stored[source.name], source, statistics)
            for source in self.sources
            if source.name in self.stored
        ]

    def apply(self, solution: Solution, each: Each) -> None:
        """Write rounded weights to the model."""
        for fitted in solution.tensors:
            self._set(fitted.name, decode(fitted.encoded, each))

    def restore(self) -> None:
        """Write the original weights to the model."""
        for name in self.stored:
            self._set(name, self.read(name))

    def _set(self, name: str, x: Tensor) -> None:
        tensor = self.stored[name]
        layers = [self.parameters[source] for source in tensor.sources]
        if tensor.rows is None:
            layers[0].parameter.data.copy_(x)
        else:
            _set_rows(layers, tensor, x)

    def find_factors(self, name: str, factors: Mapping[str, Tensor]) -> Tensor:
        """Return the factor of each row of a stored tensor, given those of layers."""
        tensor = self.stored[name]
        parts = []
        for source in tensor.sources:
            layer = self.parameters[source]
            rows = torch.ones(layer.count * layer.matrix_shape[0])
            parts.append(factors.get(layer.name, rows))
        return _select_rows(tensor, parts)

    def _make_tensor(
        self, tensor: StoredTensor, source: TensorSource, statistics: Statistics
    ) -> FitTensor:
        dims = len(tensor.shape) - 1 if tensor.transposed or self._is_stack(tensor) else 1
        codec = Trellis(row_dims=dims, transposed=tensor.transposed)
        made = FitTensor(source.name, source.spec, lambda: self.read(source.name), codec)
        keys = self._find_keys(tensor)
        found = [statistics.find(key) for key in keys]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or not known:
            return replace(made, note="not used with the calibration data")
        if len({each.inputs for each in known}) > 1:
            return replace(made, note="rows with different inputs")
        tokens = sum(each.tokens for each in known) if self._is_stack(tensor) else known[0].tokens
        if tokens < _MIN_TOKENS:
            return replace(made, note=f"fewer than {_MIN_TOKENS} inputs in the calibration data")
        gradients = self._find_gradients(tensor, statistics)
        if gradients is None or len(gradients) != made.matrix_shape[0] or not gradients.any():
            return replace(made, note="no gradient in the calibration data")
        vocabulary = any(
            isinstance(layer.module, nn.Embedding) for layer in self._find_tied(tensor)
        )
        return replace(
            made,
            inputs=known[0].inputs,
            sensitivity=gradients,
            smoothing=_OUTPUT_SMOOTHING if vocabulary else FitTensor.smoothing,
        )

    def _is_stack(self, tensor: StoredTensor) -> bool:
        return len(tensor.shape) == 3 and self.parameters[tensor.sources[0]].weight.stacked

    def _find_tied(self, tensor: StoredTensor) -> list[Layer]:
        """Return all layers with the weight of a stored tensor."""
        first = self.parameters[tensor.sources[0]]
        owner = self.keys[first.name]
        return [layer for name, layer in self.layers.items() if self.keys[name] == owner]

    def _find_keys(self, tensor: StoredTensor) -> list[tuple[str, int]]:
        """Return the matrices that the rows of a stored tensor belong to, in their order."""
        keys: list[tuple[str, int]] = []
        for source in tensor.sources:
            layer = self.parameters[source]
            keys += [(self.keys[layer.name], i) for i in range(layer.count)]
        if tensor.rows is None:
            return keys
        heights = self._find_heights(tensor)
        starts = torch.tensor([0, *heights]).cumsum(0)
        used = torch.searchsorted(starts, tensor.rows.flatten(), right=True) - 1
        return [keys[i] for i in torch.unique(used).tolist()]

    def _find_heights(self, tensor: StoredTensor) -> list[int]:
        layers = [self.parameters[source] for source in tensor.sources]
        return [layer.matrix_shape[0] for layer in layers for _ in range(layer.count)]

    def _find_gradients(self, tensor: StoredTensor, statistics: Statistics) -> Tensor | None:
        """Return the mean squared gradient of each row of a stored tensor."""
        rows: list[Tensor] = []
        for source in tensor.sources:
            layer = self.parameters[source]
            for i in range(layer.count):
                found = statistics.find((self.keys[layer.name], i))
                # An expert without a gradient does not take the statistics of the others.
                value = 0.0 if layer.weight.stacked else torch.nan
                unknown = torch.full((layer.matrix_shape[0],), value)
                gradients = None if found is None else found.gradients
                rows.append(unknown if gradients is None else gradients)
        selected = _select_rows(tensor, rows)
        return None if selected.isnan().any() else selected

    def find_scalable(self) -> list[Layer]:
        """Return the layers whose rows can be scaled by scaling outputs."""
        counts = Counter(id(layer.parameter) for layer in self.parameters.values())
        return [
            layer
            for layer in self.parameters.values()
            if layer.name in self.layers
            and counts[id(layer.parameter)] == 1
            and (isinstance(layer.module, nn.Linear) or type(layer.module).__name__ == "Conv1D")
        ]


def _set_rows(layers: Sequence[Layer], tensor: StoredTensor, x: Tensor) -> None:
    """Write the rows of a stored tensor to the weights that it consists of."""
    assert tensor.rows is not None, "otherwise it is a weight"
    rows = (x.transpose(-1, -2) if tensor.transposed else x).flatten(0, -2)
    numbers = tensor.rows.flatten()
    first = 0
    for layer in layers:
        matrix = layer.matrix
        flat = matrix.flatten(0, -2).clone()
        inside = (numbers >= first) & (numbers < first + len(flat))
        flat[numbers[inside] - first] = rows[inside].to(flat.dtype)
        layer.set_weight(flat.view(matrix.shape))
        first += len(flat)


def _select_rows(tensor: StoredTensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the values of the rows of a stored tensor, given those of its sources."""
    found = torch.cat(list(parts))
    return found if tensor.rows is None else found[tensor.rows.flatten()]


def _matches(pattern: str, layer: Layer) -> bool:
    return matches_any([pattern], layer.name, list_class_names(layer.module))
