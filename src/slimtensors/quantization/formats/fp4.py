"""4-bit floats, two per byte: `nvfp4-pack-quantized` and `mxfp4-pack-quantized`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.quantization.affine import Params, dequantize, quantize
from slimtensors.quantization.args import QuantizationArgs, QuantizationType
from slimtensors.quantization.formats.format import check_params, part
from slimtensors.quantization.formats.mx import exponents_of, powers_of


@dataclass(frozen=True)
class NvFp4:
    """Groups of 16 with 8-bit floats as scales, which one number of 32 bits divides."""

    name: ClassVar[str] = "nvfp4-pack-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed`, `weight_scale` and `weight_global_scale`."""
        if params.global_scale is None:
            raise ConfigError(f"{self.name} needs a global scale: strategy tensor_group")
        return {
            "weight_packed": pack_nibbles(codes, args),
            "weight_scale": params.scale.to(args.scale_dtype or torch.float8_e4m3fn),
            "weight_global_scale": params.global_scale,
        }

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        codes = unpack_nibbles(part(parts, "weight_packed"))
        scale = part(parts, "weight_scale")
        if not scale.is_floating_point():
            raise CorruptFileError(f"weight_scale is {scale.dtype}, not floats")
        whole = part(parts, "weight_global_scale")
        if whole.numel() != 1 and tuple(whole.shape) != (*codes.shape[:-2], 1, 1):
            raise CorruptFileError(f"weight_global_scale has shape {tuple(whole.shape)}")
        params = Params(scale.to(torch.bfloat16), global_scale=whole)
        return codes, check_params(tuple(codes.shape), params, args)

    def compress(self, weight: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Round and pack."""
        return self.store(quantize(weight, params, args), params, args)

    def decompress(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Tensor:
        """Return the dense weight as bf16."""
        return dequantize(*self.parse(parts, args), args, torch.bfloat16)


@dataclass(frozen=True)
class MxFp4:
    """Groups of 32 with powers of two as scales, stored as exponents."""

    name: ClassVar[str] = "mxfp4-pack-quantized"

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return `weight_packed` and `weight_scale` (uint8)."""
        return {
            "weight_packed": pack_nibbles(codes, args),
            "weight_scale": exponents_of(params.scale),
        }

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return the codes, and the scales as bf16."""
        codes = unpack_nibbles(part(parts, "weight_packed"))
        params = Params(powers_of(part(parts, "weight_scale")))
        return codes, check_params(tuple(codes.shape), params, args)

    def compress(self, weight: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Round and pack."""
        return self.store(quantize(weight, params, args), params, args)

    def decompress(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> Tensor:
        """Return the dense weight as bf16."""
        return dequantize(*self.parse(parts, args), args)


def pack_nibbles(codes: Tensor, args: QuantizationArgs) -> Tensor:
    """Put two codes into each byte, the first one into the lower half."""
    if args.type is not QuantizationType.FLOAT or args.num_bits != 4:
        raise ConfigError("only 4-bit floats are stored two per byte")
    if codes.shape[-1] % 2:
        raise ConfigError(f"{codes.shape[-1]} columns are not a whole number of bytes")
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`."""
    if packed.dtype is not torch.uint8 or packed.dim() not in (2, 3):
        kind = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise CorruptFileError(f"weight_packed is {kind}, not rows of bytes")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
