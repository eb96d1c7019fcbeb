"""Measure the peak memory of a block of code."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class PeakMemory:
    """Result of `measure_memory`, set when its block ends."""

    overall_peak_memory: int = 0
    """Bytes on all GPUs, or resident bytes of the process without a GPU."""


@contextmanager
def measure_memory() -> Iterator[PeakMemory]:
    """Measure the peak memory of a block: GPU memory with a GPU, else resident memory.

    Example:
        >>> with measure_memory() as peak:
        ...     output = model(tokens)
        >>> print(peak.overall_peak_memory)
    """
    measured = PeakMemory()
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    with suppress(OSError):  # only Linux can reset the peak; elsewhere it is that of the process
        Path("/proc/self/clear_refs").write_text("5")
    yield measured
    gpu_bytes = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    measured.overall_peak_memory = gpu_bytes if gpus else _read_process_peak()


def _read_process_peak() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
