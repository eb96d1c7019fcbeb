"""Deltas: store an archive as its exact difference from a base."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from slimtensors.archive.decompress import make_exact_file
from slimtensors.archive.originals import (
    Originals,
    find_originals,
    read_originals,
    store_originals,
)
from slimtensors.archive.read import Archive, Progress, open_archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan, encode
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.codecs.residual import KINDS, ResidualKind, apply_residual, choose_residual
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError, report_malformed
from slimtensors.parallel import Each
from slimtensors.storage import StrPath, check_separate, is_inside, locate
from slimtensors.tensor import QUANTIZED_DTYPES, Json, as_bytes, bitwise_equal, dtype_name

_SAMPLE, _SAMPLES = 1 << 14, 8
"""Items per sample and number of samples encoded to estimate the size of a tensor."""
_MIN_SHARE = 0.1
"""Smallest share of a model that its base must have; below, the models are not related."""


def diff(
    new: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "lossless",
    unrelated: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the difference of `new` from `base`. Lossless; `restore` needs the same base.

    Equal tensors take no space; others are stored as residuals where that is smaller. Raises
    `MismatchError` if the models have almost no tensors in common.

    Args:
        new, base: paths or open archives.
        target: path of the delta, a file or a folder.
        preset: a lossless preset, plan, or function that chooses plans for the residuals.
        unrelated: whether to accept a base with other tensors.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> weight = torch.randn(256, 256, dtype=torch.bfloat16)
        >>> _ = slimtensors.save({"w": weight}, "base.safetensors")
        >>> _ = slimtensors.save({"w": weight * 1.01}, "new.safetensors")
        >>> _ = slimtensors.diff("new.safetensors", "base.safetensors", "delta.safetensors")
        >>> _ = slimtensors.restore("delta.safetensors", "base.safetensors", "again.safetensors")
        >>> bool(slimtensors.verify("again.safetensors", against="new.safetensors"))
        True
    """
    choose = require_lossless(presets.find(preset))
    after, before = open_archive(new, storage_options), open_archive(base, storage_options)
    to = locate(target, storage_options=storage_options)
    check_separate(to, [*after.paths(), *before.paths()])
    if not unrelated:
        BaseMatch.of(after, before).check()
    source = make_delta_source(after, before, choose)
    options = WriteOptions(
        preset=choose, threads=threads, progress=progress, storage_options=storage_options
    )
    return write(source, target, options).summary()


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
    """Write the archive that was passed to `diff` as `new`, bit for bit.

    If that was one plain file and `preset` is unchanged, the file is identical, byte for byte.
    Raises `MismatchError` if `base` is not the base of the delta. See `diff` for an example.

    Args:
        delta, base: paths or open archives.
        target: path of the restored archive, a file or a folder.
        preset: how to store the restored tensors; default: plain.
        max_shard_size: maximum bytes per file, such as `"5GB"`; writes shards and an index.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
    """
    changes = open_archive(delta, storage_options)
    before = open_archive(base, storage_options)
    to = locate(target, storage_options=storage_options)
    check_separate(to, [*changes.paths(), *before.paths()])
    source = make_restored_source(changes, before)
    options = WriteOptions(
        preset=preset,
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )
    if preset == "dense" and max_shard_size is None:
        source = make_exact_file(source, find_restored(changes, source), target, options)
    return write(source, target, options).summary()


@dataclass(frozen=True)
class BaseMatch:
    """How much of a model has a tensor of the same name, dtype and shape in the base."""

    new: str
    base: str
    tensors: int
    """Tensors of the model, without tied ones."""
    matched: int
    """Those with a counterpart in the base."""
    share: float
    """Fraction of the bytes that have a counterpart."""

    @classmethod
    def of(cls, new: Archive, base: Archive) -> "BaseMatch":
        """Compare the descriptions of all tensors; raise if one of the models is a delta."""
        new.check_not_delta()
        base.check_not_delta()
        tied = new.tied()
        specs = {name: new.spec(name) for name in new if name not in tied}
        matched = [name for name in specs if name in base and base.spec(name) == specs[name]]
        total = sum(spec.nbytes for spec in specs.values())
        share = sum(specs[name].nbytes for name in matched) / total if total else 1.0
        return cls(new.path, base.path, len(specs), len(matched), share)

    def __str__(self) -> str:
        return (
            f"{self.matched} of {self.tensors} tensors match the base ({self.share:.0%} of bytes)"
        )

    def check(self) -> None:
        """Raise if a delta would not be smaller than the model itself."""
        if self.share < _MIN_SHARE:
            raise MismatchError(
                f"{self.new} and {self.base} have little in common: {self} in name, dtype and"
                " shape; use another base, compress the model instead, or pass unrelated=True"
                " (--force)"
            )

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"tensors": self.tensors, "matched": self.matched, "share": self.share}


def make_delta_source(
    new: Archive, base: Archive, choose: Chooser, *, files: Mapping[str, Any] | None = None
) -> ArchiveSource:
    """Return the delta from `base` to `new`, to be written.

    `files` are the fields `index` and `files` of `DeltaManifest`.
    """
    new.check_not_delta()
    base.check_not_delta()
    tied = new.tied()
    originals = store_originals(find_originals(new), new.keys(), new.path)
    entries: dict[str, list[str]] = {}

    def make_item(name: str) -> TensorSource:
        spec = new.spec(name)
        is_plain = spec.dtype not in QUANTIZED_DTYPES  # bytes without scales
        has_base = is_plain and name in base and base.spec(name) == spec
        entries[name] = ["whole"]  # now, so that the order does not depend on threads

        def read(each: Each) -> Tensor | None:
            x = new.load_one(name, each)
            if not has_base:
                return x
            y = base.load_one(name, each)
            if bitwise_equal(x, y):
                entries[name] = ["same", tensor_digest(y)]
                return None
            kind, r = choose_residual(x, y, lambda r: estimate_bytes(name, r, choose), each=each)
            if kind != "whole":
                entries[name] = [kind, tensor_digest(y)]
            return r

        return TensorSource(name, spec, read, always_blob=True)

    return ArchiveSource(
        [make_item(name) for name in new if name not in tied],
        tree=new.tree,
        delta={"tensors": entries, "tied": tied, **(files or {})},
        originals=originals,
    )


@dataclass(frozen=True)
class DeltaManifest:
    """The manifest of a delta."""

    tensors: Mapping[str, list[str]]
    """Name -> [kind], or [kind, digest of the base tensor]."""
    tied: Mapping[str, str]
    index: str | None = None
    """File name of the index of the original, if it was sharded."""
    files: Mapping[str, list[str]] | None = None
    """File -> tensors of the original, unless it was one file with the default name."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DeltaManifest":
        """Parse the JSON form."""
        match data:
            case {"tensors": dict(tensors), "tied": dict(tied)} if (
                all(map(_is_entry, tensors.values()))
                and tied.keys().isdisjoint(tensors)
                and set(tied.values()) <= tensors.keys()
                and _is_layout(data.get("index"), data.get("files"), tensors)
            ):
                return cls(tensors, tied, data.get("index"), data.get("files"))
        raise CorruptFileError("malformed delta: missing or invalid tensor entries")

    @classmethod
    def from_archive(cls, delta: Archive) -> "DeltaManifest":
        """Return the manifest of an archive; raise if it is not a delta."""
        if delta.delta is None:
            raise ConfigError(f"{delta.path} is not a delta")
        with report_malformed(f"{delta.path}: delta"):
            manifest = cls.from_json(delta.delta)
        for name, entry in manifest.tensors.items():
            if entry[0] != "same" and name not in delta:
                raise CorruptFileError(f"{delta.path}: {name}: listed in the delta, but not found")
        return manifest

    @property
    def base_digest(self) -> str:
        """Digest of all tensors that are needed from the base."""
        lines = [f"{name} {entry[1]}\n" for name, entry in self.tensors.items() if entry[1:]]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:32]


def make_restored_source(delta: Archive, base: Archive) -> ArchiveSource:
    """Return the original that a delta and its base represent, to be written or loaded."""
    manifest = DeltaManifest.from_archive(delta)
    base.check_not_delta()

    def make_item(name: str, entry: list[str]) -> TensorSource:
        if entry == ["whole"]:
            return TensorSource(name, delta.spec(name), lambda each: delta.load_one(name, each))
        if name not in base:
            raise MismatchError(
                f"{base.path}: {name}: not found; this is not the base of the delta"
            )
        kind, digest = entry

        def read(each: Each) -> Tensor:
            y = base.load_one(name, each)
            if tensor_digest(y) != digest:
                raise MismatchError(
                    f"{base.path}: {name}: differs from the tensor that {delta.path} was made from"
                )
            if kind == "same":
                return y
            r = delta.load_one(name, each)
            try:
                return apply_residual(cast(ResidualKind, kind), r, y, each=each)
            except CorruptFileError as error:
                raise CorruptFileError(f"{delta.path}: {name}: {error}") from error

        return TensorSource(name, base.spec(name), read)

    items = [make_item(name, entry) for name, entry in manifest.tensors.items()]
    source = ArchiveSource(items, manifest.tied, delta.tree)
    names = [*manifest.tensors, *manifest.tied]
    originals = store_originals(find_restored(delta, source), names, delta.path)
    return replace(source, originals=originals)


def find_restored(delta: Archive, source: ArchiveSource) -> Originals | None:
    """Return the files that a delta was made from; None if it does not describe them completely."""
    originals = read_originals(delta)
    if originals is None:
        return None
    specs = {item.name: item.spec for item in source.items}
    specs |= {name: specs[home] for name, home in source.tied.items()}
    return originals if originals.describe_all(specs, source.tied) else None


def tensor_digest(x: Tensor) -> str:
    """Return the first 128 bits of SHA-256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)}\n".encode())
    digest.update(as_bytes(x).numpy().data)
    return digest.hexdigest()[:32]


def estimate_bytes(name: str, x: Tensor, choose: Chooser) -> float:
    """Estimate the encoded size of a tensor from a few samples of it."""
    flat = x.reshape(-1)
    if not flat.numel():
        return 0.0
    samples = [flat]
    if flat.numel() > _SAMPLE * _SAMPLES:
        last = flat.numel() - _SAMPLE
        starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        samples = [flat[start : start + _SAMPLE] for start in starts]
    coded = sum(_coded_bytes(name, sample, choose) for sample in samples)
    return coded * flat.numel() / sum(sample.numel() for sample in samples)


def require_lossless(choose: Chooser) -> Chooser:
    """Return a chooser that raises where `choose` would round."""

    def choose_lossless(name: str, x: Tensor) -> Choice | Plan | None:
        choice = choose(name, x)
        plan = _plan_of(choice)
        if plan is not None and plan.is_lossy:
            raise ConfigError(f"{name}: {plan} is lossy; a delta needs a lossless preset")
        return choice

    return choose_lossless


def _plan_of(choice: Choice | Plan | None) -> Plan | None:
    return choice.plan if isinstance(choice, Choice) else choice


def _coded_bytes(name: str, x: Tensor, choose: Chooser) -> int:
    plan = _plan_of(choose(name, x))
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
    """Return True if each tensor is in exactly one file and all file names are safe."""
    if files is None:
        return index is None
    if not isinstance(files, dict) or not all(
        _is_safe_name(file, ".safetensors") for file in files
    ):
        return False
    if not (_is_safe_name(index, ".json") if index is not None else len(files) == 1):
        return False
    listed = [name for names in files.values() if isinstance(names, list) for name in names]
    return all(isinstance(name, str) for name in listed) and sorted(listed) == sorted(tensors)


def _is_safe_name(file: object, ending: str) -> bool:
    return is_inside(file) and str(file).endswith(ending)
