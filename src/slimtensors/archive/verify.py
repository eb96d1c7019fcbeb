"""Check archives for damage, and compare two of them bit by bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive.read import Archive, Progress, open
from slimtensors.codecs import TorchQuantized
from slimtensors.errors import FormatError
from slimtensors.parallel import Workers
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, Spec, as_bytes, bitwise_equal, dtype_name


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. True if nothing is damaged or different."""

    tensors: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason, for tensors that cannot be read."""
    different: Mapping[str, str] = field(default_factory=dict)
    """Name -> difference, for tensors that differ between the archives."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.different

    def to_json(self) -> Json:
        """Return the result as JSON (schema: `docs/schemas/verify.json`)."""
        return {
            "ok": bool(self),
            "tensors": self.tensors,
            "damaged": dict(self.damaged),
            "different": dict(self.different),
        }


def verify(
    path: StrPath,
    *,
    against: StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Verification:
    """Decode every tensor and check all checksums; compare bitwise with `against`, if given.

    Raises `FormatError` if a file cannot be opened.

    Args:
        path: file, folder or URL to check.
        against: another archive that should contain the same tensors.
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
    with open(path, storage_options=storage_options) as archive, Workers(threads) as workers:
        other = open(against, storage_options=storage_options) if against is not None else None
        if other is not None:
            if (archive.delta is None) != (other.delta is None):
                archive.check_not_delta()
                other.check_not_delta()
            different |= {name: f"only in {path}" for name in archive if name not in other}
            different |= {name: f"only in {against}" for name in other if name not in archive}
            if (archive.tree, archive.delta) != (other.tree, other.delta):
                different["<state>"] = "values that are not tensors differ"

        def check(name: str) -> str | FormatError:
            try:
                x = archive.load_one(name, workers.each)
                return _compare(x, name, other, workers) if other and name in other else ""
            except FormatError as error:
                return error

        results = workers.in_order(check, archive, archive.stored_bytes)
        for name, result in zip(archive, results, strict=True):
            if isinstance(result, FormatError):
                damaged[name] = str(result)
            elif result:
                different[name] = result
            if progress:
                progress(archive.stored_bytes(name))
        return Verification(len(archive), damaged, different)


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
