"""Write safetensors files: a single file or a folder of shards, local or remote.

Files appear under their final names when they are complete, or not at all.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from torch import Tensor

from slimtensors.errors import ConfigError, FormatError, UnsupportedTensorError
from slimtensors.storage.atomic import (
    replace_file,
    sync_folder,
    temporary_file,
    temporary_folder,
)
from slimtensors.storage.files import create_file, name_write_errors
from slimtensors.storage.installation import install_model, remove_model_leftovers, write_index
from slimtensors.storage.location import RemoteLocation
from slimtensors.storage.reader import (
    CODE_OF_DTYPE,
    INCOMPLETE,
    INDEX,
    MAX_HEADER,
    PACKED_PAIR,
    SINGLE,
    HeaderEntry,
)
from slimtensors.tensor import Spec, ceil_div, is_valid_text

_FLUSH = 16 << 20
"""Bytes after which writing to disk is started."""

_BUFFER = 1 << 20
_HEAD = 16
"""First bytes of a tensor that contain its checksum, if it contains its own."""
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

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


class Describe(Protocol):
    """Returns the metadata of a file."""

    def __call__(
        self,
        names: Sequence[str],
        checksums: Mapping[str, int | None],
        table: str,
        generation: str | None,
    ) -> Mapping[str, str]:
        """Return the metadata from the stored names, their checksums and the header table.

        `generation` is the hash that all shards of a model share, None for a single file.
        """
        ...


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


class FileOutput:
    """A single local file."""

    def __init__(self, path: Path, *, reserve: int, header: bytes | None = None) -> None:
        self._target = check_target(path)
        with ExitStack() as stack:
            temporary, _ = stack.enter_context(temporary_file(self._target))
            self._writer = Writer(temporary, self._target, reserve=reserve, header=header)
            self._resources = stack.pop_all()

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor."""
        for piece in pieces:
            self._writer.add(piece)

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Replace the target with the new file in one step."""
        self._writer.finish(order, describe, None)
        replace_file(self._writer.path, self._target)
        sync_folder(self._target.parent)
        return {str(self._target): list(order)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.abandon()
        self._resources.close()


class FolderOutput:
    """A local folder with `model.safetensors`, or with shards and an index if it is too large.

    Files are written to a temporary folder in it. An older model in the folder stays complete until
    the new one is: new shards never overwrite existing files, and old shards are removed after the
    new index was written. Of several processes that write at a time, the last one wins.
    """

    def __init__(self, folder: Path, *, max_shard_size: int | None, reserve: int) -> None:
        if max_shard_size is not None and max_shard_size < 1:
            raise ConfigError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file, not a folder")
        self._folder, self._limit = folder, max_shard_size
        self._is_new = not folder.exists()
        # Small shards have few tensors: space for all names would outweigh them.
        self._reserve = reserve if max_shard_size is None else min(reserve, max_shard_size // 64)
        self._writers: list[Writer] = []
        with ExitStack() as stack:
            remove_model_leftovers(folder)
            self._temporary = stack.enter_context(temporary_folder(folder / SINGLE))
            self._start_file()
            self._resources = stack.pop_all()

    def add(self, pieces: Sequence[TensorBytes]) -> None:
        """Append the pieces of a tensor, to a new shard if they do not fit."""
        writer = self._writers[-1]
        size = sum(piece.spec.nbytes for piece in pieces)
        if self._limit is not None and writer.size and writer.size + size > self._limit:
            writer.close()  # thousands of open files would exceed the limit of a process
            writer = self._start_file()
        for piece in pieces:
            writer.add(piece)

    def _start_file(self) -> "Writer":
        path = self._temporary / f"{len(self._writers) + 1}.safetensors"
        with name_write_errors(self._folder):
            os.close(create_file(path))
        self._writers.append(Writer(path, self._folder, reserve=self._reserve))
        return self._writers[-1]

    def commit(self, order: Sequence[str], describe: Describe) -> dict[str, list[str]]:
        """Rename the new model, then remove the files of the old one."""
        generation = self._compute_generation(order, describe) if self._writers[1:] else None
        for writer in self._writers:
            writer.finish(order, describe, generation)
        with name_write_errors(self._folder):
            count = len(self._writers)
            names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
            names = names if count > 1 else [SINGLE]
            for writer, name in zip(self._writers, names, strict=True):
                writer.path.rename(self._temporary / name)
            if count > 1:
                write_index(self._temporary, INDEX, names, order)
            final = install_model(self._temporary, self._folder)
        files = zip(names, self._writers, strict=True)
        return {str(self._folder / final[name]): list(w.checksums) for name, w in files}

    def _compute_generation(self, order: Sequence[str], describe: Describe) -> str:
        """Return a hash of the content of all shards."""
        digest = hashlib.sha256()
        for writer in self._writers:
            digest.update(writer.digest(order, describe))
        return digest.hexdigest()[:32]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._writers:
            writer.abandon()
        self._resources.close()
        if error is not None and self._is_new:
            with suppress(OSError):  # another process wrote to it in the meantime
                self._folder.rmdir()


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
    """A safetensors file that is written at `path`, which exists and is empty.

    The header is first in the file but written last: `reserve` bytes are kept free for it. If it
    is larger, `finish` moves the data, which costs a second copy. With `header`, these bytes are
    written instead; the tensors must be added in the order of its offsets. `target` is named in
    errors.
    """

    def __init__(
        self, path: Path, target: Path, *, reserve: int, header: bytes | None = None
    ) -> None:
        self.path, self._target, self._header = path, target, header
        self._reserve = max(ceil_div(reserve, 8) * 8, 16) if header is None else len(header)
        self._entries: dict[str, HeaderEntry] = {}
        self._heads = hashlib.sha256()
        """Hash of the first bytes of each tensor that contains its own checksum."""
        self.checksums: dict[str, int | None] = {}
        self.size = 0
        """Bytes of tensors written so far."""
        self._flushed = 0
        self._file = self._open()
        self._file.seek(self._reserve)

    def _open(self) -> BinaryIO:
        return os.fdopen(os.open(self.path, _WRITE), "r+b", _BUFFER)

    def add(self, piece: TensorBytes) -> None:
        """Append a tensor."""
        begin, head = self.size, b""
        with name_write_errors(self._target):
            for chunk in piece.chunks:
                data = chunk.numpy().data if isinstance(chunk, Tensor) else chunk
                head += bytes(data[: _HEAD - len(head)])
                self._file.write(data)
                self.size += len(data)
        assert self.size - begin == piece.spec.nbytes, piece.name
        if self.size - self._flushed > _FLUSH:
            self._flushed = self.size
            _start_flush(self._file.fileno())
        self._entries[piece.name] = HeaderEntry(piece.spec, begin, self.size)
        self.checksums[piece.name] = piece.checksum
        if piece.checksum is None:
            self._heads.update(head)

    def digest(self, order: Sequence[str], describe: Describe) -> bytes:
        """Return a hash of the content, computed from checksums and the header."""
        names, table = self._make_table(order)
        metadata = json.dumps(dict(describe(names, self.checksums, table, None)))
        digest = hashlib.sha256(metadata.encode())
        digest.update(table.encode())
        digest.update(self._heads.digest())
        return digest.digest()

    def finish(self, order: Sequence[str], describe: Describe, generation: str | None) -> None:
        """Write the header with the tensors in `order`, and sync the file to disk."""
        raw = self._header
        if raw is None:
            names, table = self._make_table(order)
            metadata = describe(names, self.checksums, table, generation)
            raw = pack_header(table, metadata, size=self._reserve)
        with name_write_errors(self._target):
            if self._file.closed:
                self._file = self._open()
            if len(raw) > self._reserve:
                self._move_data(len(raw))
            self._file.seek(0)
            self._file.write(raw)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _make_table(self, order: Sequence[str]) -> tuple[list[str], str]:
        names = [name for name in order if name in self._entries]
        return names, header_table({name: self._entries[name] for name in names})

    def _move_data(self, start: int) -> None:
        """Move all data towards the end of the file, the last bytes first."""
        for begin in reversed(range(0, self.size, _BUFFER)):
            self._file.seek(self._reserve + begin)
            data = self._file.read(min(_BUFFER, self.size - begin))
            self._file.seek(start + begin)
            self._file.write(data)
        self._reserve = start

    def close(self) -> None:
        """Close the file, to be finished later."""
        with name_write_errors(self._target):
            self._file.close()

    def abandon(self) -> None:
        """Close the file, to be removed."""
        with suppress(OSError):  # closing flushes, which fails again if the disk is full
            self._file.close()


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
