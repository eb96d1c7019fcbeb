"""`checkpoint.json`: what a checkpoint is, for people and for us. It is written last."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError
from slimtensors.storage import LocalLocation, open_file, write_json
from slimtensors.tensor import Json

MANIFEST = "checkpoint.json"
STATE = "state.safetensors"
VERSION = 1
_FORMAT = "slimtensors checkpoint"


@dataclass(frozen=True)
class CheckpointBase:
    """The checkpoint that a delta needs."""

    name: str
    """Of its folder, beside this one."""
    id: str


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint is."""

    id: str
    """Hash of the content of the tensors' file."""
    step: int | None
    epoch: int | None
    profile: str
    """`exact`, or what was rounded."""
    bytes: int
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    base: CheckpointBase | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative RMS error of each tensor that is not exact."""

    @property
    def kind(self) -> str:
        """Whether it stands alone."""
        return "full" if self.base is None else "delta"


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the file that makes a checkpoint complete."""
    write_json(folder / MANIFEST, {"format": _FORMAT, "version": VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read what a checkpoint says of itself."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _parsed(data)
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such checkpoint") from None
        raise FormatError(f"{folder}: is no checkpoint; it holds no {MANIFEST}") from None
    except UnsupportedVersionError as error:
        raise UnsupportedVersionError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptFileError(f"{path}: {error}") from error


def is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder holds a checkpoint that was completed."""
    return (folder / MANIFEST).is_file()


def content_id(path: Path) -> str:
    """Return a hash of a file of tensors: of its header, and of the checksums in it.

    Every stored tensor has a checksum in the header, or in its own first bytes.
    """
    file = open_file(LocalLocation(path))
    found = hashlib.sha256(file.text)
    for entry in file.header.entries.values():
        found.update(file.read(entry, 16))
    return found.hexdigest()[:32]


def _parsed(data: Json) -> CheckpointManifest:
    if data.get("format") != _FORMAT:
        raise CorruptFileError("is not the description of a checkpoint")
    if data["version"] > VERSION:
        raise UnsupportedVersionError(f"has version {data['version']}; update slimtensors")
    known: dict[str, Any] = {k: v for k, v in data.items() if k not in ("format", "version")}
    base = known.pop("base")
    return CheckpointManifest(**known, base=CheckpointBase(**base) if base is not None else None)
