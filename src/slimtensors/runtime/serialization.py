"""Conversion between compressed tensors in memory and encoded tensors in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimtensors.archive.read import register_runtime
from slimtensors.archive.write import TensorKind, register_tensor_kind
from slimtensors.codecs import Bitmask, Dense, Int, Trellis, register
from slimtensors.codecs.plan import Encoded, decode, decode_parts
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.parallel import Each, serially
from slimtensors.quantization import formats, kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.codec import Quantized
from slimtensors.runtime.coded import CodedTensor
from slimtensors.runtime.compressed import CompressedTensor, NoConfig
from slimtensors.runtime.convert import is_mostly_zero
from slimtensors.runtime.quantized import QuantizedConfig, QuantizedTensor, choose_kind
from slimtensors.runtime.sparse import CsrTensor, SparseTensor
from slimtensors.runtime.views import ViewTensor
from slimtensors.tensor import KERNEL_FLOATS, Parts, Spec, as_bytes, to_cpu


@register
@dataclass(frozen=True)
class DynamicInputs:
    """Store a weight with the quantization arguments of its inputs. Lossless."""

    name: ClassVar[str] = "dynamic-inputs"
    part_names: ClassVar[tuple[str, ...]] = ("weight",)

    args: Mapping[str, Any] = field(default_factory=dict)
    """Quantization arguments of inputs, in the form of `QuantizationArgs.to_dict`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", QuantizationArgs.from_dict(self.args).to_dict())

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `weight`."""
        return {"weight": Dense().decode(Dense().encode(x), Spec.of(x))}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Return the weight."""
        if Spec.of(parts["weight"]) != like:
            raise CorruptFileError(f"weight is {Spec.of(parts['weight'])}, expected {like}")
        return Dense().decode({"data": as_bytes(parts["weight"])}, like)


def to_encoded(x: CompressedTensor) -> Encoded:
    """Return the encoded form of a tensor for a file, without decoding it."""
    spec = Spec(x.dtype, tuple(x.shape))
    if isinstance(x, SparseTensor):
        return Encoded(Bitmask(), spec, {"mask": to_cpu(x.mask), "values": to_cpu(x.kept)})
    if isinstance(x, CodedTensor):
        return x.encoded()
    if not isinstance(x, QuantizedTensor):
        raise UnsupportedTensorError(f"{type(x).__name__} has no encoded form; store it dense")
    args, zero = x.config.args, x.zero_point
    params: dict[str, Tensor | None] = {
        "scale": x.scale,
        "zero_point": zero if zero is None else zero.to(args.zero_dtype),
        "global_scale": x.global_scale,
        "g_idx": x.g_idx,
    }
    parts: dict[str, Tensor | Encoded] = {
        "q": to_encoded(x.codes) if isinstance(x.codes, CompressedTensor) else to_cpu(x.codes)
    }
    parts |= {name: to_cpu(part) for name, part in params.items() if part is not None}
    packed = x.codes.dtype is not torch.int8
    weight = Encoded(Quantized(args, packed=packed or args.num_bits == 8), spec, parts)
    if x.config.inputs is None:
        return weight
    return Encoded(DynamicInputs(x.config.inputs.to_dict()), spec, {"weight": weight})


def to_compressed(x: Encoded, each: Each = serially) -> CompressedTensor | None:
    """Return a matrix in its stored form, without copying parts; None if not supported."""
    if len(x.spec.shape) != 2 or not x.spec.numel:
        return None
    match x.codec:
        case Bitmask():
            return _read_sparse(x, each)
        case Int():
            return _read_int(x, each)
        case Quantized():
            return _read_quantized(x, each)
        case Trellis():
            return CodedTensor.from_encoded(x)
        case DynamicInputs():
            weight = x.parts["weight"]
            inner = to_compressed(weight, each) if isinstance(weight, Encoded) else None
            if not isinstance(inner, QuantizedTensor):
                return None
            inputs = QuantizationArgs.from_dict(x.codec.args)
            config = replace(inner.config, inputs=inputs)
            quantized = QuantizedTensor(inner.parts(), config, x.spec)
            quantized.check()
            return quantized
    return None


def from_module(
    parts: Mapping[str, Tensor],
    format: str,
    args: QuantizationArgs,
    *,
    inputs: QuantizationArgs | None = None,
    dtype: torch.dtype | None = None,
    version: str | None = None,
) -> QuantizedTensor:
    """Return the weight of a module from the tensors of a compressed-tensors file.

    `parts` are named by suffix: `weight_packed`, `weight_scale`, …; `dtype` is the dtype of the
    model, by default that of the scale; `version` is the release of compressed-tensors that wrote
    the file. Packed words and 8-bit codes are not copied. Inputs are quantized only if all of their
    scales are dynamic.
    """
    codes, params = formats.find(format, version=version).parse(parts, args)
    shape = tuple(codes.shape)
    kind = choose_kind(args)
    words = parts.get("weight_packed")
    if words is not None and Spec.of(words) == kernels.stored_spec(shape, args, kind):
        stored = words
    else:
        stored = kernels.pack_codes(codes, args, kind)
    config = QuantizedConfig(args, inputs if inputs and inputs.dynamic is True else None)
    scale = params.scale.dtype
    default = scale if scale.is_floating_point and scale.itemsize > 1 else torch.bfloat16
    return QuantizedTensor.from_codes(stored, params, config, shape=shape, dtype=dtype or default)


def _decode_part(part: Tensor | Encoded, each: Each) -> Tensor:
    return decode(part, each) if isinstance(part, Encoded) else part


def _read_sparse(x: Encoded, each: Each) -> CompressedTensor:
    parts = decode_parts(x, each)
    zeros = x.spec.numel - parts["values"].numel()
    if x.spec.dtype in KERNEL_FLOATS and is_mostly_zero(zeros, x.spec.numel):
        return CsrTensor.from_dense(Bitmask().decode(parts, x.spec))
    sparse = SparseTensor({"mask": parts["mask"], "kept": parts["values"]}, NoConfig(), x.spec)
    sparse.check()
    return sparse


def _read_int(x: Encoded, each: Each) -> QuantizedTensor | None:
    assert isinstance(x.codec, Int)
    parts = decode_parts(x, each)
    scale = parts["scale"]
    args = QuantizationArgs(x.codec.bits, group_size=-1 if x.codec.per_row else None)
    params = Params(scale.view(-1, 1) if x.codec.per_row else scale)
    quantized = QuantizedTensor.from_codes(
        parts["q"], params, QuantizedConfig(args), shape=x.spec.shape, dtype=x.spec.dtype
    )
    quantized.check()
    return quantized


def _read_quantized(x: Encoded, each: Each) -> QuantizedTensor | None:
    assert isinstance(x.codec, Quantized)
    args = QuantizationArgs.from_dict(x.codec.args)
    if args.dtype is torch.uint8 and not x.codec.packed:
        return None
    codes = x.parts["q"]
    is_sparse = isinstance(codes, Encoded) and isinstance(codes.codec, Bitmask)
    parts = {
        k: _decode_part(part, each) for k, part in x.parts.items() if k != "q" or not is_sparse
    }
    if is_sparse:
        assert isinstance(codes, Encoded)
        parts["q"] = _read_sparse(codes, each)
    quantized = QuantizedTensor({"codes": parts.pop("q"), **parts}, QuantizedConfig(args), x.spec)
    quantized.check()
    return quantized


def find_encoded(x: CompressedTensor) -> Encoded | None:
    """Return the encoded form of a tensor for a file, or None to store its dense values."""
    if isinstance(x, CsrTensor | ViewTensor):  # files contain neither
        return None
    encoded = to_encoded(x)
    return encoded if encoded.spec.dtype is x.dtype else None  # cast: its codes have another dtype


register_runtime(to_compressed)
register_tensor_kind(
    CompressedTensor,
    TensorKind(CompressedTensor.leaves, find_encoded, CompressedTensor.dequantize),
)
