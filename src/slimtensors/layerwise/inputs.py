"""Inputs of layers: recorded while a model runs, without padding."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slimtensors.errors import ConfigError
from slimtensors.layerwise.engine import Batch, Stack
from slimtensors.layerwise.hessian import Hessian
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


_FACTORS: dict[Callable[..., Any], int] = {
    functional.linear: 0,
    torch.addmm: 1,
    torch.matmul: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
}
"""Products, and which argument is the input; the weight comes next."""


@dataclass
class Inputs:
    """What some weights have read: the same tensors, in every batch."""

    hessian: Hessian
    readers: list[tuple[str, int]] = field(default_factory=list)
    """Name of a layer and which of its matrices, in the order in which they are used."""
    source: str | None = None
    """The norm whose output this is."""


class Watch(TorchFunctionMode):
    """Collect Hessians of layers while it is active; it sees every product with their weights.

    That also finds the matrices of fused experts, which no module stands for.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self._matrices = {
            place: (layer.name, i) for layer in layers for i, place in enumerate(layer.places)
        }
        self._found: dict[tuple[str, int], Inputs] = {}
        self._seen: list[tuple[Tensor, Inputs]] = []
        self._norms: list[tuple[Tensor, str]] = []
        self._is_first = True

    def inputs(self) -> list[Inputs]:
        """Return what was read, without repeating what several layers share."""
        return list({id(inputs): inputs for inputs in self._found.values()}.values())

    def end_batch(self) -> None:
        """Forget the tensors of a batch; from the second on it is known who shares what."""
        self._seen.clear()
        self._norms.clear()
        self._is_first = False

    def norm_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a hook that tells which tensors come out of the norm called `name`."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._norms.append((output, name))

        return hook

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at products, and let everything happen as it would."""
        first = _FACTORS.get(func)
        if first is not None and len(args) > first + 1:
            self._see(args[first], args[first + 1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, weight: Tensor) -> None:
        if (key := self._matrices.get(weight.data_ptr())) is None:
            return
        if key not in self._found:
            self._found[key] = self._shared(x) or self._new(x)
            self._found[key].readers.append(key)
        inputs = self._found[key]
        if inputs.readers[0] != key:
            return
        try:
            inputs.hessian.add(x)
        except ConfigError as error:
            raise ConfigError(f"{key[0]}: {error}") from error

    def _shared(self, x: Tensor) -> Inputs | None:
        if not self._is_first:
            return None
        return next((inputs for seen, inputs in self._seen if seen is x), None)

    def _new(self, x: Tensor) -> Inputs:
        source = next((name for seen, name in self._norms if seen is x), None)
        inputs = Inputs(Hessian(x.shape[-1], device=x.device), source=source)
        if self._is_first:
            self._seen.append((x, inputs))
        return inputs


def watch_block(
    stack: Stack, block: str, layers: Iterable[Layer], norms: Mapping[str, nn.Module]
) -> list[Inputs]:
    """Run a block on what comes into it, and return what these layers read."""
    watch = Watch(layers)
    with ExitStack() as hooks:
        for name, norm in norms.items():
            hooks.callback(norm.register_forward_hook(watch.norm_hook(name)).remove)
        with watch:
            for _ in stack.run(block):
                watch.end_batch()
    return watch.inputs()


MASK = "attention_mask"
"""What tells tokens from padding."""


def without_padding(model: nn.Module, batches: Iterable[Batch]) -> list[Batch]:
    """Return batches of rows of equal length, without the tokens that `attention_mask` leaves out.

    The mask is one of two dimensions, in a batch that is a mapping; others stay as they are. So
    padding is neither in Hessians nor in the ranges of inputs, and every token stands where it
    would stand if its row came alone. A batch that cannot be taken apart by rows raises. Those of
    an encoder with a decoder stay as they are: their mask says nothing about what is decoded.
    """
    given = list(batches)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return given
    parts = [part for batch in given for part in _parts(batch)]
    if given and not parts:
        raise ConfigError(f"{MASK} leaves out every token")
    return parts


def _parts(batch: Batch) -> Iterator[Batch]:
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.bool().all():
        yield batch
        return
    attended = mask.bool()
    lengths = attended.sum(1)
    _check(batch, mask)
    for length in sorted({*lengths.tolist()} - {0}):
        rows = lengths == length
        tokens = attended[rows].nonzero()[:, 1].view(-1, length)
        yield {name: _cut(x, mask, rows, tokens) for name, x in batch.items()}


def _cut(x: Any, mask: Tensor, rows: Tensor, tokens: Tensor) -> Any:
    """Return of some rows the tokens, if it has them; what else a single row has stays whole."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if _is_shared(x, mask):
        x = x.expand(len(mask), *x.shape[1:])
    if x.shape[:2] != mask.shape:
        return x if len(mask) == 1 else x[rows]
    chosen = x[rows]
    which = torch.arange(len(chosen), device=x.device)[:, None]
    return chosen[which, tokens]


def _is_shared(x: Tensor, mask: Tensor) -> bool:
    """Tell whether all rows have the same, as positions often are."""
    return x.shape[:2] == (1, mask.shape[1])


def _check(batch: Mapping[str, Any], mask: Tensor) -> None:
    rows = len(mask)
    if rows == 1:
        return
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() and len(x) != rows and not _is_shared(x, mask):
            raise ConfigError(
                f"{name} has {len(x)} rows where {MASK} has {rows}, so that padding cannot be cut"
                " off; give each sample in a batch of its own"
            )
