"""Quantization schemes: arguments for a set of layers, and the named presets."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import torch

from slimtensors.errors import ConfigError, suggest
from slimtensors.quantization.args import (
    PydanticMethods,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
    to_text,
)
from slimtensors.tensor import Json


class CompressionFormat(StrEnum):
    """Names of formats in configs of compressed-tensors."""

    dense = "dense"
    sparse_bitmask = "sparse-bitmask"
    sparse_24_bitmask = "sparse-24-bitmask"
    int_quantized = "int-quantized"
    float_quantized = "float-quantized"
    naive_quantized = "naive-quantized"
    pack_quantized = "pack-quantized"
    marlin_24 = "marlin-24"
    mixed_precision = "mixed-precision"
    nvfp4_pack_quantized = "nvfp4-pack-quantized"
    mxfp4_pack_quantized = "mxfp4-pack-quantized"
    mxfp6_pack_quantized = "mxfp6-pack-quantized"
    mxfp8_quantized = "mxfp8-quantized"


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
    "MXFP6A16": (_mx(6), None),
    "MXFP6A8": (_mx(6), _mx(8, dynamic=True)),
    "MXFP8": (_mx(8), _mx(8, dynamic=True)),
    "MXFP8A16": (_mx(8), None),
    "UNQUANTIZED": (None, None),
}
"""Arguments of weights and of input activations, by preset."""


_ARGS_FIELDS = ("weights", "input_activations", "output_activations")
_ACTIVATION_STRATEGIES = {
    QuantizationStrategy.TENSOR,
    QuantizationStrategy.TOKEN,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
    QuantizationStrategy.ATTN_HEAD,
}


@dataclass(frozen=True)
class QuantizationScheme(PydanticMethods):
    """How the layers that match `targets` are quantized; fields that are None are not.

    QuantizationScheme(["Linear"], weights=QuantizationArgs(num_bits=4, group_size=128))
    """

    targets: Sequence[str]
    """Class names, layer names, or regular expressions of layer names: `re:.*mlp.*`."""
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None
    format: str | None = None
    """Format of the stored weights; by default inferred from the arguments."""
    fits_columns: bool = field(default=False, compare=False, repr=False)
    """Whether layers that the group size does not fit get a smaller one, as in presets without a
    chosen size; not stored."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not all(isinstance(t, str) for t in self.targets):
            raise ConfigError(f"targets must be a list of names, got {self.targets!r}")
        object.__setattr__(self, "targets", list(self.targets))
        for key in _ARGS_FIELDS:
            if isinstance(args := getattr(self, key), Mapping):
                object.__setattr__(self, key, QuantizationArgs.model_validate(args))
        if not isinstance(self.format, str | None):
            raise ConfigError(f"format must be a name, got {str(self.format)[:80]!r}")
        if self.format is not None:
            object.__setattr__(self, "format", to_text(self.format))
        if self.format is not None and self.format not in list(CompressionFormat):
            raise ConfigError(
                f"unknown format {self.format[:80]!r}; {suggest(self.format, CompressionFormat)}"
            )
        if self.format == "mixed-precision":
            raise ConfigError("mixed-precision is the format of a config, not of a group")
        for key in ("input_activations", "output_activations"):
            self._check_activations(key, getattr(self, key))
        if self.weights is not None and self.weights.dynamic:
            raise ConfigError("weights cannot be quantized dynamically; use dynamic=False")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized."""
        return all(getattr(self, key) is None for key in _ARGS_FIELDS)

    @property
    def needs_data(self) -> bool:
        """Whether static scales of activations require calibration data."""
        activations = (self.input_activations, self.output_activations)
        return any(args is not None and args.dynamic is not True for args in activations)

    @classmethod
    def preset(
        cls, name: str, targets: Sequence[str] = ("Linear",), *, group_size: int | None = None
    ) -> Self:
        """Return a named scheme such as `W4A16`, with another group size if given.

        Without a `group_size`, layers that it does not fit get a smaller one.
        """
        known = str(name).upper()
        if known not in PRESETS:
            raise ConfigError(f"unknown preset {name!r}; {suggest(known, PRESETS)}")
        weights, inputs = PRESETS[known]
        scheme = cls(targets, weights=weights, input_activations=inputs)
        if group_size is None:
            return replace(scheme, fits_columns=scheme.has_free_groups)
        try:
            return scheme.with_group_size(group_size)
        except ConfigError as error:
            raise ConfigError(f"{known}: {error}") from error

    def to_dict(self) -> Json:
        """Return the JSON form with every key, null where unset."""
        return self.model_dump()

    def model_dump(self, *, mode: str = "python", exclude: Collection[str] = ()) -> Json:
        """Return the JSON form, as compressed-tensors does; in either mode."""
        data: Json = {"targets": list(self.targets)}
        for key in _ARGS_FIELDS:
            args: QuantizationArgs | None = getattr(self, key)
            data[key] = None if args is None else args.model_dump()
        data["format"] = self.format
        return {key: value for key, value in data.items() if key not in exclude}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form of any release of compressed-tensors.

        Raise `ConfigError` on unknown keys, with the nearest valid one.
        """
        parsed = {
            key: QuantizationArgs.from_dict(data[key])
            for key in _ARGS_FIELDS
            if data.get(key) is not None
        }
        return cls.model_validate({**data, **dict.fromkeys(_ARGS_FIELDS), **parsed})

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Parse the JSON form of compressed-tensors 0.20."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected a quantization scheme, got {str(data)[:80]!r}")
        known = {"targets", *_ARGS_FIELDS, "format"}
        for key in data.keys() - known:
            raise ConfigError(f"unknown key {key!r} in a config group; {suggest(key, known)}")
        if not isinstance(data.get("targets"), list | tuple):
            raise ConfigError(f"a config group needs a list of targets, got {data}")
        return cls(**data)

    def with_targets(self, targets: Sequence[str]) -> Self:
        """Return the same scheme with other targets."""
        return replace(self, targets=targets)

    def with_group_size(self, group_size: int) -> Self:
        """Return the same scheme with another group size for weights; -1: a scale per channel.

        Raise `ConfigError` if weights have no groups, or groups of a fixed size.
        """
        args = self.weights
        if args is None:
            raise ConfigError("weights are not quantized, so there is no group size")
        if args.is_mx or args.strategy is QuantizationStrategy.TENSOR_GROUP:
            raise ConfigError(f"the group size of this format is always {args.group_size}")
        if args.strategy is not QuantizationStrategy.GROUP:
            raise ConfigError(f"weights have one scale per {args.strategy}, not per group")
        if group_size == -1:
            weights = replace(args, strategy=QuantizationStrategy.CHANNEL, group_size=None)
        else:
            weights = replace(args, group_size=group_size)
        return replace(self, weights=weights, fits_columns=False)

    @property
    def has_free_groups(self) -> bool:
        """Whether weights have a scale per group, and the format does not fix the group size."""
        args = self.weights
        return args is not None and args.strategy is QuantizationStrategy.GROUP and not args.is_mx

    def _check_activations(self, key: str, args: QuantizationArgs | None) -> None:
        if args is None:
            return
        if args.strategy not in _ACTIVATION_STRATEGIES:
            raise ConfigError(f"{key}: strategy {args.strategy} is not supported for activations")
        if args.actorder is not None:
            raise ConfigError(f"{key}: actorder applies to weights only")
        if args.strategy is QuantizationStrategy.GROUP and not args.dynamic:
            raise ConfigError(f"{key}: strategy group requires dynamic=True")


def preset_name_to_scheme(name: str, targets: Sequence[str]) -> QuantizationScheme:
    """Return the scheme of a preset, under the name of this function in compressed-tensors."""
    return QuantizationScheme.preset(name, targets)


def is_preset_scheme(name: str) -> bool:
    """Return True if a preset has this name, in upper or lower case."""
    return name.upper() in PRESETS
