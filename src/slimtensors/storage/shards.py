"""Write a model as one file or a folder of shards, local or remote; visible when complete."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from slimtensors.errors import ConfigError, FormatError
from slimtensors.storage.atomic import remove_leftovers, sync_folder
from slimtensors.storage.location import LocalLocation, RemoteLocation
from slimtensors.storage.reader import INCOMPLETE, INDEX, SINGLE, open_file, read_index
from slimtensors.storage.writer import TensorBytes, Writer, check_target
from slimtensors.tensor import Json

Describe = Callable[[Sequence[str], Mapping[str, int | None], str], Mapping[str, str]]
"""Gets the stored names of one file, their checksums and the list of tensors; returns metadata."""


class Output(Protocol):
    """Takes the pieces of a model one after the other."""

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append what belongs to one tensor; it stays together in one file."""
        ...

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Make everything visible under its final name; return the files and what each holds."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _Writers:
    """The files being written; leaving the `with` block removes those that were not committed."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._writers:
            writer.discard()


class FileOutput(_Writers):
    """One file."""

    def __init__(self, path: Path, *, reserve: int) -> None:
        super().__init__()
        self._target = check_target(path)
        remove_leftovers(self._target)
        self._writers.append(Writer(self._target, reserve=reserve))

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append what belongs to one tensor."""
        for piece in pieces:
            self._writers[0].add(piece)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Replace the target by the new file in one step."""
        _finish(self._writers[0], order, describe)
        self._writers[0].commit(self._target)
        sync_folder(self._target.parent)
        return {str(self._target): list(order)}


class FolderOutput(_Writers):
    """`model.safetensors` in a folder, or shards and an index where that would be too large.

    An older model in the folder stays complete until the new one is: new shards never take the
    name of a file that is there, and old ones go only after the new index is in place.
    """

    def __init__(self, folder: Path, *, max_shard_size: int | None, reserve: int) -> None:
        super().__init__()
        if max_shard_size is not None and max_shard_size < 1:
            raise ConfigError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: is a file, and shards need a folder")
        self._folder, self._limit = folder, max_shard_size
        self._is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        # Few tensors reach a small shard, so the room for all their names would outweigh them.
        self._reserve = reserve if max_shard_size is None else min(reserve, max_shard_size // 64)
        remove_leftovers(folder / SINGLE)
        self._writers.append(Writer(folder / SINGLE, reserve=self._reserve))

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append what belongs to one tensor, in a new shard if it would not fit."""
        writer = self._writers[-1]
        size = sum(piece.spec.nbytes for piece in pieces)
        if self._limit is not None and writer.size and writer.size + size > self._limit:
            writer = Writer(self._folder / SINGLE, reserve=self._reserve)
            self._writers.append(writer)
        for piece in pieces:
            writer.add(piece)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Put the new model in place, then remove what is left of the old one."""
        for writer in self._writers:
            _finish(writer, order, describe)
        old = old_files(self._folder)
        names = [SINGLE] if len(self._writers) == 1 else self._free_names()
        try:
            self._rename(names, order)
        finally:
            _insist(lambda: self._tidy(names, old))
        sync_folder(self._folder)
        homes = zip(names, self._writers, strict=True)
        return {str(self._folder / name): list(writer.checksums) for name, writer in homes}

    def _rename(self, names: Sequence[str], order: Sequence[str]) -> None:
        for writer, name in zip(self._writers, names, strict=True):
            writer.commit(self._folder / name)
        if names != [SINGLE]:
            write_index(self._folder, INDEX, names, order)
            (self._folder / SINGLE).unlink(missing_ok=True)  # readers take it before an index

    def _tidy(self, names: Sequence[str], old: set[str]) -> None:
        """Remove the old model if the new one is in place, else whatever of the new one is."""
        if names == [SINGLE]:
            is_in_place = self._writers[0].is_committed_as(self._folder / SINGLE)
            gone = old - {SINGLE} if is_in_place else set()
        elif not self._is_indexed(names):
            gone = set(names)
        elif (self._folder / SINGLE).exists():
            gone = {*names, INDEX}
        else:
            gone = old - {*names, INDEX}
        for name in gone:
            (self._folder / name).unlink(missing_ok=True)

    def _is_indexed(self, names: Sequence[str]) -> bool:
        try:
            return set(read_index(LocalLocation(self._folder / INDEX))) == set(names)
        except (OSError, FormatError):
            return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is not None and self._is_new:
            with suppress(OSError):  # somebody else has put something there meanwhile
                self._folder.rmdir()

    def _free_names(self) -> list[str]:
        count, revision = len(self._writers), 0
        while True:
            mark = f".r{revision}" if revision else ""
            names = [f"model-{i:05d}-of-{count:05d}{mark}.safetensors" for i in range(1, count + 1)]
            if not any((self._folder / name).exists() for name in names):
                return names
            revision += 1


def write_index(folder: Path, index: str, names: Sequence[str], order: Sequence[str] = ()) -> None:
    """Write the index of these shards, listing stored tensors in `order` or as they come."""
    entries = {name: open_file(LocalLocation(folder / name)).header.entries for name in names}
    homes = {key: name for name, table in entries.items() for key in table}
    total = sum(entry.spec.nbytes for table in entries.values() for entry in table.values())
    table: Json = {
        "metadata": {"total_size": total},
        "weight_map": {key: homes[key] for key in order or homes},
    }
    write_json(folder / index, table)


def note_parameters(index: Path, count: int) -> None:
    """Add to an index, if there is one, how many parameters its shards hold, as the hub wants."""
    if index.exists():
        table = json.loads(index.read_bytes())
        table["metadata"] = {"total_parameters": count, **table["metadata"]}
        write_json(index, table)


def write_json(path: Path, data: Json) -> None:
    """Write a JSON file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.slimtensors-tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(size: int | str | None) -> int | None:
    """Read a size such as `5GB` (10⁹ bytes), `512MiB` (2²⁰) or a number of bytes."""
    if size is None or isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip())
    if not found:
        raise ConfigError(f"not a size: {size!r}; write 5GB, 512MiB or a number of bytes")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _finish(writer: Writer, order: Sequence[str], describe: Describe) -> None:
    here = [name for name in order if name in writer.checksums]
    writer.finish(here, lambda table: describe(here, writer.checksums, table))


def _insist(action: Callable[[], None]) -> None:
    """Do it, and once more if Ctrl-C came in between."""
    try:
        action()
    except KeyboardInterrupt:
        action()
        raise


def old_files(folder: Path) -> set[str]:
    """Name the files of the model that a folder holds, if it holds one."""
    old = {SINGLE} if (folder / SINGLE).exists() else set()
    if (folder / INDEX).exists():
        old.add(INDEX)
        with suppress(FormatError):  # an index that cannot be read names nothing to remove
            shards = read_index(LocalLocation(folder / INDEX))
            old |= {name for name in shards if name.endswith(".safetensors")}
    return old


class RemoteOutput:
    """A file, or a folder of shards, in one of fsspec's file systems."""

    def __init__(
        self, where: RemoteLocation, *, is_folder: bool, max_shard_size: int | None, reserve: int
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

    def add(self, pieces: Sequence[TensorBytes]) -> None:
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
def sending_folder(where: RemoteLocation) -> Iterator[Path]:
    """Give a folder of this machine to fill, which is sent at the end."""
    with _temporary() as name:
        yield Path(name)
        _send(Path(name), where)


def _send(folder: Path, where: RemoteLocation) -> None:
    mark = where.child(INCOMPLETE)
    mark.write(b"{}\n")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    # Loaders look for JSON first: without it, what is there already is nothing to them.
    for file in sorted(files, key=lambda file: file.suffix == ".json"):
        where.child(file.as_posix()).send(folder / file)
    mark.remove()


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slimtensors-")


def _files(where: RemoteLocation) -> list[str]:
    return where.files() if where.is_folder() else []
