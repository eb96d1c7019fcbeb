"""Formats: the tensors that a compressed-tensors file stores for a quantized weight.

A `Format` maps codes and params to tensors named `<module>.<suffix>` and back. The formats differ
in which tensors they store and in the dtype of codes and scales; the table is at the end.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError, FormatError, suggest
from slimtensors.parallel import Each, serially
from slimtensors.quantization import kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.quantization.kernels import CodeKind, Layout
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.tensor import KERNEL_FLOATS, Parts, Spec, ceil_div

__all__ = [
    "MIXED",
    "SUFFIXES",
    "Format",
    "find",
    "infer",
    "list_names",
    "merge",
]


MIXED = "mixed-precision"
"""The format of a config whose groups have different formats."""

SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
)
"""Suffixes of the tensors that formats store."""

_FLOATS = (*KERNEL_FLOATS, torch.float64)
_SCALE_DTYPES = (*_FLOATS, torch.float8_e4m3fn, torch.uint8)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight in the representation of a file."""

    codes: Tensor
    kind: CodeKind
    """Representation of the codes."""
    shape: tuple[int, ...]
    """Shape of the dense weight."""
    params: Params
    """Params in their stored dtypes."""


Check = Callable[[str, QuantizationArgs, int], None]
"""Raise `ConfigError` if the named format cannot store these codes and columns."""
Write = Callable[[StoredWeight, QuantizationArgs], dict[str, Tensor]]
Read = Callable[[Mapping[str, Tensor], QuantizationArgs, str | None], StoredWeight]
"""Return the stored weight; raise `CorruptFileError` if the tensors do not fit together."""


@dataclass(frozen=True)
class Format:
    """One way to store codes and params as tensors with fixed suffixes."""

    name: str
    """Name in configs."""
    kind: Callable[[QuantizationArgs], CodeKind]
    check: Check
    write: Write
    read: Read
    decode_scale: Callable[[Tensor], Tensor] = lambda scale: scale
    """Return stored scales in a dtype that torch computes with."""
    version: str | None = None
    """Release of compressed-tensors that wrote the tensors, if known."""

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return the tensors that store `codes`, by suffix."""
        self.check(self.name, args, codes.shape[-1])
        kind = self.kind(args)
        packed = kernels.pack_codes(codes, args, kind)
        return self.write(StoredWeight(packed, kind, tuple(codes.shape), params), args)

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return codes and params; raise `CorruptFileError` if the tensors do not fit together."""
        stored = self.read(parts, args, self.version)
        codes = kernels.unpack_codes(stored.codes, args, stored.kind, stored.shape[-1])
        return codes, replace(stored.params, scale=self.decode_scale(stored.params.scale))

    def decode_params(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Parts:
        """Return the stored tensors with scales as floats and zero points one per item."""
        stored = self.read(parts, args, self.version).params
        decoded = {"weight_scale": self.decode_scale(stored.scale)}
        if stored.zero_point is not None:
            decoded["weight_zero_point"] = stored.zero_point
        return {**parts, **decoded}

    def encode_params(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Parts:
        """Return the stored tensors again, after `decode_params`."""
        codes = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        shape = tuple(int(size) for size in parts.get("weight_shape", ()))
        others = (parts.get(f"weight_{name}") for name in ("zero_point", "global_scale", "g_idx"))
        params = Params(parts["weight_scale"], *others)
        return self.write(StoredWeight(codes, self.kind(args), shape, params), args)

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Quantize a weight and return the tensors that store it; `each` runs parts of the work."""
        self.check(self.name, args, weight.shape[-1])
        kind = self.kind(args)
        codes = kernels.compress(weight, params, args, kind, each)
        return self.write(StoredWeight(codes, kind, tuple(weight.shape), params), args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight, written into `out` if given.

        Its dtype is that of the scale, or bf16 if scales are stored in 8 bits.
        """
        stored = self.read(parts, args, self.version)
        codes, kind, params = stored.codes, stored.kind, stored.params
        return kernels.decompress(codes, kind, params, args, stored.shape, each, out)


def list_names() -> list[str]:
    """Return the names of all formats."""
    return list(_FORMATS)


def find(name: str, *, version: str | None = None) -> Format:
    """Return the format called `name`, as release `version` of compressed-tensors wrote it.

    The release matters only for codes of 3, 5, 6 and 7 bits whose layout is ambiguous.
    """
    if name not in _FORMATS:
        raise ConfigError(f"unknown format {name!r}; {suggest(name, _FORMATS)}")
    return replace(_FORMATS[name], version=version)


def infer(scheme: QuantizationScheme) -> str:
    """Return the format that compressed-tensors uses for a scheme; `dense` without weights."""
    args = scheme.weights
    if args is None:
        return "dense"
    if args.dtype is torch.uint8:
        return _infer_small_float(args)
    if args.is_mx and args.group_size == 32:
        return _MXFP8
    if scheme.input_activations is None:
        return _PACKED if args.type is QuantizationType.INT else "naive-quantized"
    return "int-quantized" if args.type is QuantizationType.INT else "float-quantized"


def _infer_small_float(args: QuantizationArgs) -> str:
    """Return the format of 4- or 6-bit floats: by their scales, else by the size of groups."""
    if args.num_bits == 6 and (args.is_mx or args.group_size == 32):
        return _MXFP6
    if args.num_bits == 4 and args.strategy is QuantizationStrategy.TENSOR_GROUP:
        return _NVFP4
    if args.num_bits == 4 and (args.is_mx or args.group_size == 32):
        return _MXFP4
    raise ConfigError(
        f"no format stores floats of {args.num_bits} bits with strategy {args.strategy}: set"
        " strategy='tensor_group' (nvfp4, 4 bits) or scale_dtype=torch.uint8 (mxfp4, mxfp6)"
    )


def merge(names: Iterable[str]) -> str:
    """Return the format of a config whose groups have these formats."""
    distinct = set(names)
    return MIXED if len(distinct) > 1 else next(iter(distinct), "dense")


def require_part(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    """Return a stored tensor; raise `CorruptFileError` if it is missing."""
    if suffix not in parts:
        found = ", ".join(sorted(parts)) or "nothing"
        raise CorruptFileError(f"{suffix} is missing; found {found}")
    return parts[suffix]


def check_params(shape: tuple[int, ...], params: Params, args: QuantizationArgs) -> Params:
    """Return the params of a weight of this shape; raise `CorruptFileError` if they do not fit."""
    expected = scale_shape(shape, args)
    if args.strategy is QuantizationStrategy.TENSOR:  # one number, in any number of dimensions
        zero = params.zero_point
        params = replace(
            params,
            scale=_reshape_if_equal(params.scale, expected),
            zero_point=None if zero is None else _reshape_if_equal(zero, expected),
        )
    for suffix, x in (("weight_scale", params.scale), ("weight_zero_point", params.zero_point)):
        if x is not None and tuple(x.shape) != expected:
            raise CorruptFileError(
                f"{suffix} has shape {tuple(x.shape)}, expected {expected} for a weight of {shape}"
            )
    _check_dtypes(params, args)
    global_scale, g_idx = params.global_scale, params.g_idx
    if global_scale is not None and global_scale.numel() not in (1, *shape[:-2]):
        raise CorruptFileError(f"weight_global_scale has {global_scale.numel()} items for {shape}")
    if g_idx is not None and g_idx.shape != shape[-1:]:
        raise CorruptFileError(f"invalid g_idx: {Spec.of(g_idx)} for {shape[-1]} columns")
    if g_idx is not None and not g_idx.is_meta and g_idx.numel():
        low, high = (int(end) for end in torch.aminmax(g_idx))
        if not 0 <= low <= high < expected[-1]:
            raise CorruptFileError(f"g_idx is out of range: there are {expected[-1]} groups")
    return params


def _check_dtypes(params: Params, args: QuantizationArgs) -> None:
    zero = params.zero_point
    for name, x, dtypes in (
        ("weight_scale", params.scale, (*_SCALE_DTYPES, args.scale_dtype)),
        ("weight_zero_point", zero, (*_FLOATS, *_INTEGERS, args.zero_dtype)),
        ("weight_global_scale", params.global_scale, _FLOATS),
        ("weight_g_idx", params.g_idx, _INTEGERS),
    ):
        if x is not None and (x.dtype not in dtypes or x.is_complex()):
            raise CorruptFileError(f"{name} is {x.dtype}, which is not supported")
    is_float = zero is not None and zero.is_floating_point() and not zero.is_meta
    if zero is not None and is_float and not bool(torch.isfinite(zero.float()).all()):
        raise CorruptFileError("weight_zero_point contains NaN or infinity")


def scale_shape(shape: tuple[int, ...], args: QuantizationArgs) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    *experts, rows, columns = shape
    match args.strategy:
        case QuantizationStrategy.CHANNEL:
            return *experts, rows, 1
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return *experts, rows, ceil_div(columns, args.group_size or 1)
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (1, 1)
            return *experts, ceil_div(rows, height), ceil_div(columns, width)
    return (*experts, 1, 1) if experts else (1,)


def _reshape_if_equal(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape) if x.numel() == math.prod(shape) else x


def _read_g_idx(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each column, or None if groups are contiguous."""
    g_idx = parts.get("weight_g_idx")
    if g_idx is None or bool((g_idx < 0).any()):  # older releases store -1 for unused
        return None
    return g_idx


def _read_exponents(parts: Mapping[str, Tensor]) -> Tensor:
    scale = require_part(parts, "weight_scale")
    if scale.dtype is not torch.uint8:
        raise CorruptFileError(f"weight_scale is {scale.dtype}, expected exponents (uint8)")
    return scale


def _plain_kind(args: QuantizationArgs) -> CodeKind:
    return "int" if args.dtype is torch.int8 else "fp8"


def _check_plain(name: str, args: QuantizationArgs, columns: int) -> None:
    """Check args for one code per item: int-, float-, naive- and mxfp8-quantized."""
    if args.dtype is torch.uint8:
        raise ConfigError(
            f"{name} does not store {args.num_bits}-bit floats; nvfp4, mxfp4 and mxfp6 do"
        )


def _write_plain(stored: StoredWeight, args: QuantizationArgs) -> dict[str, Tensor]:
    params = stored.params
    parts = {"weight": stored.codes, "weight_scale": params.scale}
    if params.zero_point is not None:
        parts["weight_zero_point"] = params.zero_point
    if params.g_idx is not None:
        parts["weight_g_idx"] = params.g_idx
    return parts


def _read_plain(
    parts: Mapping[str, Tensor], args: QuantizationArgs, version: str | None
) -> StoredWeight:
    codes = require_part(parts, "weight")
    shape = tuple(codes.shape)
    if codes.dtype is not args.dtype or codes.dim() not in (2, 3):
        raise CorruptFileError(f"weight is {codes.dtype} {shape}, expected {args.dtype} codes")
    zero_point = None if args.symmetric else require_part(parts, "weight_zero_point")
    params = Params(require_part(parts, "weight_scale"), zero_point, g_idx=_read_g_idx(parts))
    return StoredWeight(codes, _plain_kind(args), shape, check_params(shape, params, args))


def _write_mxfp8(stored: StoredWeight, args: QuantizationArgs) -> dict[str, Tensor]:
    scale = kernels.encode_exponents(stored.params.scale)
    return _write_plain(replace(stored, params=replace(stored.params, scale=scale)), args)


def _read_mxfp8(
    parts: Mapping[str, Tensor], args: QuantizationArgs, version: str | None
) -> StoredWeight:
    _read_exponents(parts)
    return _read_plain(parts, args, version)


def _check_fp4(name: str, args: QuantizationArgs, columns: int) -> None:
    """Check args for two 4-bit floats per byte: nvfp4- and mxfp4-pack-quantized."""
    _check_small_float(name, args, columns, bits=4, per_piece=2)


def _check_fp6(name: str, args: QuantizationArgs, columns: int) -> None:
    """Check args for four 6-bit floats in three bytes: mxfp6-pack-quantized."""
    _check_small_float(name, args, columns, bits=6, per_piece=4)


def _check_small_float(
    name: str, args: QuantizationArgs, columns: int, *, bits: int, per_piece: int
) -> None:
    if args.type is not QuantizationType.FLOAT or args.num_bits != bits:
        raise ConfigError(
            f"{name} stores {bits}-bit floats only, not {args.type} of {args.num_bits}"
        )
    if columns % per_piece:
        raise ConfigError(f"{name} needs a multiple of {per_piece} columns, got {columns}")


def _read_small_float_codes(
    parts: Mapping[str, Tensor], args: QuantizationArgs
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the packed codes and the shape of the dense weight."""
    packed = require_part(parts, "weight_packed")
    *outer, width = packed.shape
    columns, rest = divmod(8 * width, args.num_bits)
    if packed.dtype is not torch.uint8 or packed.dim() not in (2, 3) or rest:
        shape = tuple(packed.shape)
        raise CorruptFileError(f"weight_packed is {packed.dtype} {shape}, expected rows of bytes")
    return packed, (*outer, columns)


def _write_nvfp4(stored: StoredWeight, args: QuantizationArgs) -> dict[str, Tensor]:
    params = stored.params
    if params.global_scale is None:
        raise ConfigError(f"{_NVFP4} needs a global scale: strategy tensor_group")
    return {
        "weight_packed": stored.codes,
        "weight_scale": params.scale.to(args.scale_dtype or torch.float8_e4m3fn),
        "weight_global_scale": params.global_scale,
    }


def _read_nvfp4(
    parts: Mapping[str, Tensor], args: QuantizationArgs, version: str | None
) -> StoredWeight:
    (codes, shape), scale = (
        _read_small_float_codes(parts, args),
        require_part(parts, "weight_scale"),
    )
    if not scale.is_floating_point():
        raise CorruptFileError(f"weight_scale is {scale.dtype}, expected floats")
    global_scale = require_part(parts, "weight_global_scale")
    if global_scale.numel() != 1 and tuple(global_scale.shape) != (*shape[:-2], 1, 1):
        raise CorruptFileError(f"weight_global_scale has shape {tuple(global_scale.shape)}")
    if scale.dtype is not torch.float8_e4m3fn:
        scale = scale.to(torch.bfloat16)
    params = Params(scale, global_scale=global_scale)
    return StoredWeight(codes, "fp4", shape, check_params(shape, params, args))


def _write_mx(stored: StoredWeight, args: QuantizationArgs) -> dict[str, Tensor]:
    scale = kernels.encode_exponents(stored.params.scale)
    return {"weight_packed": stored.codes, "weight_scale": scale}


def _read_mx(
    parts: Mapping[str, Tensor], args: QuantizationArgs, version: str | None
) -> StoredWeight:
    codes, shape = _read_small_float_codes(parts, args)
    params = check_params(shape, Params(_read_exponents(parts)), args)
    return StoredWeight(codes, "fp4" if args.num_bits == 4 else "fp6", shape, params)


_FIRST_STREAM = (0, 18)
"""Release that changed the layout of 3, 5, 6 and 7 bits from `words` to `stream`."""


def _check_packed(name: str, args: QuantizationArgs, columns: int) -> None:
    """Check args for integers packed into 32-bit words: pack-quantized."""
    if args.type is not QuantizationType.INT:
        raise ConfigError(f"{name} stores integers, not floats of {args.num_bits} bits")


def _write_packed(stored: StoredWeight, args: QuantizationArgs) -> dict[str, Tensor]:
    params = stored.params
    parts = {
        "weight_packed": stored.codes,
        "weight_scale": params.scale,
        "weight_shape": torch.tensor(stored.shape),
    }
    zero_point = params.zero_point
    if zero_point is not None:
        if _packs_zero_point(args):
            by_row = zero_point.to(torch.int8).transpose(-1, -2)
            zero_point = kernels.pack_bits(by_row, args.num_bits).transpose(-1, -2).contiguous()
        parts["weight_zero_point"] = zero_point
    if params.g_idx is not None:
        parts["weight_g_idx"] = params.g_idx
    return parts


def _read_packed(
    parts: Mapping[str, Tensor], args: QuantizationArgs, version: str | None
) -> StoredWeight:
    packed = _read_words(parts, "weight_packed")
    shape = _read_shape(parts, packed)
    layouts = kernels.find_layouts(packed, args.num_bits, shape[-1])
    packs_zero_point = _packs_zero_point(args) and _is_packed(parts.get("weight_zero_point"))
    if not args.symmetric and packs_zero_point:
        zeros = _read_words(parts, "weight_zero_point").transpose(-1, -2)
        layouts &= kernels.find_layouts(zeros, args.num_bits, shape[-2])
    layout = _choose_layout(layouts, args.num_bits, shape[-1], version)
    zero_point = None
    if not args.symmetric:
        zero_point = require_part(parts, "weight_zero_point")
        if packs_zero_point:
            words = zero_point.transpose(-1, -2)
            by_row = kernels.unpack_bits(words, args.num_bits, shape[-2], layout)
            zero_point = by_row.transpose(-1, -2).contiguous()
    params = Params(require_part(parts, "weight_scale"), zero_point, g_idx=_read_g_idx(parts))
    params = check_params(shape, params, args)
    if layout == "stream":
        return StoredWeight(packed, "packed", shape, params)
    codes = kernels.unpack_bits(packed, args.num_bits, shape[-1], layout)
    return StoredWeight(codes, "int", shape, params)


def _is_packed(zero_point: Tensor | None) -> bool:
    """Return True unless zero points are bytes, as in files of early releases."""
    return zero_point is None or zero_point.dtype is not torch.int8


def _packs_zero_point(args: QuantizationArgs) -> bool:
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def _choose_layout(layouts: set[Layout], bits: int, columns: int, version: str | None) -> Layout:
    """Return the layout of packed codes, by release where the tensors allow both."""
    if not layouts:
        raise CorruptFileError("weight_packed has an unknown layout")
    if len(layouts) == 1:
        return next(iter(layouts))
    if 32 % bits == 0 or columns <= 32 // bits:  # both layouts are the same
        return "stream"
    if version is None:
        raise FormatError(
            f"ambiguous layout of {columns} codes of {bits} bits: compressed-tensors changed it in"
            " 0.18; pass the release that wrote the file: find(name, version=...)"
        )
    release = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    return "stream" if release >= _FIRST_STREAM else "words"


def _read_words(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    words = require_part(parts, suffix)
    if words.dtype is not torch.int32 or words.dim() not in (2, 3):
        shape = tuple(words.shape)
        raise CorruptFileError(f"{suffix} is {words.dtype} {shape}, expected rows of 32-bit words")
    return words


def _read_shape(parts: Mapping[str, Tensor], packed: Tensor) -> tuple[int, ...]:
    stored = require_part(parts, "weight_shape")
    if stored.is_floating_point() or stored.shape != (packed.dim(),):
        raise CorruptFileError(f"weight_shape has shape {tuple(stored.shape)}")
    shape = tuple(int(size) for size in stored)
    if min(shape) < 1 or shape[:-1] != tuple(packed.shape[:-1]):
        raise CorruptFileError(
            f"weight_shape is {shape}, but weight_packed has shape {tuple(packed.shape)}"
        )
    return shape


_PACKED = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_MXFP4 = "mxfp4-pack-quantized"
_MXFP6 = "mxfp6-pack-quantized"
_MXFP8 = "mxfp8-quantized"

_FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        *(
            Format(name, _plain_kind, _check_plain, _write_plain, _read_plain)
            for name in ("int-quantized", "float-quantized", "naive-quantized")
        ),
        Format(_PACKED, lambda _: "packed", _check_packed, _write_packed, _read_packed),
        Format(
            _NVFP4,
            lambda _: "fp4",
            _check_fp4,
            _write_nvfp4,
            _read_nvfp4,
            decode_scale=lambda scale: scale.to(torch.bfloat16),
        ),
        Format(
            _MXFP4,
            lambda _: "fp4",
            _check_fp4,
            _write_mx,
            _read_mx,
            decode_scale=kernels.decode_exponents,
        ),
        Format(
            _MXFP6,
            lambda _: "fp6",
            _check_fp6,
            _write_mx,
            _read_mx,
            decode_scale=kernels.decode_exponents,
        ),
        Format(
            _MXFP8,
            _plain_kind,
            _check_plain,
            _write_mxfp8,
            _read_mxfp8,
            decode_scale=kernels.decode_exponents,
        ),
    )
}
