"""Arguments of quantization, for the weights of a layer or for its activations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Self, TypeVar

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


class ActivationOrdering(StrEnum):
    """Order in which GPTQ rounds the columns of a weight."""

    WEIGHT = "weight"
    """Most active first; groups stay contiguous."""
    GROUP = "group"
    """Most active first; groups follow that order, which `weight_g_idx` stores."""


_ORDER_ALIASES = {"static": "weight", "dynamic": "group", True: "group", False: None}
_INT_BITS = range(1, 9)
_FLOAT_BITS = (4, 8)


@dataclass(frozen=True)
class QuantizationArgs:
    """Bits and type of the codes, and which values share a scale.

        QuantizationArgs(num_bits=4, group_size=128, symmetric=False)

    The fields and their names in JSON are those of compressed-tensors.
    """

    num_bits: int = 8
    type: QuantizationType = QuantizationType.INT
    symmetric: bool = True
    strategy: QuantizationStrategy | None = None
    """By default implied by `group_size`: tensor (None), channel (-1) or group."""
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    """Whether scales are computed at run time; `local`: all but the global scale."""
    actorder: ActivationOrdering | None = None
    scale_dtype: torch.dtype | None = None
    zp_dtype: torch.dtype | None = None
    observer: str | None = None
    observer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strategy = _parse_choice(
            QuantizationStrategy, self.strategy or _imply_strategy(self.group_size), "strategy"
        )
        order = self.actorder
        if order is not None:
            order = _ORDER_ALIASES.get(order, order)  # type: ignore[assignment]
            order = None if order is None else _parse_choice(ActivationOrdering, order, "actorder")
        object.__setattr__(self, "strategy", strategy)
        object.__setattr__(self, "actorder", order)
        object.__setattr__(self, "type", _parse_choice(QuantizationType, self.type, "type"))
        object.__setattr__(self, "block_structure", _parse_block(self.block_structure))
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a code before packing."""
        if self.type is QuantizationType.INT:
            return torch.int8
        return torch.float8_e4m3fn if self.num_bits == 8 else torch.uint8

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two stored in bytes, as in the MX formats of the OCP."""
        return self.type is QuantizationType.FLOAT and self.scale_dtype is torch.uint8

    def to_dict(self) -> Json:
        """Return the JSON form, without fields that are unset."""
        data: Json = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, torch.dtype):
                value = f"torch.{dtype_name(value)}"
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, StrEnum):
                value = str(value)
            if value is not None and value != {}:
                data[entry.name] = value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form; raise `ConfigError` on unknown keys, with the nearest valid one."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected quantization arguments, got {str(data)[:80]!r}")
        known = {entry.name for entry in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"unknown quantization argument {key!r}; {suggest(key, known)}")
        values = dict(data)
        for key in ("scale_dtype", "zp_dtype"):
            if isinstance(values.get(key), str):
                values[key] = _parse_dtype(values[key].removeprefix("torch."), key)
        values["observer_kwargs"] = values.get("observer_kwargs") or {}
        return cls(**values)

    def _check(self) -> None:
        if type(self.symmetric) is not bool:
            raise ConfigError(f"symmetric must be true or false, got {self.symmetric!r}")
        if not isinstance(self.observer, str | None):
            raise ConfigError(f"observer must be a name, got {self.observer!r}")
        if not isinstance(self.observer_kwargs, Mapping):
            raise ConfigError(f"observer_kwargs must be a mapping, got {self.observer_kwargs!r}")
        for key in ("scale_dtype", "zp_dtype"):
            if not isinstance(getattr(self, key), torch.dtype | None):
                raise ConfigError(f"{key} must be a dtype, got {getattr(self, key)!r}")
        bits = self.num_bits
        supported = _INT_BITS if self.type is QuantizationType.INT else _FLOAT_BITS
        if type(bits) is not int or bits not in supported:
            raise ConfigError(f"num_bits {bits!r} is not supported for type {self.type}")
        if self.type is QuantizationType.FLOAT and not self.symmetric:
            raise ConfigError("type float supports symmetric=True only")
        groups = self.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
        size = self.group_size
        if size is not None and (type(size) is not int or size == 0 or size < -1):
            raise ConfigError(f"group_size must be positive, or -1 for a channel, got {size!r}")
        if groups != (size is not None and size > 0):
            raise ConfigError(f"strategy {self.strategy} does not match group_size {size}")
        if (self.strategy is QuantizationStrategy.BLOCK) != (self.block_structure is not None):
            raise ConfigError(
                "strategy block requires block_structure, and no other strategy has it"
            )
        if self.dynamic not in (True, False, "local"):
            raise ConfigError(f"dynamic must be true, false or 'local', got {self.dynamic!r}")
        if self.strategy is QuantizationStrategy.TOKEN and not self.dynamic:
            raise ConfigError("strategy token requires dynamic=True")
        if self.dynamic == "local" and self.strategy is not QuantizationStrategy.TENSOR_GROUP:
            raise ConfigError("dynamic='local' requires strategy tensor_group")


def _imply_strategy(group_size: int | None) -> QuantizationStrategy:
    if group_size is None:
        return QuantizationStrategy.TENSOR
    return QuantizationStrategy.CHANNEL if group_size == -1 else QuantizationStrategy.GROUP


E = TypeVar("E", bound=StrEnum)


def _parse_choice(kind: type[E], value: Any, key: str) -> E:
    text = str(value).lower()
    if text not in set(kind):
        raise ConfigError(f"unknown {key} {value!r}; {suggest(text, list(kind))}")
    return kind(text)


def _parse_dtype(name: str, key: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"unknown {key} {name!r}; {suggest(name, DTYPES)}")
    return DTYPES[name]


def _parse_block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, str):  # "128x128", as in older files
        value = [int(n) if n.isdigit() else n for n in value.split("x")]
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"block_structure must be two positive integers, got {value!r}")
