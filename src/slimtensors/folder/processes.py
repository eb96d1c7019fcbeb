"""Processes that share the work on a folder: barriers, failures, and who writes which file."""

import heapq
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

from slimtensors.errors import ConfigError, RankError

TIMEOUT = 600.0
"""Seconds after which a rank that shows no progress counts as lost."""

_PREFIX = "slimtensors"
"""Of all names: the launcher keeps things in the same store."""
_LOOK = 0.05
"""Seconds between two looks at the others."""
_TELL = 1.0
"""Seconds between two signs of life."""
_HEARD, _ENDED = 10.0, 30.0
"""Seconds that the others have to hear of a failure, and of the end."""


class ProcessGroup(Protocol):
    """The processes of a run, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def advance(self) -> None:
        """Say that this rank gets on with its work; raise if another one has failed."""
        ...

    def meet(self, at: str) -> None:
        """Wait until all have come to the point `at`; raise if one fails or shows no progress."""
        ...


class SingleProcess:
    """One process that has nobody to wait for."""

    rank, count = 0, 1

    def advance(self) -> None:
        """Do nothing."""

    def meet(self, at: str) -> None:
        """Do nothing."""


class TorchProcessGroup:
    """Processes that know of each other by a store of torch.distributed."""

    def __init__(self, store: Any, rank: int, count: int, *, timeout: float = TIMEOUT) -> None:
        self.rank, self.count = rank, count
        self._store, self._timeout = store, timeout
        self._told, self._step, self._met = 0.0, 0, 0
        # A store outlives a run: what the ranks said in an earlier one must not count again.
        self._run = self._ask("add", f"{_PREFIX}/runs/{rank}", 1)

    def advance(self) -> None:
        """Give a sign of life once a second, and look whether all is well."""
        if time.monotonic() - self._told >= _TELL:
            self._sign()
            self._look()

    def meet(self, at: str) -> None:
        """Wait for the others, each for as long as it gets on."""
        self._sign()
        self._met += 1  # a second piece of work has points of the same names
        at = f"{self._met}/{at}"
        self._set(f"{at}/{self.rank}", "here")
        waiting = [rank for rank in range(self.count) if rank != self.rank]
        signs = dict.fromkeys(waiting, (b"", time.monotonic()))
        while waiting := [rank for rank in waiting if not self._has(f"{at}/{rank}")]:
            self.advance()
            self._look()
            for rank in waiting:
                self._check_alive(rank, signs)
            time.sleep(_LOOK)

    def fail(self, error: object) -> None:
        """Tell the others that this rank gives up.

        Waits a little until all have heard it: when one process ends, launchers end the others, and
        those that were about to begin would not say why.
        """
        self._set("failed", f"{self.rank}: {error}")
        self._see_off(_HEARD)

    def leave(self) -> None:
        """Wait until the others have seen the end, where the store is part of this process."""
        self._see_off(_ENDED if self.rank == 0 else 0)

    def _see_off(self, seconds: float) -> None:
        """Say that this rank is about to end, and wait at most so long until all have said so."""
        self._set(f"left/{self.rank}", "")
        end = time.monotonic() + min(self._timeout, seconds)
        while time.monotonic() < end and not all(
            self._has(f"left/{rank}") for rank in range(self.count)
        ):
            time.sleep(_LOOK)

    def _sign(self) -> None:
        self._told, self._step = time.monotonic(), self._step + 1
        self._set(f"alive/{self.rank}", str(self._step))

    def _look(self) -> None:
        if not self._has("failed"):
            return
        rank, _, why = self._get("failed").decode().partition(": ")
        if int(rank) != self.rank:
            with suppress(RankError):  # that the store is gone as well would hide why
                self._see_off(_HEARD)
            raise RankError(f"stopped, because rank {rank} could not go on: {why}")

    def _check_alive(self, rank: int, signs: dict[int, tuple[bytes, float]]) -> None:
        key, now = f"alive/{rank}", time.monotonic()
        sign = self._get(key) if self._has(key) else b""
        if sign != signs[rank][0]:
            signs[rank] = sign, now
        if now - signs[rank][1] > self._timeout:
            raise RankError(f"rank {rank} has not got on for {self._timeout:g} s (see --timeout)")

    def _set(self, key: str, value: str) -> None:
        self._ask("set", self._named(key), value)

    def _get(self, key: str) -> bytes:
        return bytes(self._ask("get", self._named(key)))

    def _has(self, key: str) -> bool:
        return bool(self._ask("check", [self._named(key)]))

    def _named(self, key: str) -> str:
        return f"{_PREFIX}/{self._run}/{key}"

    def _ask(self, what: str, *words: object) -> Any:
        try:
            return getattr(self._store, what)(*words)
        except RuntimeError as error:  # of torch: the process that keeps the store is gone
            raise RankError("lost the connection to the other ranks") from error


def is_multi_process() -> bool:
    """Tell whether torchrun, or what sets the same variables, started several processes."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def process_group_from_env(*, timeout: float = TIMEOUT) -> TorchProcessGroup:
    """Find the other processes by the variables that torchrun sets: RANK, WORLD_SIZE, ..."""
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError:
        raise ConfigError("this torch has no torch.distributed; start one process") from None
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except (ValueError, RuntimeError) as error:
        raise RankError(f"cannot reach the other ranks: {error}") from error
    return TorchProcessGroup(store, rank, count, timeout=timeout)


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
