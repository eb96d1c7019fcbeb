"""Checkpoints that are not complete: a hidden folder, which takes its name at the end."""

import os
import re
import secrets
import shutil
import weakref
from pathlib import Path

from slimtensors.checkpoint.commit import (
    MARK,
    check_free,
    hidden,
    leftovers,
    place_folder,
    replace_folder,
)
from slimtensors.container import StrPath, local, sync_folder
from slimtensors.distributed.manifest import Manifest, base_name, is_distributed, write_manifest
from slimtensors.errors import ConfigError


class Pending:
    """The folder of a checkpoint that is being saved; it goes with this object or gets its name."""

    def __init__(self, path: StrPath, *, overwrite: bool = False) -> None:
        self.run = secrets.token_hex(8)
        self.target = real_path(path)
        self._replaces = overwrite and is_distributed(self.target)
        if self._replaces:
            _check_not_needed(self.target)
        else:
            check_free(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for folder in _interrupted(self.target):
            shutil.rmtree(folder, ignore_errors=True)
        self.folder = hidden(self.target)
        self.folder.mkdir()
        self._removed = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def commit(self, manifest: Manifest) -> None:
        """Describe the checkpoint, which is then complete, and give it its name."""
        write_manifest(self.folder, manifest)
        if self._replaces:
            sync_folder(self.folder)
            replace_folder(self.folder, self.target)
        else:
            place_folder(self.folder, self.target)
        self._removed.detach()


def real_path(path: StrPath) -> Path:
    """Return where a checkpoint lies, through links."""
    return Path(os.path.realpath(local(path)))


def _check_not_needed(target: Path) -> None:
    """Raise if a checkpoint beside this one could not be loaded without it."""
    for folder in sorted(target.parent.iterdir()):
        if folder != target and is_distributed(folder) and base_name(folder) == target.name:
            raise ConfigError(
                f"{target}: is not overwritten, because {folder.name} is a difference from it;"
                " remove that first, or save elsewhere"
            )


def _interrupted(target: Path) -> list[Path]:
    """List what earlier saves to the same place have left behind."""
    name = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}" + re.escape(MARK))
    found = [folder for folder in leftovers(target.parent) if name.fullmatch(folder.name)]
    # Where nothing has the name, a complete one may be all there is: it was about to be replaced.
    return [folder for folder in found if target.exists() or not is_distributed(folder)]
