"""The weights of a model, seen as matrices `[outputs, inputs]` that something is multiplied by."""

from dataclasses import dataclass

from torch import Tensor, nn

from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.layers import Weight, weights_of
from slimtensors.quantization.state import quantization_of


@dataclass(frozen=True)
class Layer:
    """A weight in a model: a matrix, or a stack of them for experts."""

    name: str
    """Of the module, or of the parameter where a module has several."""
    module: nn.Module
    weight: Weight
    args: QuantizationArgs | None
    """How it is to be quantized; none if it is not."""

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as the model has it."""
        found = getattr(self.module, self.weight.parameter)
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def matrix(self) -> Tensor:
        """The weight as `[outputs, inputs]`, or a stack of such."""
        return self.weight.matrix(self.parameter.data)

    @property
    def matrices(self) -> list[Tensor]:
        """Each matrix: one, or as many as there are experts."""
        matrix = self.matrix
        return [matrix] if matrix.dim() == 2 else list(matrix)

    @property
    def places(self) -> list[int]:
        """Where in memory the matrices begin."""
        data = self.parameter.data
        own = [data] if self.weight.parameter == "weight" else list(data)
        return [x.data_ptr() for x in own]

    def put(self, matrix: Tensor, params: Params | None = None) -> None:
        """Replace the numbers of the weight; `params` are then what freezing will use."""
        own = self.parameter.data
        own.copy_(self.weight.shaped(matrix, own.shape))
        state = quantization_of(self.module)
        if params is not None and state is not None:
            state.params[self.weight.parameter] = params


def layers_of(model: nn.Module, *, prefix: str = "") -> dict[str, Layer]:
    """Return every weight that could be quantized, with how it will be, by name."""
    found = {}
    for name, module in model.named_modules(prefix=prefix):
        state = quantization_of(module)
        args = None if state is None else state.plan.weight_args
        for weight in weights_of(module):
            own = name if weight.parameter == "weight" else f"{name}.{weight.parameter}"
            found[own] = Layer(own, module, weight, args)
    return found
