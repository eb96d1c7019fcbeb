"""Read a remote file by byte ranges: concurrent requests of limited size and number."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slimtensors.errors import CorruptFileError
from slimtensors.storage.retry import ATTEMPTS, is_temporary, pause, translate

IN_FLIGHT = 64 << 20
"""Bytes that `read_ranges` requests at a time."""
PART = 8 << 20
"""Bytes of one request; larger ranges are divided."""
_LARGE = 1 << 20
"""Bytes from which on a range is read on its own."""
_GAP = 1 << 16
"""Bytes between two ranges that are read rather than requested separately."""
_MAX_REQUESTS = 128

Range = tuple[int, int]
"""First byte, and the byte after the last one."""


class RemoteFile:
    """An fsspec file. Small reads are served from a prefetched block, large ones in parts."""

    def __init__(
        self, filesystem: Any, path: str, name: str, size: int, *, is_divided: bool
    ) -> None:
        """Read a file of a known size; large ranges are divided into parts if `is_divided`."""
        self.name, self.size = name, size
        self.identity: object = None
        self._filesystem, self._path = filesystem, path
        self._part = PART if is_divided else max(size, 1)
        self._block_start, self._block = 0, memoryview(b"")
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> memoryview:
        """Read the bytes."""
        if end - begin >= _LARGE:
            return self._fetch([(begin, end)], IN_FLIGHT)[0]
        with self._lock:
            block_end = self._block_start + len(self._block)
            if not self._block_start <= begin <= end <= block_end:
                is_sequential = self._block_start <= begin <= block_end
                ahead = begin + (4 * _LARGE if is_sequential else _LARGE // 16)
                span = (begin, min(max(ahead, end), self.size))
                self._block = self._fetch([span], IN_FLIGHT)[0]
                self._block_start = begin
            start = begin - self._block_start
            return self._block[start : start + end - begin]

    def read_ranges(
        self, ranges: Iterable[Range], *, in_flight: int = IN_FLIGHT
    ) -> Iterator[memoryview]:
        """Read concurrently; ranges that are close to each other are read together."""
        batch: list[list[Range]] = []
        size = 0
        for group in _group_ranges(ranges):
            nbytes = group[-1][1] - group[0][0]
            if batch and size + nbytes > in_flight:
                yield from self._read_groups(batch, in_flight)
                batch, size = [], 0
            batch.append(group)
            size += nbytes
        yield from self._read_groups(batch, in_flight)

    def _read_groups(self, groups: Sequence[list[Range]], in_flight: int) -> Iterator[memoryview]:
        spans = [(group[0][0], group[-1][1]) for group in groups]
        for group, data in zip(groups, self._fetch(spans, in_flight), strict=True):
            start = group[0][0]
            yield from (data[begin - start : end - start] for begin, end in group)

    def release(self, begin: int, end: int) -> None:
        """Do nothing: every read returns its own memory."""

    def _fetch(self, spans: Sequence[Range], in_flight: int) -> list[memoryview]:
        """Return the bytes of these ranges, requested in parts of limited size and number."""
        blocks = [memoryview(bytearray(end - begin)) for begin, end in spans]
        parts = [
            (begin, min(begin + self._part, end), block[begin - start :])
            for (start, end), block in zip(spans, blocks, strict=True)
            for begin in range(start, end, self._part)
        ]
        count = max(1, min(_MAX_REQUESTS, in_flight // self._part))
        if all(end - begin < _LARGE for begin, end, _ in parts):
            count = _MAX_REQUESTS
        for i in range(0, len(parts), count):
            self._fetch_parts(parts[i : i + count])
        return blocks  # of bytearrays: torch warns about read-only memory

    def _fetch_parts(self, parts: Sequence[tuple[int, int, memoryview]]) -> None:
        """Copy the bytes of each part into its memory; repeat failed requests."""
        attempt = 1
        while parts:
            failed = []
            problem: Exception | None = None
            for part, data in zip(parts, self._request(parts), strict=True):
                begin, end, target = part
                if isinstance(data, Exception):
                    problem = data
                    failed.append(part)
                    continue
                if len(data) == self.size:  # a server without range requests sends everything
                    data = data[begin:end]
                if len(data) == end - begin:
                    target[: end - begin] = data
                    continue
                expected = f"expected {end - begin} bytes, got {len(data)}"
                problem = CorruptFileError(f"{self.name}: {expected}")
                failed.append(part)
            if problem is not None:
                is_short = isinstance(problem, CorruptFileError)
                if attempt == ATTEMPTS or not (is_short or is_temporary(problem)):
                    found = translate(self.name, problem)
                    raise found from found.__cause__
                pause(attempt)
                attempt += 1
            parts = failed

    def _request(self, parts: Sequence[tuple[int, int, memoryview]]) -> list[Any]:
        starts, ends = [part[0] for part in parts], [part[1] for part in parts]
        paths = [self._path] * len(parts)
        try:
            return list(self._filesystem.cat_ranges(paths, starts, ends, on_error="return"))
        except Exception as error:  # of all requests, as without a connection
            return [error] * len(parts)


def _group_ranges(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Yield groups of ranges that follow each other with small gaps."""
    group: list[Range] = []
    for begin, end in ranges:
        if group:
            start, last = group[0][0], group[-1][1]
            if not (last <= begin <= last + _GAP and end - start <= PART):
                yield group
                group = []
        group.append((begin, end))
    if group:
        yield group
