"""Deltas: a model stored as its difference from another one, exactly."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from slimtensors.archive.read import Archive, Progress
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan, encode
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.codecs.residual import KINDS, Kind, apply_residual, choose_residual
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.parallel import Each
from slimtensors.storage import StrPath, is_inside, local_path
from slimtensors.tensor import QUANTIZED_DTYPES, Json, as_bytes, bitwise_equal, dtype_name

_SAMPLE, _SAMPLES = 1 << 14, 8
"""Items of a piece that is coded to see what a tensor costs, and how many pieces are."""


def diff(
    new: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "lossless",
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write what `new` has that `base` has not. Lossless; `restore` needs the very same base.

    Tensors that are equal cost nothing, others are stored as differences where that is smaller.
    A preset that rounds is refused.
    """
    choose = lossless_only(presets.find(preset))
    after, before = as_archive(new, storage_options), as_archive(base, storage_options)
    check_base_kept(before, target)
    state = delta_source(after, before, choose)
    return write(state, target, preset=choose, dialect="slim", threads=threads, progress=progress)


def restore(
    delta: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "dense",
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the model that `diff` was given as `new`, bit for bit. Another base is refused."""
    return write(
        restored_source(as_archive(delta, storage_options), as_archive(base, storage_options)),
        target,
        preset=preset,
        dialect="slim",
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
    )


def as_archive(
    archive: StrPath | Archive, storage_options: dict[str, Any] | None = None
) -> Archive:
    """Open what is not open yet."""
    if isinstance(archive, Archive):
        return archive
    return Archive(archive, storage_options=storage_options)


def check_base_kept(base: Archive, target: StrPath) -> None:
    """Raise if `target` would take the place of the base, which its delta needs."""
    written, where = (Path(os.path.realpath(path)) for path in (local_path(target), base.path))
    folder = where if where.is_dir() else where.parent
    files = [folder / file for file in base.shards()]
    if any(written in (file, *file.parents) for file in files):
        raise ConfigError(f"{target}: holds the base, without which its delta is worth nothing")


def delta_source(
    new: Archive, base: Archive, choose: Chooser, *, files: Mapping[str, Any] | None = None
) -> ArchiveSource:
    """Return what to write so that `new` can be made from it and `base`.

    `files` describes in which files `new` lies, as `Changed` has it.
    """
    new.check_whole()
    base.check_whole()
    tied = new.tied()
    how: dict[str, list[str]] = {}

    def item(name: str) -> TensorSource:
        spec = new.spec(name)
        has_bytes = spec.dtype not in QUANTIZED_DTYPES  # whose scales lie elsewhere
        has_base = has_bytes and name in base and base.spec(name) == spec
        how[name] = ["whole"]  # in this order, whichever thread is first

        def read(each: Each) -> Tensor | None:
            x = new.load_one(name, each)
            if not has_base:
                return x
            y = base.load_one(name, each)
            if bitwise_equal(x, y):
                how[name] = ["same", tensor_digest(y)]
                return None
            kind, r = choose_residual(x, y, lambda r: estimate_bytes(name, r, choose), each=each)
            if kind != "whole":
                how[name] = [kind, tensor_digest(y)]
            return r

        return TensorSource(name, spec, read, always_blob=True)

    return ArchiveSource(
        [item(name) for name in new if name not in tied],
        tree=new.tree,
        delta={"tensors": how, "tied": tied, **(files or {})},
    )


@dataclass(frozen=True)
class DeltaManifest:
    """What the manifest of a delta says."""

    tensors: Mapping[str, list[str]]
    """For each tensor how it is stored, and the digest of the base's tensor if it needs one."""
    tied: Mapping[str, str]
    index: str | None = None
    """The name of the model's index, if it had several files."""
    files: Mapping[str, list[str]] | None = None
    """The model's files and the tensors in each, if it was not one file of the usual name."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DeltaManifest":
        """Parse what a manifest says."""
        match data:
            case {"tensors": dict(tensors), "tied": dict(tied)} if (
                all(map(_is_entry, tensors.values()))
                and tied.keys().isdisjoint(tensors)
                and set(tied.values()) <= tensors.keys()
                and _is_layout(data.get("index"), data.get("files"), tensors)
            ):
                return cls(tensors, tied, data.get("index"), data.get("files"))
        raise CorruptFileError("does not say how it differs from its base")

    @classmethod
    def of(cls, delta: Archive) -> "DeltaManifest":
        """Return what an archive says; raise if it is not a delta."""
        if delta.delta is None:
            raise ConfigError(f"{delta.path}: is not a delta, but whole")
        try:
            return cls.from_json(delta.delta)
        except CorruptFileError as error:
            raise CorruptFileError(f"{delta.path}: {error}") from error

    @property
    def base_digest(self) -> str:
        """What the tensors that are needed of the base have in common with no others."""
        lines = [f"{name} {entry[1]}\n" for name, entry in self.tensors.items() if entry[1:]]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:32]


def restored_source(delta: Archive, base: Archive) -> ArchiveSource:
    """Return the model that a delta and its base stand for, to be written or loaded."""
    changed = DeltaManifest.of(delta)
    base.check_whole()

    def item(name: str, entry: list[str]) -> TensorSource:
        if entry == ["whole"]:
            return TensorSource(name, delta.spec(name), lambda each: delta.load_one(name, each))
        if name not in base:
            raise MismatchError(f"{base.path}: {name}: is missing; this is not the delta's base")
        kind, want = entry

        def read(each: Each) -> Tensor:
            y = base.load_one(name, each)
            if tensor_digest(y) != want:
                raise MismatchError(
                    f"{base.path}: {name}: is not the tensor that {delta.path} was made from"
                )
            if kind == "same":
                return y
            r = delta.load_one(name, each)
            try:
                return apply_residual(cast(Kind, kind), r, y, each=each)
            except CorruptFileError as error:
                raise CorruptFileError(f"{delta.path}: {name}: {error}") from error

        return TensorSource(name, base.spec(name), read)

    items = [item(name, entry) for name, entry in changed.tensors.items()]
    return ArchiveSource(items, changed.tied, delta.tree)


def tensor_digest(x: Tensor) -> str:
    """Return 128 bits of SHA-256 over dtype, shape and bytes."""
    found = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)}\n".encode())
    found.update(as_bytes(x).numpy().data)
    return found.hexdigest()[:32]


def estimate_bytes(name: str, x: Tensor, choose: Chooser) -> float:
    """Estimate the bytes of a tensor from a few pieces of it, each coded alone as chunks are."""
    flat = x.reshape(-1)
    pieces = [flat]
    if flat.numel() > _SAMPLE * _SAMPLES:
        last = flat.numel() - _SAMPLE
        starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        pieces = [flat[start : start + _SAMPLE] for start in starts]
    coded = sum(_coded_bytes(name, piece, choose) for piece in pieces)
    return coded * flat.numel() / sum(piece.numel() for piece in pieces)


def lossless_only(choose: Chooser) -> Chooser:
    """Return a rule that raises where `choose` would round."""

    def chosen(name: str, x: Tensor) -> Choice | Plan | None:
        choice = choose(name, x)
        plan = _plan(choice)
        if plan is not None and plan.is_lossy:
            raise ConfigError(f"{name}: would be rounded; a delta needs a lossless preset")
        return choice

    return chosen


def _plan(choice: Choice | Plan | None) -> Plan | None:
    return choice.plan if isinstance(choice, Choice) else choice


def _coded_bytes(name: str, x: Tensor, choose: Chooser) -> int:
    plan = _plan(choose(name, x))
    if plan is None:
        return x.nbytes
    return min(sum(leaf.nbytes for _, leaf in encode(plan, x).leaves()), x.nbytes)


def _is_entry(entry: object) -> bool:
    match entry:
        case ["whole"]:
            return True
        case [str(kind), str()]:
            return kind == "same" or (kind in KINDS and kind != "whole")
    return False


def _is_layout(index: object, files: object, tensors: Json) -> bool:
    """Tell whether every tensor is in one of the files, and all of them may be written."""
    if files is None:
        return index is None
    if not isinstance(files, dict) or not all(_is_name(file, ".safetensors") for file in files):
        return False
    if not (_is_name(index, ".json") if index is not None else len(files) == 1):
        return False
    listed = [name for names in files.values() if isinstance(names, list) for name in names]
    return all(isinstance(name, str) for name in listed) and sorted(listed) == sorted(tensors)


def _is_name(file: object, ending: str) -> bool:
    return is_inside(file) and str(file).endswith(ending)
