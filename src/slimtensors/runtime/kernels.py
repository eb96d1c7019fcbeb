"""Products of inputs with weights that stay codes. The choice is made by dtype, device and size.

Kernels read codes where they lie, also in the pages of a mapped file, and never pack them anew.
"""

import os
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.tensor import KERNEL_FLOATS, as_bytes, dtype_name

_FEW = 128
"""Inputs up to which our kernel is faster than dequantized weights in float32."""

_VERY_FEW = 8
"""Inputs up to which torch multiplies 8-bit codes faster than our kernel without vectors."""

_ALIGNED = 64
"""What torch aligns memory to."""

_WORTH_THREADS = 1 << 17
"""Codes per thread that are worth starting one."""

_PIECE = 1 << 18
"""Codes that are made floats at a time, to stay in a cache."""

_RUN = 32
"""Packed codes that must share a scale for our kernel to be fast."""

_FORMATS = {
    torch.int8: _core.CodeFormat("int", 8),
    torch.float8_e4m3fn: _core.CodeFormat("fp8", 8),
    torch.int32: _core.CodeFormat("packed", 4),
}


@dataclass(frozen=True)
class Kernels:
    """What kernels are told of one weight, found once: views of its memory, never copies."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    blocks: tuple[int, int, int]
    for_torch: bool
    for_core: "_CodesAndScales | None"

    @classmethod
    def of(cls, codes: Tensor, params: Params, args: QuantizationArgs, columns: int) -> Self:
        """Find out who can multiply these codes."""
        by_row = args.strategy is QuantizationStrategy.CHANNEL
        return cls(
            codes,
            params.scale,
            params.zero_point,
            (columns, columns if by_row else args.group_size or columns, 1),
            for_torch=_is_for_torch(codes, params, args),
            for_core=_for_core(codes, params, args),
        )

    def linear(self, x: Tensor) -> Tensor | None:
        """Return the product without a bias; none if dequantized weights would be faster."""
        columns = x.shape[-1]
        count = x.numel() // max(columns, 1)
        if x.device.type != "cpu" or x.dtype not in KERNEL_FLOATS or count == 0:
            return None
        if x.dtype.itemsize > self.scale.dtype.itemsize:  # which the numbers are rounded to
            return None
        flat = x.detach().reshape(count, columns)
        if self.for_torch and count <= _VERY_FEW and x.dtype is torch.bfloat16:
            flat = flat.contiguous()
            flat = flat.clone() if flat.data_ptr() % _ALIGNED else flat
            out = torch._weight_int8pack_mm(flat, self.codes, self.scale.view(-1))
        elif self.for_core and (count <= _FEW or _is_slow(x.dtype)):
            out = self._multiplied(flat, self.for_core)
        else:
            return None
        return out.view(*x.shape[:-1], self.codes.shape[0])

    def _multiplied(self, x: Tensor, given: "_CodesAndScales") -> Tensor:
        count, rows, zero = x.shape[0], self.codes.shape[0], self.zero_point
        codes, scale, dtype = given
        out = torch.empty(count, rows, dtype=torch.float32)
        threads = min(torch.get_num_threads(), rows * x.shape[1] // _WORTH_THREADS)
        zeros = None if zero is None else as_bytes(zero.to(torch.int8))
        _core.multiply_codes(
            as_bytes(x.float()),
            codes,
            as_bytes(out),
            scales=_core.Scales(scale, dtype, self.blocks, zero_points=zeros),
            format=_FORMATS[self.codes.dtype],
            threads=max(1, threads),
        )
        return out.to(x.dtype)


def _is_for_torch(codes: Tensor, params: Params, args: QuantizationArgs) -> bool:
    # For bf16 only: with other dtypes torch's kernel takes ten times as long as a dense product.
    if _core.cpu() != "plain":
        return False
    by_row = args.strategy is QuantizationStrategy.CHANNEL and params.zero_point is None
    kinds = codes.dtype is torch.int8 and params.scale.dtype is torch.bfloat16
    # It reads whole vectors at aligned addresses, and would end the process at any other.
    aligned = codes.is_contiguous() and not (codes.data_ptr() | codes.shape[1]) % 16
    return by_row and kinds and aligned


_CodesAndScales = tuple[Tensor, Tensor, str]
"""The bytes of codes, the bytes of scales and their dtype."""


def _for_core(codes: Tensor, params: Params, args: QuantizationArgs) -> _CodesAndScales | None:
    channel = args.strategy is QuantizationStrategy.CHANNEL
    grouped = args.strategy is QuantizationStrategy.GROUP
    bytewise = codes.dtype in (torch.int8, torch.float8_e4m3fn)
    nibbles = codes.dtype is torch.int32 and args.num_bits == 4
    wide = bytewise or channel or not (args.group_size or 0) % _RUN
    alone = params.g_idx is None and params.global_scale is None and args.zp_dtype is None
    matrix = codes.dim() == 2 and codes.is_contiguous() and params.scale.is_contiguous()
    if not ((channel or grouped) and (bytewise or nibbles) and wide and alone and matrix):
        return None
    if params.scale.dtype not in KERNEL_FLOATS:
        return None
    scale = params.scale
    return as_bytes(codes), as_bytes(scale), dtype_name(scale.dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Tell whether torch multiplies numbers of 16 bits no faster than floats."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")  # oneDNN asks it too, also only once
    tiles = torch.cpu._is_amx_tile_supported() and "AMX" in allowed.upper()
    return dtype is not torch.float32 and not tiles


def integer_linear(
    x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply int8 by int8 into int32, then by a scale for each input and one for each row."""
    flat = x.reshape(-1, x.shape[-1])
    total = _int_product(flat, codes)
    out = total.float() * x_scale.reshape(-1, 1).float() * scale.reshape(1, -1).float()
    if bias is not None:
        out += bias
    return out.to(x_scale.dtype).view(*x.shape[:-1], codes.shape[0])


def _int_product(x: Tensor, codes: Tensor) -> Tensor:
    # torch gets single columns wrong.
    if x.device.type != "cpu" or (x.shape[1] > 1 and _torch_multiplies_exactly()):
        return torch._int_mm(x, codes.t())
    some = torch.split(codes, max(1, _PIECE // x.shape[1]))
    return torch.cat([x.float() @ piece.float().t() for piece in some], dim=1)


@cache
def _torch_multiplies_exactly() -> bool:
    """Try whether torch multiplies int8 by int8 without saturating, for which x86 needs VNNI."""
    x = torch.randint(-128, 128, (16, 64), generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 127, -128
    codes, wanted = x.to(torch.int8), (x.double() @ x.double().t()).int()
    return all(torch.equal(torch._int_mm(codes[:n], codes.t()), wanted[:n]) for n in (1, 5, 16))
