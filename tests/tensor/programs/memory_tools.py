"""Measure the peak memory of a process."""

import gc
from pathlib import Path

import numpy as np
import torch

import slimtensors


def read_status(key):
    """Return a memory value of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def make_tensor(items):
    """Return a bfloat16 tensor, half of it zeros."""
    words = np.random.default_rng(0).integers(1, 1 << 16, items, dtype=np.uint16)
    words *= np.random.default_rng(1).integers(0, 2, items, dtype=np.uint16)
    return torch.from_numpy(words).view(torch.bfloat16)


def measure_peak(work):
    """Call `work`; return the peak memory above the memory before, and the result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_status("VmRSS")
    result = work()
    return read_status("VmHWM") - before, result


def warm_up(path):
    """Import everything and run all kernels before the measurement."""
    slimtensors.save({"x": make_tensor(1 << 16)}, f"{path}-small")
    slimtensors.load(f"{path}-small")
