"""Check archives: that they are whole, and that two of them hold the same bits."""

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
    """What `verify` found. True if all is well."""

    tensors: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that cannot be read, and why."""
    different: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that are not the same in both archives, and how they differ."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.different

    def to_json(self) -> Json:
        """Return everything as JSON; `docs/schemas/verify.json` describes it."""
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
    """Read everything, checking all checksums; compare each tensor's bits with `against`, if given.

    Raise `FormatError` if a file cannot be opened at all. `progress` counts stored bytes.
    """
    damaged: dict[str, str] = {}
    different: dict[str, str] = {}
    with open(path, storage_options=storage_options) as archive, Workers(threads) as workers:
        other = open(against, storage_options=storage_options) if against is not None else None
        if other is not None:
            if (archive.delta is None) != (other.delta is None):
                archive.check_whole()
                other.check_whole()
            different |= {name: f"is only in {path}" for name in archive if name not in other}
            different |= {name: f"is only in {against}" for name in other if name not in archive}
            if (archive.tree, archive.delta) != (other.tree, other.delta):
                different["<state>"] = "what is not a tensor differs"

        def one(name: str) -> str | FormatError:
            try:
                x = archive.load_one(name, workers.each)
                return _difference(x, name, other, workers) if other and name in other else ""
            except FormatError as error:
                return error

        results = workers.in_order(one, archive, archive.stored_bytes)
        for name, result in zip(archive, results, strict=True):
            if isinstance(result, FormatError):
                damaged[name] = str(result)
            elif result:
                different[name] = result
            if progress:
                progress(archive.stored_bytes(name))
        return Verification(len(archive), damaged, different)


def _difference(x: Tensor, name: str, other: Archive, workers: Workers) -> str:
    want, have = Spec.of(x), other.spec(name)
    if want != have:
        return f"{_words(want)} here, {_words(have)} there"
    y = other.load_one(name, workers.each)
    if x.is_quantized:
        pairs = zip(_parts(x), _parts(y), strict=False)
        return "" if all(torch.equal(a, b) for a, b in pairs) else "values or scales differ"
    if bitwise_equal(x, y):
        return ""
    items = (as_bytes(x).view(-1, x.element_size()) != as_bytes(y).view(-1, x.element_size())).any(
        1
    )
    return f"{int(items.sum())} of {x.numel()} items differ"


def _parts(x: Tensor) -> list[Tensor]:
    return list(TorchQuantized().encode(x).values())


def _words(spec: Spec) -> str:
    return f"{dtype_name(spec.dtype)} {list(spec.shape)}"
