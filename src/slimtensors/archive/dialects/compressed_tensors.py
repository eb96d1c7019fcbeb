"""The dialect `compressed-tensors`: a sparse tensor is several plain ones with known suffixes.

Files are written as by compressed-tensors up to 0.14; files of all releases are readable.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive.dialects.entries import (
    PackedTensor,
    StoredEntry,
    TensorInfo,
    plain_tensor_bytes,
)
from slimtensors.codecs import Bitmask, Bitmask24, Codec, bitmask, bitmask24
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, UnsupportedTensorError
from slimtensors.parallel import Each, serially
from slimtensors.storage import StoredFile, has_code
from slimtensors.tensor import Spec, as_bytes, ceil_div, dtype_name, parse_shape

NAME = "compressed-tensors"

REQUIRED = ("compressed", "bitmask", "shape")
"""Suffixes of the parts that decoding a sparse tensor needs."""
SUFFIXES = (*REQUIRED, "row_offsets")
"""Suffixes of all parts of a sparse tensor."""
_CODECS: Mapping[str, Codec] = {"bitmask": Bitmask(), "bitmask24": Bitmask24()}


@dataclass(frozen=True)
class CodecPacker:
    """How this dialect stores the output of a codec of a higher layer."""

    pack: Callable[[str, Tensor, Any, Each], PackedTensor]
    pack_encoded: Callable[[str, Encoded, Any, Each], PackedTensor]


_PACKERS: dict[type[Codec], CodecPacker] = {}


def register_packer(codec: type[Codec], packer: CodecPacker) -> None:
    """Register how this dialect stores the output of `codec`."""
    _PACKERS[codec] = packer


@dataclass(frozen=True, slots=True)
class SparseMember:
    """A tensor stored as values, bit mask and shape."""

    codec: str
    parts: Mapping[str, StoredEntry]

    @property
    def file(self) -> StoredFile:
        """File that contains its values."""
        return self.parts["compressed"].file

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.entry.spec.nbytes for part in self.parts.values())

    @property
    def plan(self) -> Plan:
        """The plan with the same content."""
        return Plan(_CODECS[self.codec])

    def spec(self) -> Spec:
        """Return the dtype of the values and the shape stored in the part `shape`."""
        part = self.parts["shape"]
        if part.entry.spec.dtype is not torch.int64:
            raise CorruptFileError(f"the part 'shape' must be int64, got {part.entry.spec.dtype}")
        sizes = part.read(serially).flatten()  # [n], or [n, 1] for 2:4
        return Spec(self.parts["compressed"].entry.spec.dtype, parse_shape(sizes.tolist()))

    def info(self) -> TensorInfo:
        """Return how it is stored; always lossless."""
        sizes = {suffix: part.entry.spec.nbytes for suffix, part in self.parts.items()}
        return TensorInfo(self.spec(), self.plan, sizes)

    def load(self, each: Each) -> Tensor:
        """Scatter the values, which both sparse formats store in the order of the mask."""
        values, mask = self.parts["compressed"], self.parts["bitmask"]
        out = join(values.read(each), mask.read(each), self.spec().shape, each)
        for suffix, part in self.parts.items():
            if suffix == "row_offsets":
                part.read(each)  # not needed for decoding; verifies its checksum
            part.file.release(part.entry)
        return out

    def load_exact(self, each: Each) -> list[Tensor]:
        """Return the tensor."""
        return [self.load(each)]


def pack_encoded(name: str, x: Encoded, each: Each) -> PackedTensor:
    """Return the entries of an encoded tensor."""
    packer = _PACKERS.get(type(x.codec))
    if packer is not None:
        return packer.pack_encoded(name, x, x.codec, each)
    raise ConfigError(f"the dialect {NAME!r} cannot store {x.plan}; use 'slim'")


def check(name: str, spec: Spec) -> None:
    """Raise if safetensors does not support the dtype."""
    if not has_code(spec):
        raise UnsupportedTensorError(
            f"{name}: safetensors does not support {dtype_name(spec.dtype)}; use the dialect 'slim'"
        )


def pack(name: str, x: Tensor, plan: Plan | None, each: Each) -> PackedTensor:
    """Return the entries of `x`: one plain tensor, or one per part."""
    if plan is None:
        return PackedTensor([plain_tensor_bytes(name, x, each)], None, parts={"data": x.nbytes})
    packer = _PACKERS.get(type(plan.codec))
    if packer is not None and not plan.then:
        return packer.pack(name, x, plan.codec, each)
    if plan.then or not isinstance(plan.codec, Bitmask | Bitmask24):
        raise ConfigError(f"the dialect {NAME!r} does not support the plan {plan}")
    parts = split(x, plan.codec, each)
    # Largest item size first: aligned as well as a format without padding allows.
    order = sorted(parts, key=lambda suffix: -parts[suffix].element_size())
    pieces = [plain_tensor_bytes(f"{name}.{suffix}", parts[suffix], each) for suffix in order]
    return PackedTensor(pieces, plan, parts={suffix: parts[suffix].nbytes for suffix in order})


def split(x: Tensor, codec: Bitmask | Bitmask24, each: Each = serially) -> dict[str, Tensor]:
    """Return the parts of a sparse tensor by suffix."""
    row = x.shape[-1] if x.dim() else 1
    rows = x.numel() // row if row else 0
    parts = _split24(x, row, each) if isinstance(codec, Bitmask24) else _split_bitmask(x, row, each)
    return parts | {"bitmask": parts["bitmask"].view(rows, -1)}


def join(values: Tensor, mask: Tensor, shape: tuple[int, ...], each: Each = serially) -> Tensor:
    """Return the tensor of which `split` returned these parts."""
    row = shape[-1] if shape else 1
    return bitmask.scatter(mask.flatten(), as_bytes(values), Spec(values.dtype, shape), row, each)


def find_prefixes(names: Collection[str]) -> dict[str, str]:
    """Return the tensors that entries without a manifest are parts of: prefix -> name."""
    ends = (name.rpartition(".") for name in names)
    prefixes = [
        prefix
        for prefix, _, last in ends
        if last == "bitmask" and all(f"{prefix}.{part}" in names for part in REQUIRED)
    ]
    # Up to 0.8 all tensors were sparse, as module.weight.bitmask and module.bias.bitmask; later
    # only weights, as module.bitmask.
    full_names = any(map(_is_tensor_name, prefixes))
    return {prefix: prefix if full_names else f"{prefix}.weight" for prefix in prefixes}


def find_tensor_name(prefix: str) -> str:
    """Return the name of a tensor from the prefix of its parts, if no others are known."""
    return prefix if _is_tensor_name(prefix) else f"{prefix}.weight"


def _is_tensor_name(prefix: str) -> bool:
    return prefix.rpartition(".")[2] in ("weight", "bias")


@dataclass(frozen=True, slots=True)
class PartGroup:
    """A tensor stored in parts: its name and the entries that belong to it."""

    name: str
    keys: Sequence[str]
    member: SparseMember


def find_own_groups(
    stored: Mapping[str, StoredEntry], plans: Mapping[str, str], file: str
) -> Iterator[PartGroup]:
    """Yield the tensors that the manifest of a file lists as stored in parts."""
    for name, codec in plans.items():
        parts = _find_parts(name, stored)
        if codec not in _CODECS or not set(REQUIRED) <= parts.keys():
            raise FormatError(f"{file}: {name}: missing parts of codec {codec!r}")
        yield _make_group(name, name, codec, parts)


def find_foreign_groups(stored: Mapping[str, StoredEntry]) -> Iterator[PartGroup]:
    """Yield the sparse tensors in files without a manifest, recognized by their suffixes."""
    for prefix, name in find_prefixes(stored).items():
        parts = _find_parts(prefix, stored)
        codec = "bitmask24" if len(parts["compressed"].entry.spec.shape) == 2 else "bitmask"
        yield _make_group(name, prefix, codec, parts)


def _find_parts(prefix: str, stored: Mapping[str, StoredEntry]) -> dict[str, StoredEntry]:
    keys = {suffix: f"{prefix}.{suffix}" for suffix in SUFFIXES}
    return {suffix: stored[key] for suffix, key in keys.items() if key in stored}


def _make_group(name: str, prefix: str, codec: str, parts: Mapping[str, StoredEntry]) -> PartGroup:
    return PartGroup(name, [f"{prefix}.{suffix}" for suffix in parts], SparseMember(codec, parts))


def _split_bitmask(x: Tensor, row: int, each: Each) -> dict[str, Tensor]:
    items = as_bytes(x)
    mask, counts = bitmask.find_nonzero(items, x.element_size(), row, each)
    values = bitmask.gather(items, x.element_size(), row, mask, counts, each)
    per_row = _count_per_row(mask, ceil_div(row, 8))
    return {
        "shape": torch.tensor(x.shape, dtype=torch.int64),
        "row_offsets": per_row.cumsum(0) - per_row,
        "compressed": values.view(x.dtype),
        "bitmask": mask,
    }


def _split24(x: Tensor, row: int, each: Each) -> dict[str, Tensor]:
    mask, values = bitmask24.select(x, row, each)
    return {
        "shape": torch.tensor(x.shape, dtype=torch.int64).view(-1, 1),
        "compressed": values.view(-1, row // 2),
        "bitmask": mask,
    }


def _count_per_row(mask: Tensor, width: int) -> Tensor:
    table = mask.view(-1, width).numpy()
    if width % 8 == 0:
        table = table.view(np.uint64)  # eight times fewer additions
    return torch.from_numpy(np.bitwise_count(table).sum(axis=1, dtype=np.int64))
