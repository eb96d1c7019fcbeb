"""Floats rounded to bytes, with a scale for every few of them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.pieces import room
from slimtensors.codecs.registry import register
from slimtensors.distance import relative_distance
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.memory import empty
from slimtensors.spec import Each, Parts, Spec, as_bytes, dtype_name, serially

_LARGEST = 127
_BY_CORE = (torch.bfloat16, torch.float16, torch.float32)
_NO_ZEROS = room(0)
_PIECE = 1 << 18
"""Items per piece of work: enough to be worth a thread, few enough to stay in a cache."""


@register
@dataclass(frozen=True)
class IntBlocks:
    """Round floats to 8-bit integers, with a scale for each block of items. Lossy; zeros stay."""

    name: ClassVar[str] = "int-blocks"
    lossy: ClassVar[bool] = True

    block: int = 64

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 1 <= self.block <= 1 << 16 or (1 << 16) % self.block:
            raise ConfigError(f"block must be a power of two up to 65536, got {self.block!r}")

    def encode(self, x: Tensor) -> Parts:
        """Return `q` (int8) and `scale` (float32)."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Multiply back."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Round pieces of the tensor side by side."""
        if not x.is_floating_point():
            raise ConfigError(f"only floats can be rounded, not {x.dtype}")
        items = _flat(x)
        q = empty(Spec(torch.int8, (items.numel(),)))
        scale = torch.empty(self._blocks(items.numel()))

        def one(i: int) -> None:
            part, mine = items[_piece(i)], scale[self._scales(i)]
            largest = largest_in_blocks(part, self.block).div_(_LARGEST)
            if not torch.isfinite(largest).all():
                raise ConfigError("holds NaN or infinity, which integers cannot say")
            # The least normal number: below it, a quotient would overflow; such blocks become 0.
            mine.copy_(largest.clamp_(min=torch.finfo(torch.float32).tiny))
            _core.quantize(
                as_bytes(part),
                dtype_name(part.dtype),
                "float32",
                *self._layout(mine, part.numel()),
                "int",
                8,
                as_bytes(q[_piece(i)]),
            )

        each(one, -(-items.numel() // _PIECE))
        return {"q": q.view(x.shape), "scale": scale}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Multiply pieces of the tensor side by side."""
        q, scale = parts["q"], parts["scale"]
        if Spec.of(q) != Spec(torch.int8, like.shape) or not like.dtype.is_floating_point:
            raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
        if Spec.of(scale) != Spec(torch.float32, (self._blocks(like.numel),)):
            raise CorruptFileError(f"scales of {Spec.of(scale)} do not fit a tensor of {like}")
        out = empty(like if like.dtype in _BY_CORE else Spec(torch.float32, like.shape))
        codes, items = q.reshape(-1), out.view(-1)

        def one(i: int) -> None:
            part = codes[_piece(i)]
            _core.dequantize(
                as_bytes(part),
                "int",
                8,
                *self._layout(scale[self._scales(i)], part.numel()),
                dtype_name(out.dtype),
                as_bytes(items[_piece(i)]),
            )

        each(one, -(-like.numel // _PIECE))
        return out.to(like.dtype)

    def relative_error(self, parts: Parts, x: Tensor) -> float:
        """Return how far the integers are from `x`, relative to it."""
        if x.dtype not in _BY_CORE or not x.numel():
            return relative_distance(self.decode(parts, Spec.of(x)), x)
        distance, whole = _core.rounding_loss(
            as_bytes(x),
            dtype_name(x.dtype),
            as_bytes(parts["q"]),
            "int",
            8,
            *self._layout(parts["scale"], x.numel()),
        )
        return math.sqrt(distance) / math.sqrt(whole) if whole else 0.0

    def _blocks(self, items: int) -> int:
        return -(-items // self.block)

    def _scales(self, piece: int) -> slice:
        return slice(piece * _PIECE // self.block, (piece + 1) * _PIECE // self.block)

    def _layout(
        self, scale: Tensor, items: int
    ) -> tuple[Tensor, str, float, Tensor, tuple[int, int, int]]:
        """Return what the core wants to know of scales: here a piece is one row."""
        return as_bytes(scale), "float32", 1.0, _NO_ZEROS, (items, self.block, 1)


def largest_in_blocks(x: Tensor, block: int) -> Tensor:
    """Return the largest magnitude in each block; not finite where one holds what is not."""
    items = _flat(x)
    low, high = (items.new_empty(-(-items.numel() // block)) for _ in range(2))
    if items.numel():
        kind, row = dtype_name(items.dtype), items.numel()
        _core.find_ranges(as_bytes(items), kind, row, block, as_bytes(low), as_bytes(high))
    return torch.maximum(low.abs(), high.abs()).float()


def _flat(x: Tensor) -> Tensor:
    return (x if x.dtype in _BY_CORE else x.float()).reshape(-1)


def _piece(i: int) -> slice:
    return slice(i * _PIECE, (i + 1) * _PIECE)
