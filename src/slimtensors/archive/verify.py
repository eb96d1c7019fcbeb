"""Check archives for damage, and compare two of them bit by bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slimtensors.archive.originals import find_originals, read_originals
from slimtensors.archive.read import Archive, Progress, open_archive, open_stored
from slimtensors.codecs import TorchQuantized
from slimtensors.errors import FormatError
from slimtensors.parallel import Workers
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, Spec, as_bytes, bitwise_equal, dtype_name

FilesVerdict = Literal["identical", "different", "unknown"]
"""`identical`: byte for byte. `unknown`: the headers of the original files are not stored."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. True if nothing is damaged or different."""

    tensors: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason, for tensors that cannot be read."""
    different: Mapping[str, str] = field(default_factory=dict)
    """Name -> difference, for tensors that differ between the archives."""
    equal: int | None = None
    """Number of tensors that are bitwise equal in both archives; None without another archive."""
    files: FilesVerdict | None = None
    """Whether decompressed files would be identical to those of the other archive."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.different

    def to_json(self) -> Json:
        """Return the result as JSON (schema: `docs/schemas/verify.json`)."""
        data: Json = {
            "ok": bool(self),
            "tensors": self.tensors,
            "damaged": dict(self.damaged),
            "different": dict(self.different),
        }
        if self.equal is not None:
            data |= {"equal": self.equal, "files": self.files}
        return data


def verify(
    path: StrPath | Archive,
    *,
    against: StrPath | None = None,
    base: StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Verification:
    """Decode every tensor and check all checksums; compare bitwise with `against`, if given.

    Raises `FormatError` if a file cannot be opened. The tensors of a delta are its residuals,
    unless it is compared with a model, or `base` is given: then they are those of its model.

    Args:
        path: file, folder, URL or open archive to check.
        against: another archive that should contain the same tensors.
        base: the base of a delta; if it is compared, the default is what `open` finds.
        threads: number of threads; default: one per core.
        progress: called with the number of stored bytes just processed.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> _ = slimtensors.save({"weight": torch.eye(256)}, "model.safetensors")
        >>> bool(slimtensors.verify("model.safetensors"))
        True
    """
    damaged: dict[str, str] = {}
    different: dict[str, str] = {}
    archive = open_stored(path, storage_options)
    other = open_stored(against, storage_options) if against is not None else None
    if base is not None or (other is not None and archive.is_delta != other.is_delta):
        archive = open_archive(archive, storage_options, base=base)
        archive.check_not_delta()
        if other is not None:
            other = open_archive(other, storage_options)
            other.check_not_delta()
    with archive, Workers(threads) as workers:
        if other is not None:
            different |= {name: f"only in {archive.path}" for name in archive if name not in other}
            different |= {name: f"only in {against}" for name in other if name not in archive}
            deltas = [x.delta if x.is_delta else None for x in (archive, other)]
            if archive.tree != other.tree or deltas[0] != deltas[1]:
                different["<state>"] = "values that are not tensors differ"

        def check(name: str) -> str | FormatError:
            try:
                x = archive.load_one(name, workers.each)
                return _compare(x, name, other, workers) if other and name in other else ""
            except FormatError as error:
                return error

        if problem := _find_source_problem(archive):
            damaged["<source>"] = problem
        results = workers.in_order(check, archive, archive.stored_bytes)
        for name, result in zip(archive, results, strict=True):
            if isinstance(result, FormatError):
                damaged[name] = str(result)
            elif result:
                different[name] = result
            if progress:
                progress(archive.stored_bytes(name))
        if other is None:
            return Verification(len(archive), damaged, different)
        equal = sum(name in other and name not in {**damaged, **different} for name in archive)
        files = "unknown" if damaged else _compare_files(archive, other, is_equal=not different)
        return Verification(len(archive), damaged, different, equal, files)


def _find_source_problem(archive: Archive) -> str:
    """Return what is wrong with the description of the original files; empty if nothing is."""
    try:
        if not archive.is_delta:
            find_originals(archive)
        elif originals := read_originals(archive):
            originals.check_parses()
    except FormatError as error:
        return str(error)
    return ""


def _compare_files(archive: Archive, other: Archive, *, is_equal: bool) -> FilesVerdict:
    if archive.is_delta:
        return "unknown"
    found, expected = find_originals(archive), find_originals(other)
    if found is None or expected is None:
        return "unknown"
    return "identical" if is_equal and found.matches(expected) else "different"


def _compare(x: Tensor, name: str, other: Archive, workers: Workers) -> str:
    """Return how a tensor differs from that of another archive; empty if it is equal."""
    spec, expected = Spec.of(x), other.spec(name)
    if spec != expected:
        return f"{_format_spec(spec)}, expected {_format_spec(expected)}"
    y = other.load_one(name, workers.each)
    if x.is_quantized:
        pairs = zip(_quantized_parts(x), _quantized_parts(y), strict=False)
        return "" if all(torch.equal(a, b) for a, b in pairs) else "values or scales differ"
    if bitwise_equal(x, y):
        return ""
    items = (as_bytes(x).view(-1, x.element_size()) != as_bytes(y).view(-1, x.element_size())).any(
        1
    )
    return f"{int(items.sum())} of {x.numel()} items differ"


def _quantized_parts(x: Tensor) -> list[Tensor]:
    return list(TorchQuantized().encode(x).values())


def _format_spec(spec: Spec) -> str:
    return f"{dtype_name(spec.dtype)} {list(spec.shape)}"
