"""Write one safetensors file tensor by tensor; it appears whole or not at all."""

import ctypes
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.storage import header as headers
from slimtensors.storage.atomic import create_temporary
from slimtensors.storage.header import HeaderEntry
from slimtensors.tensor import Spec, ceil_div

_AHEAD = 16 << 20
"""Bytes after which the disk is told to begin."""

_BUFFER = 1 << 20

ByteChunk = Tensor | bytes
"""Bytes on their way to a file: `bytes`, or a flat `uint8` tensor in main memory."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A stored tensor on its way to a file."""

    name: str
    spec: Spec
    chunks: Sequence[ByteChunk]
    checksum: int | None
    """CRC-32C of its bytes; none if they carry their own."""


class Writer:
    """A file that grows under a temporary name beside its target.

    The header comes first in the file and is known last: `reserve` bytes are kept free for it.
    Should they not suffice, `finish` moves the data, which costs a second copy but is never wrong.
    `discard` removes it; after `commit` there is nothing left to remove.
    """

    def __init__(self, target: Path, *, reserve: int) -> None:
        touch = partial(Path.touch, exist_ok=False)
        self._temporary, self._descriptor = create_temporary(target, touch)
        self._reserve = max(ceil_div(reserve, 8) * 8, 16)
        self._entries: dict[str, HeaderEntry] = {}
        self.checksums: dict[str, int | None] = {}
        self.size = 0
        """Bytes of tensors written so far."""
        self._file: BinaryIO = os.fdopen(self._descriptor, "r+b", _BUFFER, closefd=False)
        self._file.seek(self._reserve)
        self._sent = 0

    def add(self, piece: TensorBytes) -> None:
        """Append a tensor."""
        begin = self.size
        for chunk in piece.chunks:
            data = chunk.numpy().data if isinstance(chunk, Tensor) else chunk
            self._file.write(data)
            self.size += len(data)
        assert self.size - begin == piece.spec.nbytes, piece.name
        if self.size - self._sent > _AHEAD:
            self._sent = self.size
            _start_writing(self._file.fileno())
        self._entries[piece.name] = HeaderEntry(piece.spec, begin, self.size)
        self.checksums[piece.name] = piece.checksum

    def finish(self, order: Sequence[str], describe: Callable[[str], Mapping[str, str]]) -> None:
        """Write the header, listing the tensors in `order`, and make sure all is on the disk.

        `describe` gets the list of tensors as it will stand in the file, and returns the metadata.
        """
        table = headers.table_text({name: self._entries[name] for name in order})
        raw = headers.pack(table, describe(table), size=self._reserve)
        if len(raw) > self._reserve:
            self._move_data(len(raw))
        self._file.seek(0)
        self._file.write(raw)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def commit(self, target: Path) -> None:
        """Give the finished file its name, replacing what had it."""
        if target.exists():
            shutil.copymode(target, self._temporary)
        self._temporary.replace(target)

    def is_committed_as(self, target: Path) -> bool:
        """Tell whether the file has this name."""
        return target.exists() and os.path.samestat(target.stat(), os.fstat(self._descriptor))

    def _move_data(self, start: int) -> None:
        """Move all towards the end of the file, the last bytes first."""
        for begin in reversed(range(0, self.size, _BUFFER)):
            self._file.seek(self._reserve + begin)
            data = self._file.read(min(_BUFFER, self.size - begin))
            self._file.seek(start + begin)
            self._file.write(data)
        self._reserve = start

    def discard(self) -> None:
        """Remove whatever has not been committed."""
        with suppress(OSError):  # closing flushes, which fails again if the disk is full
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        os.close(self._descriptor)  # until then, nobody takes it for abandoned


def _start_writing(file: int) -> None:
    """Let the disk begin with what was written, so that less is left to wait for at the end."""
    send = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if send is not None:  # only Linux has it
        everything, begin = 0, 2  # a length, SYNC_FILE_RANGE_WRITE
        send(file, ctypes.c_int64(0), ctypes.c_int64(everything), begin)


def check_target(path: Path) -> Path:
    """Return the file that writing to `path` would replace; raise if that cannot be done."""
    target = Path(os.path.realpath(path))  # write through a link, as open() would
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path}: is not an ordinary file and cannot be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {target.parent} does not exist")
    return target
