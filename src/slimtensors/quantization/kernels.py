"""Fused round-and-pack and unpack-and-multiply kernels, and bit packing."""

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

Layout = Literal["stream", "words"]

_LAYOUTS: tuple[Layout, ...] = ("stream", "words")
_WORD = 32


def width(columns: int, bits: int, layout: Layout = "stream") -> int:
    """Return how many words a row takes."""
    if layout == "stream":
        return ceil_div(columns * bits, _WORD)
    return ceil_div(columns, _WORD // bits)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes `[..., columns]` into int32 words `[..., width]`, the lowest code as 0."""
    *outer, columns = codes.shape
    words = allocate(Spec(torch.int32, (*outer, width(columns, bits))))
    _core.pack_codes(as_bytes(codes.cpu()), bits, columns, as_bytes(words))
    return words.to(codes.device)


def unpack_bits(words: Tensor, bits: int, columns: int, layout: Layout = "stream") -> Tensor:
    """Undo `pack`."""
    outer = words.shape[:-1]
    if layout == "words":
        shifts = range(0, _WORD // bits * bits, bits)
        codes = [((words >> shift) & _mask(bits)).to(torch.uint8) for shift in shifts]
        whole = torch.stack(codes, -1).reshape(*outer, -1)[..., :columns]
        return (whole - (1 << bits - 1)).view(torch.int8)
    out = allocate(Spec(torch.int8, (*outer, columns)))
    _core.unpack_codes(as_bytes(words.cpu()), bits, columns, as_bytes(out))
    return out.to(words.device)


def possible_layouts(words: Tensor, bits: int, columns: int) -> set[Layout]:
    """Return the layouts that words can have: by their number, else by bits that are zero."""
    found: set[Layout] = {
        layout for layout in _LAYOUTS if words.shape[-1] == width(columns, bits, layout)
    }
    if not found:
        raise CorruptFileError(
            f"{words.shape[-1]} words per row do not hold {columns} codes of {bits} bits"
        )
    if len(found) == 1 or _WORD % bits == 0 or columns <= _WORD // bits:
        return found
    return {layout for layout in found if not _uses_spare_bits(words, bits, columns, layout)}


def _uses_spare_bits(words: Tensor, bits: int, columns: int, layout: Layout) -> bool:
    """Tell whether bits are set that a layout leaves unused."""
    count, used = words.shape[-1], columns * bits
    if layout == "words":
        whole = _WORD // bits * bits
        used -= (count - 1) * whole
    else:
        whole, used = _WORD, used - (count - 1) * _WORD
    kept = torch.tensor([_mask(whole)] * (count - 1) + [_mask(used)], device=words.device)
    return bool((words.long() & ~kept & _mask(_WORD)).any())


def _mask(bits: int) -> int:
    return (1 << bits) - 1


Kind = Literal["int", "packed", "fp4", "fp8"]
"""How codes are stored: one integer per byte, words, two 4-bit floats per byte, 8-bit floats."""

_SCALES = {**{dtype: dtype_name(dtype) for dtype in KERNEL_FLOATS}, torch.uint8: "float8_e8m0fnu"}
_SCALES[torch.float8_e4m3fn] = "float8_e4m3fn"

_PIECE = 1 << 20
"""Items per piece of work: enough to be worth a thread."""


def compress(
    weight: Tensor, params: Params, args: QuantizationArgs, kind: Kind, each: Each = serially
) -> Tensor:
    """Return the codes of a weight as they are stored."""
    affine.check_weight(weight, args)
    scale = params.scale.dtype if params.global_scale is None else torch.float32
    steps = torch.promote_types(weight.dtype, scale)
    if not _fits(weight, params) or steps not in KERNEL_FLOATS or weight.dtype not in KERNEL_FLOATS:
        if not torch.isfinite(weight).all():
            raise ConfigError(_NOT_FINITE)
        return pack_codes(affine.quantize(weight, params, args), args, kind)
    out = allocate(stored_spec(tuple(weight.shape), args, kind))

    def work(piece: _Piece) -> bool:
        return _core.quantize(
            as_bytes(piece.items),
            as_bytes(piece.codes),
            dtype=dtype_name(weight.dtype),
            compute_dtype=dtype_name(steps),
            scales=piece.scales(),
            format=_core.CodeFormat(kind, args.num_bits),
        )

    if not all(_each_piece(work, weight, out, params, args, each)):
        raise ConfigError(_NOT_FINITE)
    return out


def decompress(
    stored: Tensor,
    kind: Kind,
    params: Params,
    args: QuantizationArgs,
    shape: tuple[int, ...],
    each: Each = serially,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the dense weight, by default in the dtype of its scale; bf16 if that is of 8 bits.

    With `out`, a contiguous tensor of that kind, into its memory: fresh memory costs more than the
    work itself.
    """
    narrow = params.scale.element_size() == 1
    product = torch.bfloat16 if narrow else params.scale.dtype
    dtype = dtype or product
    exact = narrow and args.type is QuantizationType.FLOAT  # a few bits times a few bits
    if exact or params.global_scale is not None or product is torch.float32:
        product = dtype  # nothing is rounded before the end
    if not _fits(stored, params) or product not in KERNEL_FLOATS or product is not dtype:
        if params.scale.dtype is torch.uint8:
            params = replace(params, scale=powers_of(params.scale))
        elif narrow:
            params = replace(params, scale=params.scale.to(torch.bfloat16))
        codes = unpack_codes(stored, args, kind, shape[-1])
        dense = affine.dequantize(codes, params, args, dtype)
        return dense if out is None else out.copy_(dense)
    if out is None:
        out = allocate(Spec(dtype, shape))
    elif Spec.of(out) != Spec(dtype, shape) or not out.is_contiguous():
        raise ConfigError(f"out is {Spec.of(out)}, the weight {Spec(dtype, shape)}")

    def work(piece: _Piece) -> None:
        _core.dequantize(
            as_bytes(piece.codes),
            as_bytes(piece.items),
            dtype=dtype_name(dtype),
            scales=piece.scales(),
            format=_core.CodeFormat(kind, args.num_bits),
        )

    _each_piece(work, out, stored, params, args, each)
    return out


def pack_codes(codes: Tensor, args: QuantizationArgs, kind: Kind) -> Tensor:
    """Return codes of one per item as they are stored."""
    if kind == "packed":
        return pack_bits(codes, args.num_bits)
    return codes[..., ::2] | codes[..., 1::2] << 4 if kind == "fp4" else codes


def unpack_codes(stored: Tensor, args: QuantizationArgs, kind: Kind, columns: int) -> Tensor:
    """Undo `pack`."""
    if kind == "packed":
        return unpack_bits(stored, args.num_bits, columns)
    if kind == "fp4":
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    return stored


def stored_spec(shape: tuple[int, ...], args: QuantizationArgs, kind: Kind) -> Spec:
    """Return what the stored codes of a weight look like."""
    *outer, columns = shape
    if kind == "packed":
        return Spec(torch.int32, (*outer, width(columns, args.num_bits)))
    return Spec(torch.uint8, (*outer, columns // 2)) if kind == "fp4" else Spec(args.dtype, shape)


def powers_of(exponents: Tensor) -> Tensor:
    """Return powers of two, stored as their exponents plus 127, in bf16, which has all of them."""
    return torch.exp2(exponents.float() - 127).to(torch.bfloat16)


_NOT_FINITE = "holds NaN or infinity, which no code can say; leave it unquantized"


def _fits(x: Tensor, params: Params) -> bool:
    """Tell whether the core can do it."""
    zero, whole = params.zero_point, params.global_scale
    return (
        x.device.type == "cpu"
        and params.scale.dtype in _SCALES
        and params.scale.dim() > 0
        and params.g_idx is None
        and (zero is None or zero.dtype is torch.int8)
        and (whole is None or whole.dtype is torch.float32)
    )


@dataclass(frozen=True)
class _Piece:
    """Some rows of one matrix."""

    items: Tensor
    codes: Tensor
    params: Params
    blocks: tuple[int, int, int]

    def scales(self) -> _core.Scales:
        """Return the params as the core takes them."""
        scale, zero, whole = self.params.scale, self.params.zero_point, self.params.global_scale
        return _core.Scales(
            as_bytes(scale),
            _SCALES[scale.dtype],
            self.blocks,
            divisor=1.0 if whole is None else float(whole),
            zero_points=None if zero is None else as_bytes(zero),
        )


def _each_piece(
    work: Callable[[_Piece], bool | None],
    items: Tensor,
    codes: Tensor,
    params: Params,
    args: QuantizationArgs,
    each: Each,
) -> list[bool | None]:
    pieces = list(_pieces(items.contiguous(), codes.contiguous(), params, args))
    return each(lambda i: work(pieces[i]), len(pieces))


def _pieces(
    items: Tensor, codes: Tensor, params: Params, args: QuantizationArgs
) -> Iterator[_Piece]:
    if items.dim() == 3:
        for expert in range(len(items)):
            alone = Params(
                params.scale[expert],
                None if params.zero_point is None else params.zero_point[expert],
                _of_expert(params.global_scale, expert),
            )
            yield from _pieces(items[expert], codes[expert], alone, args)
        return
    rows, columns = items.shape
    width, height = _block(rows, columns, args)
    across, down = ceil_div(columns, width), ceil_div(rows, height)
    scale = params.scale.reshape(down, across)
    zero = None if params.zero_point is None else params.zero_point.reshape(down, across)
    step = max(1, _PIECE // (columns * height)) if height < rows else 1
    for first in range(0, down, step):
        some = slice(first * height, (first + step) * height)
        mine = slice(first, first + step)
        part = replace(params, scale=scale[mine], zero_point=None if zero is None else zero[mine])
        yield from _cut(_Piece(items[some], codes[some], part, (columns, width, height)))


def _of_expert(whole: Tensor | None, expert: int) -> Tensor | None:
    return whole if whole is None or whole.numel() == 1 else whole[expert]


def _cut(piece: _Piece) -> Iterator[_Piece]:
    """Cut a piece with one row of scales further: they are the same for all of its rows."""
    rows, columns = piece.items.shape
    if piece.params.scale.shape[0] > 1:
        yield piece
        return
    step = max(1, _PIECE // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        yield replace(piece, items=piece.items[some], codes=piece.codes[some])


def _block(rows: int, columns: int, args: QuantizationArgs) -> tuple[int, int]:
    """Return how many columns and rows share a scale."""
    match args.strategy:
        case QuantizationStrategy.CHANNEL:
            return columns, 1
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return args.group_size or columns, 1
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (rows, columns)
            return width, height
    return columns, rows
