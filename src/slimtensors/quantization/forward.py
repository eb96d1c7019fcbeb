"""Functions on tensors with the names and arguments that they have in compressed-tensors.

They take scale and zero point separately; `affine` has the same functions on `Params`.
"""

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization import affine
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@torch.no_grad()
def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    dtype: torch.dtype | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Return the codes of `x` as numbers in `dtype`, by default in the dtype of the quotient."""
    params = Params(scale, zero_point, global_scale)
    codes = affine.quantize(x, params, args)
    if dtype is None:
        grouped = args.strategy in _GROUPED
        dtype = x.dtype if grouped else torch.promote_types(x.dtype, scale.dtype)
    return affine.decode(codes, args, dtype)


@torch.no_grad()
def dequantize(
    x_q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    args: QuantizationArgs | None = None,
    dtype: torch.dtype | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Return the values of codes that are numbers of any dtype; by default in the scale's dtype."""
    if args is None:
        raise ConfigError("dequantize requires args: they cannot be inferred from shapes")
    params = Params(scale, zero_point, global_scale)
    return affine.scale_up(x_q, params, args, scale.dtype if dtype is None else dtype)


@torch.no_grad()
def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Return `x` after quantization and dequantization, in its own dtype."""
    return affine.fake_quantize(x, Params(scale, zero_point, global_scale), args)


def calculate_range(
    quantization_args: QuantizationArgs, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return min and max of the unscaled codes."""
    low, high = affine.code_range(quantization_args)
    return torch.tensor(low, device=device), torch.tensor(high, device=device)


def calculate_qparams(
    min_vals: Tensor,
    max_vals: Tensor,
    quantization_args: QuantizationArgs,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points for codes that cover a range; zeros if symmetric."""
    params = affine.compute_params(min_vals, max_vals, quantization_args, global_scale=global_scale)
    zero = params.zero_point
    if zero is None:
        zero = torch.zeros_like(params.scale).to(quantization_args.zero_dtype)
    return params.scale, zero
