"""The codec protocol, its optional abilities, and the registry."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from slimtensors.errors import ConfigError, FormatError, UnknownCodecError, nearest
from slimtensors.parallel import Each
from slimtensors.tensor import Json, Parts, Spec


class Codec(Protocol):
    """One reversible step: a tensor becomes named parts, and parts become the tensor again.

    A codec is a frozen dataclass. Its fields are its configuration and go into the file as JSON;
    whatever depends on the data goes into a part. Both methods are pure.
    """

    name: ClassVar[str]
    """Wire name. Once released it means the same thing forever."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def encode(self, x: Tensor) -> Parts:
        """Split `x`, a tensor in main memory, into parts."""
        ...

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Rebuild the tensor that `like` describes; raise `CorruptFileError` if parts do not fit.

        Check the size of every part before allocating: `like` comes from the file. The result owns
        its memory: parts may lie in the file's pages.
        """
        ...


@runtime_checkable
class Chunked(Protocol):
    """An ability: the work falls into independent chunks, so that one tensor uses every core."""

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Do what `encode` does, dividing the work by `each`."""
        ...

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Do what `decode` does, dividing the work by `each`."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """An ability: the parts of pieces, laid end to end, are the parts of the whole."""

    def step(self, spec: Spec) -> int:
        """Return the number of items at whose multiples a tensor of this kind may be cut."""
        ...


@runtime_checkable
class Cut(Divisible, Protocol):
    """An ability: to find the parts of pieces in the parts of the whole."""

    def cut(self, parts: Parts, like: Spec, every: int) -> list[Parts]:
        """Return views, the parts of every so many items; that is a multiple of `step`."""
        ...

    def decode_again(self, parts: Parts, out: Tensor, threads: int) -> None:
        """Decode into `out` without comparing checksums, if that was done before."""
        ...


@runtime_checkable
class Into(Protocol):
    """An ability: to decode into memory that is there, since fresh memory costs as much again."""

    def decode_into(self, parts: Parts, out: Tensor, each: Each) -> None:
        """Do what `decode` does, into a contiguous tensor of the kind that was encoded."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """An ability: to decode a run of items without all others."""

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An ability of what rounds: to tell how much was lost without decoding."""

    def relative_error(self, parts: Parts, x: Tensor) -> float:
        """Return the RMS of what `x` lost when it became `parts`, relative to the RMS of `x`."""
        ...


@cache  # asking a protocol is slow, and a model has thousands of tensors
def _can(cls: type[Codec], ability: type) -> bool:
    return issubclass(cls, ability)


def as_chunked(codec: Codec) -> Chunked | None:
    """Return `codec` itself if it has the ability `Chunked`."""
    return cast(Chunked, codec) if _can(type(codec), Chunked) else None


def as_into(codec: Codec) -> Into | None:
    """Return `codec` itself if it has the ability `Into`."""
    return cast(Into, codec) if _can(type(codec), Into) else None


C = TypeVar("C", bound=type[Codec])

_registry: dict[str, type[Codec]] = {}

_GROUP = "slimtensors.codecs"


def register(cls: C) -> C:
    """Make a codec known by its `name`."""
    if cls.name in _registry and _registry[cls.name] is not cls:
        raise ConfigError(f"codec {cls.name!r} is already registered")
    _registry[cls.name] = cls
    return cls


def names() -> list[str]:
    """List all codecs: ours and those of installed packages (entry point `slimtensors.codecs`)."""
    return sorted(_registry.keys() | {entry.name for entry in entry_points(group=_GROUP)})


def find(name: str) -> type[Codec]:
    """Return the codec class called `name`, loading the package that has it if need be."""
    if name not in _registry:
        for entry in entry_points(group=_GROUP, name=name):
            register(entry.load())
    if name not in _registry:
        raise UnknownCodecError(f"unknown codec {name!r}; {nearest(name, names())}")
    return _registry[name]


def to_json(codec: Codec) -> Json:
    """Return the name and configuration of `codec`."""
    return {"name": codec.name, **asdict(codec)}


def from_json(data: Mapping[str, Any]) -> Codec:
    """Build the codec that `data` describes."""
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


def empty_bytes(count: int) -> Tensor:
    """Return so many bytes with any content."""
    return torch.empty(count, dtype=torch.uint8)


def concatenate(pieces: Sequence[Tensor]) -> Tensor:
    """Lay pieces end to end; torch.cat would wake its own threads for it."""
    return torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))


def scale_slice(chunks: slice, size: int) -> slice:
    """Return where the bytes of some chunks lie that have `size` bytes each."""
    return slice(chunks.start * size, chunks.stop * size)


def chunk_groups(chunks: int, size: int) -> list[slice]:
    """Divide chunks into groups of `size`, the last one of what is left."""
    return [slice(i, min(i + size, chunks)) for i in range(0, chunks, size)]
