"""Folders in remote storage that are complete or absent: files first, a manifest last.

A folder without its manifest does not exist for readers. While files are written or removed, the
claim `INCOMPLETE` marks the folder; those of killed processes are recognized by it.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from slimtensors.errors import ConfigError
from slimtensors.storage.claim import Claim, find_owner
from slimtensors.storage.location import RemoteLocation
from slimtensors.storage.multipart import abort_uploads, upload_file
from slimtensors.storage.reader import INCOMPLETE

_log = logging.getLogger(__name__)


def upload_folder(folder: Path, target: RemoteLocation, *, manifest: str) -> None:
    """Upload a local folder; the manifest makes it complete.

    Files that an interrupted upload has completed are not sent again. Raise `ConfigError` if the
    target exists, and `InUseError` if another process writes it.
    """
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in files if path.as_posix() != manifest]
    with claim_folder(target) as claim:
        found = set(target.walk())
        if manifest in found:
            raise ConfigError(f"{target} already exists and is not empty (contains {manifest})")
        for name in found - {*names, INCOMPLETE}:
            (target / name).unlink()  # of an interrupted upload of something else
        for name in names:
            upload_file(folder / name, target / name)
        claim.check()
        (target / manifest).write((folder / manifest).read_bytes())


@contextmanager
def claim_folder(target: RemoteLocation) -> Iterator[Claim]:
    """Return a context in which only this process writes a folder.

    After an error the mark stays, so that the next upload removes what this one left. A
    `ConfigError` must be raised before anything is written.
    """
    target.make_folder()
    claim = Claim(target / INCOMPLETE)
    try:
        yield claim
    except ConfigError:
        claim.release()
        raise
    except BaseException:
        claim.abandon()
        raise
    claim.release()


def check_vacant(target: RemoteLocation) -> None:
    """Raise `ConfigError` if a target contains anything but leftovers of an interrupted upload."""
    try:
        found = target.walk()
    except FileNotFoundError:
        return
    if found and INCOMPLETE not in found:
        raise ConfigError(f"{target} already exists and is not empty (contains {found[0]})")


def remove_uploaded(target: RemoteLocation, *, manifest: str) -> None:
    """Remove a folder: first the manifest, last the mark that it is incomplete."""
    with claim_folder(target):
        _remove_files(target, manifest)


def _remove_files(target: RemoteLocation, manifest: str) -> None:
    abort_uploads(target)
    names = set(target.walk()) - {INCOMPLETE}
    for name in sorted(names, key=lambda name: name != manifest):
        (target / name).unlink()


def find_interrupted(parent: RemoteLocation) -> list[RemoteLocation]:
    """Return the folders in `parent` whose upload or removal was interrupted, sorted."""
    marked = [path for path in parent.walk() if path.count("/") == 1]
    folders = [parent / path.partition("/")[0] for path in marked if path.endswith(INCOMPLETE)]
    return [folder for folder in folders if not find_owner(folder / INCOMPLETE)]


def remove_interrupted(
    parent: RemoteLocation, *, manifest: str, keep: Collection[str] = ()
) -> list[str]:
    """Remove what interrupted uploads and removals left in the folders of `parent`; return names.

    A folder with a manifest is complete and only loses its mark. Those in `keep` stay as they are,
    for an upload that continues.
    """
    found = [folder for folder in find_interrupted(parent) if folder.name not in keep]
    for folder in found:
        with claim_folder(folder):
            if not (folder / manifest).is_file():
                _remove_files(folder, manifest)
        _log.info("%s: leftovers of an interrupted upload removed", folder)
    return [folder.name for folder in found]
