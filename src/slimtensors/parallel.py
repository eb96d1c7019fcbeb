"""Thread pools: run independent pieces of work, in order and with bounded memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, Self, TypeVar

from slimtensors.errors import ConfigError

T = TypeVar("T")


class Each(Protocol):
    """Run `work(0)` … `work(count - 1)`, in any order or at once, and return the results in order.

    Code that can be divided takes one of these, so that only the archive knows about threads.
    """

    def __call__(self, work: Callable[[int], T], count: int, /) -> list[T]: ...  # noqa: D102


def serially(work: Callable[[int], T], count: int, /) -> list[T]:
    """Run one piece after the other: the simplest `Each`."""
    return [work(i) for i in range(count)]


Item = TypeVar("Item")

_SMALL = 256 << 10
"""Bytes below which handing work to a thread costs more than doing it."""
_IN_FLIGHT = 64 << 20
"""Bytes of tensors that may be under way at once; one may always be."""


class Workers:
    """A few threads that share the work on tensors, and on the chunks of large ones."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        self._count = threads or _cores()
        self._pool = ThreadPoolExecutor(self._count, "slimtensors") if self._count > 1 else None

    def each(self, work: Callable[[int], T], count: int, /) -> list[T]:
        """Run `work(0)` … `work(count - 1)` here and on idle threads.

        The caller works too and waits only for helpers that have begun, so that calls may nest.
        After a failure nobody begins another piece.
        """
        if self._pool is None or count < 2:
            return serially(work, count)
        results: dict[int, T] = {}
        numbers = iter(range(count))

        def help_out() -> None:
            try:
                for i in numbers:
                    results[i] = work(i)
            except BaseException:
                deque(numbers, maxlen=0)  # leave nothing to the others
                raise

        helpers = [self._pool.submit(help_out) for _ in range(min(self._count, count) - 1)]
        try:
            help_out()
        finally:
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()
        return [results[i] for i in range(count)]

    def in_order(
        self, work: Callable[[Item], T], items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[T]:
        """Yield `work(item)` for each item, in order, while the next ones are under way.

        `size` tells how many bytes an item takes; that bounds how many are under way at once.
        """
        if self._pool is None:
            yield from map(work, items)
            return
        queue: deque[tuple[Future[T] | Item, int]] = deque()
        total = 0

        def take() -> T:  # a function, so that nothing here holds the result while others work
            nonlocal total
            job, freed = queue.popleft()
            total -= freed
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


def _cores() -> int:
    """Return how many threads this process may keep busy; torchrun tells how many share them."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(cores // int(sharing), 1) if sharing.isdigit() and int(sharing) else cores
