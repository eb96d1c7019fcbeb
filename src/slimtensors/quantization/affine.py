"""The maths of quantization: scales from ranges, codes from numbers, numbers from codes.

Everything here is plain torch, and the same bits as compressed-tensors 0.20: each step rounds to
the dtype that torch gives its result, so a bf16 weight is divided by its bf16 scale in bf16.

A weight is a matrix `[rows, columns]`, or a stack of them `[experts, rows, columns]`, each of which
is quantized as if it were alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import ConfigError
from slimtensors.parallel import Each, serially
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.tensor import KERNEL_FLOATS, as_bytes, ceil_div, dtype_name

_PIECE = 1 << 20
"""Items per piece of work: enough to be worth a thread."""


def run_ranges(x: Tensor, columns: int, each: Each = serially) -> tuple[Tensor, Tensor]:
    """Return least and greatest of every `columns` neighbours of a row; the last may be fewer.

    Where there is infinity or NaN, one of the two is not finite.
    """
    row = x.shape[-1]
    shape = (*x.shape[:-1], ceil_div(row, columns))
    if x.device.type != "cpu" or x.dtype not in KERNEL_FLOATS:
        runs = [part.aminmax(dim=-1) for part in torch.split(x, columns, -1)]
        return torch.stack([r.min for r in runs], -1), torch.stack([r.max for r in runs], -1)
    low, high = x.new_empty(shape), x.new_empty(shape)
    items, lows, highs = as_bytes(x), as_bytes(low), as_bytes(high)
    step = max(1, _PIECE // row)
    rows = x.numel() // row

    def work(i: int) -> None:
        def cut(of: Tensor) -> Tensor:
            size = of.numel() // rows
            return of[i * step * size : (i + 1) * step * size]

        _core.find_ranges(cut(items), dtype_name(x.dtype), row, columns, cut(lows), cut(highs))

    each(work, ceil_div(rows, step))
    return low, high


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 of 4-bit floats mean; 8 to 15 are the same below zero."""

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Params:
    """What turns codes back into numbers."""

    scale: Tensor
    """Tensor [1], channel [R, 1], group [R, groups], block [rows of blocks, columns of blocks]."""
    zero_point: Tensor | None = None
    """The code of zero, shaped as the scale; none if symmetric."""
    global_scale: Tensor | None = None
    """Divides every scale; one for the tensor."""
    g_idx: Tensor | None = None
    """The group of each column, where groups are not neighbours."""


def code_range(args: QuantizationArgs) -> tuple[float, float]:
    """Return the least and the greatest number that a code can say, before scaling."""
    if args.type is QuantizationType.INT:
        half = 2.0 ** (args.num_bits - 1)
        return -half, half - 1
    top = 448.0 if args.num_bits == 8 else FP4[-1]
    return -top, top


def params_of_range(
    low: Tensor, high: Tensor, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> Params:
    """Return scales, and zero points if asymmetric, that let codes reach from `low` to `high`.

    Zero can always be said exactly, so a range is first extended to it.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    # Tensors, because a number would not promote a range of no dimensions to float32 as they do.
    least, greatest = (low.new_tensor(x, dtype=torch.float32) for x in code_range(args))
    steps = (greatest - least).to(low.dtype)
    zero_point = None
    if args.is_mx:
        scale = _exponents(_largest(low, high), args)
    elif args.symmetric:
        scale = _largest(low, high) / (steps / 2)
    else:
        scale = (high - low) / steps
        zero_point = (least - low / scale).clamp(least, greatest)
        zero_point = _rounded(zero_point.nan_to_num(0.0), args.zp_dtype or torch.int8)
    if global_scale is not None:
        scale = global_scale * scale
    if args.scale_dtype is not None:
        scale = _rounded(scale, args.scale_dtype).to(scale.dtype)
    if args.is_mx:
        scale = torch.exp2(scale.float() - 127).to(scale.dtype)
    scale = torch.where(scale == 0, _smallest(args.scale_dtype or scale.dtype), scale)
    if not scale.dim():
        scale = scale.reshape(1)
        zero_point = None if zero_point is None else zero_point.reshape(1)
    return Params(scale, zero_point, global_scale)


def global_scale_of_range(low: Tensor, high: Tensor) -> Tensor:
    """Return the divisor that brings the scales of 4-bit floats into the range of 8-bit floats."""
    largest = _largest(low.clamp(max=0), high.clamp(min=0))
    largest = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    scale = 448.0 * 6.0 / largest
    scale = scale.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).float()
    return scale if scale.dim() else scale.reshape(1)


def find_params(weight: Tensor, args: QuantizationArgs, *, each: Each = serially) -> Params:
    """Return params that span the least and greatest number of each part of a weight."""
    check_weight(weight, args)
    low, high = _ranges(weight, args, each)
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ConfigError("holds NaN or infinity, which no code can say; leave it unquantized")
    global_scale = None
    if args.strategy is QuantizationStrategy.TENSOR_GROUP:
        global_scale = global_scale_of_range(
            _over_matrix(low, torch.amin), _over_matrix(high, torch.amax)
        )
    return params_of_range(low, high, args, global_scale=global_scale)


def find_dynamic_params(
    x: Tensor, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> Params:
    """Return params for activations `[..., features]`, found while the model runs.

    A scale per token is one for each index of all dimensions but the last.
    """
    match args.strategy:
        case QuantizationStrategy.TOKEN:
            low, high = torch.aminmax(x, dim=-1, keepdim=True)
        case QuantizationStrategy.ATTN_HEAD:  # [batch, heads, tokens, features]
            low, high = x.amin((0, 2, 3))[:, None, None], x.amax((0, 2, 3))[:, None, None]
        case QuantizationStrategy.TENSOR:
            low, high = torch.aminmax(x)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            low, high = torch.aminmax(_in_groups(x, args), dim=-1)
        case _:
            raise ConfigError(f"activations have no scales per {args.strategy}")
    return params_of_range(low, high, args, global_scale=global_scale)


def quantize(x: Tensor, params: Params, args: QuantizationArgs) -> Tensor:
    """Return the codes of `x`: int8, float8_e4m3fn, or bytes that hold one 4-bit float each."""

    def codes(x: Tensor, params: Params) -> Tensor:
        scaled = x / _effective(params)
        if params.zero_point is not None:
            scaled = scaled + params.zero_point.to(x.dtype)
        scaled = scaled.clamp(*code_range(args))
        if args.type is QuantizationType.INT:
            return scaled.round().to(torch.int8)
        return scaled.to(torch.float8_e4m3fn) if args.num_bits == 8 else fp4_codes(scaled)

    return _by_parts(codes, x, params, args)


def dequantize(
    codes: Tensor, params: Params, args: QuantizationArgs, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the numbers that `codes` stand for, in `dtype` or that of the scale."""
    out = params.scale.dtype if dtype is None else dtype

    def numbers(codes: Tensor, params: Params) -> Tensor:
        scale = _effective(params)
        if args.type is QuantizationType.FLOAT and args.num_bits == 4:
            values = fp4_values(codes, scale.dtype)
        else:
            values = codes.to(scale.dtype)
        if params.zero_point is not None:
            values = values - params.zero_point.to(scale.dtype)
        return (values * scale).to(out)

    return _by_parts(numbers, codes, params, args)


def fake_quantize(x: Tensor, params: Params, args: QuantizationArgs) -> Tensor:
    """Return what remains of `x` after it was quantized, in its own dtype."""
    return dequantize(quantize(x, params, args), params, args, x.dtype)


def fp4_codes(x: Tensor) -> Tensor:
    """Return the nearest 4-bit float of each number, ties to even: a byte with bit 3 as sign."""
    size = x.abs()
    index = (size > 0.25).to(torch.uint8)
    for bound, reaches in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        index += size >= bound if reaches else size > bound
    index += size > 5.0
    return index | (x < 0).to(torch.uint8) << 3


def fp4_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that 4-bit floats stand for, -0.0 among them."""
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=dtype, device=codes.device)
    return table[codes.int()]


def check_weight(weight: Tensor, args: QuantizationArgs) -> None:
    """Raise if a weight of this kind and shape cannot be quantized as `args` say."""
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise ConfigError(f"only floats of 16 bits and more can be quantized, not {weight.dtype}")
    if weight.dim() not in (2, 3):
        raise ConfigError(f"a weight is a matrix or a stack of them, not {tuple(weight.shape)}")
    if not weight.numel():
        raise ConfigError(f"is empty, shape {tuple(weight.shape)}: there is nothing to quantize")
    if args.strategy in _GROUPED:
        _count_groups(weight, args)


def _ranges(weight: Tensor, args: QuantizationArgs, each: Each) -> tuple[Tensor, Tensor]:
    """Return the least and greatest number of everything that shares a scale."""
    columns = weight.shape[-1]
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            low, high = run_ranges(weight, columns, each)
            return _over_matrix(low, torch.amin), _over_matrix(high, torch.amax)
        case QuantizationStrategy.CHANNEL:
            return run_ranges(weight, columns, each)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return run_ranges(weight, args.group_size or columns, each)
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (1, columns)
            low, high = run_ranges(weight, width, each)
            return _in_blocks(low, height, 1).amin((-1, -3)), _in_blocks(high, height, 1).amax(
                (-1, -3)
            )
    raise ConfigError(f"weights have no scales per {args.strategy}")


def _over_matrix(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return reduce(x, ()) if x.dim() < 3 else reduce(x, (-1, -2), keepdim=True)


def _largest(low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(low.abs(), high.abs())


def _effective(params: Params) -> Tensor:
    return params.scale if params.global_scale is None else params.scale / params.global_scale


_LAYOUT = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""The integers with the bits of each float, and how many of these are its mantissa."""


def _exponents(largest: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the exponents of two, with a bias of 127, that bring `largest` near the top code."""
    kind, mantissa = _LAYOUT[largest.dtype]
    # A quarter more: from 1.75 times a power of two on, the next one is nearer to the top code.
    power = (largest.view(kind) + (1 << mantissa - 2)) & -(1 << mantissa)
    top = 8 if args.num_bits == 8 else 2
    return 127 + power.view(largest.dtype).log2().floor() - top


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return x.clamp(limits.min, limits.max).to(dtype)
    bounds = torch.iinfo(dtype)
    return x.clamp(bounds.min, bounds.max).round().to(dtype)


def _smallest(dtype: torch.dtype) -> float:
    """Return what stands in for a scale of zero, by which nothing can be divided."""
    if dtype is torch.float8_e4m3fn:
        return 0.125
    return torch.finfo(dtype).eps if dtype.is_floating_point else 1.0


def _by_parts(
    work: Callable[[Tensor, Params], Tensor], x: Tensor, params: Params, args: QuantizationArgs
) -> Tensor:
    """Apply `work` with `x` cut so that the params of each piece spread over it by themselves."""
    if params.g_idx is not None:
        return work(x, _by_column(params, params.g_idx))
    if args.strategy in _GROUPED:
        whole = params if params.scale.dim() > 1 else _each(params, lambda p: p.unsqueeze(1))
        return work(_in_groups(x, args), _each(whole, lambda p: p.unsqueeze(-1))).flatten(-2)
    if args.strategy is QuantizationStrategy.BLOCK:
        spread = _each(params, lambda p: p.unsqueeze(-1).unsqueeze(-3))
        blocks = work(_in_blocks(x, *(args.block_structure or (1, 1))), spread)
        rows, columns = x.shape[-2:]
        return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
    return work(x, params)


def _each(params: Params, change: Callable[[Tensor], Tensor]) -> Params:
    """Change scale and zero point, which go together; also a global scale of several matrices."""
    zero, whole = params.zero_point, params.global_scale
    return replace(
        params,
        scale=change(params.scale),
        zero_point=None if zero is None else change(zero),
        global_scale=change(whole) if whole is not None and whole.dim() > 1 else whole,
    )


def _by_column(params: Params, g_idx: Tensor) -> Params:
    groups = params.scale.shape[-1]
    if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        raise ConfigError(f"g_idx names groups outside of the {groups} that have scales")
    zero, order = params.zero_point, g_idx.long()
    spread = None if zero is None else zero[..., order]
    return replace(params, scale=params.scale[..., order], zero_point=spread)


def _count_groups(x: Tensor, args: QuantizationArgs) -> int:
    size, columns = args.group_size or 0, x.shape[-1]
    if columns % size:
        raise ConfigError(
            f"{columns} columns do not divide into groups of {size}; "
            "choose a group_size that divides them, or strategy channel"
        )
    return columns // size


def _in_groups(x: Tensor, args: QuantizationArgs) -> Tensor:
    return x.reshape(*x.shape[:-1], _count_groups(x, args), args.group_size or 0)


def _in_blocks(x: Tensor, height: int, width: int) -> Tensor:
    """Return `[..., rows of blocks, height, columns of blocks, width]`, filled up with zeros."""
    *experts, rows, columns = x.shape
    below, beside = -rows % height, -columns % width
    if below or beside:
        whole = x.new_zeros((*experts, rows + below, columns + beside))
        whole[..., :rows, :columns] = x
        x = whole
    return x.reshape(*experts, x.shape[-2] // height, height, x.shape[-1] // width, width)
