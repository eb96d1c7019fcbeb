"""Manifest of a checkpoint: `checkpoint.json`, which makes it complete, and numbers for it."""

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive.dialects.entries import check_version
from slimtensors.checkpoint.documents import (
    Fields,
    format_number,
    is_sealed,
    parse_document,
    parse_object,
    seal,
)
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.storage import Folder, as_location, open_file
from slimtensors.storage.atomic import write_file_atomically
from slimtensors.tensor import Json

MANIFEST = "checkpoint.json"
VERSION = 3
"""Newest version; version 1 has no checksum, version 3 is written for a pretrained model only."""
UNSEALED = "format version 1 has no checksum: changes of checkpoint.json are not detected"
"""Note on a checkpoint of version 1."""
FORMAT = "slimtensors checkpoint"
MAX_HINTS, _MAX_PATH = 4, 4096
"""Number and length of the paths where a pretrained model is searched."""
_CHECKSUM = "crc32c"
_SEAL = f',\n  "{_CHECKSUM}": '


@dataclass(frozen=True)
class CheckpointBase:
    """The checkpoint that a delta needs."""

    name: str
    """Name of its folder, next to the delta."""
    id: str


@dataclass(frozen=True)
class PretrainedBase:
    """The model from which the weights of a checkpoint are differences."""

    name: str
    """Name of its folder or file, for messages."""
    id: str
    """Hash of all its tensors, see `checkpoint.pretrained`."""
    hints: tuple[str, ...] = ()
    """Paths where it was, relative to the run or absolute; used only if its tensors match."""


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of `checkpoint.json`, which is written last and makes a checkpoint complete."""

    id: str
    """Hash of `state.safetensors`, see `content_id`."""
    step: int | None
    epoch: int | None
    profile: str
    """`exact`, or the profile by which tensors were rounded."""
    bytes: int
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    base: CheckpointBase | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative RMS error of each tensor that is not exact."""
    pretrained: PretrainedBase | None = None
    """A model elsewhere that is needed besides the base, or instead of one."""
    is_sealed: bool = True
    """False for format version 1, which has no checksum: changes of the file go unnoticed."""

    @property
    def kind(self) -> str:
        """`full`, or `delta` if the checkpoint needs a base or a pretrained model."""
        return "full" if self.base is None and self.pretrained is None else "delta"

    @property
    def needed(self) -> str:
        """Names of the base and of the pretrained model, if any."""
        return " and ".join(part.name for part in (self.base, self.pretrained) if part is not None)

    def to_text(self) -> str:
        """Return strict JSON with a checksum at the end."""
        base = {"name": self.base.name, "id": self.base.id} if self.base else None
        data: Json = {
            "format": FORMAT,
            "version": 2 if self.pretrained is None else 3,
            "id": self.id,
            "step": self.step,
            "epoch": self.epoch,
            "profile": self.profile,
            "bytes": self.bytes,
            "created": self.created,
            "metrics": {name: format_number(x) for name, x in self.metrics.items()},
            "base": base,
            "errors": {name: format_number(x) for name, x in self.errors.items()},
        }
        if self.pretrained is not None:
            data["pretrained"] = {
                "name": self.pretrained.name,
                "id": self.pretrained.id,
                "hints": list(self.pretrained.hints),
            }
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        return seal(text.removesuffix("\n}"), _SEAL)

    @classmethod
    def from_text(cls, text: str) -> "CheckpointManifest":
        """Parse the JSON form and check all of it."""
        fields = parse_object(text, FORMAT, strict=lambda version: version > 1)
        version = fields.integer("version")
        check_version(version, VERSION)
        if version > 1 and not is_sealed(text, _SEAL):
            raise CorruptFileError("checksum mismatch; the file is damaged")
        return _parse_fields(fields, version)


def _parse_fields(fields: Fields, version: int) -> CheckpointManifest:
    required = {"format", "version", "id", "step", "epoch", "profile", "bytes", "created", "base"}
    tables = {"metrics", "errors"}
    if version > 1:
        extra = {"pretrained"} if version > 2 else set()
        fields.check_keys(required | tables | extra | {_CHECKSUM})
    else:
        fields.check_keys(required, tables)
    base = None
    if fields.data["base"] is not None:
        row = fields.child("base")
        row.check_keys(("name", "id"))
        base = CheckpointBase(row.folder_name("name"), _parse_id(row))
    metrics, errors = (
        fields.table(key, Fields.number) if key in fields.data else {}
        for key in ("metrics", "errors")
    )
    return CheckpointManifest(
        id=_parse_id(fields),
        step=fields.optional_integer("step"),
        epoch=fields.optional_integer("epoch"),
        profile=fields.text("profile"),
        bytes=fields.integer("bytes", low=0),
        created=_parse_time(fields),
        metrics=metrics,
        base=base,
        errors=errors,
        pretrained=_parse_pretrained(fields.child("pretrained")) if version > 2 else None,
        is_sealed=version > 1,
    )


def _parse_pretrained(row: Fields) -> PretrainedBase:
    row.check_keys(("name", "id", "hints"))
    hints = row.items("hints")
    if len(hints) > MAX_HINTS or not all(map(is_local_path, hints)):
        raise CorruptFileError(row.explain("hints", f"at most {MAX_HINTS} local paths"))
    return PretrainedBase(row.folder_name("name"), _parse_id(row), tuple(hints))


def is_local_path(hint: object) -> bool:
    """Return True for a path that is neither a URL nor on another machine (`//server/share`)."""
    if not isinstance(hint, str) or not 0 < len(hint) <= _MAX_PATH or not hint.isprintable():
        return False
    return not (hint.startswith(("//", "\\\\", "~")) or "://" in hint)


def _parse_id(fields: Fields) -> str:
    value = fields.text("id")
    if len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise CorruptFileError(fields.explain("id", "32 hexadecimal digits"))
    return value


def _parse_time(fields: Fields) -> str:
    value = fields.text("created")
    try:
        has_zone = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        has_zone = False
    if not has_zone:
        raise CorruptFileError(fields.explain("created", "a time with a time zone"))
    return value


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write `checkpoint.json`, which makes a checkpoint complete."""
    write_file_atomically(folder / MANIFEST, manifest.to_text().encode())


def read_manifest(folder: Folder) -> CheckpointManifest:
    """Read `checkpoint.json`."""
    return parse_document(folder, MANIFEST, "checkpoint", CheckpointManifest.from_text)


def is_checkpoint(folder: Folder) -> bool:
    """Return True if the folder contains a complete checkpoint."""
    try:
        return (folder / MANIFEST).is_file()
    except PermissionError:
        return False


def content_id(path: Folder) -> str:
    """Return a hash of a safetensors file, computed from its header and checksums.

    The checksum of each stored tensor is in the header, or in its first bytes.
    """
    file = open_file(as_location(path))
    digest = hashlib.sha256(file.text)
    for data in file.read_starts(file.header.entries.values(), 16):
        digest.update(data)
    return digest.hexdigest()[:32]


def check_metrics(metrics: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a metric that is not a scalar; do not wait for a device."""
    for name, value in metrics.items():
        is_deferred = isinstance(value, Tensor) and not value.is_cpu
        if not _is_scalar(value) or not (is_deferred or to_number(value) is not None):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            kind = type(value).__name__
            raise ConfigError(f"metric {name!r} must be a number, got {kind}{shape}")


def read_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return all metrics that are scalars as floats."""
    numbers = {str(name): to_number(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def to_number(value: object) -> float | None:
    """Return a scalar as a float: a number, a tensor or an array of one item; else None."""
    if not _is_scalar(value):
        return None
    item = value.item() if isinstance(value, Tensor | np.ndarray) else value
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def read_count(name: str, value: object) -> int | None:
    """Return a step or epoch as an int, or None; raise `ConfigError` for anything else."""
    count = to_integer(value)
    if value is not None and (count is None or count < 0):
        raise ConfigError(f"{name} must be an integer >= 0, got {value!r}")
    return count


def to_integer(value: object) -> int | None:
    """Return an integer of any library as an int; None for anything else, also for bool."""
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return hasattr(value, "__float__") and not isinstance(value, str | np.complexfloating)
