"""A finished folder takes the place of another one, if that may go."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slimtensors.container import StrPath, hidden_folder, local, replace_folder, sync_folder
from slimtensors.errors import ConfigError


@contextmanager
def new_folder(path: StrPath, *sources: StrPath, replace: bool) -> Iterator[Path]:
    """Give a folder to fill, which takes the place of `path` at the end, or disappears."""
    target = Path(os.path.realpath(local(path)))
    check_replaceable(target, sources, replace=replace)
    with hidden_folder(target) as folder:
        yield folder
        put_in_place(folder, target)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there goes when the new one is in place."""
    sync_folder(folder)
    if target.exists():
        replace_folder(folder, target)
    else:
        folder.rename(target)
        sync_folder(target.parent)


def check_replaceable(target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
    """Raise if there is something that nobody wants destroyed."""
    if not target.exists():
        return
    if not replace:
        raise ConfigError(f"{target}: exists already; pass replace=True")
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file, not a folder")
    paths = [Path(os.path.realpath(source)) for source in sources]
    if any(target in (path if path.is_dir() else path.parent).parents for path in paths):
        raise ConfigError(f"{target}: holds the source's folder and cannot be replaced")
    if any(target.iterdir()) and not any(target.rglob("*.safetensors")):
        raise ConfigError(f"{target}: holds files, but no model, and is not replaced")
