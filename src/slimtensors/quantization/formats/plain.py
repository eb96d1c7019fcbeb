"""One code per item: `int-`, `float-`, `naive-` and `mxfp8-quantized`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.quantization import fused
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.formats.format import check_params, column_groups, part
from slimtensors.quantization.formats.mx import check_exponents, exponents_of
from slimtensors.spec import Each, serially


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
        return self.store(fused.compress(weight, params, args, _kind(args), each), params, args)

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight in the dtype of its scale."""
        codes, params = self.parse(parts, args)
        return fused.decompress(codes, _kind(args), params, args, tuple(codes.shape), each, out)

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
        return codes, replace(params, scale=fused.powers_of(check_exponents(params.scale)))

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round and store."""
        return self.store(fused.compress(weight, params, args, "fp8", each), params, args)

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


def _kind(args: QuantizationArgs) -> fused.Kind:
    return "int" if args.dtype is torch.int8 else "fp8"
