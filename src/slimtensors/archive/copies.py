"""Find tensors with the same bits in different memory, which are stored once."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from slimtensors.archive.dialects.entries import MAX_COPIES, checksum
from slimtensors.parallel import serially
from slimtensors.tensor import as_bytes, bitwise_equal

_MIN_BYTES = 1024
"""Smaller tensors take little more space than the name of the tensor they equal."""
_SAMPLES, _SAMPLE_BYTES = 4, 256

Key = TypeVar("Key", bound=Hashable)


def find_copies(tensors: Mapping[str, Tensor], shared: Collection[str] = ()) -> dict[str, str]:
    """Return {name: name of another tensor with equal dtype, shape and bits}.

    Tensors that share memory must be listed once. Those in `shared`, to which other names are
    tied, may have copies, but are not copies themselves. Almost all comparisons end after samples
    of a tensor; the rest of it is read only if another tensor has the same samples.
    """
    plain = [
        (name, x)
        for name, x in tensors.items()
        if x.nbytes >= _MIN_BYTES and not x.is_quantized and type(x) in _PLAIN_TYPES
    ]
    found: dict[str, str] = {}
    for group in _group(((x.dtype, x.shape, x.device), name) for name, x in plain):
        for similar in _group((_read_samples(tensors[name]), name) for name in group):
            for equal in _group((_checksum(tensors[name]), name) for name in similar):
                _match(equal, tensors, shared, found)
    return found


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _match(
    names: list[str],
    tensors: Mapping[str, Tensor],
    shared: Collection[str],
    found: dict[str, str],
) -> None:
    """Compare tensors of one checksum bit by bit."""
    homes = {name: 0 for name in names if name in shared}
    for name in [name for name in names if name not in shared]:
        for home, count in homes.items():
            if count < MAX_COPIES and bitwise_equal(_plain(tensors[name]), _plain(tensors[home])):
                found[name] = home
                homes[home] += 1
                break
        else:
            homes[name] = 0


def _group(pairs: Iterable[tuple[Key, str]]) -> Iterator[list[str]]:
    """Yield the names with equal keys, at least two at a time."""
    groups: dict[Key, list[str]] = {}
    for key, name in pairs:
        groups.setdefault(key, []).append(name)
    yield from (names for names in groups.values() if len(names) > 1)


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _read_samples(x: Tensor) -> bytes:
    raw = as_bytes(_plain(x))
    step = (raw.numel() - _SAMPLE_BYTES) // (_SAMPLES - 1)
    parts = [raw[i * step : i * step + _SAMPLE_BYTES] for i in range(_SAMPLES)]
    return bytes(torch.cat(parts).cpu().numpy())


def _checksum(x: Tensor) -> int:
    """Return a checksum of all bytes; 0 on other devices, where a comparison is faster."""
    return checksum(as_bytes(_plain(x)), serially) if x.device.type == "cpu" else 0
