"""Write safetensors files: a single file or a folder of shards, local or remote.

Files appear under their final names when they are complete, or not at all.
"""

import ctypes
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from torch import Tensor

from slimtensors.errors import ConfigError, FormatError, UnsupportedTensorError
from slimtensors.storage.atomic import create_temporary, remove_leftovers, sync_folder, write_json
from slimtensors.storage.location import LocalLocation, RemoteLocation
from slimtensors.storage.reader import (
    CODE_OF_DTYPE,
    INCOMPLETE,
    INDEX,
    MAX_HEADER,
    PACKED_PAIR,
    SINGLE,
    HeaderEntry,
    open_file,
    read_index,
)
from slimtensors.tensor import Json, Spec, ceil_div, is_valid_text

_FLUSH = 16 << 20
"""Bytes after which writing to disk is started."""

_BUFFER = 1 << 20

ByteChunk = Tensor | bytes
"""Bytes to write: `bytes`, or a flat `uint8` tensor in main memory."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """The bytes of a tensor to write."""

    name: str
    spec: Spec
    chunks: Sequence[ByteChunk]
    checksum: int | None
    """CRC-32C of the bytes, or None if they contain their own checksums."""


Describe = Callable[[Sequence[str], Mapping[str, int | None], str], Mapping[str, str]]
"""Returns the metadata of a file from its stored names, their checksums and the header table."""


class Output(Protocol):
    """The file or folder to which the tensors of a model are written."""

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor, all of them to the same file."""
        ...

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Rename everything to its final name; return the files and the stored names in each."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _Writers:
    """Files being written; those that were not committed are removed at the end."""

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
    """A single local file."""

    def __init__(self, path: Path, *, reserve: int, header: bytes | None = None) -> None:
        super().__init__()
        self._target = check_target(path)
        remove_leftovers(self._target)
        self._writers.append(Writer(self._target, reserve=reserve, header=header))

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor."""
        for piece in pieces:
            self._writers[0].add(piece)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Replace the target with the new file in one step."""
        _finish(self._writers[0], order, describe)
        self._writers[0].commit(self._target)
        sync_folder(self._target.parent)
        return {str(self._target): list(order)}


class FolderOutput(_Writers):
    """A local folder with `model.safetensors`, or with shards and an index if it is too large.

    An older model in the folder stays complete until the new one is: new shards never overwrite
    existing files, and old shards are removed after the new index was written.
    """

    def __init__(self, folder: Path, *, max_shard_size: int | None, reserve: int) -> None:
        super().__init__()
        if max_shard_size is not None and max_shard_size < 1:
            raise ConfigError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file, not a folder")
        self._folder, self._limit = folder, max_shard_size
        self._is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        # Small shards have few tensors: space for all names would outweigh them.
        self._reserve = reserve if max_shard_size is None else min(reserve, max_shard_size // 64)
        remove_leftovers(folder / SINGLE)
        self._writers.append(Writer(folder / SINGLE, reserve=self._reserve))

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor, to a new shard if they do not fit."""
        writer = self._writers[-1]
        size = sum(piece.spec.nbytes for piece in pieces)
        if self._limit is not None and writer.size and writer.size + size > self._limit:
            writer = Writer(self._folder / SINGLE, reserve=self._reserve)
            self._writers.append(writer)
        for piece in pieces:
            writer.add(piece)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Rename the new model, then remove the files of the old one."""
        for writer in self._writers:
            _finish(writer, order, describe)
        old = find_model_files(self._folder)
        names = [SINGLE] if len(self._writers) == 1 else self._choose_names()
        try:
            self._rename(names, order)
        finally:
            _retry_interrupted(lambda: self._clean_up(names, old))
        sync_folder(self._folder)
        files = zip(names, self._writers, strict=True)
        return {str(self._folder / name): list(writer.checksums) for name, writer in files}

    def _rename(self, names: Sequence[str], order: Sequence[str]) -> None:
        for writer, name in zip(self._writers, names, strict=True):
            writer.commit(self._folder / name)
        if names != [SINGLE]:
            write_index(self._folder, INDEX, names, order)
            (self._folder / SINGLE).unlink(missing_ok=True)  # readers prefer it to an index

    def _clean_up(self, names: Sequence[str], old: set[str]) -> None:
        """Remove the old model if the new one is complete, else the files of the new one."""
        if names == [SINGLE]:
            is_complete = self._writers[0].is_committed_as(self._folder / SINGLE)
            obsolete = old - {SINGLE} if is_complete else set()
        elif not self._is_indexed(names):
            obsolete = set(names)
        elif (self._folder / SINGLE).exists():
            obsolete = {*names, INDEX}
        else:
            obsolete = old - {*names, INDEX}
        for name in obsolete:
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
            with suppress(OSError):  # another process wrote to it in the meantime
                self._folder.rmdir()

    def _choose_names(self) -> list[str]:
        """Return shard names that do not exist yet."""
        count, revision = len(self._writers), 0
        while True:
            mark = f".r{revision}" if revision else ""
            names = [f"model-{i:05d}-of-{count:05d}{mark}.safetensors" for i in range(1, count + 1)]
            if not any((self._folder / name).exists() for name in names):
                return names
            revision += 1


class RemoteOutput:
    """A file or a folder of shards in an fsspec file system, written locally and uploaded."""

    def __init__(
        self,
        where: RemoteLocation,
        *,
        is_folder: bool,
        max_shard_size: int | None,
        reserve: int,
        header: bytes | None = None,
    ) -> None:
        if is_folder and any(name.endswith(".safetensors") for name in _list_files(where)):
            raise ConfigError(f"{where} contains a model; remove it or choose another folder")
        self._where, self._is_folder, self._resources = where, is_folder, ExitStack()
        temporary = tempfile.TemporaryDirectory(prefix="slimtensors-")
        self._folder = Path(self._resources.enter_context(temporary))
        output: Output = (
            FolderOutput(self._folder, max_shard_size=max_shard_size, reserve=reserve)
            if is_folder
            else FileOutput(self._folder / where.name, reserve=reserve, header=header)
        )
        self._output = self._resources.enter_context(output)

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor."""
        self._output.add(pieces)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Upload everything, an index last."""
        files = self._output.commit(order, describe)
        if self._is_folder:
            _upload_folder(self._folder, self._where)
            return {str(self._where.child(Path(file).name)): keys for file, keys in files.items()}
        ((file, keys),) = files.items()
        self._where.upload(Path(file))
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
    if index.exists():
        table = json.loads(index.read_bytes())
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


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(size: int | str | None) -> int | None:
    """Parse a size such as `5GB` (10⁹ bytes), `512MiB` (2²⁰) or a number of bytes."""
    if size is None or isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip())
    if not found:
        raise ConfigError(f"invalid size {size!r}; expected 5GB, 512MiB or a number of bytes")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def has_code(spec: Spec) -> bool:
    """Return True if safetensors supports the dtype and shape."""
    return spec.dtype in CODE_OF_DTYPE and not (spec.dtype == PACKED_PAIR and not spec.shape)


def check_name(name: str) -> None:
    """Raise `UnsupportedTensorError` if a stored tensor cannot have this name."""
    if name == "__metadata__":
        raise UnsupportedTensorError("tensor name '__metadata__' is reserved")
    if not is_valid_text(name):
        raise UnsupportedTensorError(f"tensor name is not valid Unicode: {name!r}")


class Writer:
    """A safetensors file that is written under a temporary name beside its target.

    The header is first in the file but written last: `reserve` bytes are kept free for it. If it
    is larger, `finish` moves the data, which costs a second copy. With `header`, these bytes are
    written instead; the tensors must be added in the order of its offsets. `discard` removes the
    file unless it was committed.
    """

    def __init__(self, target: Path, *, reserve: int, header: bytes | None = None) -> None:
        touch = partial(Path.touch, exist_ok=False)
        self._temporary, self._descriptor = create_temporary(target, touch)
        self._header = header
        self._reserve = max(ceil_div(reserve, 8) * 8, 16) if header is None else len(header)
        self._entries: dict[str, HeaderEntry] = {}
        self.checksums: dict[str, int | None] = {}
        self.size = 0
        """Bytes of tensors written so far."""
        self._file: BinaryIO = os.fdopen(self._descriptor, "r+b", _BUFFER, closefd=False)
        self._file.seek(self._reserve)
        self._flushed = 0

    def add(self, piece: TensorBytes) -> None:
        """Append a tensor."""
        begin = self.size
        for chunk in piece.chunks:
            data = chunk.numpy().data if isinstance(chunk, Tensor) else chunk
            self._file.write(data)
            self.size += len(data)
        assert self.size - begin == piece.spec.nbytes, piece.name
        if self.size - self._flushed > _FLUSH:
            self._flushed = self.size
            _start_flush(self._file.fileno())
        self._entries[piece.name] = HeaderEntry(piece.spec, begin, self.size)
        self.checksums[piece.name] = piece.checksum

    def finish(self, order: Sequence[str], describe: Callable[[str], Mapping[str, str]]) -> None:
        """Write the header with the tensors in `order`, and sync the file to disk.

        `describe` returns the metadata from the text of the header table.
        """
        raw = self._header
        if raw is None:
            table = header_table({name: self._entries[name] for name in order})
            raw = pack_header(table, describe(table), size=self._reserve)
        if len(raw) > self._reserve:
            self._move_data(len(raw))
        self._file.seek(0)
        self._file.write(raw)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def commit(self, target: Path) -> None:
        """Rename the finished file to `target`, replacing an existing file."""
        if target.exists():
            shutil.copymode(target, self._temporary)
        self._temporary.replace(target)

    def is_committed_as(self, target: Path) -> bool:
        """Return True if `target` is this file."""
        return target.exists() and os.path.samestat(target.stat(), os.fstat(self._descriptor))

    def _move_data(self, start: int) -> None:
        """Move all data towards the end of the file, the last bytes first."""
        for begin in reversed(range(0, self.size, _BUFFER)):
            self._file.seek(self._reserve + begin)
            data = self._file.read(min(_BUFFER, self.size - begin))
            self._file.seek(start + begin)
            self._file.write(data)
        self._reserve = start

    def discard(self) -> None:
        """Remove the file unless it was committed."""
        with suppress(OSError):  # closing flushes, which fails again if the disk is full
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        os.close(self._descriptor)  # releases the lock: until then it is not a leftover


def header_table(entries: Mapping[str, HeaderEntry]) -> str:
    """Return the JSON text of the tensors, without the opening brace."""
    table = {
        name: {
            "dtype": CODE_OF_DTYPE[entry.spec.dtype],
            "shape": _stored_shape(entry.spec),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in entries.items()
    }
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False)[1:]


def pack_header(table: str, metadata: Mapping[str, str], *, size: int = 0) -> bytes:
    """Return the bytes of a header, padded with spaces to `size` bytes if it is shorter."""
    start = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":"))
    comma = "," if len(table) > 1 else ""
    text = (start[:-1] + comma + table).encode()
    width = max(size - 8, math.ceil(len(text) / 8) * 8)
    if width > MAX_HEADER:
        raise FormatError(
            f"header of {width} bytes is too large (limit {MAX_HEADER}); use more shards"
        )
    return struct.pack("<Q", width) + text.ljust(width)


def _stored_shape(spec: Spec) -> list[int]:
    if spec.dtype == PACKED_PAIR:
        return [*spec.shape[:-1], spec.shape[-1] * 2]
    return list(spec.shape)


def check_target(path: Path) -> Path:
    """Return the file to replace, through symlinks; raise if it cannot be written."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path} is not a regular file and cannot be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {target.parent} does not exist")
    return target


def _finish(writer: Writer, order: Sequence[str], describe: Describe) -> None:
    names = [name for name in order if name in writer.checksums]
    writer.finish(names, lambda table: describe(names, writer.checksums, table))


def _retry_interrupted(action: Callable[[], None]) -> None:
    """Run `action`, and once more if Ctrl-C interrupted it."""
    try:
        action()
    except KeyboardInterrupt:
        action()
        raise


def _upload_folder(folder: Path, where: RemoteLocation) -> None:
    marker = where.child(INCOMPLETE)
    marker.write(b"{}\n")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    # JSON files last: without them, loaders do not find an incomplete model.
    for file in sorted(files, key=lambda file: file.suffix == ".json"):
        where.child(file.as_posix()).upload(folder / file)
    marker.remove()


def _list_files(where: RemoteLocation) -> list[str]:
    return where.files() if where.is_folder() else []


def _start_flush(file: int) -> None:
    """Start writing to disk, without waiting, so that the final fsync is short."""
    flush = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if flush is not None:  # Linux only
        everything, write = 0, 2  # a length, SYNC_FILE_RANGE_WRITE
        flush(file, ctypes.c_int64(0), ctypes.c_int64(everything), write)
