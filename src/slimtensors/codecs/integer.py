"""Floats rounded to small integers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.codecs.registry import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.spec import Parts, Spec


@register
@dataclass(frozen=True)
class Int:
    """Round floats to integers of `bits` bits, with one scale or one per row. Lossy; zeros stay."""

    name: ClassVar[str] = "int"
    lossy: ClassVar[bool] = True

    bits: int = 8
    per_row: bool = False
    """A scale for each index of the first dimension, instead of one for all."""

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise ConfigError(f"bits must be 2 to 8, got {self.bits!r}")

    def encode(self, x: Tensor) -> Parts:
        """Return `q` (int8) and `scale` (float32)."""
        if not x.is_floating_point():
            raise ConfigError(f"only floats can be rounded, not {x.dtype}")
        values = x.float()
        if not torch.isfinite(values).all():
            raise ConfigError("holds NaN or infinity, which integers cannot say")
        top = 2 ** (self.bits - 1) - 1
        rows = self._rows(values)
        scale = rows.abs().amax(dim=1, keepdim=True) / top
        scale[scale == 0] = 1.0
        q = (rows / scale).round().clamp(-top, top).to(torch.int8)
        return {"q": q.view(x.shape), "scale": scale.view(-1)}

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Multiply back."""
        q, scale = parts["q"], parts["scale"]
        if Spec.of(q) != Spec(torch.int8, like.shape) or scale.dtype is not torch.float32:
            raise CorruptFileError(f"integers of {Spec.of(q)} for a tensor of {like}")
        rows = self._rows(q)
        if scale.numel() != rows.shape[0]:
            raise CorruptFileError(f"{scale.numel()} scales for {rows.shape[0]} rows")
        return (rows.float() * scale.view(-1, 1)).to(like.dtype).view(like.shape)

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] if self.per_row and x.dim() else 1, -1)
