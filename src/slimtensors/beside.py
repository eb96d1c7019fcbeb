"""What lies beside the weights of a model folder: `config.json`, a tokenizer and the like."""

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from slimtensors.container import Place, StrPath, place, weight_files, write_json
from slimtensors.errors import ConfigError
from slimtensors.spec import Json

CONFIG = "config.json"


def folder_of(where: Place) -> Place:
    """Return the folder itself, or that of a file."""
    return where if where.is_folder() else where.parent()


def other_files(where: Place) -> dict[str, Place]:
    """Return everything but the weights, their index, and what is hidden, by relative paths."""
    weights, folder = set(weight_files(where)), folder_of(where)
    return {
        name: folder.child(name)
        for name in folder.walk()
        if name not in weights and not any(part.startswith(".") for part in PurePath(name).parts)
    }


def read_config(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> Json:
    """Return what `config.json` beside the weights says; nothing if there is none."""
    folder = folder_of(place(source, storage_options=storage_options))
    return _parsed(folder.child(CONFIG).read()) if CONFIG in folder.files() else {}


def edit_config(folder: Path, edit: Callable[[Json], Json]) -> None:
    """Rewrite `config.json`, if there is one and `edit` changes it."""
    path = folder / CONFIG
    if not path.exists():
        return
    config = _parsed(path.read_bytes())
    edited = edit(config)
    if edited != config:
        write_json(path, edited)


def edited_config(text: bytes, edit: Callable[[Json], Json]) -> bytes:
    """Return the text of a `config.json`, as it was if `edit` changes nothing."""
    config = _parsed(text)
    edited = edit(config)
    return text if edited == config else json_text(edited)


def json_text(data: Json) -> bytes:
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
