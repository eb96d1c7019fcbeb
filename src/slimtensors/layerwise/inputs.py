"""The layers of a model, and their inputs: recorded while the model runs, without padding."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import Hessian, MatrixKey
from slimtensors.layerwise.products import (
    TRANSPARENT,
    find_address,
    find_operands,
    split_inputs,
)
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.layers import Weight, list_weights
from slimtensors.quantization.state import get_quantization

Batch = Any
"""Arguments of one call of the model: a mapping, a sequence, or a single input."""

MASK = "attention_mask"
"""Argument that is 0 for padding and 1 for tokens."""


@dataclass(frozen=True)
class Layer:
    """A weight in a model: a matrix, or a stack of matrices for experts."""

    name: str
    """Name of the module, or of the parameter if the module has several."""
    module: nn.Module
    weight: Weight
    args: QuantizationArgs | None
    """How the weight is quantized; None if it is not."""

    @property
    def parameter(self) -> nn.Parameter:
        """Parameter that contains the weight."""
        found = getattr(self.module, self.weight.parameter)
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def matrix(self) -> Tensor:
        """The weight as `[outputs, inputs]`, or as a stack of such matrices."""
        return self.weight.to_matrix(self.parameter.data)

    @property
    def matrices(self) -> list[Tensor]:
        """The single matrix, or the matrix of each expert."""
        return list(self.matrix) if self.weight.stacked else [self.matrix]

    @property
    def count(self) -> int:
        """Number of matrices: more than one for stacked experts."""
        return len(self.parameter) if self.weight.stacked else 1

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Number of outputs and inputs of each matrix."""
        shape = self.parameter.shape[1:] if self.weight.stacked else self.parameter.shape
        rows, columns = shape[0], math.prod(shape[1:])
        return (columns, rows) if self.weight.transposed else (rows, columns)

    @property
    def addresses(self) -> list[int]:
        """Memory address of each matrix."""
        data = self.parameter.data
        return [x.data_ptr() for x in (data if self.weight.stacked else [data])]

    def set_weight(self, matrix: Tensor, params: Params | None = None) -> None:
        """Replace the values of the weight; freezing will use `params` if given."""
        data = self.parameter.data
        data.copy_(self.weight.from_matrix(matrix, data.shape))
        state = get_quantization(self.module)
        if params is not None and state is not None:
            state.params[self.weight.parameter] = params


def collect_layers(model: nn.Module, *, prefix: str = "") -> dict[str, Layer]:
    """Return every weight that can be quantized, by name."""
    layers = {}
    for module_name, module in model.named_modules(prefix=prefix):
        state = get_quantization(module)
        args = None if state is None else state.plan.weight_args
        for weight in list_weights(module):
            is_only = weight.parameter == "weight"
            name = module_name if is_only else f"{module_name}.{weight.parameter}"
            layers[name] = Layer(name, module, weight, args)
    return layers


class MatrixTable:
    """The matrices of layers by memory address, to find the products that read them."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._keys = {
            address: (layer.name, i)
            for layer in self._layers.values()
            for i, address in enumerate(layer.addresses)
        }

    def find_products(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[MatrixKey, Tensor]]:
        """Return the matrices that a call multiplies, each with its inputs `[..., columns]`."""
        for weight, get_inputs in find_operands(function, args, kwargs):
            if (key := self._keys.get(find_address(weight))) is None:
                continue
            name, i = key
            layer = self._layers[name]
            shape = (layer.count - i, *layer.matrix_shape)
            if (inputs := split_inputs(get_inputs(), weight, shape)) is not None:
                return [((name, i + j), x) for j, x in enumerate(inputs)]
        return []

    def find_weights(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return the names of the layers whose weight is among the tensors, or viewed by one."""
        keys = [self._keys.get(find_address(x)) for x in tensors]
        return {key[0] for key in keys if key is not None}


@dataclass
class SharedInputs:
    """Statistics of inputs that one or more matrices read, the same tensors in every batch."""

    hessian: Hessian
    readers: list[MatrixKey] = field(default_factory=list)
    """Layer name and matrix index of each reader, in the order of use."""
    source: str | None = None
    """Name of the norm that outputs these tensors, if any."""


class InputsComplete(BaseException):
    """Stops a forward pass once all requested inputs are recorded."""


class InputRecorder(TorchFunctionMode):
    """Collects the Hessians of layers while active, by observing products with their weights.

    Unlike module hooks, this also sees the matrices of fused experts. With `once`, it raises
    `InputsComplete` as soon as each layer was seen once in a batch. With `share`, layers that read
    the same tensor first are assumed to share all their inputs.
    """

    def __init__(self, layers: Iterable[Layer], *, once: bool = False, share: bool = True) -> None:
        super().__init__()
        self._share = share
        layers = list(layers)
        self._matrices = MatrixTable(layers)
        self._names = {layer.name for layer in layers} if once else set()
        self._missing = {*self._names}
        self._inputs: dict[MatrixKey, SharedInputs] = {}
        self._tensors: list[tuple[Tensor, SharedInputs]] = []
        self._norm_outputs: list[tuple[Tensor, str]] = []
        self._seen: set[MatrixKey] = set()
        self._is_first_batch = True
        self.repeated: set[str] = set()
        """Layers that were used more than once in a batch."""

    def inputs(self) -> list[SharedInputs]:
        """Return the recorded inputs, each once even if several layers share it."""
        return list({id(inputs): inputs for inputs in self._inputs.values()}.values())

    def end_batch(self) -> None:
        """Drop references to the tensors of a batch; sharing is detected in the first one."""
        self._tensors.clear()
        self._norm_outputs.clear()
        self._missing = {*self._names}
        self._seen.clear()
        self._is_first_batch = False

    def norm_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook that records the outputs of the norm called `name`."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._norm_outputs.append((output, name))

        return hook

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record products, and call the function unchanged."""
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            with self:
                return TRANSPARENT[func](*args, **kwargs)
        for key, x in self._matrices.find_products(func, args, kwargs):
            self._record(key, x)
            self._missing.discard(key[0])
            if self._names and not self._missing:
                raise InputsComplete
        return func(*args, **kwargs)

    def _record(self, key: MatrixKey, x: Tensor) -> None:
        if key in self._seen:
            self.repeated.add(key[0])
        self._seen.add(key)
        if key not in self._inputs:
            self._inputs[key] = self._find_shared(x) or self._add(x)
            self._inputs[key].readers.append(key)
        inputs = self._inputs[key]
        if inputs.readers[0] != key:
            return
        try:
            inputs.hessian.add(x)
        except ConfigError as error:
            raise ConfigError(f"{key[0]}: {error}") from error

    def _find_shared(self, x: Tensor) -> SharedInputs | None:
        if not self._share or not self._is_first_batch:
            return None
        return next((inputs for tensor, inputs in self._tensors if tensor is x), None)

    def _add(self, x: Tensor) -> SharedInputs:
        source = next((name for tensor, name in self._norm_outputs if tensor is x), None)
        inputs = SharedInputs(Hessian(x.shape[-1], device=x.device), source=source)
        if self._is_first_batch:
            self._tensors.append((x, inputs))
        return inputs


def remove_padding(model: nn.Module, batches: Iterable[Batch]) -> list[Batch]:
    """Return batches of rows of equal length, without the tokens that `attention_mask` excludes.

    This affects batches that are mappings with a two-dimensional mask; others are returned as they
    are. Padding then contributes neither to Hessians nor to activation ranges, and each token has
    the position it would have if its row were a batch of its own. A batch that cannot be split by
    rows raises. Batches of encoder-decoder models are returned as they are, because the mask does
    not cover the decoder's inputs.
    """
    originals = list(batches)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return originals
    parts = [part for batch in originals for part in _split_batch(batch)]
    if originals and not parts:
        raise ConfigError(f"{MASK} excludes every token")
    return parts


def _split_batch(batch: Batch) -> Iterator[Batch]:
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.bool().all():
        yield batch
        return
    attended = mask.bool()
    lengths = attended.sum(1)
    _check_rows(batch, mask)
    for length in sorted({*lengths.tolist()} - {0}):
        rows = lengths == length
        tokens = attended[rows].nonzero()[:, 1].view(-1, length)
        yield {name: _select(x, mask, rows, tokens) for name, x in batch.items()}


def _select(x: Any, mask: Tensor, rows: Tensor, tokens: Tensor) -> Any:
    """Return the selected rows of an argument, and the selected tokens if it has any.

    Arguments of a single row without a token dimension are returned whole.
    """
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if _is_broadcast(x, mask):
        x = x.expand(len(mask), *x.shape[1:])
    if x.shape[:2] != mask.shape:
        return x if len(mask) == 1 else x[rows]
    selected = x[rows]
    indices = torch.arange(len(selected), device=x.device)[:, None]
    return selected[indices, tokens]


def _is_broadcast(x: Tensor, mask: Tensor) -> bool:
    """Return True if all rows share one row of values, as position ids often do."""
    return x.shape[:2] == (1, mask.shape[1])


def _check_rows(batch: Mapping[str, Any], mask: Tensor) -> None:
    rows = len(mask)
    if rows == 1:
        return
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() and len(x) != rows and not _is_broadcast(x, mask):
            raise ConfigError(
                f"{name} has {len(x)} rows but {MASK} has {rows}, so padding cannot be removed;"
                " pass each sample as a batch of its own"
            )
