"""The weights of a model that are to be quantized, seen as matrices `[outputs, inputs]`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization.args import QuantizationArgs


@dataclass(frozen=True)
class Layer:
    """A weight in a model, and how it is to be quantized."""

    name: str
    """Of the module, or of the parameter where a module has several (fused experts)."""
    parameter: nn.Parameter
    args: QuantizationArgs
    is_transposed: bool = False
    """Whether it is kept as `[inputs, outputs]`."""

    @property
    def matrix(self) -> Tensor:
        """A view of the weight as `[outputs, inputs]`, or a stack of them."""
        data = self.parameter.data
        return data.mT if self.is_transposed else data

    @property
    def matrices(self) -> list[Tensor]:
        """Each matrix: one, or as many as there are experts."""
        matrix = self.matrix
        return [matrix] if matrix.dim() == 2 else list(matrix)

    def put(self, weight: Tensor) -> None:
        """Replace the numbers of the weight."""
        self.matrix.copy_(weight)


def find_layers(model: nn.Module, chosen: Mapping[str, QuantizationArgs]) -> dict[str, Layer]:
    """Return the layers that `chosen` names, in the order of the model."""
    if not chosen:
        raise ConfigError("no layer of the model is to be quantized; check targets and ignore")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    found = {}
    for name, args in chosen.items():
        module = modules.get(name)
        if module is None and name not in parameters:
            raise ConfigError(f"the model has no layer {name!r}; {nearest(name, modules)}")
        weight = parameters[name] if module is None else getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() not in (2, 3):
            raise ConfigError(f"{name}: has no weight that is a matrix or a stack of them")
        if not torch.isfinite(weight).all():
            raise ConfigError(f"{name}: holds NaN or infinity; fix it, or put it under ignore")
        found[name] = Layer(name, weight, args, is_transposed=_is_conv1d(module))
    places = {id(p): i for i, p in enumerate(model.parameters())}
    return dict(sorted(found.items(), key=lambda item: places[id(item[1].parameter)]))


def _is_conv1d(module: nn.Module | None) -> bool:
    """Tell whether this is the layer of GPT-2 in transformers, which multiplies from the right."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
