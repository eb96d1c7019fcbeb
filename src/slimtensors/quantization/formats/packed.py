"""Integers of 1 to 8 bits, packed into words: `pack-quantized`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.quantization import bits, fused
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.quantization.bits import Layout
from slimtensors.quantization.formats.format import check_params, column_groups, part
from slimtensors.spec import Each, serially

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
        return self._named(bits.pack(codes, args.num_bits), tuple(codes.shape), params, args)

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Unpack codes and zero points."""
        shape, layout = self._shape_and_layout(parts, args)
        codes = bits.unpack(parts["weight_packed"], args.num_bits, shape[-1], layout)
        return codes, self._params(parts, args, shape, layout)

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        self._check(args)
        packed = fused.compress(weight, params, args, "packed", each)
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
            return fused.decompress(packed, "packed", params, args, shape, each, out)
        codes = bits.unpack(packed, args.num_bits, shape[-1], layout)
        return fused.decompress(codes, "int", params, args, shape, each, out)

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
                zero_point = bits.pack(by_row, args.num_bits).transpose(-1, -2).contiguous()
            parts["weight_zero_point"] = zero_point
        if params.g_idx is not None:
            parts["weight_g_idx"] = params.g_idx
        return parts

    def _shape_and_layout(
        self, parts: Mapping[str, Tensor], args: QuantizationArgs
    ) -> tuple[tuple[int, ...], Layout]:
        packed = _words(parts, "weight_packed")
        shape = _shape(part(parts, "weight_shape"), packed)
        found = bits.possible_layouts(packed, args.num_bits, shape[-1])
        if not args.symmetric and _packs_zero_point(args):
            zeros = _words(parts, "weight_zero_point").transpose(-1, -2)
            found &= bits.possible_layouts(zeros, args.num_bits, shape[-2])
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
                by_row = bits.unpack(zero_point.transpose(-1, -2), args.num_bits, shape[-2], layout)
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
