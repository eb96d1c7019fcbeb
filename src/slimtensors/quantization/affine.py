"""Affine quantization: scales from ranges, codes from values, values from codes.

Plain torch, bitwise equal to compressed-tensors 0.20: each step rounds to the dtype that torch
gives its result, so a bf16 weight is divided by its bf16 scale in bf16.

A weight is a matrix `[rows, columns]`, or a stack of independent matrices `[experts, rows,
columns]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import ConfigError
from slimtensors.parallel import Each, serially
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.tensor import KERNEL_FLOATS, as_bytes, ceil_div, dtype_name

_PIECE_ITEMS = 1 << 20
"""Items per task: enough to be worth a thread."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4-bit float codes 0 to 7; codes 8 to 15 are their negatives."""

FP6 = (*(i / 8 for i in range(8)), *((8 + i) / 8 * 2.0**e for e in range(3) for i in range(8)))
"""Values of the 6-bit float codes 0 to 31 (E2M3); codes 32 to 63 are their negatives."""

_TOPS = {4: FP4[-1], 6: FP6[-1], 8: 448.0}
"""Largest value of the floats of each number of bits."""

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
_SMALLEST_GROUP = 16


@dataclass(frozen=True)
class Params:
    """Scales and zero points that map codes to values."""

    scale: Tensor
    """Shape: tensor [1], channel [rows, 1], group [rows, groups], block [blocks down, across]."""
    zero_point: Tensor | None = None
    """Code of the value zero, in the shape of the scale; None if symmetric."""
    global_scale: Tensor | None = None
    """Divisor of all scales; one per matrix."""
    g_idx: Tensor | None = None
    """Group of each column; None if groups are contiguous."""


def code_range(args: QuantizationArgs) -> tuple[float, float]:
    """Return min and max of the unscaled codes."""
    if args.type is QuantizationType.INT:
        half = 2.0 ** (args.num_bits - 1)
        return -half, half - 1
    top = _TOPS[args.num_bits]
    return -top, top


def compute_params(
    low: Tensor, high: Tensor, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> Params:
    """Return scales, and zero points if asymmetric, for codes that cover `low` to `high`.

    Ranges are extended to include zero, so that zero is always exact.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    # Tensors: a Python float would not promote a zero-dimensional range to float32.
    min_code, max_code = (low.new_tensor(x, dtype=torch.float32) for x in code_range(args))
    steps = (max_code - min_code).to(low.dtype)
    zero_point = None
    if args.is_mx:
        scale = _compute_exponents(_max_abs(low, high), args)
    elif args.symmetric:
        scale = _max_abs(low, high) / (steps / 2)
    else:
        scale = (high - low) / steps
        zero_point = (min_code - low / scale).clamp(min_code, max_code)
        zero_point = _round_to(zero_point.nan_to_num(0.0), args.zero_dtype)
    if global_scale is not None:
        scale = global_scale * scale
    if args.scale_dtype is not None:
        scale = _round_to(scale, args.scale_dtype).to(scale.dtype)
    if args.is_mx:
        scale = torch.exp2(scale.float() - 127).to(scale.dtype)
    scale = torch.where(scale == 0, _replacement_for_zero(args.scale_dtype or scale.dtype), scale)
    if not scale.dim():
        scale = scale.reshape(1)
        zero_point = None if zero_point is None else zero_point.reshape(1)
    return Params(scale, zero_point, global_scale)


def compute_global_scale(low: Tensor, high: Tensor) -> Tensor:
    """Return the divisor that scales a matrix's 4-bit float scales into the range of 8-bit floats.

    `low` and `high` are the ranges of all groups of a matrix, or of each matrix in a stack.
    """
    low, high = _reduce_matrix(low, torch.amin), _reduce_matrix(high, torch.amax)
    largest = _max_abs(low.clamp(max=0), high.clamp(min=0))
    largest = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    scale = 448.0 * 6.0 / largest
    scale = scale.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).float()
    return scale if scale.dim() else scale.reshape(1)


def find_params(
    weight: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    each: Each = serially,
) -> Params:
    """Return params that cover min and max of all values of a weight that share a scale.

    `global_scale` is that of several matrices, if this one shares it.
    """
    check_weight(weight, args)
    low, high = _find_ranges(weight, args, each)
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ConfigError(
            "contains NaN or infinity, which cannot be quantized; leave it unquantized"
        )
    if args.strategy is QuantizationStrategy.TENSOR_GROUP and global_scale is None:
        global_scale = compute_global_scale(low, high)
    return compute_params(low, high, args, global_scale=global_scale)


def find_dynamic_params(
    x: Tensor, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> Params:
    """Return params for activations `[..., features]` at run time.

    With strategy token, each vector along the last dimension has its own scale.
    """
    match args.strategy:
        case QuantizationStrategy.TOKEN:
            low, high = torch.aminmax(x, dim=-1, keepdim=True)
        case QuantizationStrategy.ATTN_HEAD:  # [batch, heads, tokens, features]
            low, high = x.amin((0, 2, 3))[:, None, None], x.amax((0, 2, 3))[:, None, None]
        case QuantizationStrategy.TENSOR:
            low, high = torch.aminmax(x)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            low, high = torch.aminmax(_split_groups(x, args), dim=-1)
        case _:
            raise ConfigError(f"strategy {args.strategy} is not supported for activations")
    return compute_params(low, high, args, global_scale=global_scale)


def quantize(x: Tensor, params: Params, args: QuantizationArgs) -> Tensor:
    """Return the codes of `x`: int8, float8_e4m3fn, or bytes with a 4- or 6-bit float each."""

    def encode(x: Tensor, params: Params) -> Tensor:
        scaled = x / _effective_scale(params)
        if params.zero_point is not None:
            scaled = scaled + params.zero_point.to(x.dtype)
        scaled = scaled.clamp(*code_range(args))
        if args.type is QuantizationType.INT:
            return scaled.round().to(torch.int8)
        if args.num_bits == 8:
            return scaled.to(torch.float8_e4m3fn)
        return encode_fp4(scaled) if args.num_bits == 4 else encode_fp6(scaled)

    return _apply_broadcast(encode, x, params, args)


def dequantize(
    codes: Tensor, params: Params, args: QuantizationArgs, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values of `codes`, in `dtype` or in the dtype of the scale."""
    out = params.scale.dtype if dtype is None else dtype
    return scale_up(decode(codes, args, torch.float32), params, args, out)


def decode(codes: Tensor, args: QuantizationArgs, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes stand for, unscaled."""
    if args.dtype is not torch.uint8:
        return codes.to(dtype)
    return decode_fp4(codes, dtype) if args.num_bits == 4 else decode_fp6(codes, dtype)


def scale_up(numbers: Tensor, params: Params, args: QuantizationArgs, dtype: torch.dtype) -> Tensor:
    """Return decoded codes minus their zero points, times their scales."""

    def multiply(numbers: Tensor, params: Params) -> Tensor:
        scale = _effective_scale(params)
        values = numbers.to(scale.dtype)
        if params.zero_point is not None:
            values = values - params.zero_point.to(scale.dtype)
        return (values * scale).to(dtype)

    return _apply_broadcast(multiply, numbers, params, args)


def fake_quantize(x: Tensor, params: Params, args: QuantizationArgs) -> Tensor:
    """Return `x` after quantization and dequantization, in its own dtype."""
    return dequantize(quantize(x, params, args), params, args, x.dtype)


def encode_fp4(x: Tensor) -> Tensor:
    """Return the code of the nearest 4-bit float, ties to even: a byte with bit 3 as sign."""
    magnitude = x.abs()
    index = (magnitude > 0.25).to(torch.uint8)
    for bound, included in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        index += magnitude >= bound if included else magnitude > bound
    index += magnitude > 5.0
    return index | (x < 0).to(torch.uint8) << 3


def decode_fp4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of 4-bit float codes, including -0.0."""
    return _decode(codes, FP4, dtype)


def encode_fp6(x: Tensor) -> Tensor:
    """Return the code of the nearest 6-bit float, ties to even: a byte with bit 5 as sign."""
    magnitude = x.abs().float()
    # Steps double from 2 on and again from 4 on: 1/8, 1/4, 1/2.
    step = 0.125 * (1 + (magnitude >= 2).float() + 2 * (magnitude >= 4).float())
    rounded = (magnitude / step).round() * step
    index = torch.searchsorted(torch.tensor(FP6, device=x.device), rounded).to(torch.uint8)
    return index | x.signbit().to(torch.uint8) << 5


def decode_fp6(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of 6-bit float codes, including -0.0."""
    return _decode(codes, FP6, dtype)


def _decode(codes: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    table = torch.tensor([*values, *(-x for x in values)], dtype=dtype, device=codes.device)
    return table[codes.int()]


def check_weight(weight: Tensor, args: QuantizationArgs) -> None:
    """Raise `ConfigError` if `args` do not apply to a weight of this dtype and shape."""
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise ConfigError(f"cannot quantize {weight.dtype}; expected floats of at least 16 bits")
    if weight.dim() not in (2, 3):
        raise ConfigError(
            f"expected a weight of 2 or 3 dimensions, got shape {tuple(weight.shape)}"
        )
    if not weight.numel():
        raise ConfigError(f"cannot quantize an empty weight of shape {tuple(weight.shape)}")
    if args.strategy in _GROUPED:
        _count_groups(weight, args)


def list_group_sizes(columns: int, largest: int) -> list[int]:
    """Return the group sizes up to `largest` that fit a number of columns, the largest first.

    Sizes below 16 are omitted: their scales would take more than a bit per weight.
    """
    return [size for size in range(largest, _SMALLEST_GROUP - 1, -1) if columns % size == 0]


def split_blocks(x: Tensor, height: int, width: int) -> Tensor:
    """Return `x` as `[..., blocks down, height, blocks across, width]`, padded with zeros."""
    *experts, rows, columns = x.shape
    below, right = -rows % height, -columns % width
    if below or right:
        padded = x.new_zeros((*experts, rows + below, columns + right))
        padded[..., :rows, :columns] = x
        x = padded
    return x.reshape(*experts, x.shape[-2] // height, height, x.shape[-1] // width, width)


def _find_ranges(weight: Tensor, args: QuantizationArgs, each: Each) -> tuple[Tensor, Tensor]:
    """Return min and max of all values that share a scale."""
    columns = weight.shape[-1]
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            low, high = _find_run_ranges(weight, columns, each)
            return _reduce_matrix(low, torch.amin), _reduce_matrix(high, torch.amax)
        case QuantizationStrategy.CHANNEL:
            return _find_run_ranges(weight, columns, each)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return _find_run_ranges(weight, args.group_size or columns, each)
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (1, columns)
            low, high = _find_run_ranges(weight, width, each)
            low, high = split_blocks(low, height, 1), split_blocks(high, height, 1)
            return low.amin((-1, -3)), high.amax((-1, -3))
    raise ConfigError(f"strategy {args.strategy} is not supported for weights")


def _find_run_ranges(x: Tensor, columns: int, each: Each = serially) -> tuple[Tensor, Tensor]:
    """Return min and max of every run of `columns` items in a row; the last run may be shorter.

    If a run contains infinity or NaN, its min or max is not finite.
    """
    row = x.shape[-1]
    shape = (*x.shape[:-1], ceil_div(row, columns))
    if x.device.type != "cpu" or x.dtype not in KERNEL_FLOATS:
        runs = [part.aminmax(dim=-1) for part in torch.split(x, columns, -1)]
        return torch.stack([r.min for r in runs], -1), torch.stack([r.max for r in runs], -1)
    low, high = x.new_empty(shape), x.new_empty(shape)
    items, lows, highs = as_bytes(x), as_bytes(low), as_bytes(high)
    step = max(1, _PIECE_ITEMS // row)
    rows = x.numel() // row

    def find(i: int) -> None:
        def cut(data: Tensor) -> Tensor:
            size = data.numel() // rows
            return data[i * step * size : (i + 1) * step * size]

        _core.find_ranges(cut(items), dtype_name(x.dtype), row, columns, cut(lows), cut(highs))

    each(find, ceil_div(rows, step))
    return low, high


def _reduce_matrix(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return reduce(x, ()) if x.dim() < 3 else reduce(x, (-1, -2), keepdim=True)


def _max_abs(low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(low.abs(), high.abs())


def _effective_scale(params: Params) -> Tensor:
    return params.scale if params.global_scale is None else params.scale / params.global_scale


_FLOAT_BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""Integer dtype of the same size, and number of mantissa bits, of each float dtype."""


def _compute_exponents(largest: Tensor, args: QuantizationArgs) -> Tensor:
    """Return exponents of two, with a bias of 127, that scale `largest` close to the top code."""
    integer, mantissa = _FLOAT_BITS[largest.dtype]
    # Adding a quarter rounds up from 1.75 times a power of two: the next power is closer there.
    # Floats of 6 bits reach 1.875 times it; from halfway to 2 on they would round beyond.
    shift = 4 if args.num_bits == 6 else 2
    power = (largest.view(integer) + (1 << mantissa - shift)) & -(1 << mantissa)
    top = 8 if args.num_bits == 8 else 2
    return 127 + power.view(largest.dtype).log2().floor() - top


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return x.clamp(limits.min, limits.max).to(dtype)
    bounds = torch.iinfo(dtype)
    return x.clamp(bounds.min, bounds.max).round().to(dtype)


def _replacement_for_zero(dtype: torch.dtype) -> float:
    """Return the scale to use instead of zero, which cannot be a divisor."""
    if dtype is torch.float8_e4m3fn:
        return 0.125
    return torch.finfo(dtype).eps if dtype.is_floating_point else 1.0


def _apply_broadcast(
    function: Callable[[Tensor, Params], Tensor], x: Tensor, params: Params, args: QuantizationArgs
) -> Tensor:
    """Apply `function` to `x`, reshaped so that its params broadcast."""
    if params.g_idx is not None:
        return function(x, _expand_columns(params, params.g_idx))
    if args.strategy in _GROUPED:
        if params.scale.dim() == 1:
            params = _map_params(params, lambda p: p.unsqueeze(1))
        params = _map_params(params, lambda p: p.unsqueeze(-1))
        return function(_split_groups(x, args), params).flatten(-2)
    if args.strategy is QuantizationStrategy.BLOCK:
        params = _map_params(params, lambda p: p.unsqueeze(-1).unsqueeze(-3))
        blocks = function(split_blocks(x, *(args.block_structure or (1, 1))), params)
        rows, columns = x.shape[-2:]
        return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
    return function(x, params)


def _map_params(params: Params, function: Callable[[Tensor], Tensor]) -> Params:
    """Apply `function` to scale and zero point, and to the global scales of a stack."""
    zero, global_scale = params.zero_point, params.global_scale
    if global_scale is not None and global_scale.dim() > 1:
        global_scale = function(global_scale)
    return replace(
        params,
        scale=function(params.scale),
        zero_point=None if zero is None else function(zero),
        global_scale=global_scale,
    )


def _expand_columns(params: Params, g_idx: Tensor) -> Params:
    """Return params with one scale and zero point per column."""
    groups = params.scale.shape[-1]
    if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        raise ConfigError(f"g_idx is out of range: there are {groups} groups")
    zero, index = params.zero_point, g_idx.long()
    return replace(
        params,
        scale=params.scale[..., index],
        zero_point=None if zero is None else zero[..., index],
    )


def _count_groups(x: Tensor, args: QuantizationArgs) -> int:
    size, columns = args.group_size or 0, x.shape[-1]
    if columns % size:
        problem = f"{columns} columns are not divisible by group_size {size}"
        if args.is_mx or args.strategy is QuantizationStrategy.TENSOR_GROUP:
            raise ConfigError(f"{problem}, which this format requires")
        fitting = [*map(str, list_group_sizes(columns, size)), "channel"]
        raise ConfigError(f"{problem}; group sizes that fit: {', '.join(fitting)}")
    return columns // size


def _split_groups(x: Tensor, args: QuantizationArgs) -> Tensor:
    return x.reshape(*x.shape[:-1], _count_groups(x, args), args.group_size or 0)
