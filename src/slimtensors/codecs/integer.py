"""Floats rounded to small integers, with one scale per tensor, row or block."""

import math
from collections.abc import Sequence
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

_TINY = torch.finfo(torch.float32).tiny
_INT8 = _core.CodeFormat("int", 8)
_PIECE = 1 << 18
"""Items per piece of work: enough for a thread, few enough for the cache."""


@register
@dataclass(frozen=True)
class Int:
    """Round floats to integers of `bits` bits, with one scale or one per row. Lossy; zeros stay."""

    name: ClassVar[str] = "int"
    part_names: ClassVar[tuple[str, ...]] = ("q", "scale")
    lossy: ClassVar[bool] = True

    bits: int = 8
    per_row: bool = False
    """Use a scale for each index of the first dimension instead of one for all."""

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise ConfigError(f"bits must be 2 to 8, got {self.bits!r}")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `q` (int8) and `scale` (float32)."""
        items = _flatten(x)
        if not x.numel():
            raise ConfigError(f"an empty tensor of shape {tuple(x.shape)} cannot be rounded")
        scales, row = self._layout(Spec.of(x))
        pieces = _split(x.numel(), row, row)
        largest = torch.cat(each(lambda i: pieces[i].find_largest(items), len(pieces)))
        _check_finite(largest)
        if scales == 1:
            largest = largest.amax(0, keepdim=True)
        top = 2 ** (self.bits - 1) - 1
        scale = largest / top
        scale[scale == 0] = 1.0
        if float(scale.min()) < _TINY:  # the kernel divides by subnormal scales inexactly
            rounded = (items.float().view(scales, -1) / scale.view(-1, 1)).round()
            return {"q": rounded.clamp(-top, top).to(torch.int8).view(x.shape), "scale": scale}
        q = allocate(Spec(torch.int8, (x.numel(),)))
        each(lambda i: pieces[i].quantize(items, scale, self.bits, q), len(pieces))
        return {"q": q.view(x.shape), "scale": scale}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Multiply the integers by their scales."""
        scales, row = self._layout(like)
        return _dequantize(parts, like, scales, _split(like.numel, row, row), each)

    def _layout(self, spec: Spec) -> tuple[int, int]:
        """Return the number of scales, and of the items that share one."""
        scales = spec.shape[0] if self.per_row and spec.shape else 1
        return scales, spec.numel // scales if scales else 0


@register
@dataclass(frozen=True)
class IntBlocks:
    """Round floats to 8-bit integers, with a scale for each block of items. Lossy; zeros stay."""

    name: ClassVar[str] = "int-blocks"
    part_names: ClassVar[tuple[str, ...]] = ("q", "scale")
    lossy: ClassVar[bool] = True

    block: int = 64

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 1 <= self.block <= 1 << 16 or (1 << 16) % self.block:
            raise ConfigError(f"block must be a power of two up to 65536, got {self.block!r}")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `q` (int8) and `scale` (float32)."""
        items = _flatten(x)
        pieces = _split(x.numel(), x.numel(), self.block)
        q = allocate(Spec(torch.int8, (x.numel(),)))
        scale = torch.empty(ceil_div(x.numel(), self.block))

        def encode_piece(i: int) -> None:
            piece = pieces[i]
            largest = piece.find_largest(items).div_(127)
            _check_finite(largest)
            # Quotients by smaller scales could overflow; such blocks are rounded to zero.
            scale[piece.scales].copy_(largest.clamp_(min=_TINY))
            piece.quantize(items, scale, 8, q)

        each(encode_piece, len(pieces))
        return {"q": q.view(x.shape), "scale": scale}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Multiply the integers by their scales."""
        pieces = _split(like.numel, like.numel, self.block)
        return _dequantize(parts, like, ceil_div(like.numel, self.block), pieces, each)

    def relative_error(self, parts: Parts, x: Tensor) -> float:
        """Return the RMS error of the integers, relative to the RMS of `x`."""
        if x.dtype not in KERNEL_FLOATS or not x.numel():
            return relative_distance(self.decode(parts, Spec.of(x)), x)
        error, total = _core.rounding_loss(
            as_bytes(x),
            as_bytes(parts["q"]),
            dtype=dtype_name(x.dtype),
            scales=_kernel_scales(parts["scale"], (x.numel(), self.block, 1)),
            format=_INT8,
        )
        return math.sqrt(error) / math.sqrt(total) if total else 0.0


def find_largest(x: Tensor, block: int) -> Tensor:
    """Return the largest magnitude in each block; not finite for blocks with NaN or infinity."""
    items = x if x.dtype in KERNEL_FLOATS else x.float()
    return _find_largest(items.reshape(-1), x.numel(), block)


@dataclass(frozen=True)
class _Piece:
    """A range of flat items, the range of their scales, and the layout of both."""

    items: slice
    scales: slice
    layout: tuple[int, int, int]
    """Items per row, items per scale, rows per scale."""

    def find_largest(self, items: Tensor) -> Tensor:
        row, group, _ = self.layout
        return _find_largest(items[self.items], row, group)

    def quantize(self, items: Tensor, scale: Tensor, bits: int, q: Tensor) -> None:
        _core.quantize(
            as_bytes(items[self.items]),
            as_bytes(q[self.items]),
            dtype=dtype_name(items.dtype),
            compute_dtype="float32",
            scales=_kernel_scales(scale[self.scales], self.layout),
            format=_core.CodeFormat("int", bits),
        )

    def dequantize(self, q: Tensor, scale: Tensor, items: Tensor) -> None:
        _core.dequantize(
            as_bytes(q[self.items]),
            as_bytes(items[self.items]),
            dtype=dtype_name(items.dtype),
            scales=_kernel_scales(scale[self.scales], self.layout),
            format=_INT8,
        )


def _split(numel: int, row: int, group: int) -> list[_Piece]:
    """Divide items into pieces of whole rows, or of about `_PIECE` items if there is one row.

    `group` items of a row share a scale.
    """
    if not numel:
        return []
    step = _PIECE if row == numel else max(1, _PIECE // row) * row
    pieces = []
    for first in range(0, numel, step):
        last = min(first + step, numel)
        scales = slice(0, 1) if group == numel else slice(first // group, ceil_div(last, group))
        count = last - first
        pieces.append(_Piece(slice(first, last), scales, (min(row, count), min(group, count), 1)))
    return pieces


def _dequantize(
    parts: Parts, like: Spec, scales: int, pieces: Sequence[_Piece], each: Each
) -> Tensor:
    q, scale = parts["q"], parts["scale"]
    is_float = like.dtype.is_floating_point and dtype_name(like.dtype) != "float4_e2m1fn_x2"
    if Spec.of(q) != Spec(torch.int8, like.shape) or not is_float:
        raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
    if scale.dtype is not torch.float32 or scale.numel() != scales:
        raise CorruptFileError(f"expected {scales} float32 scales, got {Spec.of(scale)}")
    out = allocate(like if like.dtype in KERNEL_FLOATS else Spec(torch.float32, like.shape))
    codes, items, scale = q.reshape(-1), out.view(-1), scale.flatten()
    each(lambda i: pieces[i].dequantize(codes, scale, items), len(pieces))
    return out.to(like.dtype)


def _flatten(x: Tensor) -> Tensor:
    """Return the items as a flat tensor of a dtype that the kernels read."""
    if not x.is_floating_point():
        raise ConfigError(f"only float tensors can be rounded, got {x.dtype}")
    return (x if x.dtype in KERNEL_FLOATS else x.float()).reshape(-1)


def _check_finite(largest: Tensor) -> None:
    if not torch.isfinite(largest).all():
        raise ConfigError("NaN and infinity cannot be rounded to integers")


def _find_largest(items: Tensor, row: int, group: int) -> Tensor:
    low, high = (items.new_empty(ceil_div(items.numel(), group)) for _ in range(2))
    if items.numel():
        dtype = dtype_name(items.dtype)
        _core.find_ranges(as_bytes(items), dtype, row, group, as_bytes(low), as_bytes(high))
    return torch.maximum(low.abs(), high.abs()).float()


def _kernel_scales(scale: Tensor, layout: tuple[int, int, int]) -> _core.Scales:
    """Return float32 scales without zero points, as the kernels take them."""
    return _core.Scales(as_bytes(scale), "float32", layout)
