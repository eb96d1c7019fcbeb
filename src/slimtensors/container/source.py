"""Files as ranges of bytes: mapped into memory, or fetched piece by piece."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from slimtensors.errors import CorruptFileError, SlimError

_PAGE = mmap.PAGESIZE
_LARGE = 1 << 20
_AHEAD = 64 << 20


class Source(Protocol):
    """An open file of known size."""

    name: str
    size: int

    def read(self, begin: int, end: int) -> memoryview:
        """Return these bytes; they are only to be read, and before `release`."""
        ...

    def release(self, begin: int, end: int) -> None:
        """Say that these bytes are no longer needed."""
        ...


class MappedFile:
    """A local file, mapped. Pages that were used are given back, so memory stays flat."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size == 0:
                raise CorruptFileError(f"{path}: the file is empty")
            # Copy-on-write only so that torch takes the pages without a warning; nobody writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = memoryview(self._map)
        self._small = 0
        self._last = self._fetched = 0

    def read(self, begin: int, end: int) -> memoryview:
        """Return a view of the mapped bytes."""
        if end - begin >= _LARGE:
            self._fetch(begin, end)
        return self._bytes[begin:end]

    def _fetch(self, begin: int, end: int) -> None:
        """Have these pages fetched; for who reads on from where he was, those that come next too.

        The disk then works while they are decoded.
        """
        reads_on = abs(begin - self._last) < _AHEAD  # threads side by side come in any order
        self._last = end
        if not reads_on:
            self._fetched = begin
        elif self._fetched - end >= _AHEAD // 2:
            return
        start, stop = max(begin, self._fetched), min(end + _AHEAD * reads_on, self.size)
        if start < stop:
            self._advise("MADV_WILLNEED", start, stop)
            self._fetched = stop

    def release(self, begin: int, end: int) -> None:
        """Give the pages back; those of small ranges together, once they add up."""
        if end - begin >= _LARGE:
            self._advise("MADV_DONTNEED", begin, end)
            return
        self._small += end - begin
        if self._small > 4 * _LARGE:
            self._small = 0
            self._advise("MADV_DONTNEED", 0, self.size)

    def _advise(self, advice: str, begin: int, end: int) -> None:
        if hasattr(mmap, advice):
            start = begin // _PAGE * _PAGE
            self._map.madvise(getattr(mmap, advice), start, end - start)


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Make errors of a file system `OSError`s that name what could not be reached."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{url}: no such file or folder") from None
    except (OSError, SlimError):
        raise
    except Exception as error:  # every client of a storage service has its own kinds
        raise OSError(f"{url}: {error}") from error


class RemoteFile:
    """A file of fsspec's. Small reads come from a block read ahead, large ones go by themselves."""

    def __init__(self, filesystem: Any, path: str, name: str) -> None:
        self.name = name
        with naming(name):
            size = filesystem.info(path)["size"]
        if size is None:
            raise OSError(f"{name}: the server does not say how large it is")
        self.size = int(size)
        self._filesystem, self._path = filesystem, path
        self._ahead, self._block = 0, memoryview(b"")
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> memoryview:
        """Fetch the bytes."""
        if end - begin >= _LARGE:
            return self._fetch(begin, end)
        with self._lock:
            last = self._ahead + len(self._block)
            if not self._ahead <= begin <= end <= last:
                # Far ahead only for who reads on from where he was.
                wanted = begin + (4 * _LARGE if self._ahead <= begin <= last else _LARGE // 16)
                self._block = self._fetch(begin, min(max(wanted, end), self.size))
                self._ahead = begin
            start = begin - self._ahead
            return self._block[start : start + end - begin]

    def release(self, begin: int, end: int) -> None:
        """Do nothing: what was read belongs to who asked for it."""

    def _fetch(self, begin: int, end: int) -> memoryview:
        if begin == end:
            return memoryview(b"")
        with naming(self.name):
            data = bytearray(self._filesystem.cat_file(self._path, start=begin, end=end))
        if len(data) == self.size:  # a server that does not know ranges sends everything
            data = data[begin:end]
        if len(data) != end - begin:
            raise CorruptFileError(f"{self.name}: asked for {end - begin} bytes, got {len(data)}")
        return memoryview(data)  # of a bytearray, as torch warns about memory it may not write
