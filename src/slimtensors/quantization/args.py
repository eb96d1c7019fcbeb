"""Arguments of quantization, for the weights of a layer or for its activations."""

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from typing import Any, Self, TypeVar

import torch

from slimtensors.errors import ConfigError, suggest
from slimtensors.tensor import DTYPES, Json, dtype_name


class QuantizationType(StrEnum):
    """Type of the codes."""

    INT = "int"
    FLOAT = "float"


class QuantizationStrategy(StrEnum):
    """Which values share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"
    TOKEN = "token"
    TENSOR_GROUP = "tensor_group"
    """A scale per group, divided by a global scale of the tensor."""
    ATTN_HEAD = "attn_head"


class DynamicType(StrEnum):
    """Values of `dynamic` besides true and false."""

    LOCAL = "local"
    """Scales are computed at run time, except for the global scale."""


class ActivationOrdering(StrEnum):
    """Order in which GPTQ rounds the columns of a weight."""

    WEIGHT = "weight"
    """Most active first; groups stay contiguous."""
    GROUP = "group"
    """Most active first; groups follow that order, which `weight_g_idx` stores."""
    STATIC = WEIGHT
    DYNAMIC = GROUP

    @classmethod
    def _missing_(cls, value: object) -> "ActivationOrdering | None":
        return {"static": cls.WEIGHT, "dynamic": cls.GROUP}.get(str(value).lower())


_INT_BITS = range(1, 9)
_FLOAT_BITS = (4, 6, 8)
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
_DYNAMIC = (*_GROUPED, QuantizationStrategy.TOKEN, QuantizationStrategy.TENSOR)
_ALWAYS_WRITTEN = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic")


class PydanticMethods:
    """Methods that compressed-tensors' classes inherit from pydantic, for their scripts."""

    def model_dump(self, *, mode: str = "python", exclude: Collection[str] = ()) -> Json:
        """Return the fields as JSON values, as compressed-tensors does; in either mode."""
        raise NotImplementedError

    def model_dump_json(self, *, indent: int | None = None, exclude: Collection[str] = ()) -> str:
        """Return `model_dump` as text."""
        separators = (",", ":") if indent is None else None
        return json.dumps(self.model_dump(exclude=exclude), indent=indent, separators=separators)

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Parse the fields from a mapping."""
        return data if isinstance(data, cls) else cls(**data)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Parse the fields from text."""
        return cls.model_validate(json.loads(text))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed."""
        return replace(copy.deepcopy(self) if deep else self, **update or {})  # type: ignore[type-var]


@dataclass(frozen=True)
class QuantizationArgs(PydanticMethods):
    """Bits and type of the codes, and which values share a scale.

        QuantizationArgs(num_bits=4, group_size=128, symmetric=False)

    The fields and their names in JSON are those of compressed-tensors.
    """

    num_bits: int = 8
    type: QuantizationType = QuantizationType.INT
    symmetric: bool = True
    group_size: int | None = None
    strategy: QuantizationStrategy | None = None
    """By default implied by `group_size`: tensor (None), channel (-1) or group."""
    block_structure: Sequence[int] | None = None
    """Rows and columns of a block."""
    dynamic: bool | str = False
    """Whether scales are computed at run time; `local`: all but the global scale."""
    actorder: ActivationOrdering | None = None
    scale_dtype: torch.dtype | None = None
    zp_dtype: torch.dtype | None = None
    observer: str | None = None
    observer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group_size is not None and type(self.group_size) is not int:
            raise ConfigError(f"group_size must be an integer, got {self.group_size!r}")
        strategy = self.strategy or _imply_strategy(self.group_size)
        parsed = {
            "type": _parse_choice(QuantizationType, self.type, "type"),
            "strategy": _parse_choice(QuantizationStrategy, strategy, "strategy"),
            "block_structure": _parse_block(self.block_structure),
            "dynamic": _parse_dynamic(self.dynamic),
            "actorder": _parse_order(self.actorder),
            "scale_dtype": _parse_dtype(self.scale_dtype, "scale_dtype"),
            "zp_dtype": _parse_dtype(self.zp_dtype, "zp_dtype"),
            "observer_kwargs": {} if self.observer_kwargs is None else self.observer_kwargs,
        }
        for key, value in parsed.items():
            object.__setattr__(self, key, value)
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a code before packing."""
        if self.type is QuantizationType.INT:
            return torch.int8
        return torch.float8_e4m3fn if self.num_bits == 8 else torch.uint8

    @property
    def zero_dtype(self) -> torch.dtype:
        """Dtype of zero points: `zp_dtype`, by default that of the codes."""
        return self.zp_dtype or self.dtype

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two stored in bytes, as in the MX formats of the OCP."""
        return self.type is QuantizationType.FLOAT and self.scale_dtype is torch.uint8

    def pytorch_dtype(self) -> torch.dtype:
        """Return the dtype of a code, as compressed-tensors does; 4- and 6-bit floats have none."""
        if self.dtype is torch.uint8:
            raise ConfigError(f"torch has no dtype for floats of {self.num_bits} bits")
        return self.dtype

    def to_dict(self) -> Json:
        """Return the JSON form, without fields that are unset."""
        return {key: value for key, value in self.model_dump().items() if value is not None}

    def model_dump(self, *, mode: str = "python", exclude: Collection[str] = ()) -> Json:
        """Return the JSON form as compressed-tensors writes it: with `group_size`, maybe null."""
        data: Json = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, torch.dtype):
                value = f"torch.{dtype_name(value)}"
            elif isinstance(value, StrEnum):
                value = str(value)
            elif isinstance(value, Mapping):
                value = dict(value) or None
            if entry.name == "zp_dtype" and self.symmetric:
                value = None  # there are no zero points
            if value is not None or entry.name in _ALWAYS_WRITTEN:
                data[entry.name] = value
        return {key: value for key, value in data.items() if key not in exclude}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | Self) -> Self:
        """Parse the JSON form of any release of compressed-tensors.

        Raise `ConfigError` on unknown keys, with the nearest valid one.
        """
        return cls.model_validate(_update_older(data) if isinstance(data, Mapping) else data)

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Parse the JSON form of compressed-tensors 0.20."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected quantization arguments, got {str(data)[:80]!r}")
        known = {entry.name for entry in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"unknown quantization argument {key!r}; {suggest(key, known)}")
        return cls(**data)

    def _check(self) -> None:
        if type(self.symmetric) is not bool:
            raise ConfigError(f"symmetric must be true or false, got {self.symmetric!r}")
        if not isinstance(self.observer, str | None):
            raise ConfigError(f"observer must be a name, got {self.observer!r}")
        if not isinstance(self.observer_kwargs, Mapping):
            raise ConfigError(f"observer_kwargs must be a mapping, got {self.observer_kwargs!r}")
        bits = self.num_bits
        supported = _INT_BITS if self.type is QuantizationType.INT else _FLOAT_BITS
        if type(bits) is not int or bits not in supported:
            raise ConfigError(f"num_bits {bits!r} is not supported for type {self.type}")
        if self.type is QuantizationType.FLOAT and not self.symmetric and (bits < 8 or self.is_mx):
            raise ConfigError(
                "floats of 4 or 6 bits, or with scale_dtype uint8, support symmetric=True only"
            )
        self._check_strategy()

    def _check_strategy(self) -> None:
        size = self.group_size
        if size is not None and (size == 0 or size < -1):
            raise ConfigError(f"group_size must be positive, or -1 for a channel, got {size!r}")
        if (self.strategy in _GROUPED) != (size is not None and size > 0):
            raise ConfigError(f"strategy {self.strategy} does not match group_size {size}")
        if (self.strategy is QuantizationStrategy.BLOCK) != (self.block_structure is not None):
            raise ConfigError(
                "strategy block requires block_structure, and no other strategy has it"
            )
        if self.strategy is QuantizationStrategy.TOKEN and not self.dynamic:
            raise ConfigError("strategy token requires dynamic=True")
        if self.dynamic and self.strategy not in _DYNAMIC:
            raise ConfigError(f"strategy {self.strategy} requires dynamic=False")
        if self.dynamic == "local" and self.strategy is not QuantizationStrategy.TENSOR_GROUP:
            raise ConfigError("dynamic='local' requires strategy tensor_group")


def _update_older(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in which combinations that releases before 0.9 ignored are resolved."""
    values = dict(data)
    strategy = str(values.get("strategy")).lower()
    if strategy == "token" and not values.get("dynamic"):
        values["strategy"] = "tensor"  # the stored scale was a single number
    size = values.get("group_size")
    if strategy in ("tensor", "channel", "token") and isinstance(size, int) and size > 0:
        values["group_size"] = None
    return values


def _imply_strategy(group_size: int | None) -> QuantizationStrategy:
    if group_size is None:
        return QuantizationStrategy.TENSOR
    return QuantizationStrategy.CHANNEL if group_size == -1 else QuantizationStrategy.GROUP


E = TypeVar("E", bound=StrEnum)


def to_text(value: object) -> str:
    """Return a text, or that of a member of any Enum: compressed-tensors has Enums of its own."""
    return str(value.value if isinstance(value, Enum) else value)


def _parse_choice(kind: type[E], value: Any, key: str) -> E:
    text = to_text(value).lower()
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"unknown {key} {value!r}; {suggest(text, list(kind))}") from None


def _parse_order(value: Any) -> ActivationOrdering | None:
    if value is None or type(value) is bool:
        return ActivationOrdering.GROUP if value else None
    return _parse_choice(ActivationOrdering, value, "actorder")


def _parse_dynamic(value: Any) -> bool | str:
    if type(value) is bool:
        return value
    if to_text(value).lower() == DynamicType.LOCAL:
        return "local"
    raise ConfigError(f"dynamic must be true, false or 'local', got {value!r}")


def _parse_dtype(value: Any, key: str) -> torch.dtype | None:
    if isinstance(value, torch.dtype | None):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a dtype, got {value!r}")
    name = value.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"unknown {key} {name!r}; {suggest(name, DTYPES)}")
    return DTYPES[name]


def _parse_block(value: Any) -> list[int] | None:
    if isinstance(value, str):  # "128x128", as in older files
        value = [int(n) if n.isdigit() else n for n in value.split("x")]
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return [rows, columns]
    raise ConfigError(f"block_structure must be two positive integers, got {value!r}")
