"""Products of inputs with weights that stay codes. The choice is made by dtype, device and size.

Kernels read codes where they lie, also in the pages of a mapped file, and never pack them anew.
"""

import torch
from torch import Tensor

from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy

_FEW = 64
"""Inputs up to which 8-bit codes are multiplied faster than dequantized weights."""


def linear_of_codes(
    x: Tensor, codes: Tensor, params: Params, args: QuantizationArgs
) -> Tensor | None:
    """Return the product without a bias; none if dequantized weights would be faster."""
    count = x.numel() // max(x.shape[-1], 1)
    if x.device.type != "cpu" or not 0 < count <= _FEW:
        return None
    by_row = args.strategy is QuantizationStrategy.CHANNEL and args.symmetric
    if codes.dtype is torch.int8 and codes.dim() == 2 and by_row and x.dtype is torch.bfloat16:
        # torch has this one for bf16; with other dtypes it takes ten times as long as dense.
        flat = x.reshape(count, x.shape[-1]).contiguous()
        scale = params.scale.reshape(-1).to(x.dtype)
        out = torch._weight_int8pack_mm(flat, codes.contiguous(), scale)
        return out.view(*x.shape[:-1], codes.shape[0])
    return None


def integer_linear(
    x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply int8 by int8 into int32, then by a scale for each input and one for each row."""
    flat = x.reshape(-1, x.shape[-1])
    total = torch._int_mm(flat, codes.t())
    out = total.float() * x_scale.reshape(-1, 1).float() * scale.reshape(1, -1).float()
    if bias is not None:
        out += bias
    return out.to(x_scale.dtype).view(*x.shape[:-1], codes.shape[0])
