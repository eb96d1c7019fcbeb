"""A finished folder takes the place of another one, if that may go."""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slimtensors.container import StrPath, local, sync_folder
from slimtensors.errors import ConfigError


@contextmanager
def new_folder(path: StrPath, *sources: StrPath, replace: bool) -> Iterator[Path]:
    """Give a folder to fill, which takes the place of `path` at the end, or disappears."""
    target = Path(os.path.realpath(local(path)))
    check_replaceable(target, sources, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.slimtensors-tmp")
    folder.mkdir()
    try:
        yield folder
        put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there goes when the new one is in place."""
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.slimtensors-old")
    try:
        if target.exists():
            target.rename(old)
        folder.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    if old.exists():
        shutil.rmtree(old)


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
