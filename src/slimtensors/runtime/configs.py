"""Configurations of `quantize_`, with the names and options of torchao (0.4 to 0.18).

Options that only choose a memory layout or tune a GPU kernel are accepted and have no effect: codes
have one layout, which does not depend on the machine. Options that would change the numbers and are
not implemented raise `ConfigError` when the configuration is made. Options may be objects of
torchao or those defined here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, suggest
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


_LAYOUTS = {
    "Int4CPULayout",
    "Int4XPULayout",
    "Int8DynamicActInt4WeightCPULayout",
    "NoneType",
    "PackedLinearInt8DynamicActivationIntxWeightLayout",
    "PlainLayout",
    "QDQLayout",
    "TensorCoreTiledLayout",
}
"""Layouts that have the same codes as a plain one."""

_INT4_FORMATS = ("plain", "plain_int32", "preshuffled", "tile_packed_to_4d", "opaque")
_INTX_FORMATS = (
    "unpacked_to_int8",
    "opaque_aten_kleidiai",
    "opaque_torchao_auto",
    "opaque_torchao_kleidiai",
    "opaque_torchao_lowbit",
)


@dataclass(frozen=True)
class WeightConfig:
    """Base class: a function that quantizes a dense weight."""

    def __post_init__(self) -> None:
        self.find_args()

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments; raise `ConfigError` if an option is not supported."""
        raise NotImplementedError

    def __call__(self, weight: Tensor) -> QuantizedTensor:
        """Quantize a weight."""
        return QuantizedTensor.quantize(weight, self.find_args())


@dataclass(frozen=True)
class Int8WeightOnlyConfig(WeightConfig):
    """Quantize weights to 8-bit integers with a scale per row, or per group of columns."""

    group_size: int | None = None
    _: KW_ONLY
    granularity: Any = PerRow()
    set_inductor_config: bool = True
    version: int = 2

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        granularity = self.granularity
        if self.group_size is not None:
            if type(granularity).__name__ != "PerRow":
                _refuse("granularity", granularity, "either granularity or group_size")
            granularity = PerGroup(self.group_size)
        return QuantizedConfig(_parse_weight_args(8, "granularity", granularity))


@dataclass(frozen=True)
class Int4WeightOnlyConfig(WeightConfig):
    """Quantize weights to 4-bit integers with a scale and a zero point per group of columns.

    quantize_(model, int4_weight_only(group_size=64))
    """

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

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_layout(self.layout or self.layout_type)
        _check_choice("use_hqq", self.use_hqq, ("false",))
        _check_choice("zero_point_domain", self.zero_point_domain, ("none", "int"))
        _check_choice("int4_packing_format", self.int4_packing_format, _INT4_FORMATS)
        algorithm = self.int4_choose_qparams_algorithm
        _check_choice("int4_choose_qparams_algorithm", algorithm, ("tinygemm",))
        size = -1 if self.group_size is None else self.group_size
        return QuantizedConfig(QuantizationArgs(4, symmetric=self.symmetric, group_size=size))


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(WeightConfig):
    """Quantize weights to 8-bit integers, and inputs per token at run time."""

    layout: Any = None
    act_mapping_type: Any = MappingType.SYMMETRIC
    weight_only_decode: bool = False
    _: KW_ONLY
    granularity: Any = PerRow()
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool | None = False
    layout_type: Any = None

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_layout(self.layout or self.layout_type)
        _check_choice("weight_only_decode", self.weight_only_decode, ("false",))
        _check_choice("reduce_range", self.reduce_range, ("false", "none"))
        inputs, weight = _split_pair(self.granularity)
        symmetric = _is_symmetric("act_mapping_type", self.act_mapping_type)
        return QuantizedConfig(
            _parse_weight_args(8, "granularity", weight),
            _parse_input_args("granularity", inputs, symmetric=symmetric),
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(WeightConfig):
    """Quantize weights to 4-bit integers per group, and inputs to 8 bits per token at run time."""

    group_size: int = 32
    layout: Any = None
    mapping_type: Any = MappingType.SYMMETRIC
    act_mapping_type: Any = MappingType.ASYMMETRIC
    _: KW_ONLY
    set_inductor_config: bool = True

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_layout(self.layout)
        symmetric = _is_symmetric("mapping_type", self.mapping_type)
        act_symmetric = _is_symmetric("act_mapping_type", self.act_mapping_type)
        return QuantizedConfig(
            QuantizationArgs(4, symmetric=symmetric, group_size=self.group_size),
            _parse_input_args("granularity", PerToken(), symmetric=act_symmetric),
        )


@dataclass(frozen=True)
class Float8WeightOnlyConfig(WeightConfig):
    """Quantize weights to 8-bit floats with a scale per row."""

    weight_dtype: torch.dtype = torch.float8_e4m3fn
    _: KW_ONLY
    granularity: Any = None
    set_inductor_config: bool = True
    version: int = 2

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_float8("weight_dtype", self.weight_dtype)
        granularity = PerRow() if self.granularity is None else self.granularity
        return QuantizedConfig(
            _parse_weight_args(8, "granularity", granularity, kind=QuantizationType.FLOAT)
        )


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

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_float8("activation_dtype", self.activation_dtype)
        _check_float8("weight_dtype", self.weight_dtype)
        _check_choice("packing_format", self.packing_format, ("plain", "none"))
        _check_choice("activation_value_lb", self.activation_value_lb, ("none",))
        _check_choice("activation_value_ub", self.activation_value_ub, ("none",))
        inputs, weight = _split_pair(PerTensor() if self.granularity is None else self.granularity)
        kind = QuantizationType.FLOAT
        return QuantizedConfig(
            _parse_weight_args(8, "granularity", weight, kind=kind),
            _parse_input_args("granularity", inputs, kind=kind),
        )


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

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_layout(self.layout)
        _check_choice("scale_dtype", self.scale_dtype, ("none",))
        _check_choice("intx_packing_format", self.intx_packing_format, _INTX_FORMATS)
        algorithm = self.intx_choose_qparams_algorithm
        _check_choice("intx_choose_qparams_algorithm", algorithm, ("affine",))
        bits = _count_bits("weight_dtype", self.weight_dtype, "int")
        symmetric = _is_symmetric("mapping_type", self.mapping_type)
        args = _parse_weight_args(bits, "granularity", self.granularity, symmetric=symmetric)
        return QuantizedConfig(args)


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

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        weight = IntxWeightOnlyConfig(
            self.weight_dtype,
            self.weight_granularity,
            self.weight_mapping_type,
            self.weight_scale_dtype,
            layout=self.layout,
            intx_packing_format=self.intx_packing_format,
            intx_choose_qparams_algorithm=self.intx_choose_qparams_algorithm,
        )
        symmetric = _is_symmetric("act_mapping_type", self.act_mapping_type)
        inputs = _parse_input_args("granularity", PerToken(), symmetric=symmetric)
        return QuantizedConfig(weight.find_args().args, inputs)


@dataclass(frozen=True)
class UIntXWeightOnlyConfig(WeightConfig):
    """Quantize weights to integers of 2 to 8 bits with a zero point per group of columns."""

    dtype: torch.dtype
    group_size: int = 64
    _: KW_ONLY
    pack_dim: int = -1
    use_hqq: bool = False
    set_inductor_config: bool = True

    def find_args(self) -> QuantizedConfig:
        """Return the quantization arguments."""
        _check_choice("use_hqq", self.use_hqq, ("false",))
        bits = _count_bits("dtype", self.dtype, "uint")
        return QuantizedConfig(QuantizationArgs(bits, symmetric=False, group_size=self.group_size))


@dataclass(frozen=True)
class FqnToConfig:
    """Map names of modules to configurations, or to None to leave a module as it is.

    A name may be that of the module, of its weight (`"layers.0.weight"`), a regular expression for
    either (`"re:layers[.].*"`), or `"_default"` for all other linear layers.
    """

    fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    module_fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1

    def find(self, name: str) -> tuple[str, Any] | None:
        """Return the key that selects a module and its configuration, or None."""
        configs = {**self.module_fqn_to_config, **self.fqn_to_config}
        names = (f"{name}.weight".lstrip("."), name)
        exact = [key for key in names if key in configs]
        patterns = [key for key in configs if key.startswith("re:")]
        matching = [key for each in names for key in patterns if re.fullmatch(key[3:], each)]
        for key in (*exact, *matching):
            return key, configs[key]
        return ("_default", configs["_default"]) if "_default" in configs else None


def parse_config(config: Any) -> Compression | FqnToConfig:
    """Return a configuration; one of torchao as the one with the same name and options here."""
    if isinstance(config, FqnToConfig):
        return config
    if type(config).__module__.partition(".")[0] == "torchao":
        name = type(config).__name__
        if name not in _CONFIGS:
            raise ConfigError(f"{name} of torchao is not supported; {suggest(name, _CONFIGS)}")
        parsed: Any = _CONFIGS[name](**vars(config))
        return parsed  # type: ignore[no-any-return]
    if not callable(config):
        raise ConfigError(f"expected a configuration such as int8_weight_only(), got {config!r}")
    return config  # type: ignore[no-any-return]


_CONFIGS: dict[str, Callable[..., Any]] = {
    "Float8DynamicActivationFloat8WeightConfig": Float8DynamicActivationFloat8WeightConfig,
    "Float8WeightOnlyConfig": Float8WeightOnlyConfig,
    "FqnToConfig": FqnToConfig,
    "Int4WeightOnlyConfig": Int4WeightOnlyConfig,
    "Int8DynamicActivationInt4WeightConfig": Int8DynamicActivationInt4WeightConfig,
    "Int8DynamicActivationInt8WeightConfig": Int8DynamicActivationInt8WeightConfig,
    "Int8DynamicActivationIntxWeightConfig": Int8DynamicActivationIntxWeightConfig,
    "Int8WeightOnlyConfig": Int8WeightOnlyConfig,
    "IntxWeightOnlyConfig": IntxWeightOnlyConfig,
    "ModuleFqnToConfig": FqnToConfig,
    "UIntXWeightOnlyConfig": UIntXWeightOnlyConfig,
}

ModuleFqnToConfig = FqnToConfig
float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
float8_weight_only = Float8WeightOnlyConfig
int4_weight_only = Int4WeightOnlyConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
int8_weight_only = Int8WeightOnlyConfig
uintx_weight_only = UIntXWeightOnlyConfig


def _refuse(option: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"{option}={value!r} is not supported; expected {expected}")


def _check_choice(option: str, value: object, allowed: tuple[str, ...]) -> None:
    name = (value.name if isinstance(value, Enum) else str(value)).lower()
    if name not in allowed:
        _refuse(option, value, " or ".join(allowed))


def _check_layout(layout: object) -> None:
    name = layout if isinstance(layout, str) else type(layout).__name__.removesuffix("Type")
    if name not in _LAYOUTS and name != "None":
        _refuse("layout", layout, "a layout that keeps all codes, such as PlainLayout()")


def _check_float8(option: str, dtype: object) -> None:
    if dtype is not torch.float8_e4m3fn:
        _refuse(option, dtype, "torch.float8_e4m3fn")


def _count_bits(option: str, dtype: object, prefix: str) -> int:
    bits = str(dtype).removeprefix(f"torch.{prefix}")
    if bits not in {str(n) for n in range(2, 9)}:
        _refuse(option, dtype, f"torch.{prefix}2 to torch.{prefix}8")
    return int(bits)


def _is_symmetric(option: str, mapping: object) -> bool:
    _check_choice(option, mapping, ("symmetric", "asymmetric"))
    name = mapping.name if isinstance(mapping, Enum) else str(mapping)
    return name.lower() == "symmetric"


def _split_pair(granularity: Any) -> tuple[Any, Any]:
    """Return the granularity of inputs and that of weights."""
    if isinstance(granularity, list | tuple):
        if len(granularity) != 2:
            _refuse("granularity", granularity, "one for inputs and one for weights")
        return granularity[0], granularity[1]
    return granularity, granularity


def _parse_weight_args(
    bits: int,
    option: str,
    granularity: Any,
    *,
    kind: QuantizationType = QuantizationType.INT,
    symmetric: bool = True,
) -> QuantizationArgs:
    match type(granularity).__name__:
        case "PerTensor":
            size = None
        case "PerRow" if granularity.dim in (-1, 1):
            size = -1
        case "PerAxis" if granularity.axis == 0:
            size = -1
        case "PerGroup":
            size = granularity.group_size
        case _:
            _refuse(option, granularity, "PerTensor(), PerRow(), PerAxis(0) or PerGroup(n)")
    return QuantizationArgs(bits, kind, symmetric=symmetric, group_size=size)


def _parse_input_args(
    option: str,
    granularity: Any,
    *,
    kind: QuantizationType = QuantizationType.INT,
    symmetric: bool = True,
) -> QuantizationArgs:
    match type(granularity).__name__:
        case "PerTensor":
            strategy = QuantizationStrategy.TENSOR
        case "PerRow" | "PerToken":
            strategy = QuantizationStrategy.TOKEN
        case _:
            _refuse(option, granularity, "PerTensor() or PerRow() for inputs")
    return QuantizationArgs(8, kind, symmetric=symmetric, strategy=strategy, dynamic=True)
