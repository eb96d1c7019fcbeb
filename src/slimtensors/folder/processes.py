"""Several processes that write one folder: barriers, failures, division of the work."""

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
"""Seconds without progress after which a rank counts as lost."""

_PREFIX = "slimtensors"
"""Prefix of all keys: the launcher uses the same store."""
_POLL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 1.0
_FAILURE_SECONDS, _END_SECONDS = 10.0, 30.0
"""How long a rank waits for the others to notice a failure, or the end of the run."""


class ProcessGroup(Protocol):
    """The processes of a run, as seen by one of them."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of processes."""
        ...

    def heartbeat(self) -> None:
        """Signal that this rank makes progress; raise if another one has failed."""
        ...

    def barrier(self, name: str) -> None:
        """Wait until all ranks have arrived; raise if one fails or makes no progress."""
        ...


class SingleProcess:
    """A run of one process."""

    rank, count = 0, 1

    def heartbeat(self) -> None:
        """Do nothing."""

    def barrier(self, name: str) -> None:
        """Do nothing."""


class TorchProcessGroup:
    """Processes that communicate through a store of torch.distributed."""

    def __init__(self, store: Any, rank: int, count: int, *, timeout: float = TIMEOUT) -> None:
        self.rank, self.count = rank, count
        self._store, self._timeout = store, timeout
        self._last_heartbeat, self._heartbeats, self._barriers = 0.0, 0, 0
        # The store outlives a run, so keys of earlier runs must not count again.
        self._run = self._call("add", f"{_PREFIX}/runs/{rank}", 1)

    def heartbeat(self) -> None:
        """Send a heartbeat and check for failures, at most once a second."""
        if time.monotonic() - self._last_heartbeat >= _HEARTBEAT_SECONDS:
            self._send_heartbeat()
            self._check_failure()

    def barrier(self, name: str) -> None:
        """Wait for the others, each as long as it sends heartbeats."""
        self._send_heartbeat()
        self._barriers += 1  # names repeat when several folders are written
        name = f"{self._barriers}/{name}"
        self._set(f"{name}/{self.rank}", "arrived")
        waiting = [rank for rank in range(self.count) if rank != self.rank]
        seen = dict.fromkeys(waiting, (b"", time.monotonic()))
        while waiting := [rank for rank in waiting if not self._has(f"{name}/{rank}")]:
            self.heartbeat()
            self._check_failure()
            for rank in waiting:
                self._check_alive(rank, seen)
            time.sleep(_POLL_SECONDS)

    def fail(self, error: object) -> None:
        """Report to the others that this rank failed.

        Waits until all have received it: when one process ends, launchers kill the others, which
        then could not report the reason.
        """
        self._set("failed", f"{self.rank}: {error}")
        self._wait_for_end(_FAILURE_SECONDS)

    def leave(self) -> None:
        """End the run; rank 0, which may host the store, waits for the others."""
        self._wait_for_end(_END_SECONDS if self.rank == 0 else 0)

    def _wait_for_end(self, seconds: float) -> None:
        """Report that this rank is about to end; wait until all have, at most `seconds`."""
        self._set(f"left/{self.rank}", "")
        end = time.monotonic() + min(self._timeout, seconds)
        while time.monotonic() < end and not all(
            self._has(f"left/{rank}") for rank in range(self.count)
        ):
            time.sleep(_POLL_SECONDS)

    def _send_heartbeat(self) -> None:
        self._last_heartbeat, self._heartbeats = time.monotonic(), self._heartbeats + 1
        self._set(f"alive/{self.rank}", str(self._heartbeats))

    def _check_failure(self) -> None:
        if not self._has("failed"):
            return
        rank, _, reason = self._get("failed").decode().partition(": ")
        if int(rank) != self.rank:
            with suppress(RankError):  # a lost store must not hide the reason
                self._wait_for_end(_FAILURE_SECONDS)
            raise RankError(f"stopped because rank {rank} failed: {reason}")

    def _check_alive(self, rank: int, seen: dict[int, tuple[bytes, float]]) -> None:
        """Raise on timeout; `seen` is the last heartbeat of each rank and when it arrived."""
        key, now = f"alive/{rank}", time.monotonic()
        heartbeat = self._get(key) if self._has(key) else b""
        if heartbeat != seen[rank][0]:
            seen[rank] = heartbeat, now
        if now - seen[rank][1] > self._timeout:
            raise RankError(f"no progress from rank {rank} for {self._timeout:g} s (--timeout)")

    def _set(self, key: str, value: str) -> None:
        self._call("set", self._full_key(key), value)

    def _get(self, key: str) -> bytes:
        return bytes(self._call("get", self._full_key(key)))

    def _has(self, key: str) -> bool:
        return bool(self._call("check", [self._full_key(key)]))

    def _full_key(self, key: str) -> str:
        return f"{_PREFIX}/{self._run}/{key}"

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # from torch, when the process that hosts the store ended
            raise RankError("lost the connection to the other ranks") from error


def is_multi_process() -> bool:
    """Return True if torchrun (or a launcher with the same variables) started this process."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def process_group_from_env(*, timeout: float = TIMEOUT) -> TorchProcessGroup:
    """Connect to the other processes through the variables of torchrun: RANK, WORLD_SIZE, ..."""
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError:
        raise ConfigError(
            "this build of torch has no torch.distributed; run a single process"
        ) from None
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except (ValueError, RuntimeError) as error:
        raise RankError(f"cannot connect to the other ranks: {error}") from error
    return TorchProcessGroup(store, rank, count, timeout=timeout)


MIN_PART_BYTES = 16 << 20
"""Smaller parts of a file cost more to transfer than to encode."""

_TOLERANCE = 1.25
"""Files up to this multiple of an equal share are not divided."""
_PARTS_PER_SHARE = 2
"""Parts per equal share: small enough for ranks to finish at the same time."""


@dataclass(frozen=True)
class FileSizes:
    """A file to write: the bytes of each of its tensors, without tied ones."""

    key: str
    sizes: Mapping[str, int]
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of rows and row step of the tensors that may be divided by rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Task:
    """Work of one rank: a file, or a part of one."""

    file: str
    nbytes: int
    names: Sequence[str] = ()
    """Tensors of a part; empty for a whole file."""
    rows: tuple[int, int] | None = None
    """Rows of the only tensor, if it is divided."""

    @property
    def key(self) -> str:
        """Unique name of the part, also among other divisions of the file."""
        digest = zlib.crc32(json.dumps([list(self.names), self.rows]).encode())
        return f"{self.file}.part-{digest:08x}.safetensors"


@dataclass(frozen=True)
class WorkDivision:
    """The tasks of each rank, and the rank that joins the parts of each divided file."""

    tasks: Sequence[Sequence[Task]]
    parts: Mapping[str, Sequence[Task]]
    """Divided file -> tasks that write its parts, in order."""
    joiners: Mapping[str, int]
    """Divided file -> rank that joins its parts."""


def divide_work(
    files: Sequence[FileSizes], count: int, *, min_part_bytes: int = MIN_PART_BYTES
) -> WorkDivision:
    """Divide the work among `count` ranks: large files into parts, large tensors by rows.

    Deterministic from the headers alone, so every rank computes the same division.
    """
    share = sum(file.nbytes for file in files) / count
    size = max(int(share / _PARTS_PER_SHARE), min_part_bytes)
    parts = {
        file.key: tasks
        for file in files
        if count > 1
        and file.nbytes > _TOLERANCE * share
        and len(tasks := list(_divide_file(file, size))) > 1
    }
    undivided = [Task(file.key, file.nbytes) for file in files if file.key not in parts]
    tasks_by_rank = _assign([*undivided, *chain(*parts.values())], count)
    # Spread over distant ranks, because neighbours share a machine and its network.
    joiners = {key: i * count // len(parts) for i, key in enumerate(parts)}
    return WorkDivision(tasks_by_rank, parts, joiners)


def _divide_file(file: FileSizes, size: int) -> Iterator[Task]:
    """Yield tasks of about `size` bytes, in order; larger tensors are divided if allowed."""
    names: list[str] = []
    total = 0
    for name, nbytes in file.sizes.items():
        rows, step = file.rows.get(name, (0, 1))
        spans = _divide_rows(rows, step, nbytes, size)
        if names and (spans or total + nbytes > size):
            yield Task(file.key, total, names)
            names, total = [], 0
        for begin, end in spans:
            yield Task(file.key, nbytes * (end - begin) // rows, [name], (begin, end))
        if not spans:
            names, total = [*names, name], total + nbytes
    if names:
        yield Task(file.key, total, names)


def _divide_rows(rows: int, step: int, nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return spans of about `size` bytes that start at multiples of `step`; empty if undivided."""
    if nbytes <= _TOLERANCE * size or rows <= step:
        return []
    count = max(size * rows // nbytes // step, 1) * step
    return [(begin, min(begin + count, rows)) for begin in range(0, rows, count)]


def _assign(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Assign each task, largest first, to the least loaded rank; a single rank keeps the order."""
    if count == 1:
        return [list(tasks)]
    assigned: list[list[Task]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        load, rank = loads[0]
        assigned[rank].append(task)
        heapq.heapreplace(loads, (load + task.nbytes, rank))
    return assigned
