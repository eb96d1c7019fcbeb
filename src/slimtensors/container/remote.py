"""Models that go elsewhere: written on this machine first, then sent, what leads to them last."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from slimtensors.container.place import RemotePlace
from slimtensors.container.reader import UNFINISHED
from slimtensors.container.shards import Describe, FileOutput, FolderOutput, Output
from slimtensors.container.writer import Piece
from slimtensors.errors import ConfigError


class RemoteOutput:
    """A file, or a folder of shards, in one of fsspec's file systems."""

    def __init__(
        self, where: RemotePlace, *, is_folder: bool, max_shard_size: int | None, reserve: int
    ) -> None:
        if is_folder and any(name.endswith(".safetensors") for name in _files(where)):
            raise ConfigError(f"{where}: holds a model; remove it, or name another folder")
        self._where, self._is_folder, self._resources = where, is_folder, ExitStack()
        self._folder = Path(self._resources.enter_context(_temporary()))
        output: Output = (
            FolderOutput(self._folder, max_shard_size=max_shard_size, reserve=reserve)
            if is_folder
            else FileOutput(self._folder / where.name, reserve=reserve)
        )
        self._output = self._resources.enter_context(output)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append what belongs to one tensor."""
        self._output.add(pieces)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Send everything, an index last."""
        files = self._output.commit(order, describe)
        if self._is_folder:
            _send(self._folder, self._where)
            return {str(self._where.child(Path(file).name)): keys for file, keys in files.items()}
        ((file, keys),) = files.items()
        self._where.send(Path(file))
        return {str(self._where): keys}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, trace)


@contextmanager
def sending_folder(where: RemotePlace) -> Iterator[Path]:
    """Give a folder of this machine to fill, which is sent at the end."""
    with _temporary() as name:
        yield Path(name)
        _send(Path(name), where)


def _send(folder: Path, where: RemotePlace) -> None:
    mark = where.child(UNFINISHED)
    mark.write(b"{}\n")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    # Loaders look for JSON first: without it, what is there already is nothing to them.
    for file in sorted(files, key=lambda file: file.suffix == ".json"):
        where.child(file.as_posix()).send(folder / file)
    mark.remove()


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slimtensors-")


def _files(where: RemotePlace) -> list[str]:
    return where.files() if where.is_folder() else []
