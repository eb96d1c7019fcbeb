"""Replace the model in a folder that also contains other files: one file, or shards and an index.

An older model stays complete until the new one is: new shards never overwrite existing files, and
old shards are removed after the new index is on disk.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from slimtensors.errors import FormatError
from slimtensors.storage.atomic import (
    lock_replacement,
    remove_leftovers,
    replace_file,
    sync_folder,
    write_json,
)
from slimtensors.storage.files import name_write_errors, read_bytes
from slimtensors.storage.location import LocalLocation
from slimtensors.storage.reader import INDEX, SINGLE, open_file, read_index, weight_files
from slimtensors.tensor import Json

_NAMES = ".names.json"
"""Final names and inodes of the shards in a temporary folder, to find them after a crash."""
_SHARD = re.compile(r"[^/]+\.safetensors")


def install_model(new: Path, folder: Path) -> dict[str, str]:
    """Move the weights in the folder `new` to `folder`, and remove those of the model there.

    Return the final names by those in `new`. Of several processes, the last one wins.
    """
    with name_write_errors(folder), lock_replacement(folder / SINGLE):
        installation = _Installation(new, folder)
        try:
            installation.run()
        finally:
            _retry_interrupted(installation.clean_up)
        sync_folder(folder)
        (new / _NAMES).unlink(missing_ok=True)
    return installation.names


class _Installation:
    def __init__(self, new: Path, folder: Path) -> None:
        self._new, self._folder = new, folder
        main, *shards = weight_files(LocalLocation(new))
        self._main = new / main
        self._old = find_model_files(folder)
        self._status = self._main.stat()
        self.names = _choose_names(shards, folder) if shards else {main: SINGLE}
        self._is_sharded = bool(shards)

    def run(self) -> None:
        """Rename the files; each step is on disk before the next."""
        if self._is_sharded:
            self._rename_shards()
            replace_file(self._main, self._folder / INDEX)
            sync_folder(self._folder)
            (self._folder / SINGLE).unlink(missing_ok=True)  # readers prefer it to an index
        else:
            replace_file(self._main, self._folder / SINGLE)
        sync_folder(self._folder)

    def _rename_shards(self) -> None:
        if any(name != final for name, final in self.names.items()):
            table = json.loads(read_bytes(self._main))
            files = table["weight_map"].items()
            table["weight_map"] = {key: self.names[name] for key, name in files}
            write_json(self._main, table)
        inodes = {final: (self._new / name).stat().st_ino for name, final in self.names.items()}
        write_json(self._new / _NAMES, inodes)
        for name, final in self.names.items():
            (self._folder / final).parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._new / name, self._folder / final)
        sync_folder(self._folder)

    def clean_up(self) -> None:
        """Remove the old model if the new one is complete, else the files of the new one."""
        names = set(self.names.values())
        if not self._is_sharded:
            obsolete = self._old - {SINGLE} if self._is_renamed() else set()
        elif not _is_indexed(self._folder, names):
            obsolete = names
        elif (self._folder / SINGLE).exists():
            obsolete = {*names, INDEX}
        else:
            obsolete = self._old - {*names, INDEX}
        for name in obsolete:
            (self._folder / name).unlink(missing_ok=True)

    def _is_renamed(self) -> bool:
        path = self._folder / SINGLE
        return path.exists() and os.path.samestat(path.stat(), self._status)


def remove_model_leftovers(folder: Path) -> None:
    """Remove what killed writers of the model in a folder left there, also renamed shards."""
    remove_leftovers(folder / SINGLE, lambda path: _remove_orphans(path, folder))


def _remove_orphans(leftover: Path, folder: Path) -> None:
    """Remove the shards that a killed writer renamed before it wrote their index."""
    try:
        inodes = json.loads(read_bytes(leftover / _NAMES))
        listed = find_model_files(folder)
        for name in inodes.keys() - listed:
            path = folder / name
            if _SHARD.fullmatch(name) and path.lstat().st_ino == inodes[name]:
                path.unlink()
    except (OSError, ValueError, AttributeError):  # no shard was renamed
        return


def _choose_names(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Return file names that do not exist in `folder`, by the given ones."""
    revision = 0
    while True:
        mark = f".r{revision}" if revision else ""
        found = {name: f"{name.removesuffix('.safetensors')}{mark}.safetensors" for name in names}
        if not any(os.path.lexists(folder / final) for final in found.values()):
            return found
        revision += 1


def _is_indexed(folder: Path, names: set[str]) -> bool:
    try:
        return set(read_index(LocalLocation(folder / INDEX))) == names
    except (OSError, FormatError):
        return False


def write_index(folder: Path, index: str, names: Sequence[str], order: Sequence[str] = ()) -> None:
    """Write the index of shards, with the stored tensors in `order` or in that of the files."""
    entries = {name: open_file(LocalLocation(folder / name)).header.entries for name in names}
    file_of = {key: name for name, table in entries.items() for key in table}
    total = sum(entry.spec.nbytes for table in entries.values() for entry in table.values())
    table: Json = {
        "metadata": {"total_size": total},
        "weight_map": {key: file_of[key] for key in order or file_of},
    }
    write_json(folder / index, table)


def note_parameters(index: Path, count: int) -> None:
    """Add the number of parameters, which the Hub displays, to an index if it exists."""
    with lock_replacement(index.with_name(SINGLE)):
        if index.exists():
            table = json.loads(read_bytes(index))
            table["metadata"] = {"total_parameters": count, **table["metadata"]}
            write_json(index, table)


def find_model_files(folder: Path) -> set[str]:
    """Return the names of the weight files of the model in a folder, or an empty set."""
    files = {SINGLE} if (folder / SINGLE).exists() else set()
    if (folder / INDEX).exists():
        files.add(INDEX)
        with suppress(FormatError):  # an invalid index lists no shards
            shards = read_index(LocalLocation(folder / INDEX))
            files |= {name for name in shards if name.endswith(".safetensors")}
    return files


def _retry_interrupted(action: Callable[[], None]) -> None:
    """Run `action`, and once more if Ctrl-C interrupted it."""
    try:
        action()
    except KeyboardInterrupt:
        action()
        raise
