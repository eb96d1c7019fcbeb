"""See what flows into each weight while a model runs."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slimtensors.errors import ConfigError
from slimtensors.quantization.algorithms.blocks import Stack
from slimtensors.quantization.algorithms.hessian import Hessian
from slimtensors.quantization.algorithms.layers import Layer

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
