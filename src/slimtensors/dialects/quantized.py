"""Quantized weights in the dialect `compressed-tensors`: codes, scales and more beside each other.

They are tensors in their own right, named as its loaders expect them; what they mean is written in
the folder's `config.json`.
"""

from collections.abc import Mapping

from torch import Tensor

from slimtensors.dialects.member import Packed, plain_piece
from slimtensors.errors import ConfigError
from slimtensors.plan import Encoded, Plan, plain_parts, relative_error
from slimtensors.quantization import QuantizationType, Quantized, formats
from slimtensors.quantization.affine import find_params
from slimtensors.spec import Each


def packed(name: str, x: Tensor, codec: Quantized, each: Each) -> Packed:
    """Round a weight, and return what is stored of it."""
    args, how = codec.arguments, formats.find(format_of(codec))
    parts = how.compress(x, find_params(x, args, each=each), args, each)
    return _packed(name, parts, codec, relative_error(Plan(codec), x), each)


def encoded(name: str, x: Encoded, codec: Quantized, each: Each) -> Packed:
    """Return what is stored of a weight that was rounded before."""
    codes, params = codec.parsed(plain_parts(x, each), x.spec.shape[-1])
    parts = formats.find(format_of(codec)).store(codes, params, codec.arguments)
    return _packed(name, parts, codec, None, each)


def format_of(codec: Quantized) -> str:
    """Return the format that stores what this codec makes."""
    args = codec.arguments
    if args.type is QuantizationType.INT:
        return "pack-quantized" if codec.packed else "int-quantized"
    if args.num_bits == 4:
        return "mxfp4-pack-quantized" if args.is_mx else "nvfp4-pack-quantized"
    return "mxfp8-quantized" if args.is_mx else "float-quantized"


def _packed(
    name: str, parts: Mapping[str, Tensor], codec: Quantized, error: float | None, each: Each
) -> Packed:
    layer, _, last = name.rpartition(".")
    if last != "weight":
        raise ConfigError("only what is called 'weight' has a quantized form in this dialect")
    prefix = f"{layer}." if layer else ""
    # Largest items first: as aligned as a format without padding allows.
    order = sorted(parts, key=lambda suffix: -parts[suffix].element_size())
    return Packed(
        [plain_piece(prefix + suffix, parts[suffix].contiguous(), each) for suffix in order],
        Plan(codec),
        error,
        {suffix: parts[suffix].nbytes for suffix in order},
        is_one_tensor=False,
    )
