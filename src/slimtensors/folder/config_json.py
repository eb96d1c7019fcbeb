"""`config.json` and the other files beside the weights of a model folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, ClassVar, Self

from slimtensors.errors import ConfigError, nearest
from slimtensors.storage import Location, StrPath, locate, weight_files, write_json
from slimtensors.tensor import Json

CONFIG = "config.json"


def resolve_folder(where: Location) -> Location:
    """Return the folder itself, or that of a file."""
    return where if where.is_folder() else where.parent()


def other_files(where: Location) -> dict[str, Location]:
    """Return everything but the weights, their index, and what is hidden, by relative paths."""
    weights, folder = set(weight_files(where)), resolve_folder(where)
    return {
        name: folder.child(name)
        for name in folder.walk()
        if name not in weights and not any(part.startswith(".") for part in PurePath(name).parts)
    }


def read_config(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> Json:
    """Return what `config.json` beside the weights says; nothing if there is none."""
    folder = resolve_folder(locate(source, storage_options=storage_options))
    return _parsed(folder.child(CONFIG).read()) if CONFIG in folder.files() else {}


def update_config(folder: Path, edit: Callable[[Json], Json]) -> None:
    """Rewrite `config.json`, if there is one and `edit` changes it."""
    path = folder / CONFIG
    if not path.exists():
        return
    config = _parsed(path.read_bytes())
    edited = edit(config)
    if edited != config:
        write_json(path, edited)


def updated_config(text: bytes, edit: Callable[[Json], Json]) -> bytes:
    """Return the text of a `config.json`, as it was if `edit` changes nothing."""
    config = _parsed(text)
    edited = edit(config)
    return text if edited == config else to_json_text(edited)


def to_json_text(data: Json) -> bytes:
    """Return JSON as it is written into model folders."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _parsed(text: bytes) -> Json:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{CONFIG}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{CONFIG}: is not a table")
    return config


@dataclass(frozen=True)
class SparsityConfig:
    """How the zeros of a model are stored, and how many there are."""

    default_format: ClassVar[str] = "dense_sparsity"

    format: str = ""
    sparsity_structure: str = "unstructured"
    """`unstructured`, or how many of how many are kept: `2:4`, `8:16`."""
    global_sparsity: float = 0.0
    """The fraction of all weights that is zero. Says; does not decide."""

    def __post_init__(self) -> None:
        if not self.format:
            object.__setattr__(self, "format", self.default_format)

    def to_dict(self) -> dict[str, Any]:
        """Return the section as it stands in `config.json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the section; `global_sparsity` may be text, as older files have it."""
        known = {field.name for field in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"sparsity_config has no {key!r}; {nearest(key, known)}")
        values = dict(data)
        if "global_sparsity" in values:
            values["global_sparsity"] = float(values["global_sparsity"])
        return cls(**values)


@dataclass(frozen=True)
class BitmaskConfig(SparsityConfig):
    """Nonzero values and one bit per position, for any pattern of zeros."""

    default_format: ClassVar[str] = "sparse-bitmask"


@dataclass(frozen=True)
class Sparse24BitmaskConfig(SparsityConfig):
    """Half of the values and one bit per position, where two of every four are zero."""

    default_format: ClassVar[str] = "sparse-24-bitmask"
    sparsity_structure: str = "2:4"


def parse_section(section: Mapping[str, Any]) -> SparsityConfig:
    """Read any section `sparsity_config`, leaving out what only other libraries put there."""
    kinds = (SparsityConfig, BitmaskConfig, Sparse24BitmaskConfig)
    named = {kind.default_format.replace("_", "-"): kind for kind in kinds}
    kind = named.get(str(section.get("format")).replace("_", "-"), SparsityConfig)
    known = {field.name for field in fields(kind)}
    return kind.from_dict({key: value for key, value in section.items() if key in known})
