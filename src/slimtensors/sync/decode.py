"""Decode a version: verified patches from archives and the tensors of a reader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.delta_manifest import DeltaManifest
from slimtensors.checkpoint.distributed.pieces import Box
from slimtensors.codecs.changes import decode_residual
from slimtensors.errors import CorruptFileError, MismatchError, report_malformed
from slimtensors.parallel import Each, Workers
from slimtensors.sync.manifest import Files, PublishedTensor, Version, digest_tensor
from slimtensors.sync.store import Store
from slimtensors.tensor import Spec, allocate, as_bytes, clone_bits, copy_into, to_cpu

_CHUNK = 1 << 20
"""Bytes per comparison."""
_SPARSE = 8
"""A patch with more than one in so many items changed contains the whole tensor."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Patch:
    """The items of one tensor that changed."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    indices: Tensor | None
    """Positions in the flat tensor, int64, ascending; None if `values` is the whole tensor."""
    values: Tensor


@dataclass(frozen=True)
class Route:
    """How to reach the newest version: from that of the reader, or from a keyframe, by deltas."""

    start: Version
    deltas: Sequence[Version]
    is_keyframe: bool
    size: int

    @property
    def target(self) -> Version:
        """The newest version."""
        return self.deltas[-1] if self.deltas else self.start


class DivergedError(MismatchError):
    """The tensors of the reader are not those of the version where a route starts."""


class Decoder:
    """The open files of a route."""

    def __init__(
        self,
        store: Store,
        route: Route,
        base: Mapping[str, Tensor] | None,
        folder: Path,
        workers: Workers,
    ) -> None:
        self._store, self._route, self._base = store, route, base
        versions = [(route.start, route.start.keyframe)] if route.is_keyframe else []
        versions += [(version, version.delta) for version in route.deltas]
        wanted = [(v, rank) for v, files in versions for rank in (files or {})]
        tables = {v.number: cast(Files, files) for v, files in versions}

        def open_file(i: int) -> Archive:
            version, rank = wanted[i]
            file = tables[version.number][rank]
            return Archive.from_location(store.fetch(version.number, file, folder, workers))

        opened = workers.each(open_file, len(wanted))
        self._archives = {
            (version.number, rank): archive
            for (version, rank), archive in zip(wanted, opened, strict=True)
        }
        self._entries = {
            key: DeltaManifest.from_archive(archive).tensors
            for key, archive in self._archives.items()
            if key[0] != route.start.number
        }

    def size(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._route.target.find(name).spec.nbytes

    def decode(self, each: Each, name: str) -> Patch | None:
        """Return what changes in one tensor, or None; raise unless the result is verified."""
        route, target = self._route, self._route.target.find(name)
        known = None if self._base is None else self._base.get(name)
        old = None if known is None else to_cpu(known)
        if route.is_keyframe:
            x = self._load_whole(name, each)
        else:
            assert old is not None
            start = route.start.find(name)
            if not _has_digests(old, start, each):
                raise DivergedError(f"{name}: differs from version {route.start.number}")
            x = old
        for version in route.deltas:
            x = self._apply_delta(name, version, x, each, is_ours=x is not old)
        if x is old:
            if start != target and not _has_digests(x, target, each):
                raise CorruptFileError(self._explain_damage(name))
            return None
        if Spec.of(x) != target.spec or not _has_digests(x, target, each):
            raise CorruptFileError(self._explain_damage(name))
        if old is None or Spec.of(old) != target.spec:
            return make_whole(name, x)
        is_flat = known is not None and known.is_contiguous()
        return _make_patch(name, x, old, allow_sparse=is_flat)

    def _explain_damage(self, name: str) -> str:
        number = self._route.target.number
        return (
            f"{self._store}: version {number}: {name}: the decoded tensor differs from the"
            " published digest; nothing was changed"
        )

    def _load_whole(self, name: str, each: Each) -> Tensor:
        version = self._route.start
        number, tensor = version.number, version.find(name)
        spec = tensor.spec
        whole = Box.whole(spec.shape)
        out: Tensor | None = None
        for key, part in tensor.keys(version.tied.get(name, name)):
            x = self._load(number, part.rank, key, each)
            if Spec.of(x) != Spec(spec.dtype, part.box.shape):
                raise CorruptFileError(self._explain_damage(name))
            if part.box == whole:
                return x
            out = allocate(spec) if out is None else out
            copy_into(part.box.narrow(out, whole), x)
        assert out is not None
        return out

    def _load(self, number: int, rank: int, key: str, each: Each) -> Tensor:
        archive = self._archives.get((number, rank))
        if archive is None or key not in archive:
            raise CorruptFileError(
                f"{self._store}: version {number}: {key}: not found in its files"
            )
        return archive.load_one(key, each)

    def _apply_delta(
        self, name: str, version: Version, x: Tensor, each: Each, *, is_ours: bool
    ) -> Tensor:
        """Return the tensor of this version; `x` is changed only if `is_ours`."""
        tensor, number = version.find(name), version.number
        whole = Box.whole(tensor.spec.shape)
        for key, part in tensor.keys(version.tied.get(name, name)):
            entry = self._entries.get((number, part.rank), {}).get(key)
            if entry is None:
                raise CorruptFileError(
                    f"{self._store}: version {number}: {key}: not found in its files"
                )
            kind, *_ = entry
            if kind == "same":
                continue
            base = part.box.narrow(x, whole)
            loaded = self._load(number, part.rank, key, each)
            with report_malformed(f"{self._store}: version {number}: {name}"):
                new = decode_residual(kind, loaded, base, each)
            if Spec.of(new) != Spec(tensor.spec.dtype, part.box.shape):
                raise CorruptFileError(self._explain_damage(name))
            if part.box == whole:
                return new
            if not is_ours:
                x, is_ours = clone_bits(x), True
            copy_into(part.box.narrow(x, whole), new)
        return x


def _digest_part(
    box: Box, x: Tensor, whole: Box, each: Each, known: dict[Box, str] | None = None
) -> str:
    known = {} if known is None else known
    if box not in known:
        known[box] = digest_tensor(box.narrow(x, whole), each)
    return known[box]


def filter_versions(versions: Sequence[Version], name: str, x: Tensor, each: Each) -> list[Version]:
    """Return the versions with this tensor; each part of it is hashed once."""
    whole, digests = Box.whole(tuple(x.shape)), dict[Box, str]()

    def contains(version: Version) -> bool:
        tensor = version.find(name)
        return tensor.spec == Spec.of(x) and all(
            _digest_part(part.box, x, whole, each, digests) == part.digest for part in tensor.parts
        )

    return [version for version in versions if version.has(name) and contains(version)]


def _has_digests(x: Tensor, tensor: PublishedTensor, each: Each) -> bool:
    whole = Box.whole(tuple(x.shape))
    return x.shape == tensor.spec.shape and all(
        _digest_part(part.box, x, whole, each) == part.digest for part in tensor.parts
    )


def make_whole(name: str, x: Tensor) -> Patch:
    """Return a patch that contains the whole tensor."""
    return Patch(name, tuple(x.shape), x.dtype, None, x)


def _make_patch(name: str, new: Tensor, old: Tensor, *, allow_sparse: bool) -> Patch | None:
    """Return the difference of two tensors, None if there is none."""
    found = _find_changes(new, old, new.numel() // _SPARSE if allow_sparse else 0)
    if found is None:
        return make_whole(name, new)
    positions, values = found
    if not positions.size:
        return None
    words = torch.from_numpy(values).view(new.dtype)
    return Patch(name, tuple(new.shape), new.dtype, torch.from_numpy(positions), words)


_Array = np.ndarray[Any, np.dtype[Any]]


def _find_changes(new: Tensor, old: Tensor, limit: int) -> tuple[_Array, _Array] | None:
    """Return the flat positions of items with other bits, and these items.

    Return None if there are more than `limit`.
    """
    size = new.element_size()
    words = f"i{size}" if size in _WORDS and size > 1 else "u1"
    a, b = (as_bytes(x).numpy().view(words) for x in (new, old))
    step = _CHUNK // a.itemsize
    positions, values = [np.zeros(0, np.int64)], [np.zeros(0, words)]
    count = 0
    for begin in range(0, a.size, step):
        chunk = a[begin : begin + step]
        differs = chunk != b[begin : begin + step]
        if not differs.any():
            continue
        found = np.flatnonzero(differs)
        count += found.size
        if count > limit or a.itemsize != size:
            return None
        positions.append(found + begin)
        values.append(chunk[found])
    return np.concatenate(positions), np.concatenate(values)


def apply_patch(patch: Patch, target: Tensor) -> None:
    """Change a tensor in place; its gradient and version counter are not involved."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target = target.detach()
        if patch.indices is None:
            copy_into(target, patch.values)
            return
        words = _WORDS[target.element_size()]
        flat = target.view(words).view(-1)
        flat[patch.indices.to(flat.device)] = patch.values.view(words).to(flat.device)
