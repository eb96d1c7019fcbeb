"""The codec protocol, its optional abilities, and the registry."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar, runtime_checkable

from torch import Tensor

from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    UnknownCodecError,
    suggest,
)
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Json, Parts, Spec


class Codec(Protocol):
    """One reversible step: encode a tensor as named parts, and decode the parts.

    A codec is a frozen dataclass. Its fields are configuration and stored as JSON; data computed
    from the tensor is stored in parts. Both methods are pure. They divide large tensors into
    independent pieces of work and run these with `each`, which may use several threads.

    A codec that rounds sets the class attribute `lossy` to True. The class attribute `part_names`
    lists the parts that `decode` reads; files with others are refused. Without it, every part that
    a file contains is decoded.
    """

    name: ClassVar[str]
    """Name in files. Once released, its meaning never changes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Split `x`, a tensor in main memory, into parts."""
        ...

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Rebuild the tensor that `like` describes; raise `CorruptFileError` if parts do not fit.

        Check the size of every part before allocating: `like` was read from the file. The result
        owns its memory, because the parts may be views of a memory-mapped file.
        """
        ...


@runtime_checkable
class RandomAccess(Protocol):
    """Optional ability: decode into existing memory, or decode a range of items."""

    def decode_into(self, parts: Parts, out: Tensor, each: Each = serially) -> None:
        """Decode like `decode`, into a contiguous tensor of the encoded dtype and shape."""
        ...

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor."""
        ...


@runtime_checkable
class Sliceable(Protocol):
    """Optional ability: the concatenated parts of slices are the parts of the whole tensor."""

    def step(self, spec: Spec) -> int:
        """Return the step of slices: the tensor may be sliced at multiples of this many items."""
        ...


@runtime_checkable
class Measured(Protocol):
    """Optional ability of lossy codecs: compute the error without decoding."""

    def relative_error(self, parts: Parts, x: Tensor) -> float:
        """Return the RMS error of `parts`, relative to the RMS of `x`."""
        ...


def check_part_names(codec: Codec, names: Iterable[str]) -> None:
    """Raise `CorruptFileError` for parts that a codec does not read, if it declares its parts."""
    known: Sequence[str] | None = getattr(codec, "part_names", None)
    for name in names:
        if known is not None and name not in known:
            raise CorruptFileError(f"codec {codec.name!r} has no part {name[:80]!r}")


def has_random_access(codec: Codec) -> TypeGuard[RandomAccess]:
    """Return True if a codec has the ability `RandomAccess`; faster than `isinstance`."""
    return _has_random_access(type(codec))


@cache
def _has_random_access(cls: type[Codec]) -> bool:
    return issubclass(cls, RandomAccess)


@cache
def takes_each(cls: type[Codec]) -> bool:
    """Return True if the methods of a codec have the parameter `each`.

    Codecs of other packages may lack it: it is not part of the protocol of early versions.
    """
    return all("each" in signature(method).parameters for method in (cls.encode, cls.decode))


C = TypeVar("C", bound=type[Codec])

_registry: dict[str, type[Codec]] = {}

_ENTRY_POINTS = "slimtensors.codecs"


def register(cls: C) -> C:
    """Register a codec class under its `name`."""
    if cls.name in _registry and _registry[cls.name] is not cls:
        raise ConfigError(f"codec {cls.name!r} is already registered")
    _registry[cls.name] = cls
    return cls


def names() -> list[str]:
    """List the names of all codecs, including those of installed packages (entry points)."""
    return sorted(_registry.keys() | {entry.name for entry in entry_points(group=_ENTRY_POINTS)})


def find(name: str) -> type[Codec]:
    """Return the codec class registered as `name`; load its entry point if needed."""
    if name not in _registry:
        for entry in entry_points(group=_ENTRY_POINTS, name=name):
            register(entry.load())
    if name not in _registry:
        raise UnknownCodecError(f"unknown codec {name!r}; {suggest(name, names())}")
    return _registry[name]


def to_json(codec: Codec) -> Json:
    """Return the name and configuration of `codec`."""
    return {"name": codec.name, **asdict(codec)}


def from_json(data: Mapping[str, Any]) -> Codec:
    """Build a codec from its name and configuration; raise `FormatError` if they are invalid."""
    cls = find(str(data.get("name")))
    options = {key: value for key, value in data.items() if key != "name"}
    if not options:
        return cls()
    known = {field.name for field in fields(cls)}
    for option in options.keys() - known:
        raise FormatError(f"codec {cls.name!r} has no option {option!r}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise FormatError(f"codec {cls.name!r}: {error}") from error
