"""Floats rounded to 8-bit integers, with one scale per tensor, row or block."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    KERNEL_FLOATS,
    Parts,
    Spec,
    allocate,
    as_bytes,
    ceil_div,
    dtype_name,
    relative_distance,
)

_PIECE = 1 << 20
"""Items per piece of work: enough to be worth a thread."""


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
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Multiply back."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Find the scales, then round a piece at a time."""
        if not x.is_floating_point():
            raise ConfigError(f"only floats can be rounded, not {x.dtype}")
        if not x.numel():
            raise ConfigError(f"is empty, shape {tuple(x.shape)}: there is nothing to round")
        rows = self._rows(x if x.dtype in KERNEL_FLOATS else x.float()).contiguous()
        pieces = _pieces(rows)
        largest = torch.cat(each(lambda i: _largest(pieces[i]), len(pieces)))
        if not torch.isfinite(largest).all():
            raise ConfigError("holds NaN or infinity, which integers cannot say")
        if rows.shape[0] == 1:
            largest = largest.amax(0, keepdim=True)
        top = 2 ** (self.bits - 1) - 1
        scale = largest / top
        scale[scale == 0] = 1.0
        if float(scale.min()) < torch.finfo(torch.float32).tiny:  # too coarse to stay within `top`
            q = (rows.float() / scale.view(-1, 1)).round().clamp(-top, top).to(torch.int8)
            return {"q": q.view(x.shape), "scale": scale}
        q = allocate(Spec(torch.int8, tuple(rows.shape)))
        codes, scales = _pieces(q), _scales(scale, len(pieces), rows)

        def round_off(i: int) -> None:
            kind = dtype_name(rows.dtype)
            columns = pieces[i].shape[1]
            _core.quantize(
                as_bytes(pieces[i]),
                as_bytes(codes[i]),
                dtype=kind,
                compute_dtype="float32",
                scales=_core.Scales(as_bytes(scales[i]), "float32", (columns, columns, 1)),
                format=_core.CodeFormat("int", self.bits),
            )

        each(round_off, len(pieces))
        return {"q": q.view(x.shape), "scale": scale}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Multiply a piece at a time."""
        q, scale = parts["q"], parts["scale"]
        if Spec.of(q) != Spec(torch.int8, like.shape) or scale.dtype is not torch.float32:
            raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
        rows = self._rows(q)
        if scale.numel() != rows.shape[0]:
            raise CorruptFileError(f"{scale.numel()} scales for {rows.shape[0]} rows")
        if like.dtype not in KERNEL_FLOATS or not like.numel:
            return (rows.float() * scale.view(-1, 1)).to(like.dtype).view(like.shape)
        out = allocate(like)
        codes, items = _pieces(rows.contiguous()), _pieces(self._rows(out))
        scales = _scales(scale.flatten(), len(codes), rows)

        def multiply(i: int) -> None:
            columns = codes[i].shape[1]
            _core.dequantize(
                as_bytes(codes[i]),
                as_bytes(items[i]),
                dtype=dtype_name(like.dtype),
                scales=_core.Scales(as_bytes(scales[i]), "float32", (columns, columns, 1)),
                format=_core.CodeFormat("int", 8),
            )

        each(multiply, len(codes))
        return out

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] if self.per_row and x.dim() else 1, -1)


def _pieces(rows: Tensor) -> list[Tensor]:
    """Cut rows into pieces with one or more whole ones; a single row anywhere."""
    if rows.shape[0] == 1:
        return [piece.view(1, -1) for piece in torch.split(rows.view(-1), _PIECE)]
    return list(torch.split(rows, max(1, _PIECE // rows.shape[1])))


def _scales(scale: Tensor, pieces: int, rows: Tensor) -> list[Tensor]:
    if rows.shape[0] == 1:
        return [scale] * pieces
    return list(torch.split(scale, max(1, _PIECE // rows.shape[1])))


def _largest(rows: Tensor) -> Tensor:
    """Return the largest size of each row; not finite if it holds what is not."""
    low, high = (rows.new_empty(rows.shape[0]) for _ in range(2))
    columns = rows.shape[1]
    _core.find_ranges(
        as_bytes(rows), dtype_name(rows.dtype), columns, columns, as_bytes(low), as_bytes(high)
    )
    return torch.maximum(low.abs(), high.abs()).float()


_LARGEST = 127
_INT8 = _core.CodeFormat("int", 8)
_BLOCK_PIECE = 1 << 18
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
        q = allocate(Spec(torch.int8, (items.numel(),)))
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
                as_bytes(q[_piece(i)]),
                dtype=dtype_name(part.dtype),
                compute_dtype="float32",
                scales=self._layout(mine, part.numel()),
                format=_INT8,
            )

        each(one, ceil_div(items.numel(), _BLOCK_PIECE))
        return {"q": q.view(x.shape), "scale": scale}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Multiply pieces of the tensor side by side."""
        q, scale = parts["q"], parts["scale"]
        if Spec.of(q) != Spec(torch.int8, like.shape) or not like.dtype.is_floating_point:
            raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
        if Spec.of(scale) != Spec(torch.float32, (self._blocks(like.numel),)):
            raise CorruptFileError(f"scales of {Spec.of(scale)} do not fit a tensor of {like}")
        out = allocate(like if like.dtype in KERNEL_FLOATS else Spec(torch.float32, like.shape))
        codes, items = q.reshape(-1), out.view(-1)

        def one(i: int) -> None:
            part = codes[_piece(i)]
            _core.dequantize(
                as_bytes(part),
                as_bytes(items[_piece(i)]),
                dtype=dtype_name(out.dtype),
                scales=self._layout(scale[self._scales(i)], part.numel()),
                format=_INT8,
            )

        each(one, ceil_div(like.numel, _BLOCK_PIECE))
        return out.to(like.dtype)

    def relative_error(self, parts: Parts, x: Tensor) -> float:
        """Return how far the integers are from `x`, relative to it."""
        if x.dtype not in KERNEL_FLOATS or not x.numel():
            return relative_distance(self.decode(parts, Spec.of(x)), x)
        distance, whole = _core.rounding_loss(
            as_bytes(x),
            as_bytes(parts["q"]),
            dtype=dtype_name(x.dtype),
            scales=self._layout(parts["scale"], x.numel()),
            format=_INT8,
        )
        return math.sqrt(distance) / math.sqrt(whole) if whole else 0.0

    def _blocks(self, items: int) -> int:
        return ceil_div(items, self.block)

    def _scales(self, piece: int) -> slice:
        return slice(piece * _BLOCK_PIECE // self.block, (piece + 1) * _BLOCK_PIECE // self.block)

    def _layout(self, scale: Tensor, items: int) -> _core.Scales:
        """Return the scales of a piece, which is a single row."""
        return _core.Scales(as_bytes(scale), "float32", (items, self.block, 1))


def largest_in_blocks(x: Tensor, block: int) -> Tensor:
    """Return the largest magnitude in each block; not finite where one holds what is not."""
    items = _flat(x)
    low, high = (items.new_empty(ceil_div(items.numel(), block)) for _ in range(2))
    if items.numel():
        kind, row = dtype_name(items.dtype), items.numel()
        _core.find_ranges(as_bytes(items), kind, row, block, as_bytes(low), as_bytes(high))
    return torch.maximum(low.abs(), high.abs()).float()


def _flat(x: Tensor) -> Tensor:
    return (x if x.dtype in KERNEL_FLOATS else x.float()).reshape(-1)


def _piece(i: int) -> slice:
    return slice(i * _BLOCK_PIECE, (i + 1) * _BLOCK_PIECE)
