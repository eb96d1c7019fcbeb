"""How one kind of numbers is quantized: the weights of a layer, or what flows in or out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Self, TypeVar

import torch

from slimtensors.errors import ConfigError, nearest
from slimtensors.tensor import DTYPES, Json, dtype_name


class QuantizationType(StrEnum):
    """What the codes are."""

    INT = "int"
    FLOAT = "float"


class QuantizationStrategy(StrEnum):
    """Which numbers share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"
    TOKEN = "token"
    TENSOR_GROUP = "tensor_group"
    """A scale per group, in units of one scale for the tensor."""
    ATTN_HEAD = "attn_head"


class ActivationOrdering(StrEnum):
    """In which order GPTQ rounds the columns of a weight."""

    WEIGHT = "weight"
    """The most active first; groups stay neighbours."""
    GROUP = "group"
    """The most active first; groups follow that order, and `weight_g_idx` keeps it."""


_ORDER_ALIASES = {"static": "weight", "dynamic": "group", True: "group", False: None}
_FLOAT_BITS = (4, 8)


@dataclass(frozen=True)
class QuantizationArgs:
    """How many bits, of what kind, and which numbers share a scale.

    The fields and their names in JSON are those of compressed-tensors.
    """

    num_bits: int = 8
    type: QuantizationType = QuantizationType.INT
    symmetric: bool = True
    strategy: QuantizationStrategy | None = None
    """By default what `group_size` implies: tensor, channel (-1) or group."""
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    """Whether scales are found while the model runs; `local`: all but the tensor's own."""
    actorder: ActivationOrdering | None = None
    scale_dtype: torch.dtype | None = None
    zp_dtype: torch.dtype | None = None
    observer: str | None = None
    observer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.strategy or _implied(self.group_size)
        strategy = _choice(QuantizationStrategy, given, "strategy")
        order = self.actorder
        if order is not None:
            order = _ORDER_ALIASES.get(order, order)  # type: ignore[assignment]
            order = None if order is None else _choice(ActivationOrdering, order, "actorder")
        object.__setattr__(self, "strategy", strategy)
        object.__setattr__(self, "actorder", order)
        object.__setattr__(self, "type", _choice(QuantizationType, self.type, "type"))
        object.__setattr__(self, "block_structure", _block(self.block_structure))
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """What holds one code before it is packed."""
        if self.type is QuantizationType.INT:
            return torch.int8
        return torch.float8_e4m3fn if self.num_bits == 8 else torch.uint8

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two, stored as bytes, as the OCP's MX formats have them."""
        return self.type is QuantizationType.FLOAT and self.scale_dtype is torch.uint8

    def to_dict(self) -> Json:
        """Return the JSON form, without what was not said."""
        data: Json = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.dtype):
                value = f"torch.{dtype_name(value)}"
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, StrEnum):
                value = str(value)
            if value is not None and value != {}:
                data[each.name] = value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form; a key that is unknown raises with the nearest one that exists."""
        known = {each.name for each in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"quantization arguments have no {key!r}; {nearest(key, known)}")
        values = dict(data)
        for key in ("scale_dtype", "zp_dtype"):
            if isinstance(values.get(key), str):
                values[key] = _dtype(values[key].removeprefix("torch."), key)
        values["observer_kwargs"] = values.get("observer_kwargs") or {}
        return cls(**values)

    def _check(self) -> None:
        top = 8 if self.type is QuantizationType.INT else 0
        bits = self.num_bits
        if type(bits) is not int or not (1 <= bits <= top or (not top and bits in _FLOAT_BITS)):
            raise ConfigError(f"there are no codes of type {self.type} with {bits!r} bits")
        if self.type is QuantizationType.FLOAT and not self.symmetric:
            raise ConfigError("codes of type float are symmetric")
        groups = self.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
        size = self.group_size
        if size is not None and (type(size) is not int or size == 0 or size < -1):
            raise ConfigError(f"group_size must be positive, or -1 for a channel, got {size!r}")
        if groups != (size is not None and size > 0):
            raise ConfigError(f"strategy {self.strategy} does not go with group_size {size}")
        if (self.strategy is QuantizationStrategy.BLOCK) != (self.block_structure is not None):
            raise ConfigError("strategy block and block_structure go together")
        if self.dynamic not in (True, False, "local"):
            raise ConfigError(f"dynamic is true, false or 'local', not {self.dynamic!r}")
        if self.strategy is QuantizationStrategy.TOKEN and not self.dynamic:
            raise ConfigError("a scale per token is found while the model runs: dynamic=True")
        local = self.strategy is QuantizationStrategy.TENSOR_GROUP
        if self.dynamic == "local" and not local:
            raise ConfigError("dynamic='local' goes with strategy tensor_group")


def _implied(group_size: int | None) -> QuantizationStrategy:
    if group_size is None:
        return QuantizationStrategy.TENSOR
    return QuantizationStrategy.CHANNEL if group_size == -1 else QuantizationStrategy.GROUP


E = TypeVar("E", bound=StrEnum)


def _choice(kind: type[E], value: Any, key: str) -> E:
    text = str(value).lower()
    if text not in set(kind):
        raise ConfigError(f"{key} {value!r} does not exist; {nearest(text, list(kind))}")
    return kind(text)


def _dtype(name: str, key: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{key} {name!r} does not exist; {nearest(name, DTYPES)}")
    return DTYPES[name]


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, str):  # as older files have it: "128x128"
        value = [int(n) if n.isdigit() else n for n in value.split("x")]
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"block_structure must be two positive integers, got {value!r}")
