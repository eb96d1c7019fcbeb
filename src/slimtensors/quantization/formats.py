"""Formats: how the codes and params of a weight become tensors of a compressed-tensors file."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError, FormatError, nearest
from slimtensors.parallel import Each, serially
from slimtensors.quantization import kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.quantization.kernels import Layout
from slimtensors.tensor import Spec, ceil_div


class Format(Protocol):
    """How codes and params of a weight are stored: as tensors named by suffixes of the module."""

    @property
    def name(self) -> str:
        """What configs call it."""
        ...

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return the stored tensors of codes that are there already."""
        ...

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return codes and params; raise `CorruptFileError` if the tensors do not fit together."""
        ...

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round a weight to codes and return the stored tensors, dividing the work by `each`."""
        ...

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight, in the memory of `out` if given."""
        ...


def part(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    """Return a stored tensor that must be there."""
    if suffix not in parts:
        raise CorruptFileError(f"lacks {suffix}; there is {', '.join(sorted(parts)) or 'nothing'}")
    return parts[suffix]


def column_groups(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each column, if groups are not neighbours."""
    order = parts.get("weight_g_idx")
    if order is None or bool((order < 0).any()):  # how older releases say that it is unused
        return None
    return order


def check_params(shape: tuple[int, ...], params: Params, args: QuantizationArgs) -> Params:
    """Return the params of a weight of this shape if they fit it."""
    wanted = scale_shape(shape, args)
    if args.strategy is QuantizationStrategy.TENSOR:  # one number, whatever its dimensions
        zero = params.zero_point
        params = replace(
            params,
            scale=_shaped(params.scale, wanted),
            zero_point=None if zero is None else _shaped(zero, wanted),
        )
    for what, given in (("weight_scale", params.scale), ("weight_zero_point", params.zero_point)):
        if given is not None and tuple(given.shape) != wanted:
            raise CorruptFileError(
                f"{what} of shape {tuple(given.shape)}, but a weight of {shape} needs {wanted}"
            )
    order = params.g_idx
    if order is not None and (order.shape != shape[-1:] or order.is_floating_point()):
        raise CorruptFileError(f"g_idx of {Spec.of(order)} for {shape[-1]} columns")
    if order is not None and not 0 <= int(order.min()) <= int(order.max()) < wanted[-1]:
        raise CorruptFileError(f"g_idx names groups outside of the {wanted[-1]} that have scales")
    return params


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape) if x.numel() == math.prod(shape) else x


def scale_shape(shape: tuple[int, ...], args: QuantizationArgs) -> tuple[int, ...]:
    """Return the shape that the scales of a weight have."""
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


def exponents_of(scale: Tensor) -> Tensor:
    """Return the exponents of powers of two."""
    return (127 + scale.log2().floor()).to(torch.int32).to(torch.uint8)


def check_exponents(scale: Tensor) -> Tensor:
    """Return stored scales if they are exponents."""
    if scale.dtype is not torch.uint8:
        raise CorruptFileError(f"weight_scale is {scale.dtype}, not exponents (uint8)")
    return scale


@dataclass(frozen=True)
class NvFp4:
    """Groups of 16 with 8-bit floats as scales, which one number of 32 bits divides."""

    name: ClassVar[str] = "nvfp4-pack-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed`, `weight_scale` and `weight_global_scale`."""
        _check(codes.shape[-1], args)
        return self._named(kernels.pack_codes(codes, args, "fp4"), params, args)

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        packed, params = self._parsed(parts, args)
        codes = kernels.unpack_codes(packed, args, "fp4", 2 * packed.shape[-1])
        return codes, replace(params, scale=params.scale.to(torch.bfloat16))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        _check(weight.shape[-1], args)
        return self._named(kernels.compress(weight, params, args, "fp4", each), params, args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight as bf16."""
        packed, params = self._parsed(parts, args)
        if params.scale.dtype is not torch.float8_e4m3fn:
            params = replace(params, scale=params.scale.to(torch.bfloat16))
        return kernels.decompress(packed, "fp4", params, args, _dense_shape(packed), each, out)

    def _named(self, packed: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        if params.global_scale is None:
            raise ConfigError(f"{self.name} needs a global scale: strategy tensor_group")
        return {
            "weight_packed": packed,
            "weight_scale": params.scale.to(args.scale_dtype or torch.float8_e4m3fn),
            "weight_global_scale": params.global_scale,
        }

    def _parsed(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        packed, scale = _packed(parts), part(parts, "weight_scale")
        if not scale.is_floating_point():
            raise CorruptFileError(f"weight_scale is {scale.dtype}, not floats")
        whole = part(parts, "weight_global_scale")
        if whole.numel() != 1 and tuple(whole.shape) != (*packed.shape[:-2], 1, 1):
            raise CorruptFileError(f"weight_global_scale has shape {tuple(whole.shape)}")
        params = Params(scale, global_scale=whole)
        return packed, check_params(_dense_shape(packed), params, args)


@dataclass(frozen=True)
class MxFp4:
    """Groups of 32 with powers of two as scales, stored as exponents."""

    name: ClassVar[str] = "mxfp4-pack-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed` and `weight_scale` (uint8)."""
        _check(codes.shape[-1], args)
        packed = kernels.pack_codes(codes, args, "fp4")
        return {"weight_packed": packed, "weight_scale": exponents_of(params.scale)}

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        packed, params = self._parsed(parts, args)
        codes = kernels.unpack_codes(packed, args, "fp4", 2 * packed.shape[-1])
        return codes, replace(params, scale=kernels.powers_of(params.scale))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        _check(weight.shape[-1], args)
        packed = kernels.compress(weight, params, args, "fp4", each)
        return {"weight_packed": packed, "weight_scale": exponents_of(params.scale)}

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight as bf16."""
        packed, params = self._parsed(parts, args)
        return kernels.decompress(packed, "fp4", params, args, _dense_shape(packed), each, out)

    def _parsed(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        packed = _packed(parts)
        params = Params(check_exponents(part(parts, "weight_scale")))
        return packed, check_params(_dense_shape(packed), params, args)


def _check(columns: int, args: QuantizationArgs) -> None:
    if args.type is not QuantizationType.FLOAT or args.num_bits != 4:
        raise ConfigError("only 4-bit floats are stored two per byte")
    if columns % 2:
        raise ConfigError(f"{columns} columns are not a whole number of bytes")


def _packed(parts: Mapping[str, Tensor]) -> Tensor:
    packed = part(parts, "weight_packed")
    if packed.dtype is not torch.uint8 or packed.dim() not in (2, 3):
        kind = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise CorruptFileError(f"weight_packed is {kind}, not rows of bytes")
    return packed


def _dense_shape(packed: Tensor) -> tuple[int, ...]:
    *outer, width = packed.shape
    return *outer, 2 * width


_FIRST_STREAM = (0, 18)
"""The release that changed the layout of 3, 5, 6 and 7 bits."""


@dataclass(frozen=True)
class PackQuantized:
    """Packed integers; also as releases before 0.18 packed them, and with `weight_g_idx`."""

    name: ClassVar[str] = "pack-quantized"

    version: str | None = None
    """The release that wrote it, if known; asked only where the tensors do not tell."""

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed`, `weight_scale`, `weight_shape`, and what else there is."""
        self._check(args)
        return self._named(
            kernels.pack_bits(codes, args.num_bits), tuple(codes.shape), params, args
        )

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Unpack codes and zero points."""
        shape, layout = self._shape_and_layout(parts, args)
        codes = kernels.unpack_bits(parts["weight_packed"], args.num_bits, shape[-1], layout)
        return codes, self._params(parts, args, shape, layout)

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        self._check(args)
        packed = kernels.compress(weight, params, args, "packed", each)
        return self._named(packed, tuple(weight.shape), params, args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight in the dtype of its scale."""
        shape, layout = self._shape_and_layout(parts, args)
        packed, params = parts["weight_packed"], self._params(parts, args, shape, layout)
        if layout == "stream":
            return kernels.decompress(packed, "packed", params, args, shape, each, out)
        codes = kernels.unpack_bits(packed, args.num_bits, shape[-1], layout)
        return kernels.decompress(codes, "int", params, args, shape, each, out)

    def _check(self, args: QuantizationArgs) -> None:
        if args.type is not QuantizationType.INT:
            raise ConfigError(f"{self.name} stores integers, not floats of {args.num_bits} bits")

    def _named(
        self, packed: Tensor, shape: tuple[int, ...], params: Params, args: QuantizationArgs
    ) -> dict[str, Tensor]:
        parts = {
            "weight_packed": packed,
            "weight_scale": params.scale,
            "weight_shape": torch.tensor(shape),
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

    def _shape_and_layout(
        self, parts: Mapping[str, Tensor], args: QuantizationArgs
    ) -> tuple[tuple[int, ...], Layout]:
        packed = _words(parts, "weight_packed")
        shape = _shape(part(parts, "weight_shape"), packed)
        found = kernels.possible_layouts(packed, args.num_bits, shape[-1])
        if not args.symmetric and _packs_zero_point(args):
            zeros = _words(parts, "weight_zero_point").transpose(-1, -2)
            found &= kernels.possible_layouts(zeros, args.num_bits, shape[-2])
        if not found:
            raise CorruptFileError("weight_packed has no layout that was ever in use")
        return shape, self._only(found, args.num_bits, shape[-1])

    def _only(self, found: set[Layout], width: int, columns: int) -> Layout:
        if len(found) == 1:
            return found.pop()
        if 32 % width == 0 or columns <= 32 // width:  # both layouts are the same
            return "stream"
        if self.version is None:
            raise FormatError(
                f"{columns} codes of {width} bits can have the layout of compressed-tensors before"
                " 0.18 or that since; say which release wrote them: find(name, version=...)"
            )
        return "stream" if _release(self.version) >= _FIRST_STREAM else "words"

    def _params(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        shape: tuple[int, ...],
        layout: Layout,
    ) -> Params:
        zero_point = None
        if not args.symmetric:
            zero_point = part(parts, "weight_zero_point")
            if _packs_zero_point(args):
                by_row = kernels.unpack_bits(
                    zero_point.transpose(-1, -2), args.num_bits, shape[-2], layout
                )
                zero_point = by_row.transpose(-1, -2).contiguous()
        params = Params(part(parts, "weight_scale"), zero_point, g_idx=column_groups(parts))
        return check_params(shape, params, args)


def _packs_zero_point(args: QuantizationArgs) -> bool:
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def _words(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    words = part(parts, suffix)
    if words.dtype is not torch.int32 or words.dim() not in (2, 3):
        kind = f"{words.dtype} of shape {tuple(words.shape)}"
        raise CorruptFileError(f"{suffix} is {kind}, not rows of 32-bit words")
    return words


def _shape(stored: Tensor, packed: Tensor) -> tuple[int, ...]:
    if stored.is_floating_point() or stored.shape != (packed.dim(),):
        raise CorruptFileError(f"weight_shape has shape {tuple(stored.shape)}")
    shape = tuple(int(size) for size in stored)
    if min(shape) < 1 or shape[:-1] != tuple(packed.shape[:-1]):
        raise CorruptFileError(f"weight_shape {shape} for words of {tuple(packed.shape)}")
    return shape


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())


@dataclass(frozen=True)
class PlainCodes:
    """Codes as they are. The three formats of this kind differ in name only."""

    name: str

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight` (int8 or float8), `weight_scale` and, if asymmetric, the zero point."""
        self._check(args)
        parts = {"weight": codes, "weight_scale": params.scale}
        if params.zero_point is not None:
            parts["weight_zero_point"] = params.zero_point
        if params.g_idx is not None:
            parts["weight_g_idx"] = params.g_idx
        return parts

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return what is there."""
        codes = part(parts, "weight")
        if codes.dtype is not args.dtype or codes.dim() not in (2, 3):
            kind = f"{codes.dtype} of shape {tuple(codes.shape)}"
            raise CorruptFileError(f"weight is {kind}, but codes would be {args.dtype}")
        zero_point = None if args.symmetric else part(parts, "weight_zero_point")
        params = Params(part(parts, "weight_scale"), zero_point, g_idx=column_groups(parts))
        return codes, check_params(tuple(codes.shape), params, args)

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and store."""
        self._check(args)
        return self.store(kernels.compress(weight, params, args, _kind(args), each), params, args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight in the dtype of its scale."""
        codes, params = self.parse(parts, args)
        return kernels.decompress(codes, _kind(args), params, args, tuple(codes.shape), each, out)

    def _check(self, args: QuantizationArgs) -> None:
        if args.dtype is torch.uint8:
            raise ConfigError(f"{self.name} does not store 4-bit floats; mxfp4 and nvfp4 do")


@dataclass(frozen=True)
class MxFp8:
    """8-bit floats with powers of two as scales, stored as exponents."""

    name: ClassVar[str] = "mxfp8-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight` (float8) and `weight_scale` (uint8)."""
        return _PLAIN.store(codes, replace(params, scale=exponents_of(params.scale)), args)

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        codes, params = _PLAIN.parse(parts, args)
        return codes, replace(params, scale=kernels.powers_of(check_exponents(params.scale)))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and store."""
        return self.store(kernels.compress(weight, params, args, "fp8", each), params, args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight as bf16."""
        check_exponents(part(parts, "weight_scale"))
        return _PLAIN.decompress(parts, args, each, out)


_PLAIN = PlainCodes(MxFp8.name)


def _kind(args: QuantizationArgs) -> kernels.Kind:
    return "int" if args.dtype is torch.int8 else "fp8"


MIXED = "mixed-precision"
"""What a config says whose groups have different formats; each group then names its own."""

_FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        PlainCodes("int-quantized"),
        PlainCodes("float-quantized"),
        PlainCodes("naive-quantized"),
        PackQuantized(),
        NvFp4(),
        MxFp4(),
        MxFp8(),
    )
}


class Scheme(Protocol):
    """As much of a quantization scheme as its format depends on."""

    @property
    def weights(self) -> QuantizationArgs | None:
        """How weights are quantized."""
        ...

    @property
    def input_activations(self) -> QuantizationArgs | None:
        """How inputs are quantized."""
        ...


def names() -> list[str]:
    """List the formats."""
    return list(_FORMATS)


def find(name: str, *, version: str | None = None) -> Format:
    """Return the format called `name`, as the release `version` of compressed-tensors wrote it.

    The release only matters for codes of 3, 5, 6 and 7 bits whose shape does not tell their layout.
    """
    if name not in _FORMATS:
        raise ConfigError(f"unknown format {name!r}; {nearest(name, _FORMATS)}")
    if name == PackQuantized.name and version is not None:
        return PackQuantized(version)
    return _FORMATS[name]


def infer(scheme: Scheme) -> str:
    """Return the format that compressed-tensors stores a scheme in; `dense` without weights."""
    args = scheme.weights
    if args is None:
        return "dense"
    if args.type is QuantizationType.FLOAT and args.num_bits == 4:
        fitting = {32: MxFp4.name, 16: NvFp4.name}
        if args.group_size not in fitting:
            raise ConfigError("4-bit floats are stored in groups of 16 (nvfp4) or 32 (mxfp4)")
        return fitting[args.group_size]
    if args.is_mx and args.group_size == 32:
        return MxFp8.name
    if scheme.input_activations is None:
        return PackQuantized.name if args.type is QuantizationType.INT else "naive-quantized"
    return "int-quantized" if args.type is QuantizationType.INT else "float-quantized"


def of_all(stored: Iterable[str]) -> str:
    """Return what a config says whose groups are stored in these formats."""
    kinds = set(stored)
    return MIXED if len(kinds) > 1 else next(iter(kinds), "dense")


__all__ = ["MIXED", "Format", "Scheme", "find", "infer", "names", "of_all"]
