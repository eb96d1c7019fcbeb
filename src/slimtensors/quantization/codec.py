"""Quantized weights in archives.

`Quantized` is the codec of the `slim` dialect; the packers below store the same weights as separate
tensors in the `compressed-tensors` dialect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from slimtensors._moved import Renamed
from slimtensors.archive.dialects.compressed_tensors import CodecPacker, register_packer
from slimtensors.archive.dialects.entries import PackedTensor, plain_tensor_bytes
from slimtensors.codecs import register
from slimtensors.codecs.plan import Encoded, Plan, decode, decode_parts, encode, relative_error
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.quantization import formats, kernels
from slimtensors.quantization.affine import Params, find_params
from slimtensors.quantization.args import QuantizationArgs, QuantizationType
from slimtensors.quantization.formats import check_params
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.tensor import KERNEL_FLOATS, Parts, Spec, relative_distance

_ARGS_KEYS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "scale_dtype",
    "zp_dtype",
)
"""Arguments that decoding depends on; the others are not stored."""
_FLOAT_KINDS: Mapping[int, kernels.CodeKind] = {4: "fp4", 6: "fp6", 8: "fp8"}
_FLOATS = (*KERNEL_FLOATS, torch.float64)


@register
@dataclass(frozen=True)
class Quantized:
    """Quantize a weight with scales per group, channel, block or tensor. Lossy."""

    name: ClassVar[str] = "quantized"
    part_names: ClassVar[tuple[str, ...]] = ("q", "scale", "zero_point", "global_scale", "g_idx")
    lossy: ClassVar[bool] = True

    args: Mapping[str, Any] | QuantizationArgs = field(default_factory=dict)
    """Quantization arguments, as `QuantizationArgs.to_dict` writes them."""
    packed: bool = True
    """Whether codes of a few bits are packed; entropy coding works on one code per byte."""

    def __post_init__(self) -> None:
        args = self.args
        if not isinstance(args, QuantizationArgs | Mapping):
            raise ConfigError(f"args must be quantization arguments, got {str(args)[:80]!r}")
        args = args if isinstance(args, QuantizationArgs) else QuantizationArgs.from_dict(args)
        data = args.to_dict()
        object.__setattr__(self, "args", {key: data[key] for key in _ARGS_KEYS if key in data})
        if type(self.packed) is not bool:
            raise ConfigError(f"packed must be true or false, got {self.packed!r}")

    @classmethod
    def in_whole_bytes(cls, args: QuantizationArgs) -> Self:
        """Return a codec for entropy coding: codes are packed only if they fill bytes evenly."""
        return cls(args, packed=args.num_bits in (1, 2, 4))

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `q` (codes), `scale`, and `zero_point` and `global_scale` if there are any."""
        args = self.arguments
        params = find_params(x, args, each=each)
        return self._parts(kernels.compress(x, params, args, self._kind, each), params)

    def encode_scaled(
        self,
        x: Tensor,
        global_scale: Tensor,
        each: Each = serially,
        *,
        then: Mapping[str, Plan] | None = None,
    ) -> Encoded:
        """Return the encoded form of a weight that shares its global scale with others."""
        args, plans = self.arguments, then or {}
        params = find_params(x, args, global_scale=global_scale, each=each)
        parts = self._parts(kernels.compress(x, params, args, self._kind, each), params)
        inner = {k: encode(plans[k], part) if k in plans else part for k, part in parts.items()}
        return Encoded(self, Spec.of(x), inner)

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Multiply the codes by their scales."""
        args, codes = self.arguments, parts["q"]
        self._check(codes, parts, like)
        params = Params(
            parts["scale"], parts.get("zero_point"), parts.get("global_scale"), parts.get("g_idx")
        )
        check_params(like.shape, params, args)
        if self._is_unpacked:
            codes = kernels.pack_codes(codes, args, self._kind)
        return kernels.decompress(
            codes, self._kind, params, args, like.shape, each, dtype=like.dtype
        )

    def encoded(
        self,
        codes: Tensor,
        params: Params,
        dtype: torch.dtype,
        *,
        then: Mapping[str, Plan] | None = None,
    ) -> Encoded:
        """Return the encoded form of codes and params that were computed elsewhere.

        `dtype` is the dtype of the dense weight; `then` maps parts to plans that encode them.
        """
        plans = then or {}
        parts = self._parts(kernels.pack_codes(codes, self.arguments, self._kind), params)
        for unknown in plans.keys() - parts.keys():
            raise ConfigError(f"unknown part {unknown!r}; known: {', '.join(parts)}")
        inner = {k: encode(plans[k], part) if k in plans else part for k, part in parts.items()}
        return Encoded(self, Spec(dtype, tuple(codes.shape)), inner)

    @property
    def arguments(self) -> QuantizationArgs:
        """The arguments, parsed."""
        assert isinstance(self.args, dict)
        return QuantizationArgs.from_dict(self.args)

    parsed = Renamed("parse")

    def parse(self, parts: Parts, columns: int) -> tuple[Tensor, Params]:
        """Return codes, one per item, and params: the arguments of `encoded`."""
        stored, scale = parts["q"], parts["scale"]
        if scale.dtype is torch.uint8:
            scale = kernels.decode_exponents(scale)
        kind = "int" if self._is_unpacked else self._kind
        codes = kernels.unpack_codes(stored, self.arguments, kind, columns)
        others = (parts.get(name) for name in ("zero_point", "global_scale", "g_idx"))
        return codes, Params(scale, *others)

    @property
    def _kind(self) -> kernels.CodeKind:
        args = self.arguments
        if args.type is QuantizationType.FLOAT:
            return _FLOAT_KINDS[args.num_bits]
        return "packed" if self.packed and args.num_bits < 8 else "int"

    @property
    def _is_unpacked(self) -> bool:
        """Whether floats of less than a byte are stored in one byte each."""
        return not self.packed and self._kind in ("fp4", "fp6")

    def _parts(self, stored: Tensor, params: Params) -> Parts:
        args = self.arguments
        if self._is_unpacked:
            stored = kernels.unpack_codes(stored, args, self._kind, stored.shape[-1])
        scale = params.scale
        if args.is_mx:
            scale = kernels.encode_exponents(scale)
        elif args.scale_dtype is not None:
            scale = scale.to(args.scale_dtype)
        parts = {
            "q": stored,
            "scale": scale,
            "zero_point": params.zero_point,
            "global_scale": params.global_scale,
            "g_idx": params.g_idx,
        }
        return {name: part.contiguous() for name, part in parts.items() if part is not None}

    def _check(self, codes: Tensor, parts: Parts, like: Spec) -> None:
        """Raise `CorruptFileError` if parts do not fit a tensor of this spec."""
        args = self.arguments
        kind: kernels.CodeKind = "int" if self._is_unpacked else self._kind
        if like.dtype not in _FLOATS or len(like.shape) not in (2, 3) or not like.numel:
            raise CorruptFileError(f"a tensor of {like} cannot be quantized")
        if Spec.of(codes) != kernels.stored_spec(like.shape, args, kind):
            raise CorruptFileError(f"codes of {Spec.of(codes)} do not fit a tensor of {like}")
        if args.group_size and args.group_size > 0 and like.shape[-1] % args.group_size:
            raise CorruptFileError(f"groups of {args.group_size} do not fit a tensor of {like}")
        if args.symmetric != ("zero_point" not in parts):
            raise CorruptFileError(
                "zero_point must be present if, and only if, codes are asymmetric"
            )
        global_scale = parts.get("global_scale")
        shape = (*like.shape[:-2], 1, 1) if len(like.shape) == 3 else (1,)
        if global_scale is not None and Spec.of(global_scale) != Spec(torch.float32, shape):
            raise CorruptFileError(
                f"global_scale is {Spec.of(global_scale)}, expected {Spec(torch.float32, shape)}"
            )
        scale, zero = parts["scale"], parts.get("zero_point")
        if scale.dtype not in _FLOATS and scale.dtype is not args.scale_dtype:
            raise CorruptFileError(f"scale is {scale.dtype}, expected floats")
        if zero is not None and zero.dtype is not args.zero_dtype:
            raise CorruptFileError(f"zero_point is {zero.dtype}, expected {args.zero_dtype}")


def pack_quantized(
    name: str,
    x: Tensor,
    codec: Quantized,
    each: Each,
    *,
    global_scale: Tensor | None = None,
) -> PackedTensor:
    """Quantize a weight and return its stored tensors; `global_scale` is a shared one."""
    args, format = codec.arguments, formats.find(find_codec_format(codec))
    if global_scale is None:
        parts = format.compress(x, find_params(x, args, each=each), args, each)
        return _pack(name, parts, codec, relative_error(Plan(codec), x), each)
    encoded = codec.encode_scaled(x, global_scale, each)
    parts = format.store(*codec.parse(decode_parts(encoded), x.shape[-1]), args)
    return _pack(name, parts, codec, relative_distance(decode(encoded, each), x), each)


def pack_encoded_quantized(name: str, x: Encoded, codec: Quantized, each: Each) -> PackedTensor:
    """Return the stored tensors of a weight that is already quantized."""
    codes, params = codec.parse(decode_parts(x, each), x.spec.shape[-1])
    parts = formats.find(find_codec_format(codec)).store(codes, params, codec.arguments)
    return _pack(name, parts, codec, None, each)


def find_codec_format(codec: Quantized) -> str:
    """Return the name of the format that stores the result of a codec."""
    args = codec.arguments
    if args.type is QuantizationType.INT:
        return "pack-quantized" if codec.packed else "int-quantized"
    if args.num_bits < 8:
        return formats.infer(QuantizationScheme([], weights=args))
    return "mxfp8-quantized" if args.is_mx else "float-quantized"


def _pack(
    name: str, parts: Mapping[str, Tensor], codec: Quantized, error: float | None, each: Each
) -> PackedTensor:
    layer, _, last = name.rpartition(".")
    if last != "weight":
        raise ConfigError("the compressed-tensors dialect quantizes only tensors named 'weight'")
    prefix = f"{layer}." if layer else ""
    # Largest items first, for alignment: the format has no padding.
    order = sorted(parts, key=lambda suffix: -parts[suffix].element_size())
    return PackedTensor(
        [plain_tensor_bytes(prefix + suffix, parts[suffix].contiguous(), each) for suffix in order],
        Plan(codec),
        error,
        {suffix: parts[suffix].nbytes for suffix in order},
        is_one_tensor=False,
    )


register_packer(Quantized, CodecPacker(pack_quantized, pack_encoded_quantized))
