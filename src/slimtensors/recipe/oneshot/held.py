"""Zeros that must stay zeros, whatever is done to a model."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from slimtensors.errors import MismatchError
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.sparsity import count_zeros
from slimtensors.spec import on_cpu

_SPARSE = 0.05
"""The share of zeros from which on they are there on purpose."""


class HeldZeros:
    """Where each layer was zero, in a bit per weight."""

    def __init__(self) -> None:
        self._masks: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def hold(self, layers: Iterable[Layer], *, from_share: float = _SPARSE) -> None:
        """Hold the zeros of layers that have so many of them."""
        for layer in layers:
            weight = on_cpu(layer.parameter.data)
            zeros = count_zeros(weight)
            if zeros.zero + zeros.negative > from_share * zeros.items:
                self._masks[layer.name] = np.packbits((weight == 0).flatten().numpy())

    def check(self, layers: Iterable[Layer], modifier: str) -> None:
        """Raise if a modifier gave a layer weights where it had zeros."""
        for layer in layers:
            if (packed := self._masks.get(layer.name)) is None:
                continue
            back = int(on_cpu(layer.parameter.data).flatten()[_unpacked(packed, layer)].ne(0).sum())
            if back:
                raise MismatchError(
                    f"{layer.name}: {modifier} gave back {back} weights that were pruned; this is"
                    " a fault of this library, and nothing was saved"
                )


def _unpacked(packed: "np.ndarray[tuple[int], np.dtype[np.uint8]]", layer: Layer) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed, count=layer.parameter.numel())).bool()
