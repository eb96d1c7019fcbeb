"""Formats: how the codes and params of a weight become tensors of a compressed-tensors file."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization.args import QuantizationArgs, QuantizationType
from slimtensors.quantization.formats.format import Format
from slimtensors.quantization.formats.fp4 import MxFp4, NvFp4
from slimtensors.quantization.formats.packed import PackQuantized
from slimtensors.quantization.formats.plain import MxFp8, PlainCodes

MIXED = "mixed-precision"
"""What a config says whose groups have different formats; each group then names its own."""

_FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        PlainCodes("int-quantized"),
        PlainCodes("float-quantized"),
        PlainCodes("naive-quantized"),
        PackQuantized(),
        NvFp4(),
        MxFp4(),
        MxFp8(),
    )
}


class Scheme(Protocol):
    """As much of a quantization scheme as its format depends on."""

    @property
    def weights(self) -> QuantizationArgs | None:
        """How weights are quantized."""
        ...

    @property
    def input_activations(self) -> QuantizationArgs | None:
        """How inputs are quantized."""
        ...


def names() -> list[str]:
    """List the formats."""
    return list(_FORMATS)


def find(name: str, *, version: str | None = None) -> Format:
    """Return the format called `name`, as the release `version` of compressed-tensors wrote it.

    The release only matters for codes of 3, 5, 6 and 7 bits whose shape does not tell their layout.
    """
    if name not in _FORMATS:
        raise ConfigError(f"unknown format {name!r}; {nearest(name, _FORMATS)}")
    if name == PackQuantized.name and version is not None:
        return PackQuantized(version)
    return _FORMATS[name]


def infer(scheme: Scheme) -> str:
    """Return the format that compressed-tensors stores a scheme in; `dense` without weights."""
    args = scheme.weights
    if args is None:
        return "dense"
    if args.type is QuantizationType.FLOAT and args.num_bits == 4:
        fitting = {32: MxFp4.name, 16: NvFp4.name}
        if args.group_size not in fitting:
            raise ConfigError("4-bit floats are stored in groups of 16 (nvfp4) or 32 (mxfp4)")
        return fitting[args.group_size]
    if args.is_mx and args.group_size == 32:
        return MxFp8.name
    if scheme.input_activations is None:
        return PackQuantized.name if args.type is QuantizationType.INT else "naive-quantized"
    return "int-quantized" if args.type is QuantizationType.INT else "float-quantized"


def of_all(stored: Iterable[str]) -> str:
    """Return what a config says whose groups are stored in these formats."""
    kinds = set(stored)
    return MIXED if len(kinds) > 1 else next(iter(kinds), "dense")


__all__ = ["MIXED", "Format", "Scheme", "find", "infer", "names", "of_all"]
