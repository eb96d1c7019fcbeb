"""Floats rounded to small integers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.registry import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.memory import empty
from slimtensors.spec import Each, Parts, Spec, as_bytes, dtype_name, serially

_BY_CORE = (torch.bfloat16, torch.float16, torch.float32)
_NO_ZEROS = torch.empty(0, dtype=torch.uint8)
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
        rows = self._rows(x if x.dtype in _BY_CORE else x.float()).contiguous()
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
        q = empty(Spec(torch.int8, tuple(rows.shape)))
        codes, scales = _pieces(q), _scales(scale, len(pieces), rows)

        def round_off(i: int) -> None:
            kind = dtype_name(rows.dtype)
            columns = pieces[i].shape[1]
            _core.quantize(
                as_bytes(pieces[i]),
                kind,
                "float32",
                as_bytes(scales[i]),
                "float32",
                1.0,
                _NO_ZEROS,
                (columns, columns, 1),
                "int",
                self.bits,
                as_bytes(codes[i]),
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
        if like.dtype not in _BY_CORE or not like.numel:
            return (rows.float() * scale.view(-1, 1)).to(like.dtype).view(like.shape)
        out = empty(like)
        codes, items = _pieces(rows.contiguous()), _pieces(self._rows(out))
        scales = _scales(scale.flatten(), len(codes), rows)

        def multiply(i: int) -> None:
            columns = codes[i].shape[1]
            _core.dequantize(
                as_bytes(codes[i]),
                "int",
                8,
                as_bytes(scales[i]),
                "float32",
                1.0,
                _NO_ZEROS,
                (columns, columns, 1),
                dtype_name(like.dtype),
                as_bytes(items[i]),
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
