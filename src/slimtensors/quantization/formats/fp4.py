"""4-bit floats, two per byte: `nvfp4-pack-quantized` and `mxfp4-pack-quantized`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.quantization import fused
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationType
from slimtensors.quantization.formats.format import check_params, part
from slimtensors.quantization.formats.mx import check_exponents, exponents_of
from slimtensors.spec import Each, serially


@dataclass(frozen=True)
class NvFp4:
    """Groups of 16 with 8-bit floats as scales, which one number of 32 bits divides."""

    name: ClassVar[str] = "nvfp4-pack-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed`, `weight_scale` and `weight_global_scale`."""
        _check(codes.shape[-1], args)
        return self._named(fused.pack(codes, args, "fp4"), params, args)

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        packed, params = self._parsed(parts, args)
        codes = fused.unpack(packed, args, "fp4", 2 * packed.shape[-1])
        return codes, replace(params, scale=params.scale.to(torch.bfloat16))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        _check(weight.shape[-1], args)
        return self._named(fused.compress(weight, params, args, "fp4", each), params, args)

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
        return fused.decompress(packed, "fp4", params, args, _dense_shape(packed), each, out)

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
        packed = fused.pack(codes, args, "fp4")
        return {"weight_packed": packed, "weight_scale": exponents_of(params.scale)}

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        packed, params = self._parsed(parts, args)
        codes = fused.unpack(packed, args, "fp4", 2 * packed.shape[-1])
        return codes, replace(params, scale=fused.powers_of(params.scale))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and pack."""
        _check(weight.shape[-1], args)
        packed = fused.compress(weight, params, args, "fp4", each)
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
        return fused.decompress(packed, "fp4", params, args, _dense_shape(packed), each, out)

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
