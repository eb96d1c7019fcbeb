"""Stored form of one tensor of a checkpoint: its entry, its rounding, and how it is decoded."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.delta_manifest import tensor_digest
from slimtensors.archive.dialects import check_copies
from slimtensors.checkpoint.documents import Fields
from slimtensors.codecs.residual import (
    ResidualKind,
    applicable_kinds,
    apply_residual,
    ungroup_bytes,
)
from slimtensors.errors import CorruptFileError, FormatError, MismatchError, report_malformed
from slimtensors.parallel import Each, Workers, serially
from slimtensors.storage import Folder
from slimtensors.tensor import (
    QUANTIZED_DTYPES,
    Json,
    Spec,
    allocate,
    clone_bits,
    is_valid_text,
)

WHOLE, SAME = "whole", "same"
DIFFERENCES = ("difference", "by-exponent")
GROUPED, STEPS, ROOTS = "grouped", "steps", "roots"

NEEDS_BASE = {SAME, *DIFFERENCES, STEPS}
NEEDS_SIBLING = {GROUPED, ROOTS}


_OPTIONAL = dict.fromkeys(NEEDS_BASE, ("from",))


@dataclass(frozen=True)
class TensorEntry:
    """Description of a stored tensor. `docs/format-checkpoints.md` defines the kinds."""

    kind: str
    like: Spec
    """Dtype and shape of the decoded tensor."""
    bits: int | None = None
    """Mantissa bits of the stored values, if reduced."""
    seed: int | None = None
    """Seed of the stochastic rounding, if any."""
    base: str | None = None
    """Digest of the tensor in the base."""
    times: float = 1.0
    """Factor that the tensor in the base is multiplied by before decoding."""
    by: str | None = None
    """Name of the tensor of the same checkpoint that is needed for decoding."""
    step: float | None = None
    pretrained: tuple[str, ...] = ()
    """Tensors of the pretrained model that, joined, are the base; empty for a checkpoint's."""

    def to_json(self) -> Json:
        """Return the JSON form, without fields that have their default value."""
        data: Json = {"as": self.kind, **self.like.to_json()}
        if self.times != 1.0:
            data["times"] = self.times
        for key in ("bits", "seed", "base", "by", "step"):
            if getattr(self, key) is not None:
                data[key] = getattr(self, key)
        if self.pretrained:
            data["from"] = list(self.pretrained)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TensorEntry":
        """Parse the JSON form; raise `CorruptFileError` with the key of an invalid value."""
        fields = Fields(data)
        kind = fields.text("as")
        if kind not in (WHOLE, *NEEDS_BASE, *NEEDS_SIBLING):
            raise CorruptFileError(f"as: unknown kind {kind[:40]!r}")
        required = {"as", "dtype", "shape"}
        required |= {"base"} if kind in NEEDS_BASE else set()
        required |= {"by"} if kind in NEEDS_SIBLING else set()
        required |= {"step"} if kind in (STEPS, ROOTS) else set()
        fields.check_keys(required, ("bits", "seed", "times", *_OPTIONAL.get(kind, ())))
        like = Spec.from_json(dict(data))
        is_float = like.dtype in MANTISSA
        if (kind in (GROUPED, STEPS, ROOTS) or "bits" in data) and not is_float:
            raise CorruptFileError(f"dtype: {like} cannot be stored as {kind} or rounded")
        if "times" in data and like.dtype not in SCALABLE:
            raise CorruptFileError(f"dtype: {like} cannot be scaled")
        if kind in DIFFERENCES and kind not in list(applicable_kinds(like)):
            raise CorruptFileError(f"dtype: {like} cannot be stored as {kind}")
        most = MANTISSA[like.dtype] if is_float else 0
        return cls(
            kind=kind,
            like=like,
            bits=fields.integer("bits", low=1, high=most) if "bits" in data else None,
            seed=fields.integer("seed", low=0, high=(1 << 31) - 1) if "seed" in data else None,
            base=fields.text("base") if "base" in data else None,
            times=fields.finite_number("times") if "times" in data else 1.0,
            by=fields.text("by") if "by" in data else None,
            step=fields.finite_number("step") if "step" in data else None,
            pretrained=_parse_names(fields) if "from" in data else (),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the tensor is stored."""
        return shorten_dtype(self.like.dtype, self.bits)

    def predict(self, base: Tensor) -> Tensor:
        """Return the tensor predicted from the base: scaled, and rounded with the same seed.

        Values that did not change since the base have a zero residual.
        """
        x = base if self.times == 1.0 else _multiply(base, self.times)
        return x if self.bits is None else round_mantissa(x, self.bits, self.seed)


def _parse_names(fields: Fields) -> tuple[str, ...]:
    names = fields.items("from")
    if not names or not all(isinstance(name, str) and is_valid_text(name) for name in names):
        raise CorruptFileError(fields.explain("from", "names of tensors"))
    return tuple(names)


LoadBase = Callable[[str, Spec, Each], Tensor | None]
"""Returns the tensor of this name and shape in the base, or None if the base lacks it."""
LoadPretrained = Callable[[TensorEntry, Each], Tensor]
"""Returns the tensor of the pretrained model that an entry refers to."""


def _refuse_pretrained(entry: TensorEntry, each: Each) -> Tensor:
    raise CorruptFileError("needs a pretrained model, which this file cannot have")


class TensorFile(Mapping[str, Tensor]):
    """The tensors of one file of a checkpoint, decoded on access."""

    def __init__(
        self,
        path: Folder,
        load_base: LoadBase,
        load_pretrained: LoadPretrained = _refuse_pretrained,
    ) -> None:
        self.archive = Archive(path) if isinstance(path, Path) else Archive.from_location(path)
        self.entries, self.tied, self.copies = _read_entries(self.archive)
        """Entries by name, empty if all tensors are whole; names that share memory; names of
        tensors with the bits of another one."""
        self._load_base, self._load_pretrained = load_base, load_pretrained

    def __getitem__(self, name: str) -> Tensor:
        return self.load(name, serially)

    def __contains__(self, name: object) -> bool:
        return name in (self.entries or self.archive) or name in self.copies

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors except tied ones."""
        if not self.entries:
            return iter([name for name in self.archive if name not in self.tied])
        return iter([*self.entries, *self.copies])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        name = self.copies.get(name, name)
        return self.entries[name].like if self.entries else self.archive.spec(name)

    def load(self, name: str, each: Each, siblings: Mapping[str, Tensor] | None = None) -> Tensor:
        """Read and decode a tensor; `siblings` are already decoded tensors of the same file."""
        name = self.tied.get(name, name)
        name = self.copies.get(name, name)
        if name not in self:
            raise CorruptFileError(f"{self.archive.path}: {name} not found")
        if not self.entries:
            return self.archive.load_one(name, each)
        entry = self.entries[name]
        other = None
        if entry.by is not None:
            loaded = siblings or {}
            other = loaded[entry.by] if entry.by in loaded else self.load(entry.by, each)
        elif entry.pretrained:
            with report_malformed(f"{self.archive.path}: {name}"):
                other = self._load_pretrained(entry, each)
        elif entry.base is not None:
            other = self._load_base(name, entry.like, each)
            if other is None:
                raise CorruptFileError(f"{self.archive.path}: {name} not found in the base")
            if tensor_digest(other) != entry.base:
                raise MismatchError(
                    f"{self.archive.path}: {name} was stored as a difference from another tensor"
                    " than the one in the base; pass the original base"
                )
        stored = None if entry.kind == SAME else self.archive.load_one(name, each)
        with report_malformed(f"{self.archive.path}: {name}", computes=True):
            return decode_entry(entry, stored, other, each)

    def load_all(self, *, threads: int | None = None) -> dict[str, Tensor]:
        """Read and decode all tensors, also tied ones."""
        names = [name for name in self if name not in self.copies]
        has_sibling = {name for name, e in self.entries.items() if e.by is not None}
        found: dict[str, Tensor] = {}
        with Workers(threads) as workers:

            def load(name: str) -> Tensor:
                return self.load(name, workers.each, found)

            # Two passes: the second needs tensors of the first.
            for is_second in (False, True):
                batch = [name for name in names if (name in has_sibling) == is_second]
                results = workers.in_order(load, batch, lambda name: self.spec(name).nbytes)
                found.update(zip(batch, results, strict=True))
        tensors = {name: found[name] for name in names}
        tensors |= {name: tensors[target] for name, target in self.tied.items()}
        return tensors | {name: clone_bits(tensors[target]) for name, target in self.copies.items()}


_Names = dict[str, str]


def _read_entries(archive: Archive) -> tuple[dict[str, TensorEntry], _Names, _Names]:
    """Return the entries, empty if all tensors are stored whole, tied names, and copies."""
    if archive.delta is None:
        return {}, archive.tied(), archive.copies()
    with report_malformed(f"{archive.path}: invalid table of tensor entries"):
        return _parse_entries(archive.delta, archive)


def _parse_entries(
    delta: Mapping[str, Any], archive: Archive
) -> tuple[dict[str, TensorEntry], _Names, _Names]:
    table = Fields(delta)
    table.check_keys(("checkpoint", "tied"), ("copies",))
    entries, tied = table.table("checkpoint", _parse_entry), table.table("tied", Fields.text)
    copies = table.table("copies", Fields.text) if "copies" in delta else {}
    for name, target in itertools.chain(tied.items(), copies.items()):
        if name in entries or (name in tied and name in copies) or target not in entries:
            raise CorruptFileError(f"{name}: tied to, or a copy of, an invalid name {target}")
    check_copies(copies, "copies")
    for name, entry in entries.items():
        if entry.kind != SAME and name not in archive:
            raise CorruptFileError(f"{name}: not found in the file")
        if entry.by is not None:
            sibling = entries.get(entry.by)
            if (
                sibling is None
                or sibling.kind in NEEDS_SIBLING
                or sibling.like.dtype not in MANTISSA
                or sibling.like.shape != entry.like.shape
            ):
                raise CorruptFileError(f"{name}: invalid sibling {entry.by}")
    return entries, tied, copies


def _parse_entry(table: Fields, name: str) -> TensorEntry:
    try:
        return TensorEntry.from_json(table.child(name).data)
    except FormatError as error:
        raise CorruptFileError(f"{name}: {error}") from error


def decode_entry(
    entry: TensorEntry, stored: Tensor | None, other: Tensor | None, each: Each
) -> Tensor:
    """Return the decoded tensor; `other` is the tensor in the base, or the sibling."""
    x = _decode(entry, stored, other, each)
    if tuple(x.shape) != entry.like.shape:
        raise CorruptFileError(f"expected shape {entry.like.shape}, got {tuple(x.shape)}")
    if x.dtype is entry.like.dtype:
        return x
    if x.is_quantized or entry.like.dtype in QUANTIZED_DTYPES:
        raise CorruptFileError(f"{x.dtype} cannot be converted to {entry.like.dtype}")
    return x.to(entry.like.dtype)


def _decode(entry: TensorEntry, stored: Tensor | None, other: Tensor | None, each: Each) -> Tensor:
    if entry.kind in NEEDS_BASE:
        assert other is not None
        if Spec.of(other) != entry.like:
            raise CorruptFileError(f"expected {entry.like} in the base, got {Spec.of(other)}")
        if entry.kind == SAME:
            return other
    assert stored is not None
    if entry.kind == WHOLE:
        if stored.dtype != entry.dtype:
            raise CorruptFileError(f"expected dtype {entry.dtype}, got {stored.dtype}")
        return stored
    assert other is not None
    if entry.kind in DIFFERENCES:
        return apply_residual(
            cast(ResidualKind, entry.kind), stored, entry.predict(other), each=each
        )
    if entry.kind == GROUPED:
        return ungroup_bytes(stored, other.to(entry.dtype)).view(entry.like.shape)
    assert entry.step is not None
    if stored.shape != other.shape:
        raise CorruptFileError(f"expected shape {tuple(other.shape)}, got {tuple(stored.shape)}")
    if entry.kind == STEPS:
        return other.float() + multiply_steps(stored, entry.step)
    return multiply_steps(stored, take_roots(other) * entry.step)


_MULTIPLY_SIZE = 1 << 15


def _multiply(x: Tensor, factor: float) -> Tensor:
    """Multiply in slices that are small enough for torch not to start threads of its own."""
    out = allocate(Spec.of(x))
    values, target = x.view(-1), out.view(-1)
    for i in range(0, values.numel(), _MULTIPLY_SIZE):
        torch.mul(values[i : i + _MULTIPLY_SIZE], factor, out=target[i : i + _MULTIPLY_SIZE])
    return out


MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""Mantissa bits of the dtypes that can be shortened."""
SCALABLE = {*MANTISSA, torch.float64}
"""Dtypes of the tensors of a base that can be multiplied by a factor."""
_WORDS = {4: torch.int32, 2: torch.int16}


def derive_seed(*key: object) -> int:
    """Return a seed that depends on the key only."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little") >> 1


def make_noise(count: int, seed: int) -> Tensor:
    """Return `count` random 32-bit integers. Part of the format: the same on all machines."""
    x = torch.arange(count, dtype=torch.int32).add_(seed)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def round_mantissa(x: Tensor, bits: int, seed: int | None) -> Tensor:
    """Round floats to `bits` bits of mantissa: stochastically, or to nearest without a seed.

    `float32` is returned as `bfloat16` if that is precise enough.
    """
    spare = MANTISSA[x.dtype] - bits
    if spare <= 0:
        return x
    words = x.contiguous().view(_WORDS[x.element_size()])
    if seed is None:
        # Ties to even, as hardware does: add half a step less one, and the last bit kept.
        extra = ((words >> spare) & 1) + ((1 << (spare - 1)) - 1)
    else:
        extra = make_noise(x.numel(), seed).view(x.shape) >> (32 - spare)
        extra = (extra & ((1 << spare) - 1)).to(words.dtype)
    return ((words + extra) >> spare << spare).view(x.dtype).to(shorten_dtype(x.dtype, bits))


def shorten_dtype(dtype: torch.dtype, bits: int | None) -> torch.dtype:
    """Return the dtype that stores `dtype` with `bits` bits of mantissa."""
    fits = bits is not None and bits <= MANTISSA[torch.bfloat16]
    return torch.bfloat16 if dtype is torch.float32 and fits else dtype


def round_to_steps(x: Tensor, step: Tensor | float, seed: int | None) -> Tensor | None:
    """Return `x / step` as integers of the smallest dtype, or None if they do not fit int32."""
    q = x / step
    if seed is None:
        q.round_()
    else:
        noise = (make_noise(x.numel(), seed).view(x.shape) >> 8).bitwise_and_(0xFFFFFF)
        q.add_(noise.float().mul_(2**-24)).floor_()
    largest = float(q.abs().amax())
    for dtype in (torch.int8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max // 2:
            return q.to(dtype)
    return None


_STEP_DTYPES = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}


def multiply_steps(q: Tensor, step: Tensor | float) -> Tensor:
    """Undo `round_to_steps`, one operation at a time so that all machines round alike."""
    if q.dtype not in _STEP_DTYPES:
        raise CorruptFileError(f"expected an integer dtype, got {q.dtype}")
    return q.float() * step


def take_roots(x: Tensor) -> Tensor:
    """Return square roots in `float32`, correctly rounded.

    Those of torch differ by a unit in the last place, depending on the CPU and the number of items.
    """
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.float().numpy()))
