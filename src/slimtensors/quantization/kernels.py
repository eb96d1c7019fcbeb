"""Kernels between dense weights and stored codes, and the bit packing they use.

`compress` and `decompress` run the C++ kernels where these support the dtypes, else plain torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.quantization import affine
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.tensor import KERNEL_FLOATS, Spec, allocate, as_bytes, ceil_div, dtype_name

CodeKind = Literal["int", "packed", "fp4", "fp6", "fp8"]
"""How codes are stored: one integer per byte, words, two 4-bit floats per byte, four 6-bit floats
in three bytes, 8-bit floats."""

Layout = Literal["stream", "words"]
"""Packing of codes into words: as one stream of bits, or with no code across two words."""

_LAYOUTS: tuple[Layout, ...] = ("stream", "words")
_WORD_BITS = 32

_SCALE_NAMES = {
    **{dtype: dtype_name(dtype) for dtype in KERNEL_FLOATS},
    torch.uint8: "float8_e8m0fnu",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
"""Dtypes of scales that the C++ kernels read, with their names there."""

_PIECE_ITEMS = 1 << 20
"""Items per task: enough to be worth a thread."""

_NOT_FINITE = "contains NaN or infinity, which cannot be quantized; leave it unquantized"


def compress(
    weight: Tensor, params: Params, args: QuantizationArgs, kind: CodeKind, each: Each = serially
) -> Tensor:
    """Quantize a weight and return its codes as they are stored; `each` runs parts of the work."""
    affine.check_weight(weight, args)
    scale = params.scale.dtype if params.global_scale is None else torch.float32
    quotient = torch.promote_types(weight.dtype, scale)
    supported = weight.dtype in KERNEL_FLOATS and quotient in KERNEL_FLOATS and kind != "fp6"
    if not supported or not _supports_core(weight, params):
        if not torch.isfinite(weight).all():
            raise ConfigError(_NOT_FINITE)
        return pack_codes(affine.quantize(weight, params, args), args, kind)
    out = allocate(stored_spec(tuple(weight.shape), args, kind))

    def quantize(piece: _Piece) -> bool:
        return _core.quantize(
            as_bytes(piece.items),
            as_bytes(piece.codes),
            dtype=dtype_name(weight.dtype),
            compute_dtype=dtype_name(quotient),
            scales=piece.scales(),
            format=_core.CodeFormat(kind, args.num_bits),
        )

    if not all(_run_pieces(quantize, weight, out, params, args, each)):
        raise ConfigError(_NOT_FINITE)
    return out


def decompress(
    stored: Tensor,
    kind: CodeKind,
    params: Params,
    args: QuantizationArgs,
    shape: tuple[int, ...],
    each: Each = serially,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the dense weight, by default in the dtype of its scale, or bf16 for 8-bit scales.

    `out`, a contiguous tensor of that dtype and shape, receives the result if given. Reused memory
    saves time: allocating it takes longer than the computation.
    """
    narrow = params.scale.element_size() == 1
    product = torch.bfloat16 if narrow else params.scale.dtype
    dtype = dtype or product
    exact = narrow and args.type is QuantizationType.FLOAT  # the product fits into any float
    if exact or params.global_scale is not None or product is torch.float32:
        product = dtype  # only the result is rounded
    supported = product in KERNEL_FLOATS and product is dtype and kind != "fp6"
    if not supported or not _supports_core(stored, params):
        if params.scale.dtype is torch.uint8:
            params = replace(params, scale=decode_exponents(params.scale))
        elif narrow:
            params = replace(params, scale=params.scale.to(torch.bfloat16))
        codes = unpack_codes(stored, args, kind, shape[-1])
        dense = affine.dequantize(codes, params, args, dtype)
        return dense if out is None else out.copy_(dense)
    if out is None:
        out = allocate(Spec(dtype, shape))
    elif Spec.of(out) != Spec(dtype, shape) or not out.is_contiguous():
        raise ConfigError(f"out is {Spec.of(out)}, expected {Spec(dtype, shape)}")

    def dequantize(piece: _Piece) -> None:
        _core.dequantize(
            as_bytes(piece.codes),
            as_bytes(piece.items),
            dtype=dtype_name(dtype),
            scales=piece.scales(),
            format=_core.CodeFormat(kind, args.num_bits),
        )

    _run_pieces(dequantize, out, stored, params, args, each)
    return out


def pack_codes(codes: Tensor, args: QuantizationArgs, kind: CodeKind) -> Tensor:
    """Return codes, one per item, as they are stored."""
    if kind == "packed":
        return pack_bits(codes, args.num_bits)
    if kind == "fp6":
        return _pack_fp6(codes)
    return codes[..., ::2] | codes[..., 1::2] << 4 if kind == "fp4" else codes


def unpack_codes(stored: Tensor, args: QuantizationArgs, kind: CodeKind, columns: int) -> Tensor:
    """Return stored codes as one code per item."""
    if kind == "packed":
        return unpack_bits(stored, args.num_bits, columns)
    if kind == "fp4":
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    return _unpack_fp6(stored) if kind == "fp6" else stored


def stored_spec(shape: tuple[int, ...], args: QuantizationArgs, kind: CodeKind) -> Spec:
    """Return dtype and shape of the stored codes of a weight."""
    *outer, columns = shape
    if kind == "packed":
        return Spec(torch.int32, (*outer, count_words(columns, args.num_bits)))
    if kind == "fp6":
        return Spec(torch.uint8, (*outer, columns // 4 * 3))
    return Spec(torch.uint8, (*outer, columns // 2)) if kind == "fp4" else Spec(args.dtype, shape)


def _pack_fp6(codes: Tensor) -> Tensor:
    """Return 6-bit codes as a little-endian stream of bits: four codes in three bytes."""
    a, b, c, d = codes.reshape(*codes.shape[:-1], -1, 4).unbind(-1)
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), -1).flatten(-2)


def _unpack_fp6(packed: Tensor) -> Tensor:
    """Return the codes that `_pack_fp6` packed."""
    a, b, c = packed.reshape(*packed.shape[:-1], -1, 3).unbind(-1)
    codes = (a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2)
    return torch.stack(codes, -1).flatten(-2)


def encode_exponents(scale: Tensor) -> Tensor:
    """Return scales that are powers of two as exponents with a bias of 127 (uint8)."""
    return (127 + scale.log2().floor()).to(torch.int32).to(torch.uint8)


def decode_exponents(exponents: Tensor) -> Tensor:
    """Return the powers of two that `encode_exponents` encoded, exactly, in bf16."""
    return torch.exp2(exponents.float() - 127).to(torch.bfloat16)


def count_words(columns: int, bits: int, layout: Layout = "stream") -> int:
    """Return the number of words in a row of packed codes."""
    if layout == "stream":
        return ceil_div(columns * bits, _WORD_BITS)
    return ceil_div(columns, _WORD_BITS // bits)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes `[..., columns]` into int32 words; the lowest code is stored as 0."""
    *outer, columns = codes.shape
    words = allocate(Spec(torch.int32, (*outer, count_words(columns, bits))))
    _core.pack_codes(as_bytes(codes.cpu()), bits, columns, as_bytes(words))
    return words.to(codes.device)


def unpack_bits(words: Tensor, bits: int, columns: int, layout: Layout = "stream") -> Tensor:
    """Return the int8 codes that `pack_bits` packed."""
    outer = words.shape[:-1]
    if layout == "words":
        shifts = range(0, _WORD_BITS // bits * bits, bits)
        codes = [((words >> shift) & _mask(bits)).to(torch.uint8) for shift in shifts]
        unsigned = torch.stack(codes, -1).reshape(*outer, -1)[..., :columns]
        return (unsigned - (1 << bits - 1)).view(torch.int8)
    out = allocate(Spec(torch.int8, (*outer, columns)))
    _core.unpack_codes(as_bytes(words.cpu()), bits, columns, as_bytes(out))
    return out.to(words.device)


def find_layouts(words: Tensor, bits: int, columns: int) -> set[Layout]:
    """Return the layouts that fit the number of words and leave unused bits zero."""
    layouts: set[Layout] = {
        layout for layout in _LAYOUTS if words.shape[-1] == count_words(columns, bits, layout)
    }
    if not layouts:
        raise CorruptFileError(
            f"{words.shape[-1]} words per row do not fit {columns} codes of {bits} bits"
        )
    if len(layouts) == 1 or _WORD_BITS % bits == 0 or columns <= _WORD_BITS // bits:
        return layouts
    return {layout for layout in layouts if not _uses_spare_bits(words, bits, columns, layout)}


def _uses_spare_bits(words: Tensor, bits: int, columns: int, layout: Layout) -> bool:
    """Return True if bits are set that the layout leaves unused."""
    count, used = words.shape[-1], columns * bits
    if layout == "words":
        per_word = _WORD_BITS // bits * bits
        used -= (count - 1) * per_word
    else:
        per_word, used = _WORD_BITS, used - (count - 1) * _WORD_BITS
    allowed = torch.tensor([_mask(per_word)] * (count - 1) + [_mask(used)], device=words.device)
    return bool((words.long() & ~allowed & _mask(_WORD_BITS)).any())


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _supports_core(x: Tensor, params: Params) -> bool:
    """Return True if the C++ kernels support these params on the device of `x`."""
    zero, global_scale = params.zero_point, params.global_scale
    return (
        x.device.type == "cpu"
        and params.scale.dtype in _SCALE_NAMES
        and params.scale.dim() > 0
        and params.g_idx is None
        and (zero is None or zero.dtype is torch.int8)
        and (global_scale is None or global_scale.dtype is torch.float32)
    )


@dataclass(frozen=True)
class _Piece:
    """Some rows of one matrix, with their codes and params."""

    items: Tensor
    codes: Tensor
    params: Params
    blocks: tuple[int, int, int]
    """Columns of the matrix, columns and rows of a block that shares a scale."""

    def scales(self) -> _core.Scales:
        """Return the params as an argument of the C++ kernels."""
        params = self.params
        scale, zero, global_scale = params.scale, params.zero_point, params.global_scale
        return _core.Scales(
            as_bytes(scale),
            _SCALE_NAMES[scale.dtype],
            self.blocks,
            divisor=1.0 if global_scale is None else float(global_scale),
            zero_points=None if zero is None else as_bytes(zero),
        )


def _run_pieces(
    work: Callable[[_Piece], bool | None],
    items: Tensor,
    codes: Tensor,
    params: Params,
    args: QuantizationArgs,
    each: Each,
) -> list[bool | None]:
    pieces = list(_split(items.contiguous(), codes.contiguous(), params, args))
    return each(lambda i: work(pieces[i]), len(pieces))


def _split(
    items: Tensor, codes: Tensor, params: Params, args: QuantizationArgs
) -> Iterator[_Piece]:
    """Yield the pieces of a matrix or of each matrix in a stack."""
    if items.dim() == 3:
        for expert in range(len(items)):
            expert_params = Params(
                params.scale[expert],
                None if params.zero_point is None else params.zero_point[expert],
                _select_expert(params.global_scale, expert),
            )
            yield from _split(items[expert], codes[expert], expert_params, args)
        return
    rows, columns = items.shape
    width, height = _find_block_size(rows, columns, args)
    across, down = ceil_div(columns, width), ceil_div(rows, height)
    scale = params.scale.reshape(down, across)
    zero = None if params.zero_point is None else params.zero_point.reshape(down, across)
    step = max(1, _PIECE_ITEMS // (columns * height)) if height < rows else 1
    for first in range(0, down, step):
        rows_of_items = slice(first * height, (first + step) * height)
        rows_of_scales = slice(first, first + step)
        part = replace(
            params,
            scale=scale[rows_of_scales],
            zero_point=None if zero is None else zero[rows_of_scales],
        )
        piece = _Piece(items[rows_of_items], codes[rows_of_items], part, (columns, width, height))
        yield from _split_rows(piece)


def _select_expert(global_scale: Tensor | None, expert: int) -> Tensor | None:
    if global_scale is None or global_scale.numel() == 1:
        return global_scale
    return global_scale[expert]


def _split_rows(piece: _Piece) -> Iterator[_Piece]:
    """Split a piece further if all of its rows share one row of scales."""
    rows, columns = piece.items.shape
    if piece.params.scale.shape[0] > 1:
        yield piece
        return
    step = max(1, _PIECE_ITEMS // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        yield replace(piece, items=piece.items[part], codes=piece.codes[part])


def _find_block_size(rows: int, columns: int, args: QuantizationArgs) -> tuple[int, int]:
    """Return the number of columns and rows that share a scale."""
    match args.strategy:
        case QuantizationStrategy.CHANNEL:
            return columns, 1
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return args.group_size or columns, 1
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (rows, columns)
            return width, height
    return columns, rows
