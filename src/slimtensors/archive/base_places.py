"""Where the base of a delta may be: beside it, in the cache of the hub, in listed folders."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slimtensors.archive.delta_manifest import BaseHint, DeltaManifest
from slimtensors.archive.read import Archive
from slimtensors.storage import DELTA, LocalLocation, Location
from slimtensors.tensor import Json

VARIABLE = "SLIMTENSORS_BASES"
"""Environment variable: folders with models, separated like those in PATH."""

_CONFIG = "config.json"
_CACHED = "models--"
"""Start of the names of folders in the cache of the hub."""
_MAX_ENTRIES = 1000
"""Maximum number of candidates in one folder."""


def read_hint(delta: Archive, manifest: DeltaManifest) -> BaseHint:
    """Return what a delta and its `config.json` say about the base."""
    home = find_home(delta)
    section = _read_section(home) if home.is_folder() else {}
    keys = {"base": "name", "base_model": "model", "base_revision": "revision"}
    given = {key: section[name] for name, key in keys.items() if name in section}
    return BaseHint.from_json(manifest.hint.to_json() | given)


def _read_section(folder: Location) -> Json:
    """Return the part about the delta of `config.json`; empty if there is none that is valid."""
    if _CONFIG not in folder.files():
        return {}
    try:
        config = json.loads(folder.child(_CONFIG).read())
    except (ValueError, RecursionError):  # it is not needed: the delta is found by its digests
        return {}
    match config:
        case {"quantization_config": {"delta": dict(section)}}:
            return section
    return {}


def describe_base(base: Archive) -> BaseHint:
    """Return the name of a base; on the hub, if it is in its cache."""
    home = find_home(base)
    match Path(str(home)).parts:
        case [*_, folder, "snapshots", revision] if folder.startswith(_CACHED):
            model = folder.removeprefix(_CACHED).replace("--", "/")
            return BaseHint(revision, model, revision)
    return BaseHint.from_json({"name": Path(str(home)).name})


def is_hub_name(name: str) -> bool:
    """Return True for the name of a model on the hub."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and ".." not in name


def find_home(delta: Archive) -> Location:
    """Return the folder of a delta in a model folder, else the location of its file."""
    place = delta.location
    is_in_folder = place.name == DELTA and not place.is_folder()
    return place.parent() if is_in_folder and place.parent().child(_CONFIG).exists() else place


def _absolute(path: Path) -> Path:
    """Return an absolute path; links stay, those in the cache of the hub lead elsewhere."""
    return path.resolve() if ".." in path.parts else path.absolute()


def find_siblings(delta: Archive, hint: BaseHint, rejected: list[str]) -> Iterator[Location]:
    """Yield the models beside a delta, that with the name of the base first."""
    home = find_home(delta)
    if not isinstance(home, LocalLocation):
        if hint.name:
            yield home.parent().child(hint.name)
        return
    path = _absolute(home.path)
    inside = os.path.realpath(path.parent)
    for entry in _list_models(path.parent, rejected, first=hint.name):
        real = os.path.realpath(entry)
        if real == os.path.realpath(path):
            continue
        if os.path.commonpath([real, inside]) != inside:
            rejected.append(f"{entry}: a link that leads out of {path.parent}")
            continue
        yield LocalLocation(entry)


def find_cached(delta: Archive, hint: BaseHint, rejected: list[str]) -> Iterator[Location]:
    """Yield the base in the cache of the hub, which is not asked."""
    if hint.model is None:
        return
    if not is_hub_name(hint.model):
        rejected.append(f"{hint.model!r}: not the name of a model on the hub")
        return
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        rejected.append(f"{hint.model}: huggingface_hub is not installed")
        return
    caches: list[Path | None] = [None]
    home = find_home(delta)
    if isinstance(home, LocalLocation) and home.path.parent.name == "snapshots":
        caches.append(_absolute(home.path).parents[2])
    for cache in caches:
        try:
            found = snapshot_download(
                hint.model, revision=hint.revision, cache_dir=cache, local_files_only=True
            )
        except (OSError, ValueError) as error:
            rejected.append(f"{hint.model}: {str(error).splitlines()[0]}")
        else:
            yield LocalLocation(Path(found))


def find_listed(rejected: list[str]) -> Iterator[LocalLocation]:
    """Yield the models in the folders of the environment variable, and in their subfolders.

    A folder may also be the cache of the hub.
    """
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        root = Path(text)
        if not root.is_dir():
            rejected.append(f"{root}: {VARIABLE} names a folder that does not exist")
            continue
        yield from map(LocalLocation, _list_models(root.parent, rejected, only=root.name))
        for path in _list_models(root, rejected):
            yield LocalLocation(path)
        for folder in sorted(_subfolders(root)):
            place = folder / "snapshots" if folder.name.startswith(_CACHED) else folder
            if place.is_dir():  # OWNER/NAME, or revisions of a model in a cache
                yield from map(LocalLocation, _list_models(place, rejected))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    except OSError:
        return []


def _list_models(
    folder: Path, rejected: list[str], *, first: str | None = None, only: str | None = None
) -> Iterator[Path]:
    """Yield the model files and folders in a folder, sorted by name, `first` before others."""
    try:
        names = [only] if only else sorted(path.name for path in folder.iterdir())
    except OSError as error:
        rejected.append(f"{folder}: {error.strerror}")
        return
    names.sort(key=lambda name: name != first)
    count = 0
    for name in names:
        path = folder / name
        if name[:1] == "." or not (_is_model(path) or (name == first and path.is_file())):
            continue
        count += 1
        if count > _MAX_ENTRIES:
            rejected.append(f"{folder}: contains more than {_MAX_ENTRIES} models")
            return
        yield path


def _is_model(path: Path) -> bool:
    """Return True for a safetensors file, and for a folder that contains one."""
    if path.suffix == ".safetensors":
        return path.is_file()
    try:
        return any(file.suffix == ".safetensors" for file in path.iterdir())
    except OSError:
        return False
