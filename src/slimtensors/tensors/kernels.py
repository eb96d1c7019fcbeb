"""Products of inputs with weights that stay codes. The choice is made by dtype, device and size.

Kernels read codes where they lie, also in the pages of a mapped file, and never pack them anew.
"""

from functools import cache

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.spec import as_bytes, dtype_name

_FEW = 64
"""Inputs up to which torch multiplies 8-bit codes faster than dequantized weights."""

_VERY_FEW = 12
"""Inputs up to which our kernel is faster than dequantizing."""

_ALIGNED = 64
"""What torch aligns memory to."""

_WORTH_THREADS = 1 << 17
"""Codes per thread that are worth starting one."""

_PIECE = 1 << 18
"""Codes that are made floats at a time, to stay in a cache."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def linear_of_codes(
    x: Tensor, codes: Tensor, params: Params, args: QuantizationArgs
) -> Tensor | None:
    """Return the product without a bias; none if dequantized weights would be faster."""
    count = x.numel() // max(x.shape[-1], 1)
    if x.device.type != "cpu" or codes.dim() != 2 or not 0 < count <= _FEW:
        return None
    flat = x.reshape(count, x.shape[-1])
    if _torch_has_it(x, codes, params, args):
        flat = flat.contiguous()
        flat = flat.clone() if flat.data_ptr() % _ALIGNED else flat
        out = torch._weight_int8pack_mm(flat, codes, params.scale.reshape(-1))
    elif count <= _VERY_FEW and _core_has_it(x, codes, params, args):
        out = _multiplied(flat, codes, params, args)
    else:
        return None
    return out.view(*x.shape[:-1], codes.shape[0])


def _torch_has_it(x: Tensor, codes: Tensor, params: Params, args: QuantizationArgs) -> bool:
    # For bf16 only: with other dtypes torch's kernel takes ten times as long as a dense product.
    by_row = args.strategy is QuantizationStrategy.CHANNEL and params.zero_point is None
    kinds = codes.dtype is torch.int8 and {x.dtype, params.scale.dtype} == {torch.bfloat16}
    # It reads whole vectors at aligned addresses, and would end the process at any other.
    aligned = codes.is_contiguous() and not (codes.data_ptr() | codes.shape[1]) % 16
    return by_row and kinds and aligned


def _core_has_it(x: Tensor, codes: Tensor, params: Params, args: QuantizationArgs) -> bool:
    bytewise = codes.dtype in (torch.int8, torch.float8_e4m3fn)
    nibbles = codes.dtype is torch.int32 and args.num_bits == 4
    by_row = args.strategy in (QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP)
    whole = params.g_idx is None and params.global_scale is None and args.zp_dtype is None
    even = bytewise or args.strategy is QuantizationStrategy.CHANNEL or not _group(args) % 2
    floats = x.dtype in _FLOATS and params.scale.dtype in _FLOATS
    return (bytewise or nibbles) and by_row and whole and even and floats


def _group(args: QuantizationArgs) -> int:
    return args.group_size or 0


def _multiplied(x: Tensor, codes: Tensor, params: Params, args: QuantizationArgs) -> Tensor:
    kind, bits = _KINDS[codes.dtype]
    columns = x.shape[-1]
    zero = params.zero_point
    out = torch.empty(len(x), len(codes), dtype=torch.float32)
    _core.multiply_codes(
        as_bytes(codes.contiguous()),
        kind,
        bits,
        as_bytes(params.scale.contiguous()),
        dtype_name(params.scale.dtype),
        1.0,
        _NOTHING if zero is None else as_bytes(zero.to(torch.int8).contiguous()),
        (columns, columns if args.strategy is QuantizationStrategy.CHANNEL else _group(args), 1),
        as_bytes(x.detach().float().contiguous()),
        as_bytes(out),
        max(1, min(torch.get_num_threads(), len(codes) * columns // _WORTH_THREADS)),
    )
    return out.to(x.dtype)


_KINDS = {torch.int8: ("int", 8), torch.float8_e4m3fn: ("fp8", 8), torch.int32: ("packed", 4)}
_NOTHING = torch.empty(0, dtype=torch.uint8)


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
