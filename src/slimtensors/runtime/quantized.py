"""Weights held as codes and scales."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from slimtensors.errors import CorruptFileError, UnsupportedOperationError
from slimtensors.quantization import affine, kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.formats import check_params
from slimtensors.quantization.kernels import Kind
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.kernels import Kernels, integer_linear
from slimtensors.tensor import Json, Spec

_KINDS: dict[torch.dtype, Kind] = {
    torch.int8: "int",
    torch.int32: "packed",
    torch.uint8: "fp4",
    torch.float8_e4m3fn: "fp8",
}
_PIECE = 4 << 20
"""Bytes of dequantized weights that are used while they are in a cache."""

_BY_ROW = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


@dataclass(frozen=True)
class QuantizedConfig:
    """How the codes of a weight were made, and whether inputs are quantized too."""

    args: QuantizationArgs
    inputs: QuantizationArgs | None = None
    """How inputs are quantized while the model runs; none if they are not."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        inputs = {"inputs": self.inputs.to_dict()} if self.inputs else {}
        return {"args": self.args.to_dict(), **inputs}


class QuantizedTensor(CompressedTensor):
    """A weight as codes and scales, as files hold them.

    `codes` is int8, float8, two 4-bit floats a byte, or integers of a few bits packed into words;
    int8 codes may themselves be held sparse.
    """

    kind = "quantized"
    part_names = ("codes", "scale", "zero_point", "global_scale", "g_idx")
    config: QuantizedConfig
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    g_idx: Tensor | None
    _kernels: Kernels | None = None

    @classmethod
    def parse_config(cls, data: Json) -> QuantizedConfig:
        """Read the JSON form."""
        inputs = data.get("inputs")
        return QuantizedConfig(
            QuantizationArgs.from_dict(data["args"]),
            None if inputs is None else QuantizationArgs.from_dict(inputs),
        )

    @classmethod
    def of(
        cls,
        codes: Tensor,
        params: Params,
        config: QuantizedConfig,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> "QuantizedTensor":
        """Hold codes as they are stored, and the params that turn them into numbers."""
        parts = {name: getattr(params, name) for name in cls.part_names[1:]}
        held = {name: part for name, part in parts.items() if part is not None}
        return cls({"codes": codes, **held}, config, Spec(dtype, shape))

    @classmethod
    def quantize(cls, weight: Tensor, config: QuantizedConfig) -> "QuantizedTensor":
        """Round a dense weight to codes."""
        weight = weight.detach()
        args = config.args
        params = affine.find_params(weight, args)
        codes = kernels.compress(weight, params, args, kind_for(args))
        if params.zero_point is not None:
            # As exact as integers, and what kernels take.
            params = replace(params, zero_point=params.zero_point.to(weight.dtype))
        return cls.of(codes, params, config, shape=tuple(weight.shape), dtype=weight.dtype)

    def check(self) -> None:
        """Raise `CorruptFileError` if codes and params are not those of a weight of this shape."""
        args, shape = self.config.args, tuple(self.shape)
        if isinstance(self.codes, CompressedTensor):
            self.codes.check()
        kinds: set[Kind] = {_KINDS[args.dtype], kind_for(args)}
        if Spec.of(self.codes) not in [kernels.stored_spec(shape, args, kind) for kind in kinds]:
            raise CorruptFileError(f"codes of {Spec.of(self.codes)} for a weight of shape {shape}")
        check_params(shape, self.params, args)

    @property
    def params(self) -> Params:
        """What turns codes into numbers."""
        return Params(self.scale, self.zero_point, self.global_scale, self.g_idx)

    def plain_codes(self) -> Tensor:
        """Return the codes in one plain tensor."""
        held = self.codes
        return held.dequantize() if isinstance(held, CompressedTensor) else held

    def dense(self) -> Tensor:
        """Return an ordinary tensor with the same numbers."""
        return _decoded(self.plain_codes(), self.params, self.config.args, tuple(self.shape)).to(
            self.dtype
        )

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes directly where there is a kernel for it, else dequantized weights."""
        inputs, args = self.config.inputs, self.config.args
        if inputs is not None:
            params = affine.find_dynamic_params(x, inputs)
            if _is_int8_by_int8(args, inputs):
                codes = affine.quantize(x, params, inputs)
                return integer_linear(codes, params.scale, self.plain_codes(), self.scale, bias)
            x = affine.fake_quantize(x, params, inputs)
        out = self._find_kernels().linear(x)
        if out is None:
            out = self._linear_by_pieces(x)
        return out if bias is None else out + bias

    def _find_kernels(self) -> Kernels:
        if self._kernels is not None:
            return self._kernels
        found = Kernels.of(self.plain_codes(), self.params, self.config.args, self.shape[-1])
        if not isinstance(self.codes, CompressedTensor):  # whose plain codes are not to be kept
            self._kernels = found
        return found

    def _linear_by_pieces(self, x: Tensor) -> Tensor:
        """Dequantize as many rows at a time as stay in a cache, and so never all of them."""
        count, columns = self.shape
        step = max(1, _PIECE // (columns * x.element_size()))
        if count <= step or isinstance(self.codes, CompressedTensor) or not self._is_cut():
            return functional.linear(x, self.dequantize())
        out = x.new_empty((*x.shape[:-1], count))
        # The same memory for every piece: fresh memory costs more than the work.
        room = x.new_empty((step, columns)) if self.scale.dtype is self.dtype else None
        for first in range(0, count, step):
            codes, params = self._cut(slice(first, first + step))
            here = None if room is None else room[: codes.shape[0]]
            shape = (codes.shape[0], columns)
            some = _decoded(codes, params, self.config.args, shape, here).to(self.dtype)
            out[..., first : first + step] = functional.linear(x, some)
        return out

    def _is_cut(self) -> bool:
        """Tell whether some rows, or matrices of a stack, are codes and params by themselves."""
        by_row = self.config.args.strategy in (*_BY_ROW, QuantizationStrategy.TENSOR)
        return self.dim() == 3 or (self.dim() == 2 and by_row)

    def _cut(self, index: slice | int | Tensor) -> tuple[Tensor, Params]:
        """Return the codes and params of some rows, or of some matrices of a stack."""
        params, codes = self.params, self.plain_codes()[index]
        if self.dim() == 2 and self.config.args.strategy is QuantizationStrategy.TENSOR:
            return codes, params
        zero, whole = params.zero_point, params.global_scale
        return codes, replace(
            params,
            scale=params.scale[index],
            zero_point=None if zero is None else zero[index],
            global_scale=whole if whole is None or whole.numel() == 1 else whole[index],
        )

    def rows(self, index: slice | Tensor) -> Tensor:
        """Return some rows, or matrices of a stack, compressed if they are a slice."""
        if not self._is_cut():
            if isinstance(index, slice):
                raise UnsupportedOperationError(
                    f"rows of {self.describe()} cannot be taken; use dequantize() before"
                )
            return self.dequantize()[index]
        codes, params = self._cut(index)
        shape = (codes.shape[0], *self.shape[1:])
        if isinstance(index, slice):
            return self.of(codes, params, self.config, shape=shape, dtype=self.dtype)
        return _decoded(codes, params, self.config.args, shape).to(self.dtype)

    def at(self, index: int) -> Tensor:
        """Return one matrix of a stack, compressed, or a dense row."""
        if self.dim() != 3:
            return super().at(index)
        codes, params = self._cut(index)
        shape = tuple(self.shape[1:])
        return self.of(codes, params, self.config, shape=shape, dtype=self.dtype)

    def describe(self) -> str:
        """Say in a few words how the numbers are held."""
        args = self.config.args
        size = f" {args.group_size}" if args.strategy is QuantizationStrategy.GROUP else ""
        held = "sparse " if isinstance(self.codes, CompressedTensor) else ""
        return f"{held}{args.num_bits}-bit {args.type} per {args.strategy}{size}"


def _decoded(
    codes: Tensor,
    params: Params,
    args: QuantizationArgs,
    shape: tuple[int, ...],
    out: Tensor | None = None,
) -> Tensor:
    if not math.prod(shape):
        return torch.empty(shape, dtype=params.scale.dtype, device=codes.device)
    zero = params.zero_point
    if zero is not None and zero.is_floating_point() and args.zp_dtype is None:
        params = replace(params, zero_point=zero.to(torch.int8))
    return kernels.decompress(codes, _KINDS[codes.dtype], params, args, shape, out=out)


def kind_for(args: QuantizationArgs) -> Kind:
    """Return how codes are held: integers of less than eight bits lie packed."""
    return "packed" if args.dtype is torch.int8 and args.num_bits < 8 else _KINDS[args.dtype]


def _is_int8_by_int8(args: QuantizationArgs, inputs: QuantizationArgs) -> bool:
    kinds = args.dtype is inputs.dtype is torch.int8 and args.num_bits == 8
    by_row = args.strategy is QuantizationStrategy.CHANNEL
    by_token = inputs.strategy is QuantizationStrategy.TOKEN
    return kinds and by_row and by_token and args.symmetric and inputs.symmetric
