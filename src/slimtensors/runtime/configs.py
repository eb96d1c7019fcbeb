"""Configurations of `quantize_`, with the names and options of torchao (0.4 to 0.18).

Options that only choose a memory layout or tune a GPU kernel are accepted and have no effect: codes
have one layout, which does not depend on the machine. Options that would change the numbers and are
not implemented raise `ConfigError` when the configuration is made. Options may be objects of
torchao or those defined here.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.quantized import QuantizedConfig, QuantizedTensor

Compression = Callable[[Tensor], CompressedTensor]
"""Function that compresses a dense weight."""


@dataclass(frozen=True)
class PerTensor:
    """One scale for all values."""


@dataclass(frozen=True)
class PerRow:
    """A scale per row: the values along `dim` share it."""

    dim: int = -1


@dataclass(frozen=True)
class PerAxis:
    """A scale per index of `axis`."""

    axis: int = 0


@dataclass(frozen=True)
class PerGroup:
    """A scale per `group_size` columns of a row."""

    group_size: int


@dataclass(frozen=True)
class PerToken:
    """A scale per input vector."""


class MappingType(Enum):
    """Whether zero is the middle of the codes."""

    SYMMETRIC = 1
    ASYMMETRIC = 3


class ZeroPointDomain(Enum):
    """Type of zero points."""

    INT = 1
    NONE = 3


@dataclass(frozen=True)
class PlainLayout:
    """Layout of torchao; no effect."""


@dataclass(frozen=True)
class TensorCoreTiledLayout:
    """Layout of torchao for GPUs; no effect."""

    inner_k_tiles: int = 8


@dataclass(frozen=True)
class Int4CPULayout:
    """Layout of torchao for CPUs; no effect."""


_LAYOUTS = (
    "PlainLayout",
    "Int4CPULayout",
    "Int4XPULayout",
    "Int8DynamicActInt4WeightCPULayout",
    "PackedLinearInt8DynamicActivationIntxWeightLayout",
    "QDQLayout",
    "TensorCoreTiledLayout",
    "none",
)
_MAPPINGS = ("symmetric", "asymmetric")
_SUPPORTED: dict[str, tuple[str, ...]] = {
    "act_mapping_type": _MAPPINGS,
    "activation_value_lb": ("none",),
    "activation_value_ub": ("none",),
    "int4_choose_qparams_algorithm": ("tinygemm",),
    "int4_packing_format": ("plain", "plain_int32", "preshuffled", "tile_packed_to_4d", "opaque"),
    "intx_choose_qparams_algorithm": ("affine",),
    "intx_packing_format": (
        "unpacked_to_int8",
        "opaque_aten_kleidiai",
        "opaque_torchao_auto",
        "opaque_torchao_kleidiai",
        "opaque_torchao_lowbit",
    ),
    "layout": _LAYOUTS,
    "layout_type": _LAYOUTS,
    "mapping_type": _MAPPINGS,
    "packing_format": ("plain", "none"),
    "reduce_range": ("false", "none"),
    "scale_dtype": ("none",),
    "use_hqq": ("false",),
    "weight_mapping_type": _MAPPINGS,
    "weight_only_decode": ("false",),
    "weight_scale_dtype": ("none",),
    "zero_point_domain": ("int", "none"),
}
"""Values of options that are supported, by option; other values would change the numbers."""


@dataclass(frozen=True)
class WeightConfig:
    """Base class: a function that quantizes a dense weight."""

    skips_odd_widths: ClassVar[bool] = False
    """Whether torchao leaves weights as they are if their columns are not whole groups."""

    def __post_init__(self) -> None:
        for option, value in vars(self).items():
            if option in _SUPPORTED:
                _check_choice(option, value, _SUPPORTED[option])
        self._find_args()

    def _find_args(self) -> QuantizedConfig:
        raise NotImplementedError

    def __call__(self, weight: Tensor) -> QuantizedTensor:
        """Quantize a weight."""
        return QuantizedTensor.quantize(weight, self._find_args())

    def skips(self, weight: Tensor) -> bool:
        """Return True if `quantize_` should leave a weight as it is."""
        size = self._find_args().args.group_size or -1
        return self.skips_odd_widths and size > 0 and weight.shape[-1] % size != 0


@dataclass(frozen=True)
class Int8WeightOnlyConfig(WeightConfig):
    """Quantize weights to 8-bit integers with a scale per row, or per group of columns."""

    group_size: int | None = None
    _: KW_ONLY
    granularity: Any = PerRow()
    set_inductor_config: bool = True
    version: int = 2

    def _find_args(self) -> QuantizedConfig:
        granularity = self.granularity
        if self.group_size is not None:
            if type(granularity).__name__ != "PerRow":
                _refuse("granularity", granularity, "either granularity or group_size")
            granularity = PerGroup(self.group_size)
        return QuantizedConfig(_parse_weight_args(8, granularity))


@dataclass(frozen=True)
class Int4WeightOnlyConfig(WeightConfig):
    """Quantize weights to 4-bit integers with a scale and a zero point per group of columns.

    quantize_(model, int4_weight_only(group_size=64))
    """

    skips_odd_widths = True
    group_size: int | None = 128
    _: KW_ONLY
    symmetric: bool = False
    layout: Any = None
    layout_type: Any = None
    inner_k_tiles: int = 8
    use_hqq: bool = False
    zero_point_domain: Any = None
    preserve_zero: bool | None = None
    set_inductor_config: bool = True
    int4_packing_format: Any = "plain"
    int4_choose_qparams_algorithm: Any = "tinygemm"
    int4_tile_packed_ntile: int = 8
    version: int = 2

    def _find_args(self) -> QuantizedConfig:
        size = -1 if self.group_size is None else self.group_size
        return QuantizedConfig(QuantizationArgs(4, symmetric=self.symmetric, group_size=size))


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(WeightConfig):
    """Quantize weights to 8-bit integers, and inputs per token at run time."""

    layout: Any = None
    act_mapping_type: Any = MappingType.SYMMETRIC
    weight_only_decode: bool = False
    _: KW_ONLY
    granularity: Any = None
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool | None = False
    layout_type: Any = None

    def _find_args(self) -> QuantizedConfig:
        inputs, weight = _split_pair(self.granularity, default=PerRow())
        return QuantizedConfig(
            _parse_weight_args(8, weight), _parse_input_args(inputs, mapping=self.act_mapping_type)
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(WeightConfig):
    """Quantize weights to 4-bit integers per group, and inputs to 8 bits per token at run time."""

    skips_odd_widths = True
    group_size: int = 32
    layout: Any = None
    mapping_type: Any = MappingType.SYMMETRIC
    act_mapping_type: Any = MappingType.ASYMMETRIC
    _: KW_ONLY
    set_inductor_config: bool = True

    def _find_args(self) -> QuantizedConfig:
        return QuantizedConfig(
            _parse_weight_args(4, PerGroup(self.group_size), mapping=self.mapping_type),
            _parse_input_args(PerToken(), mapping=self.act_mapping_type),
        )


@dataclass(frozen=True)
class Float8WeightOnlyConfig(WeightConfig):
    """Quantize weights to 8-bit floats with a scale per row."""

    weight_dtype: torch.dtype = torch.float8_e4m3fn
    _: KW_ONLY
    granularity: Any = None
    set_inductor_config: bool = True
    version: int = 2

    def _find_args(self) -> QuantizedConfig:
        _check_float8("weight_dtype", self.weight_dtype)
        granularity = PerRow() if self.granularity is None else self.granularity
        return QuantizedConfig(_parse_weight_args(8, granularity, QuantizationType.FLOAT))


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(WeightConfig):
    """Quantize weights to 8-bit floats, and inputs at run time; by default one scale for all."""

    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Any = None
    _: KW_ONLY
    mm_config: Any = None
    packing_format: Any = "plain"
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = None
    set_inductor_config: bool = True
    version: int = 2
    alg_id: int = 0

    def _find_args(self) -> QuantizedConfig:
        _check_float8("activation_dtype", self.activation_dtype)
        _check_float8("weight_dtype", self.weight_dtype)
        inputs, weight = _split_pair(self.granularity, default=PerTensor())
        kind = QuantizationType.FLOAT
        return QuantizedConfig(_parse_weight_args(8, weight, kind), _parse_input_args(inputs, kind))


@dataclass(frozen=True)
class IntxWeightOnlyConfig(WeightConfig):
    """Quantize weights to integers of 2 to 8 bits."""

    weight_dtype: torch.dtype = torch.int8
    granularity: Any = PerAxis()
    mapping_type: Any = MappingType.SYMMETRIC
    scale_dtype: torch.dtype | None = None
    _: KW_ONLY
    layout: Any = None
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2

    def _find_args(self) -> QuantizedConfig:
        bits = _count_bits("weight_dtype", self.weight_dtype, "int")
        return QuantizedConfig(
            _parse_weight_args(bits, self.granularity, mapping=self.mapping_type)
        )


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(WeightConfig):
    """Quantize weights to integers of 2 to 8 bits, and inputs to 8 bits per token at run time."""

    weight_dtype: torch.dtype = torch.int8
    weight_granularity: Any = PerGroup(32)
    weight_mapping_type: Any = MappingType.SYMMETRIC
    weight_scale_dtype: torch.dtype | None = None
    act_mapping_type: Any = MappingType.ASYMMETRIC
    _: KW_ONLY
    layout: Any = None
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2

    def _find_args(self) -> QuantizedConfig:
        bits = _count_bits("weight_dtype", self.weight_dtype, "int")
        return QuantizedConfig(
            _parse_weight_args(bits, self.weight_granularity, mapping=self.weight_mapping_type),
            _parse_input_args(PerToken(), mapping=self.act_mapping_type),
        )


@dataclass(frozen=True)
class UIntXWeightOnlyConfig(WeightConfig):
    """Quantize weights to integers of 2 to 8 bits with a zero point per group of columns."""

    dtype: torch.dtype
    group_size: int = 64
    _: KW_ONLY
    pack_dim: int = -1
    use_hqq: bool = False
    set_inductor_config: bool = True

    def _find_args(self) -> QuantizedConfig:
        bits = _count_bits("dtype", self.dtype, "uint")
        return QuantizedConfig(QuantizationArgs(bits, symmetric=False, group_size=self.group_size))


CONFIGS: dict[str, type[WeightConfig]] = {
    config.__name__: config
    for config in (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt4WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        UIntXWeightOnlyConfig,
    )
}
"""Configurations by the name of their class, which is that of torchao."""

float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
float8_weight_only = Float8WeightOnlyConfig
int4_weight_only = Int4WeightOnlyConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
int8_weight_only = Int8WeightOnlyConfig
uintx_weight_only = UIntXWeightOnlyConfig


def _refuse(option: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"{option}={value!r} is not supported; expected {expected}")


def _check_choice(option: str, value: object, supported: tuple[str, ...]) -> None:
    if _name(value).lower() not in {name.lower() for name in supported}:
        _refuse(option, value, " or ".join(supported))


def _name(value: object) -> str:
    """Return the name of a value: of its class for layouts, which are objects."""
    if isinstance(value, Enum):
        return value.name
    is_simple = isinstance(value, str | int | float | torch.dtype | None)
    return str(value) if is_simple else type(value).__name__.removesuffix("Type")


def _check_float8(option: str, dtype: object) -> None:
    _check_choice(option, dtype, ("torch.float8_e4m3fn",))


def _count_bits(option: str, dtype: object, prefix: str) -> int:
    bits = str(dtype).removeprefix(f"torch.{prefix}")
    if bits not in {str(n) for n in range(2, 9)}:
        _refuse(option, dtype, f"torch.{prefix}2 to torch.{prefix}8")
    return int(bits)


def _split_pair(granularity: Any, *, default: object) -> tuple[Any, Any]:
    """Return the granularity of inputs and that of weights."""
    if isinstance(granularity, list | tuple):
        if len(granularity) != 2:
            _refuse("granularity", granularity, "one for inputs and one for weights")
        return granularity[0], granularity[1]
    return (default, default) if granularity is None else (granularity, granularity)


def _is_symmetric(mapping: object) -> bool:
    return _name(mapping).lower() == "symmetric"


def _parse_weight_args(
    bits: int,
    granularity: Any,
    kind: QuantizationType = QuantizationType.INT,
    mapping: object = MappingType.SYMMETRIC,
) -> QuantizationArgs:
    match type(granularity).__name__:
        case "PerTensor":
            size = None
        case "PerRow" if granularity.dim in (-1, 1):
            size = -1
        case "PerAxis" if granularity.axis == 0:
            size = -1
        case "PerGroup":
            size = -1 if granularity.group_size is None else granularity.group_size
        case _:
            _refuse("granularity", granularity, "PerTensor(), PerRow(), PerAxis(0) or PerGroup(n)")
    return QuantizationArgs(bits, kind, symmetric=_is_symmetric(mapping), group_size=size)


def _parse_input_args(
    granularity: Any,
    kind: QuantizationType = QuantizationType.INT,
    mapping: object = MappingType.SYMMETRIC,
) -> QuantizationArgs:
    match type(granularity).__name__:
        case "PerTensor":
            strategy = QuantizationStrategy.TENSOR
        case "PerRow" | "PerToken":
            strategy = QuantizationStrategy.TOKEN
        case _:
            _refuse("granularity", granularity, "PerTensor() or PerRow() for inputs")
    symmetric = _is_symmetric(mapping)
    return QuantizationArgs(8, kind, symmetric=symmetric, strategy=strategy, dynamic=True)
