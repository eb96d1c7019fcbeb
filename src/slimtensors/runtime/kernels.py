"""Products of inputs with quantized weights; the kernel is chosen by dtype, device and size.

Kernels read codes in place, also from the pages of a mapped file, and never repack them.
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

_MAX_CORE_INPUTS = 128
"""Number of inputs up to which our kernel is faster than dequantized weights in float32."""

_MAX_TORCH_INPUTS = 8
"""Number of inputs up to which torch is faster than our kernel without vector instructions."""

_ALIGNMENT = 64
"""Alignment of torch's memory in bytes."""

_MIN_CODES_PER_THREAD = 1 << 17

_PIECE_CODES = 1 << 18
"""Codes that are converted to floats at a time, to stay in a cache."""

_GROUP_MULTIPLE = 32
"""Divisor of the group size of packed codes for which our kernel is fast."""

_CODE_FORMATS = {
    torch.int8: _core.CodeFormat("int", 8),
    torch.float8_e4m3fn: _core.CodeFormat("fp8", 8),
    torch.int32: _core.CodeFormat("packed", 4),
}


@dataclass(frozen=True)
class Kernels:
    """Kernels that support one weight, with their arguments: views of its memory, not copies."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    blocks: tuple[int, int, int]
    torch_supported: bool
    core_arguments: "_CodesAndScales | None"
    """Arguments of our kernel, or None if it does not support the weight."""

    @classmethod
    def find(cls, codes: Tensor, params: Params, args: QuantizationArgs, columns: int) -> Self:
        """Return the kernels that support a weight."""
        by_row = args.strategy is QuantizationStrategy.CHANNEL
        return cls(
            codes,
            params.scale,
            params.zero_point,
            (columns, columns if by_row else args.group_size or columns, 1),
            torch_supported=_is_supported_by_torch(codes, params, args),
            core_arguments=_find_core_arguments(codes, params, args),
        )

    def linear(self, x: Tensor) -> Tensor | None:
        """Return the product without a bias, or None if dequantized weights are faster."""
        columns = x.shape[-1]
        count = x.numel() // max(columns, 1)
        if x.device.type != "cpu" or x.dtype not in KERNEL_FLOATS or count == 0:
            return None
        if x.dtype.itemsize > self.scale.dtype.itemsize:  # values are rounded to the scale's dtype
            return None
        flat = x.detach().reshape(count, columns)
        if self.torch_supported and count <= _MAX_TORCH_INPUTS and x.dtype is torch.bfloat16:
            flat = flat.contiguous()
            flat = flat.clone() if flat.data_ptr() % _ALIGNMENT else flat
            out = torch._weight_int8pack_mm(flat, self.codes, self.scale.view(-1))
        elif self.core_arguments and (count <= _MAX_CORE_INPUTS or _is_slow(x.dtype)):
            out = self._multiply(flat, self.core_arguments)
        else:
            return None
        return out.view(*x.shape[:-1], self.codes.shape[0])

    def _multiply(self, x: Tensor, arguments: "_CodesAndScales") -> Tensor:
        count, rows, zero = x.shape[0], self.codes.shape[0], self.zero_point
        codes, scale, dtype = arguments
        out = torch.empty(count, rows, dtype=torch.float32)
        threads = min(torch.get_num_threads(), rows * x.shape[1] // _MIN_CODES_PER_THREAD)
        zeros = None if zero is None else as_bytes(zero.to(torch.int8))
        _core.multiply_codes(
            as_bytes(x.float()),
            codes,
            as_bytes(out),
            scales=_core.Scales(scale, dtype, self.blocks, zero_points=zeros),
            format=_CODE_FORMATS[self.codes.dtype],
            threads=max(1, threads),
        )
        return out.to(x.dtype)


def _is_supported_by_torch(codes: Tensor, params: Params, args: QuantizationArgs) -> bool:
    # bf16 only: for other dtypes torch's kernel takes ten times as long as a dense product.
    if _core.cpu() != "plain":
        return False
    by_row = args.strategy is QuantizationStrategy.CHANNEL and params.zero_point is None
    dtypes = codes.dtype is torch.int8 and params.scale.dtype is torch.bfloat16
    # It reads whole vectors and crashes at unaligned addresses.
    aligned = codes.is_contiguous() and not (codes.data_ptr() | codes.shape[1]) % 16
    return by_row and dtypes and aligned


_CodesAndScales = tuple[Tensor, Tensor, str]
"""Bytes of codes, bytes of scales and their dtype."""


def _find_core_arguments(
    codes: Tensor, params: Params, args: QuantizationArgs
) -> _CodesAndScales | None:
    channel = args.strategy is QuantizationStrategy.CHANNEL
    grouped = args.strategy is QuantizationStrategy.GROUP
    bytewise = codes.dtype in (torch.int8, torch.float8_e4m3fn)
    nibbles = codes.dtype is torch.int32 and args.num_bits == 4
    wide = bytewise or channel or not (args.group_size or 0) % _GROUP_MULTIPLE
    integral = params.zero_point is None or args.zero_dtype is torch.int8
    simple = params.g_idx is None and params.global_scale is None and integral
    matrix = codes.dim() == 2 and codes.is_contiguous() and params.scale.is_contiguous()
    if not ((channel or grouped) and (bytewise or nibbles) and wide and simple and matrix):
        return None
    if params.scale.dtype not in KERNEL_FLOATS:
        return None
    scale = params.scale
    return as_bytes(codes), as_bytes(scale), dtype_name(scale.dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Return True if torch multiplies 16-bit floats no faster than float32."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")  # oneDNN reads it too, also once
    has_amx = torch.cpu._is_amx_tile_supported() and "AMX" in allowed.upper()
    return dtype is not torch.float32 and not has_amx


def integer_linear(
    x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply int8 by int8 into int32, then by the scales of inputs and rows."""
    flat = x.reshape(-1, x.shape[-1])
    product = _multiply_int8(flat, codes)
    out = product.float() * x_scale.reshape(-1, 1).float() * scale.reshape(1, -1).float()
    if bias is not None:
        out += bias
    return out.to(x_scale.dtype).view(*x.shape[:-1], codes.shape[0])


def _multiply_int8(x: Tensor, codes: Tensor) -> Tensor:
    # torch returns wrong results for single columns.
    if x.device.type != "cpu" or (x.shape[1] > 1 and _is_int_mm_exact()):
        return torch._int_mm(x, codes.t())
    pieces = torch.split(codes, max(1, _PIECE_CODES // x.shape[1]))
    return torch.cat([x.float() @ piece.float().t() for piece in pieces], dim=1)


@cache
def _is_int_mm_exact() -> bool:
    """Return True if torch multiplies int8 by int8 without saturation; x86 needs VNNI for that."""
    x = torch.randint(-128, 128, (16, 64), generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 127, -128
    codes, expected = x.to(torch.int8), (x.double() @ x.double().t()).int()
    return all(torch.equal(torch._int_mm(codes[:n], codes.t()), expected[:n]) for n in (1, 5, 16))
