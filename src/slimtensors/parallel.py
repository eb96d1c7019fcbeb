"""Thread pools: run independent pieces of work in parallel, with bounded memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, Self, TypeVar

from slimtensors.errors import ConfigError

T = TypeVar("T")


class Each(Protocol):
    """Run `work(0)` … `work(count - 1)`, possibly in parallel, and return the results in order.

    Codecs take one of these as an argument, so that only the archive manages threads.
    """

    def __call__(self, work: Callable[[int], T], count: int, /) -> list[T]: ...  # noqa: D102


def serially(work: Callable[[int], T], count: int, /) -> list[T]:
    """Run one piece after the other: the simplest `Each`."""
    return [work(i) for i in range(count)]


Item = TypeVar("Item")

_SMALL = 256 << 10
"""Bytes below which handing work to a thread costs more than doing it."""
_IN_FLIGHT = 64 << 20
"""Bytes of tensors in flight at once; one tensor is always allowed."""


def check_threads(threads: object) -> None:
    """Raise `ConfigError` for an invalid option that `Workers` would refuse only later."""
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ConfigError(f"threads must be a positive integer, got {threads!r}")


class Workers:
    """A thread pool for tensors and for the chunks of large tensors."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        self._count = threads or count_cores()
        self._pool = ThreadPoolExecutor(self._count, "slimtensors") if self._count > 1 else None

    def each(self, work: Callable[[int], T], count: int, /) -> list[T]:
        """Run `work(0)` … `work(count - 1)` on this thread and on idle ones.

        The calling thread takes part and waits only for helpers that have started, so that calls
        may nest. After a failure no thread starts another piece.
        """
        if self._pool is None or count < 2:
            return serially(work, count)
        results: dict[int, T] = {}
        pending = iter(range(count))

        def run_pending() -> None:
            try:
                for i in pending:
                    results[i] = work(i)
            except BaseException:
                deque(pending, maxlen=0)  # other threads stop after their current piece
                raise

        helpers = [self._pool.submit(run_pending) for _ in range(min(self._count, count) - 1)]
        try:
            run_pending()
        finally:
            started = [helper for helper in helpers if not helper.cancel()]
            wait(started)
        for helper in started:
            helper.result()
        return [results[i] for i in range(count)]

    def in_order(
        self, work: Callable[[Item], T], items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[T]:
        """Yield `work(item)` for each item, in order, while the next ones are in flight.

        `size` returns the bytes of an item, which bounds how many are in flight.
        """
        if self._pool is None:
            yield from map(work, items)
            return
        queue: deque[tuple[Future[T] | Item, int]] = deque()
        total = 0

        def take() -> T:  # a function, so that no local variable keeps the result alive
            nonlocal total
            job, cost = queue.popleft()
            total -= cost
            return job.result() if isinstance(job, Future) else work(job)

        try:
            for item in items:
                cost = size(item)
                while queue and (total + cost > _IN_FLIGHT or len(queue) > 4 * self._count):
                    yield take()
                small = cost < _SMALL
                queue.append((item if small else self._pool.submit(work, item), cost))
                total += cost
            while queue:
                yield take()
        finally:
            for job, _ in queue:
                if isinstance(job, Future):
                    job.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def split_chunks(chunks: int, size: int) -> list[slice]:
    """Divide chunks into groups of `size`; the last group may be smaller."""
    return [slice(i, min(i + size, chunks)) for i in range(0, chunks, size)]


def scale_slice(chunks: slice, size: int) -> slice:
    """Return the byte range of chunks with `size` bytes each."""
    return slice(chunks.start * size, chunks.stop * size)


def count_cores() -> int:
    """Return the number of cores for this process, divided by the processes of torchrun."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(cores // int(processes), 1) if processes.isdigit() and int(processes) else cores
