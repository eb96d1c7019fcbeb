"""Schemes that have a name: the numbers of compressed-tensors 0.20."""

from collections.abc import Mapping

import torch

from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType

_INT, _FLOAT = QuantizationType.INT, QuantizationType.FLOAT
_STATIC = "static_minmax"


def _int(bits: int, *, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(bits, symmetric=symmetric, group_size=128)


def _per_token(bits: int, kind: QuantizationType = _INT) -> QuantizationArgs:
    return QuantizationArgs(bits, type=kind, strategy=QuantizationStrategy.TOKEN, dynamic=True)


def _per_channel(kind: QuantizationType) -> QuantizationArgs:
    return QuantizationArgs(8, type=kind, strategy=QuantizationStrategy.CHANNEL)


def _fp8(**more: object) -> QuantizationArgs:
    return QuantizationArgs.from_dict({"num_bits": 8, "type": _FLOAT, **more})


def _nvfp4(**more: object) -> QuantizationArgs:
    return QuantizationArgs.from_dict(
        {
            "num_bits": 4,
            "type": _FLOAT,
            "strategy": QuantizationStrategy.TENSOR_GROUP,
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
            **more,
        }
    )


def _mx(bits: int, *, dynamic: bool = False) -> QuantizationArgs:
    return QuantizationArgs(
        bits,
        type=_FLOAT,
        group_size=32,
        dynamic=dynamic,
        scale_dtype=torch.uint8,
    )


_FP8_GROUPS = _fp8(group_size=128, dynamic=True)
_INT8 = (_per_channel(_INT), _per_token(8))

PRESETS: Mapping[str, tuple[QuantizationArgs | None, QuantizationArgs | None]] = {
    **{f"W{bits}A4": (_int(bits), _per_token(4)) for bits in (2, 3, 4)},
    **{f"W{bits}A8": (_int(bits), _per_token(8)) for bits in range(2, 8)},
    **{f"W{bits}A16": (_int(bits), None) for bits in range(2, 9)},
    "W4A16_ASYM": (_int(4, symmetric=False), None),
    "W4AFP8": (_int(4), _per_token(8, _FLOAT)),
    "W8A8": _INT8,
    "INT8": _INT8,
    "FP8": (_fp8(strategy="tensor"), _fp8(strategy="tensor", observer=_STATIC)),
    "FP8_DYNAMIC": (_per_channel(_FLOAT), _per_token(8, _FLOAT)),
    "FP8_BLOCK": (_fp8(strategy="block", block_structure=[128, 128]), _FP8_GROUPS),
    "NVFP4": (_nvfp4(), _nvfp4(dynamic="local", observer=_STATIC)),
    "NVFP4A16": (_nvfp4(), None),
    "MXFP4": (_mx(4), _mx(4, dynamic=True)),
    "MXFP4A16": (_mx(4), None),
    "MXFP4XFP8": (_mx(4), _FP8_GROUPS),
    "MXFP8": (_mx(8), _mx(8, dynamic=True)),
    "MXFP8A16": (_mx(8), None),
    "UNQUANTIZED": (None, None),
}
"""Arguments of weights and of input activations, by name."""
