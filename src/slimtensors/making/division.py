"""Who does what: the files of a model divided over ranks by their bytes."""

import heapq
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

LEAST = 16 << 20
"""Bytes below which a part of a file costs more to hand over than to make."""

_FAIR = 1.25
"""A file may be larger than a fair share by so much before it is made in parts."""
_PARTS = 2
"""Parts per fair share: small enough for ranks to end together."""


@dataclass(frozen=True)
class File:
    """A file to be made: the bytes of each tensor that goes there, tied ones once."""

    key: str
    sizes: Mapping[str, int]
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of tensors that may be cut: how many rows they have, and at which multiples."""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Task:
    """What one rank does by itself: a whole file, or a part of one."""

    file: str
    nbytes: int
    names: Sequence[str] = ()
    """The tensors of a part; none if it is the whole file."""
    rows: tuple[int, int] | None = None
    """The rows of the only tensor, if it is cut."""

    @property
    def key(self) -> str:
        """A name for the part that no other part has, however the file was divided."""
        what = zlib.crc32(json.dumps([list(self.names), self.rows]).encode())
        return f"{self.file}.part-{what:08x}.safetensors"


@dataclass(frozen=True)
class Division:
    """The tasks of each rank, and which rank joins each file that is made in parts."""

    tasks: Sequence[Sequence[Task]]
    parts: Mapping[str, Sequence[Task]]
    """Of each file that is made in parts, the tasks that make them, in order."""
    joins: Mapping[str, int]


def divide(files: Sequence[File], count: int, *, least: int = LEAST) -> Division:
    """Divide the work over `count` ranks: large files in parts, large tensors in rows.

    Every rank comes to the same division by itself: it follows from the headers alone.
    """
    fair = sum(file.nbytes for file in files) / count
    size = max(int(fair / _PARTS), least)
    parts = {
        file.key: tasks
        for file in files
        if count > 1 and file.nbytes > _FAIR * fair and len(tasks := list(_parts(file, size))) > 1
    }
    whole = [Task(file.key, file.nbytes) for file in files if file.key not in parts]
    shares = _shared([*whole, *chain(*parts.values())], count)
    # Far from each other, because neighbours share a machine and its network.
    joins = {key: i * count // len(parts) for i, key in enumerate(parts)}
    return Division(shares, parts, joins)


def _parts(file: File, size: int) -> Iterator[Task]:
    """Yield tensors in order, about `size` bytes at a time; larger ones cut, if they may be."""
    held: list[str] = []
    total = 0
    for name, nbytes in file.sizes.items():
        rows, step = file.rows.get(name, (0, 1))
        spans = _spans(rows, step, nbytes, size)
        if held and (spans or total + nbytes > size):
            yield Task(file.key, total, held)
            held, total = [], 0
        for begin, end in spans:
            yield Task(file.key, nbytes * (end - begin) // rows, [name], (begin, end))
        if not spans:
            held, total = [*held, name], total + nbytes
    if held:
        yield Task(file.key, total, held)


def _spans(rows: int, step: int, nbytes: int, size: int) -> list[tuple[int, int]]:
    """Cut rows at multiples of `step` into pieces of about `size` bytes; nothing if that is one."""
    if nbytes <= _FAIR * size or rows <= step:
        return []
    count = max(size * rows // nbytes // step, 1) * step
    return [(begin, min(begin + count, rows)) for begin in range(0, rows, count)]


def _shared(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Give each task, the largest first, to who has least; one rank does them in order."""
    if count == 1:
        return [list(tasks)]
    shares: list[list[Task]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        load, rank = loads[0]
        shares[rank].append(task)
        heapq.heapreplace(loads, (load + task.nbytes, rank))
    return shares
