"""How much memory a piece of code takes at its worst."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class PeakMemory:
    """What `measure_memory` found, once its block has ended."""

    overall_peak_memory: int = 0
    """Bytes: of all GPUs together, or resident in main memory where there is no GPU."""


@contextmanager
def measure_memory() -> Iterator[PeakMemory]:
    """Measure the peak memory of a block: GPU memory where there is a GPU, else main memory."""
    measured = PeakMemory()
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    with suppress(OSError):  # only Linux lets the peak start again; elsewhere it is the process's
        Path("/proc/self/clear_refs").write_text("5")
    yield measured
    of_gpus = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    measured.overall_peak_memory = of_gpus if gpus else _peak_of_process()


def _peak_of_process() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
