"""One code per item: `int-`, `float-`, `naive-` and `mxfp8-quantized`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.quantization.affine import Params, dequantize, quantize
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.formats.format import check_params, part
from slimtensors.quantization.formats.mx import exponents_of, powers_of


@dataclass(frozen=True)
class PlainCodes:
    """Codes as they are. The three formats of this kind differ in name only."""

    name: str

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight` (int8 or float8), `weight_scale` and, if asymmetric, the zero point."""
        if codes.dtype is torch.uint8:
            raise ConfigError(f"{self.name} does not store 4-bit floats; mxfp4 and nvfp4 do")
        if params.g_idx is not None:
            raise ConfigError(f"{self.name} has no place for g_idx; pack-quantized has")
        parts = {"weight": codes, "weight_scale": params.scale}
        if params.zero_point is not None:
            parts["weight_zero_point"] = params.zero_point
        return parts

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return what is there."""
        codes = part(parts, "weight")
        if codes.dtype is not args.dtype or codes.dim() not in (2, 3):
            kind = f"{codes.dtype} of shape {tuple(codes.shape)}"
            raise CorruptFileError(f"weight is {kind}, but codes would be {args.dtype}")
        zero_point = None if args.symmetric else part(parts, "weight_zero_point")
        params = Params(part(parts, "weight_scale"), zero_point)
        return codes, check_params(tuple(codes.shape), params, args)

    def compress(self, weight: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Round and store."""
        return self.store(quantize(weight, params, args), params, args)

    def decompress(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Tensor:
        """Return the dense weight in the dtype of its scale."""
        return dequantize(*self.parse(parts, args), args)


@dataclass(frozen=True)
class MxFp8:
    """8-bit floats with powers of two as scales, stored as exponents."""

    name: ClassVar[str] = "mxfp8-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight` (float8) and `weight_scale` (uint8)."""
        parts = PlainCodes(self.name).store(codes, params, args)
        return {**parts, "weight_scale": exponents_of(params.scale)}

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        codes, params = PlainCodes(self.name).parse(parts, args)
        return codes, replace(params, scale=powers_of(params.scale))

    def compress(self, weight: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Round and store."""
        return self.store(quantize(weight, params, args), params, args)

    def decompress(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Tensor:
        """Return the dense weight as bf16."""
        return dequantize(*self.parse(parts, args), args)
