"""The folder of an unfinished save, and how it becomes the checkpoint in one step."""

import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimtensors.checkpoint.distributed.manifest import (
    DistributedManifest,
    read_base_name,
    read_distributed_manifest,
    write_distributed_manifest,
)
from slimtensors.errors import ConfigError, FormatError
from slimtensors.storage import DISTRIBUTED as MANIFEST
from slimtensors.storage import (
    INCOMPLETE,
    Folder,
    RemoteLocation,
    StrPath,
    is_distributed,
    is_url,
    local_path,
    locate_folder,
    temporary_folder,
)
from slimtensors.storage.atomic import (
    commit_folder,
    lock_replacement,
    remove_leftovers,
    replace_file,
    sync_folder,
    sync_tree,
)
from slimtensors.storage.claim import Claim
from slimtensors.storage.files import name_write_errors

_log = logging.getLogger(__name__)

_TORCH_MANIFEST = ".metadata"
"""The file that makes a checkpoint of torch's `FileSystemWriter` complete."""
_RANK_FILE = re.compile(r"rank-\d{5,}(?P<run>-[0-9a-f]{16})?\.safetensors")


def create_run_id() -> str:
    """Return a new random id of a save."""
    return secrets.token_hex(8)


class PendingFolder:
    """The temporary folder of a save; deleted with this object unless it is committed.

    A target that does not exist appears complete: the temporary folder is renamed. In an existing
    folder, which may be a mount point or the current folder, files get names of this save, and
    replacing the manifest is the one step that makes them the checkpoint. Files that are not part
    of a checkpoint stay.
    """

    def __init__(self, path: StrPath, run: str, *, overwrite: bool) -> None:
        self.run = run
        self._target = resolve_path(path)
        self._is_in_place = _check_target(self._target, overwrite=overwrite)
        place = self._target
        if self._is_in_place:
            remove_leftovers(self._target)
            place = self._target / MANIFEST
        resources = ExitStack()
        self.path = resources.enter_context(temporary_folder(place))
        self._close = weakref.finalize(self, resources.close)

    def commit(self, manifest: DistributedManifest) -> DistributedManifest:
        """Write the manifest, and make the files of this save the checkpoint.

        Return the manifest as stored: its files may have other names, in the same order.
        """
        with name_write_errors(self._target):
            if not self._is_in_place:
                write_distributed_manifest(self.path, manifest)
                try:
                    commit_folder(self.path, self._target)
                except ConfigError:
                    if is_distributed(self._target):
                        raise
                    self._is_in_place = True  # other files were added in the meantime
            if self._is_in_place:
                manifest = self._move_files(manifest)
        self._close()
        return manifest

    def _move_files(self, manifest: DistributedManifest) -> DistributedManifest:
        """Move the files to the target, replace its manifest, and remove the previous files."""
        target = self._target
        names = {name: f"{Path(name).stem}-{self.run}.safetensors" for name in manifest.files}
        files = {names[name]: size for name, size in manifest.files.items()}
        renamed = replace(manifest, files=files)
        write_distributed_manifest(self.path, renamed)
        sync_tree(self.path)
        with lock_replacement(target / MANIFEST):
            previous = _list_files(target)
            for old, new in names.items():
                (self.path / old).rename(target / new)
            sync_folder(target)
            replace_file(self.path / MANIFEST, target / MANIFEST)
            sync_folder(target)
            for path in sorted(target.iterdir()):
                found = _RANK_FILE.fullmatch(path.name)
                # A name with another run is a leftover of a killed save: others wait for the lock.
                is_ours = found is not None and (found["run"] or path.name in previous)
                if is_ours and path.name not in files:
                    path.unlink(missing_ok=True)
        return renamed


class RemotePending:
    """A save to remote storage: each rank uploads a file, then the manifest is replaced.

    The coordinator claims the folder, so that a second save to it is refused meanwhile.
    """

    def __init__(self, target: RemoteLocation, run: str, *, overwrite: bool) -> None:
        self.run, self.path = run, target
        if is_torch_checkpoint(target):
            raise ConfigError(
                f"Checkpoint already exists: {target} contains a checkpoint of FsspecWriter"
                f" ({_TORCH_MANIFEST}); save elsewhere, or remove it"
            )
        target.make_folder()
        self._claim = Claim(target / INCOMPLETE)
        self._close = weakref.finalize(self, self._claim.abandon)
        if is_distributed(target):
            if not overwrite:
                self._release()
                raise ConfigError(f"Checkpoint already exists and overwrite=False: {target}")
            try:
                _check_no_deltas(target)
            except ConfigError:
                self._release()
                raise

    def commit(self, manifest: DistributedManifest) -> DistributedManifest:
        """Write the manifest, and remove the files of earlier saves."""
        self._claim.check()
        (self.path / MANIFEST).write(manifest.to_text().encode())
        for name in self.path.files():
            found = _RANK_FILE.fullmatch(name)
            if found is not None and found["run"] and name not in manifest.files:
                (self.path / name).unlink()
        self._release()
        return manifest

    def _release(self) -> None:
        self._close.detach()
        self._claim.release()


def check_path(path: StrPath) -> StrPath:
    """Return a local path or URL; raise `ConfigError` if it is empty."""
    return path if is_url(path) else local_path(path)


def resolve_folder(path: StrPath, storage_options: dict[str, Any] | None) -> Folder:
    """Return the absolute path or location of a checkpoint, with symlinks resolved."""
    folder = locate_folder(path, storage_options)
    return resolve_path(folder) if isinstance(folder, Path) else folder


def resolve_path(path: StrPath) -> Path:
    """Return the absolute path of a checkpoint, with symlinks resolved."""
    return Path(os.path.realpath(local_path(path)))


def is_torch_checkpoint(folder: Folder) -> bool:
    """Return True if a folder contains a checkpoint of torch's `FileSystemWriter`."""
    return (folder / _TORCH_MANIFEST).exists()


def _check_target(target: Path, *, overwrite: bool) -> bool:
    """Return True if the target is a folder; raise if it must not be written."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder")
    if is_torch_checkpoint(target):
        # FileSystemReader would go on loading it from the same folder.
        raise ConfigError(
            f"Checkpoint already exists: {target} contains a checkpoint of FileSystemWriter"
            f" ({_TORCH_MANIFEST}); save elsewhere, or remove it"
        )
    if is_distributed(target):
        if not overwrite:
            raise ConfigError(f"Checkpoint already exists and overwrite=False: {target}")
        _check_no_deltas(target)
        _log.info("%s: replacing an existing checkpoint", target)
    return True


def _check_no_deltas(target: Folder) -> None:
    """Raise `ConfigError` if this checkpoint is the base of another one in the same folder."""
    siblings: Iterable[Folder]
    siblings = (
        sorted(target.parent.iterdir()) if isinstance(target, Path) else target.parent().folders()
    )
    for folder in siblings:
        if folder != target and is_distributed(folder) and read_base_name(folder) == target.name:
            raise ConfigError(
                f"{target} cannot be overwritten: it is the base of {folder.name};"
                f" remove {folder.name} first, or save elsewhere"
            )


def _list_files(target: Path) -> set[str]:
    """Return the names of the files of a checkpoint; none if there is no valid one."""
    with suppress(FormatError, OSError):
        return set(read_distributed_manifest(target).files)
    return set()
