"""Find the base of a delta, and read the delta as the model that it represents.

A base is identified by content: the digests that a delta stores of the tensors it needs. Names and
ids in a delta only change where, or in which order, candidates are looked for. A candidate is
checked by its headers first, then by a few tensors; all others are checked as they are decoded.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import Tensor

from slimtensors.archive.base_places import (
    VARIABLE,
    find_cached,
    find_home,
    find_listed,
    find_siblings,
    read_hint,
)
from slimtensors.archive.delta_manifest import DeltaManifest, tensor_digest
from slimtensors.archive.dialects import Member
from slimtensors.archive.dialects.entries import TensorInfo
from slimtensors.archive.read import Archive, open_stored
from slimtensors.codecs.changes import CHANGE_KINDS, decode_residual
from slimtensors.errors import (
    CorruptFileError,
    MismatchError,
    SlimError,
)
from slimtensors.parallel import Each, serially
from slimtensors.storage import LocalLocation, Location, StoredFile, StrPath
from slimtensors.tensor import Json, Spec

MAX_CHAIN = 16
"""Maximum number of deltas in a chain, each of which is the base of the next one."""

_PROBES = 8
"""Number of tensors of a candidate that are compared before it is used."""
_MAX_PROBE = 64 << 20
"""Maximum bytes of such a tensor, unless all are larger."""
_SHOWN = 4
"""Number of rejected candidates in an error message."""

_explicit: ContextVar[StrPath | Archive | None] = ContextVar("base", default=None)


@contextmanager
def using_base(base: StrPath | Archive) -> Iterator[None]:
    """Use this base for the deltas that are opened in the context, also by other libraries.

    Example:
        >>> import slimtensors
        >>> from transformers import AutoModel
        >>> with slimtensors.using_base("models/my-model"):
        ...     model = AutoModel.from_pretrained("my-finetune-delta")
    """
    token = _explicit.set(base)
    try:
        yield
    finally:
        _explicit.reset(token)


@dataclass(frozen=True)
class FoundBase:
    """A model that may be the base of a delta, and how it was found."""

    archive: Archive
    found_by: str
    """`argument`, `context`, `sibling`, `hub cache` or `SLIMTENSORS_BASES`."""

    def __str__(self) -> str:
        return f"{self.archive.path} (found by: {self.found_by})"

    def to_json(self) -> Json:
        """Return the JSON form."""
        inner = self.archive.base
        chain = {"base": inner.found.to_json()} if inner else {}
        return {"path": self.archive.path, "found_by": self.found_by, **chain}


class Base:
    """The base of an open delta: the first candidate that fits.

    If a tensor differs nevertheless, the next candidate is used.
    """

    def __init__(self, found: FoundBase, others: Iterator[FoundBase], delta: str) -> None:
        self.found = found
        self._others, self._delta, self._lock = others, delta, Lock()

    def paths(self) -> list[str]:
        """Return all paths that are read."""
        return self.found.archive.paths()

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self.found.archive.spec(name)

    def load(self, name: str, digest: str, each: Each) -> Tensor:
        """Read and decode a tensor; raise if no candidate has one with this digest."""
        while True:
            found = self.found
            if name in found.archive:
                x = found.archive.load_one(name, each)
                if tensor_digest(x) == digest:
                    return x
            self._replace(found, name)

    def _replace(self, failed: FoundBase, name: str) -> None:
        with self._lock:
            if self.found is not failed:  # another thread has replaced it
                return
            other = next(self._others, None)
            if other is None:
                raise MismatchError(
                    f"{failed.archive.path}: {name}: {_differs(self._delta)} (the base was found"
                    f" by: {failed.found_by}); pass the original base"
                )
            self.found = other


def _differs(delta: str) -> str:
    return f"differs from the tensor that {delta} was made from"


@dataclass(frozen=True, slots=True)
class DeltaMember:
    """A tensor that is stored as its difference from one of the base."""

    residuals: Archive
    name: str
    kind: str
    digest: str
    base: Base
    base_name: str

    @property
    def file(self) -> StoredFile:
        """File that contains the residual."""
        return self._stored.file if self._stored else self.residuals.files[0]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the residual."""
        return self._stored.stored_bytes if self._stored else 0

    @property
    def _stored(self) -> Member | None:
        return None if self.kind == "same" else self.residuals.member(self.name)

    def spec(self) -> Spec:
        """Return dtype and shape, which are those of the base."""
        return self.base.spec(self.base_name)

    def info(self) -> TensorInfo:
        """Return how the residual is stored."""
        if self._stored is None:
            return TensorInfo(self.spec(), None, {}, codec="same as base")
        stored = self._stored.info()
        codec = f"{self.kind}({stored.plan or 'plain'})"
        return TensorInfo(self.spec(), None, stored.parts, codec=codec)

    def load(self, each: Each) -> Tensor:
        """Read the tensor of the base, check it, and apply the residual."""
        y = self.base.load(self.base_name, self.digest, each)
        if self.kind == "same":
            return y
        r = self.residuals.load_one(self.name, each)
        try:
            return decode_residual(self.kind, r, y, each)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self.residuals.path}: {self.name}: {error}") from error

    def load_exact(self, each: Each) -> list[Tensor]:
        """Return the tensor."""
        return [self.load(each)]


def is_resolvable(archive: Archive) -> bool:
    """Return True if this is a delta of a model; deltas of checkpoints name their base."""
    return archive.is_delta and "checkpoint" not in (archive.delta or {})


def resolve(
    delta: Archive,
    base: StrPath | Archive | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Archive:
    """Return the model that a delta represents; its tensors are decoded on demand.

    Raises `MismatchError` if `base` is not the base of the delta, or if no base is found.
    """
    return _Search(storage_options).resolve(delta, base)


def describe_delta(delta: Archive, base: StrPath | Archive | None = None) -> Json:
    """Return which base a delta needs, and which one is found (`delta` in summary.json)."""
    manifest = DeltaManifest.from_archive(delta)
    hint = read_hint(delta, manifest)
    found: Json | None = None
    problem: str | None = None
    try:
        model = resolve(delta, base)
    except MismatchError as error:
        if base is not None:
            raise
        problem = str(error)
    else:
        found = model.base.found.to_json() if model.base else None
    return {
        "base": hint.name,
        "base_model": hint.model,
        "base_revision": hint.revision,
        "digest": manifest.base_digest,
        "needed": len(manifest.needed()),
        "kinds": dict(sorted(Counter(kind for kind, *_ in manifest.tensors.values()).items())),
        "renamed": len(manifest.names),
        "found": found,
        "problem": problem,
    }


def chain_length(archive: Archive) -> int:
    """Return the number of deltas that are read with an archive."""
    length, base = 0, archive.base
    while base:
        length, base = length + 1, base.found.archive.base
    return length


@dataclass
class _Search:
    """The deltas and candidates of one search, so that none is opened twice."""

    storage_options: dict[str, Any] | None = None
    opened: dict[str, Archive | str] = field(default_factory=dict)
    """Candidates by path, or why they cannot be used."""
    chain: list[str] = field(default_factory=list)
    """Deltas whose bases are searched for."""

    def resolve(self, delta: Archive, base: StrPath | Archive | None = None) -> Archive:
        """Return the model that a delta represents."""
        manifest = DeltaManifest.from_archive(delta)
        needed = manifest.needed()
        members: dict[str, Member] = {}
        found: Base | None = None
        if needed or base is not None:
            own = _real_path(delta)
            if own in self.chain:
                raise MismatchError(f"{delta.path} is the base of itself (a cycle of deltas)")
            if len(self.chain) >= MAX_CHAIN:
                raise MismatchError(
                    f"{delta.path}: chain of more than {MAX_CHAIN} deltas; restore one of them"
                    " first"
                )
            self.chain.append(own)
            try:
                found = self._find(delta, manifest, base)
            finally:
                self.chain.remove(own)
        for name, (kind, *digest) in manifest.tensors.items():
            if kind == "whole":
                members[name] = delta.member(name)
            else:
                assert found is not None, "it needs a base"
                home = manifest.names.get(name, name)
                members[name] = DeltaMember(delta, name, kind, digest[0], found, home)
        members |= {name: members[home] for name, home in manifest.tied.items()}
        return delta.resolve(members, found)

    def _find(
        self, delta: Archive, manifest: DeltaManifest, base: StrPath | Archive | None
    ) -> Base:
        way = "argument"
        if base is None and len(self.chain) == 1:
            base, way = _explicit.get(), "context"
        if base is not None:
            archive = open_stored(base, self.storage_options)
            if is_resolvable(archive):
                archive = self.resolve(archive)
            archive.check_not_delta()
            if problem := _compare_names(archive, manifest) or _probe(archive, delta, manifest):
                raise MismatchError(f"{archive.path}: {problem}")
            return Base(FoundBase(archive, way), iter(()), delta.path)
        rejected: list[str] = []
        candidates = self._search(delta, manifest, rejected)
        first = next(candidates, None)
        if first is None:
            raise MismatchError(_explain_missing(delta, manifest, rejected))
        return Base(first, candidates, delta.path)

    def _search(
        self, delta: Archive, manifest: DeltaManifest, rejected: list[str]
    ) -> Iterator[FoundBase]:
        """Yield all candidates that fit, in the order of the ways to find them."""
        chain = list(self.chain)
        hint = read_hint(delta, manifest)
        ways = {
            "sibling": find_siblings(delta, hint, rejected),
            "hub cache": find_cached(delta, hint, rejected),
            VARIABLE: find_listed(rejected),
        }
        seen: set[str] = set()
        for way, places in ways.items():
            deltas: list[tuple[str, Archive]] = []
            for place in places:
                path = os.path.realpath(str(place)) if isinstance(place, LocalLocation) else ""
                path = path or str(place)
                if path in seen:
                    continue
                seen.add(path)
                archive = self._open(path, place)
                if isinstance(archive, str):
                    rejected.append(archive)
                elif archive.is_delta and place.name != hint.name:
                    deltas.append((path, archive))  # after all complete models
                elif found := self._check(path, archive, delta, manifest, chain, rejected):
                    yield FoundBase(found, way)
            for path, archive in deltas:
                if found := self._check(path, archive, delta, manifest, chain, rejected):
                    yield FoundBase(found, way)

    def _open(self, path: str, place: Location) -> Archive | str:
        if path not in self.opened:
            try:
                self.opened[path] = Archive.from_place(place)
            except (SlimError, OSError) as error:
                self.opened[path] = str(error)
        return self.opened[path]

    def _check(
        self,
        path: str,
        archive: Archive,
        delta: Archive,
        manifest: DeltaManifest,
        chain: list[str],
        rejected: list[str],
    ) -> Archive | None:
        """Return a candidate, resolved if it is a delta; None if it is not the base."""
        if archive.is_delta:
            if not is_resolvable(archive):
                return None
            before, self.chain = self.chain, chain  # candidates may be needed later
            try:
                archive = self.resolve(archive)
            except (SlimError, OSError) as error:
                self.opened[path] = str(error)
                rejected.append(str(error))
                return None
            finally:
                self.chain = before
            self.opened[path] = archive
        try:
            problem = _compare_headers(archive, delta, manifest)
            problem = problem or _probe(archive, delta, manifest)
        except (SlimError, OSError) as error:
            rejected.append(str(error))
            return None
        if problem:
            rejected.append(f"{archive.path}: {problem}")
        return None if problem else archive


def _real_path(archive: Archive) -> str:
    """Return the path that identifies an archive: that of the folder for a delta in a folder."""
    place = find_home(archive)
    return os.path.realpath(place.path) if isinstance(place, LocalLocation) else str(place)


def _compare_names(candidate: Archive, manifest: DeltaManifest) -> str:
    """Return why a model cannot be the base of a delta, by its names; empty if it can."""
    for home, _ in manifest.needed().values():
        if home not in candidate:
            return f"{home}: not found; this is not the base of the delta"
    return ""


def _compare_headers(candidate: Archive, delta: Archive, manifest: DeltaManifest) -> str:
    """Return why a model cannot be the base of a delta, by its headers; empty if it can."""
    if problem := _compare_names(candidate, manifest):
        return problem
    for name, (home, _) in manifest.needed().items():
        if manifest.tensors[name][0] not in ("same", *CHANGE_KINDS):  # streams of any size
            like, spec = delta.spec(name), candidate.spec(home)
            if (like.numel, like.dtype.itemsize) != (spec.numel, spec.dtype.itemsize):
                return f"{home}: {_differs(delta.path)}"
    return ""


def _probe(candidate: Archive, delta: Archive, manifest: DeltaManifest) -> str:
    """Return why a model is not the base of a delta, by some tensors; empty if they are equal."""
    needed = manifest.needed()
    for name in _choose_probes(candidate, manifest):
        home, digest = needed[name]
        if tensor_digest(candidate.load_one(home, serially)) != digest:
            return f"{home}: {_differs(delta.path)}"
    return ""


def _choose_probes(candidate: Archive, manifest: DeltaManifest) -> list[str]:
    """Return names of tensors to compare, of different sizes.

    Half of them changed, as in other fine-tunes of the base; half did not, as opposed to earlier
    models in a chain.
    """
    needed = manifest.needed()
    size = {name: candidate.spec(home).nbytes for name, (home, _) in needed.items()}
    ordered = sorted(needed, key=lambda name: size[name])
    small = [name for name in ordered if size[name] <= _MAX_PROBE] or ordered[:1]
    changed = [name for name in small if manifest.tensors[name][0] != "same"]
    equal = [name for name in small if manifest.tensors[name][0] == "same"]
    return [*_spread(changed, _PROBES // 2), *_spread(equal, _PROBES // 2)]


def _spread(names: list[str], count: int) -> list[str]:
    """Return at most `count` names at equal distances."""
    count = min(count, len(names))
    return [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]


def _explain_missing(delta: Archive, manifest: DeltaManifest, rejected: list[str]) -> str:
    """Return the message of the error for a base that was not found."""
    hint = read_hint(delta, manifest)
    needed = [home for home, _ in manifest.needed().values()]
    name = hint.model or hint.name
    what = f"its base {name!r}" if name else "its base"
    where = (
        f"download it with `hf download {hint.model}"
        + (f" --revision {hint.revision}`" if hint.revision else "`")
        if hint.model
        else "download that model"
    )
    tried = "".join(f"; not the base: {reason}" for reason in rejected[:_SHOWN])
    if len(rejected) > _SHOWN:
        tried += f"; {len(rejected) - _SHOWN} other models do not match either"
    return (
        f"{delta.path} is a delta, and {what} was not found (digest {manifest.base_digest},"
        f" {len(needed)} tensors such as {needed[0]}); {where}, then put it beside the delta, in a"
        f" folder of {VARIABLE}, or pass base= (--base){tried}"
    )
