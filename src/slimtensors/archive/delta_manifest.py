"""The manifest of a delta: how its tensors differ from those of a base."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from slimtensors.archive.read import Archive
from slimtensors.codecs.changes import CHANGE_KINDS
from slimtensors.codecs.residual import KINDS
from slimtensors.errors import ConfigError, CorruptFileError, report_malformed
from slimtensors.storage import is_inside
from slimtensors.tensor import Json, as_bytes, dtype_name


@dataclass(frozen=True)
class BaseHint:
    """Where the base of a delta probably is. The digests of its tensors identify it."""

    name: str | None = None
    """Last component of its path."""
    model: str | None = None
    """Name on the hub, OWNER/NAME."""
    revision: str | None = None
    """Commit, branch or tag on the hub."""

    @classmethod
    def from_json(cls, data: object) -> "BaseHint":
        """Parse the JSON form; what is not a name is ignored, because digests find the base too."""
        if not isinstance(data, dict):
            return cls()
        name, model, revision = data.get("name"), data.get("model"), data.get("revision")
        return cls(
            name if _is_component(name) else None,
            model if isinstance(model, str) and model else None,
            revision if isinstance(revision, str) and revision else None,
        )

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {key: value for key, value in asdict(self).items() if value is not None}


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
    names: Mapping[str, str] = field(default_factory=dict)
    """Name -> name in the base, where these differ."""
    hint: BaseHint = BaseHint()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DeltaManifest":
        """Parse the JSON form."""
        match data:
            case {"tensors": dict(tensors), "tied": dict(tied)} if (
                all(map(_is_entry, tensors.values()))
                and tied.keys().isdisjoint(tensors)
                and set(tied.values()) <= tensors.keys()
                and _is_layout(data.get("index"), data.get("files"), tensors)
                and _is_name_table(names := data.get("names", {}), tensors)
            ):
                hint = BaseHint.from_json(data.get("base"))
                return cls(tensors, tied, data.get("index"), data.get("files"), names, hint)
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

    def needed(self) -> dict[str, tuple[str, str]]:
        """Return the tensors that need the base: name -> (name in the base, digest)."""
        return {
            name: (self.names.get(name, name), entry[1])
            for name, entry in self.tensors.items()
            if entry[1:]
        }

    @property
    def base_digest(self) -> str:
        """Digest of all tensors that are needed from the base."""
        lines = [f"{home} {digest}\n" for home, digest in self.needed().values()]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:32]


def tensor_digest(x: Tensor) -> str:
    """Return the first 128 bits of SHA-256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)}\n".encode())
    digest.update(as_bytes(x).numpy().data)
    return digest.hexdigest()[:32]


def _is_entry(entry: object) -> bool:
    match entry:
        case ["whole"]:
            return True
        case [str(kind), str()]:
            return kind in ("same", *KINDS[1:], *CHANGE_KINDS)
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


def _is_name_table(names: object, tensors: Json) -> bool:
    return (
        isinstance(names, dict)
        and names.keys() <= tensors.keys()
        and all(isinstance(home, str) for home in names.values())
    )


def _is_component(name: object) -> bool:
    """Return True for the name of a file or folder that is not a path."""
    return is_inside(name) and str(name) == PurePosixPath(str(name)).name
