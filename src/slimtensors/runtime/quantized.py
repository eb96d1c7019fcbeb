"""Weights that stay quantized in memory, as codes and scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from slimtensors._moved import Renamed
from slimtensors.errors import CorruptFileError, UnsupportedOperationError
from slimtensors.quantization import affine, kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.formats import check_params
from slimtensors.quantization.kernels import CodeKind
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.kernels import Kernels, integer_linear
from slimtensors.runtime.sparse import SparseTensor
from slimtensors.tensor import KERNEL_FLOATS, Json, Spec, bitwise_equal

_KINDS: dict[torch.dtype, CodeKind] = {
    torch.int8: "int",
    torch.int32: "packed",
    torch.uint8: "fp4",
    torch.float8_e4m3fn: "fp8",
}
_PIECE_BYTES = 4 << 20
"""Bytes of weights that are dequantized at a time, to stay in a cache."""

_BY_GROUP = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
_BY_ROW = (QuantizationStrategy.CHANNEL, *_BY_GROUP)


@dataclass(frozen=True)
class QuantizedConfig:
    """Quantization arguments of a weight, and of its inputs if they are quantized."""

    args: QuantizationArgs
    inputs: QuantizationArgs | None = None
    """Arguments of inputs, which are quantized at run time; None if they are not."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        inputs = {"inputs": self.inputs.to_dict()} if self.inputs else {}
        return {"args": self.args.to_dict(), **inputs}


class QuantizedTensor(CompressedTensor):
    """A weight as codes and scales, in the layout of files.

    `codes` is int8, float8, two 4-bit floats per byte, or integers of a few bits packed into words;
    int8 codes may be a sparse tensor.
    """

    kind = "quantized"
    part_names = ("codes", "scale", "zero_point", "global_scale", "g_idx")
    optional_parts = frozenset({"zero_point", "global_scale", "g_idx"})
    nested_parts = frozenset({"codes"})
    config: QuantizedConfig
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    g_idx: Tensor | None
    _kernels: Kernels | None = None

    @classmethod
    def parse_config(cls, data: Json) -> QuantizedConfig:
        """Parse the JSON form."""
        inputs = data.get("inputs")
        return QuantizedConfig(
            QuantizationArgs.from_dict(data["args"]),
            None if inputs is None else QuantizationArgs.from_dict(inputs),
        )

    of = Renamed("from_codes")

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        params: Params,
        config: QuantizedConfig,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Self:
        """Wrap stored codes and their params."""
        parts = {name: getattr(params, name) for name in cls.part_names[1:]}
        present = {name: part for name, part in parts.items() if part is not None}
        return cls({"codes": codes, **present}, config, Spec(dtype, shape))

    @classmethod
    def quantize(cls, weight: Tensor, config: QuantizedConfig) -> Self:
        """Quantize a dense weight."""
        if weight.is_meta:
            with torch.device("cpu"):
                row = cls.quantize(torch.zeros(1, *weight.shape[1:], dtype=weight.dtype), config)
            return row.map_leaves(lambda part: part.to("meta")).make_zero_rows(len(weight))
        weight = weight.detach()
        args = config.args
        params = affine.find_params(weight, args)
        codes = kernels.compress(weight, params, args, choose_kind(args))
        if params.zero_point is not None:
            # Exact, and the dtype that kernels expect.
            params = replace(params, zero_point=params.zero_point.to(weight.dtype))
        return cls.from_codes(codes, params, config, shape=tuple(weight.shape), dtype=weight.dtype)

    def check(self) -> None:
        """Raise `CorruptFileError` if codes or params do not fit the shape."""
        super().check()
        args, shape = self.config.args, tuple(self.shape)
        if self.dim() not in (2, 3) or self.dtype not in (*KERNEL_FLOATS, torch.float64):
            raise CorruptFileError(f"a tensor of {Spec.of(self)} cannot be quantized")
        if isinstance(self.codes, CompressedTensor):
            if self.codes.kind != "sparse":
                raise CorruptFileError(f"codes cannot be a {self.codes.kind} tensor")
            self.codes.check()
        kinds: set[CodeKind] = {_find_kind(args.dtype, args), choose_kind(args)}
        if Spec.of(self.codes) not in [kernels.stored_spec(shape, args, kind) for kind in kinds]:
            raise CorruptFileError(
                f"codes of {Spec.of(self.codes)} do not fit a weight of shape {shape}"
            )
        if args.dtype is torch.uint8 and shape[-1] * args.num_bits % 8:
            raise CorruptFileError(
                f"{shape[-1]} codes of {args.num_bits} bits do not fill whole bytes"
            )
        check_params(shape, self.params, args)

    @property
    def params(self) -> Params:
        """Scales and zero points of the codes."""
        return Params(self.scale, self.zero_point, self.global_scale, self.g_idx)

    def plain_codes(self) -> Tensor:
        """Return the codes as a plain tensor."""
        codes = self.codes
        return codes.dequantize() if isinstance(codes, CompressedTensor) else codes

    def decompress(self) -> Tensor:
        """Return the dense tensor."""
        args, shape = self.config.args, tuple(self.shape)
        return _dequantize(self.plain_codes(), self.params, args, shape).to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes directly if a kernel supports it, else dequantized weights."""
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
        found = Kernels.find(self.plain_codes(), self.params, self.config.args, self.shape[-1])
        if not isinstance(
            self.codes, CompressedTensor
        ):  # whose plain codes must not stay in memory
            self._kernels = found
        return found

    def _linear_by_pieces(self, x: Tensor) -> Tensor:
        """Dequantize and multiply as many rows at a time as fit into a cache."""
        count, columns = self.shape
        step = max(1, _PIECE_BYTES // (columns * x.element_size()))
        if count <= step or isinstance(self.codes, CompressedTensor) or not self._is_divisible():
            return functional.linear(x, self.dequantize())
        out = x.new_empty((*x.shape[:-1], count))
        # The same memory for every piece: allocating it takes longer than the work.
        buffer = x.new_empty((step, columns)) if self.scale.dtype is self.dtype else None
        for first in range(0, count, step):
            codes, params = self._select(slice(first, first + step))
            piece = None if buffer is None else buffer[: codes.shape[0]]
            shape = (codes.shape[0], columns)
            dense = _dequantize(codes, params, self.config.args, shape, piece).to(self.dtype)
            out[..., first : first + step] = functional.linear(x, dense)
        return out

    def _is_divisible(self) -> bool:
        """Return True if rows, or the matrices of a stack, can be dequantized independently."""
        by_row = self.config.args.strategy in (*_BY_ROW, QuantizationStrategy.TENSOR)
        return self.dim() == 3 or (self.dim() == 2 and by_row)

    def _select(self, index: slice | int | Tensor) -> tuple[Tensor, Params]:
        """Return the codes and params of some rows, or of some matrices of a stack."""
        params, codes = self.params, self.plain_codes()[index]
        if self.dim() == 2 and self.config.args.strategy is QuantizationStrategy.TENSOR:
            return codes, params
        zero, global_scale = params.zero_point, params.global_scale
        if global_scale is not None and global_scale.numel() > 1:
            global_scale = global_scale[index]
        return codes, replace(
            params,
            scale=params.scale[index],
            zero_point=None if zero is None else zero[index],
            global_scale=global_scale,
        )

    def take_rows(self, index: slice | Tensor) -> Tensor:
        """Return rows, or matrices of a stack: compressed for a slice, else dense."""
        if isinstance(index, slice) or not self._is_divisible():
            return super().take_rows(index)
        codes, params = self._select(index)
        shape = (codes.shape[0], *self.shape[1:])
        return _dequantize(codes, params, self.config.args, shape).to(self.dtype)

    def slice_rows(self, rows: slice) -> Self | None:
        """Return rows, or matrices of a stack; None if rows share scales in blocks."""
        if not self._is_divisible() or (
            isinstance(self.codes, SparseTensor) and self.has_no_values()
        ):
            return None
        codes, params = self._select(rows)
        return self._with_codes(codes, params, (codes.shape[0], *self.shape[1:]))

    def slice_columns(self, columns: slice) -> Self | None:
        """Return columns; None if they are not whole groups, or not contiguous ones."""
        args, count = self.config.args, len(range(*columns.indices(self.shape[1])))
        if not self._can_split_columns([columns.start, count]) or columns.step != 1 or not count:
            return None
        size, params = args.group_size, self.params
        if args.strategy in _BY_GROUP and size is not None:
            groups = slice(columns.start // size, (columns.start + count) // size)
            zero = None if params.zero_point is None else params.zero_point[:, groups].contiguous()
            params = replace(params, scale=params.scale[:, groups].contiguous(), zero_point=zero)
        codes = self._unpacked_codes()[:, columns].contiguous()
        return self._with_codes(
            kernels.pack_codes(codes, args, self._kind()), params, (self.shape[0], count)
        )

    @classmethod
    def concatenate(cls, tensors: Sequence[Self], dim: int) -> Self | None:
        """Return matrices as one; None if they would need more scales than one matrix has."""
        first = tensors[0]
        args, shape = first.config.args, list(first.shape)
        if not all(first._can_join(x, dim) for x in tensors):
            return None
        is_split = args.strategy in (_BY_ROW if dim == 0 else _BY_GROUP)
        params = first.params
        if is_split:
            zeros = [x.zero_point for x in tensors if x.zero_point is not None]
            params = replace(
                params,
                scale=torch.cat([x.scale for x in tensors], dim),
                zero_point=torch.cat(zeros, dim) if zeros else None,
            )
        common = ("global_scale",) if is_split else ("scale", "zero_point", "global_scale")
        if not all(_equal_parts(getattr(x, k), getattr(first, k)) for x in tensors for k in common):
            return None
        # As bytes: torch does not concatenate float8.
        codes = torch.cat([x._unpacked_codes().view(torch.uint8) for x in tensors], dim)
        stored = kernels.pack_codes(codes.view(args.dtype), args, first._kind())
        shape[dim] = sum(x.shape[dim] for x in tensors)
        return first._with_codes(stored, params, tuple(shape))

    def _can_join(self, other: Self, dim: int) -> bool:
        """Return True if codes of both mean the same and may be beside each other."""
        is_same = other.config == self.config and type(other.codes) is type(self.codes)
        is_same = is_same and other.codes.dtype is self.codes.dtype
        return is_same and other._can_split_columns([] if dim == 0 else [other.shape[1]])

    def _can_split_columns(self, positions: Sequence[int]) -> bool:
        """Return True if columns before and after these positions have scales of their own."""
        args = self.config.args
        if self.dim() != 2 or self.g_idx is not None or self.has_no_values():
            return False
        if args.strategy in _BY_GROUP:
            return not any(position % (args.group_size or 1) for position in positions)
        by_row = args.strategy in (QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR)
        return by_row and not (self._kind() == "fp4" and any(i % 2 for i in positions))

    def _kind(self) -> CodeKind:
        return _KINDS[self.codes.dtype]

    def _unpacked_codes(self) -> Tensor:
        """Return one code per item."""
        args, columns = self.config.args, self.shape[-1]
        return kernels.unpack_codes(self.plain_codes(), args, self._kind(), columns)

    def _with_codes(self, codes: Tensor, params: Params, shape: tuple[int, ...]) -> Self:
        """Return a tensor like this one with other codes, which stay sparse if they were."""
        if isinstance(self.codes, SparseTensor):
            codes = self.codes.from_dense(codes)
        return self.from_codes(codes, params, self.config, shape=shape, dtype=self.dtype)

    def take_row(self, index: int) -> Tensor:
        """Return one matrix of a stack, compressed, or a dense row."""
        if self.dim() != 3:
            return super().take_row(index)
        codes, params = self._select(index)
        shape = tuple(self.shape[1:])
        return self.from_codes(codes, params, self.config, shape=shape, dtype=self.dtype)

    def make_zero_rows(self, count: int) -> Self:
        """Return a tensor like this one with `count` rows of zeros."""
        if not self._is_divisible() or isinstance(self.codes, SparseTensor):
            return super().make_zero_rows(count)
        by_row = self._list_row_parts()
        parts = {
            name: part.new_zeros((count, *part.shape[1:])) if name in by_row else part
            for name, part in self.parts().items()
        }
        return type(self)(parts, self.config, Spec(self.dtype, (count, *self.shape[1:])))

    def _list_row_parts(self) -> list[str]:
        """Return the names of parts with an item per row, or per matrix of a stack."""
        by_row = ["codes"]
        if self.dim() == 3 or self.config.args.strategy in _BY_ROW:
            by_row += ["scale", "zero_point"]
        if self.global_scale is not None and self.global_scale.numel() > 1:
            by_row.append("global_scale")
        return [name for name in by_row if getattr(self, name) is not None]

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Any,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Json]:
        """Return the parts of a shard that FSDP2 gathers, with their names and the whole shape."""
        if outer_size[0] % mesh.size():
            raise UnsupportedOperationError(
                f"FSDP2 needs the same number of rows on each rank for {self.describe()} weights:"
                f" {outer_size[0]} rows on {mesh.size()} ranks; exclude {module} (ignored_params)"
            )
        gathered = {name: getattr(self, name) for name in self._list_row_parts()}
        return tuple(gathered.values()), {"gathered": list(gathered), "shape": tuple(outer_size)}

    def fsdp_post_all_gather(
        self, parts: tuple[Tensor, ...], metadata: Json, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the weight from gathered parts; `out` has the same parts, in the same memory."""
        if out is not None:
            return None
        gathered = {**self.parts(), **dict(zip(metadata["gathered"], parts, strict=True))}
        return type(self)(gathered, self.config, Spec(dtype, metadata["shape"])), parts

    def describe(self) -> str:
        """Return a short description of the encoding."""
        args = self.config.args
        size = f" {args.group_size}" if args.strategy is QuantizationStrategy.GROUP else ""
        sparse = "sparse " if isinstance(self.codes, CompressedTensor) else ""
        return f"{sparse}{args.num_bits}-bit {args.type} per {args.strategy}{size}"


def _dequantize(
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
        params = replace(params, zero_point=zero.to(args.zero_dtype))
    kind = _find_kind(codes.dtype, args)
    return kernels.decompress(codes, kind, params, args, shape, out=out)


def _equal_parts(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and bitwise_equal(a, b))


def choose_kind(args: QuantizationArgs) -> CodeKind:
    """Return the representation of codes: integers of less than eight bits are packed."""
    is_packed = args.dtype is torch.int8 and args.num_bits < 8
    return "packed" if is_packed else _find_kind(args.dtype, args)


def _find_kind(dtype: torch.dtype, args: QuantizationArgs) -> CodeKind:
    """Return the representation of codes that are stored in a dtype."""
    return "fp6" if dtype is torch.uint8 and args.num_bits == 6 else _KINDS[dtype]


def _is_int8_by_int8(args: QuantizationArgs, inputs: QuantizationArgs) -> bool:
    is_int8 = args.dtype is inputs.dtype is torch.int8 and args.num_bits == 8
    by_row = args.strategy is QuantizationStrategy.CHANNEL
    by_token = inputs.strategy is QuantizationStrategy.TOKEN
    return is_int8 and by_row and by_token and args.symmetric and inputs.symmetric
