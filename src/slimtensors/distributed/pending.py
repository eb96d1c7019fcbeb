"""Checkpoints that are not complete: a hidden folder, which takes its name at the end."""

import os
import secrets
import weakref
from contextlib import ExitStack
from pathlib import Path

from slimtensors.checkpoint.commit import check_free, place_folder
from slimtensors.container import StrPath, hidden_folder, local, replace_folder, sync_folder
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
        resources = ExitStack()
        self.folder = resources.enter_context(hidden_folder(self.target))
        self._close = weakref.finalize(self, resources.close)

    def commit(self, manifest: Manifest) -> None:
        """Describe the checkpoint, which is then complete, and give it its name."""
        write_manifest(self.folder, manifest)
        if self._replaces:
            sync_folder(self.folder)
            replace_folder(self.folder, self.target)
        else:
            place_folder(self.folder, self.target)
        self._close()


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
