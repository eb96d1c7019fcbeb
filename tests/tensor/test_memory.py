"""Peak memory of saving and loading: the tensors and a few in flight, never a second model."""

import json
import sys
from typing import Any

import pytest
from reliability_tools import run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="uses what Linux tells about memory"
)

MB = 1 << 20

TOOLS = """
import gc, json, sys
from pathlib import Path
import numpy as np
import torch
import slimtensors

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def tensor(items):
    \"\"\"Return items of bfloat16, half of them zeros.\"\"\"
    words = np.random.default_rng(0).integers(1, 1 << 16, items, dtype=np.uint16)
    words *= np.random.default_rng(1).integers(0, 2, items, dtype=np.uint16)
    return torch.from_numpy(words).view(torch.bfloat16)

def peak_of(work):
    \"\"\"Return how far memory rose above what it was, and what `work` returned.\"\"\"
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before, result

def warm_up(path):
    \"\"\"Import everything and run every kernel before anything is measured.\"\"\"
    slimtensors.save({"x": tensor(1 << 16)}, f"{path}-small")
    slimtensors.load(f"{path}-small")
"""

SAVE = (
    TOOLS
    + """
path, dialect, preset = sys.argv[1:]
warm_up(path)
first = tensor(1 << 24).view(4096, 4096)
state = {f"layers.{i}.weight": first.roll(i, 0) for i in range(19)}
total = sum(x.nbytes for x in state.values())
peak, _ = peak_of(lambda: slimtensors.save(state, path, dialect=dialect, preset=preset))
assert status("VmRSS") > total  # all of it was really there
print(json.dumps([total, peak]))
"""
)

LOAD = (
    TOOLS
    + """
path = sys.argv[1]
warm_up(path)
verifying, found = peak_of(lambda: slimtensors.verify(path))
assert found
loading, loaded = peak_of(lambda: slimtensors.load(path))
print(json.dumps([sum(x.nbytes for x in loaded.values()), loading, verifying]))
"""
)


@pytest.mark.parametrize(
    ("dialect", "preset"),
    [("slim", "sparse"), ("slim", "dense"), ("compressed-tensors", "bitmask")],
)
@pytest.mark.slow
def test_saving_and_loading_take_at_most_256_mb_more_than_the_tensors(tmp_path, dialect, preset):
    path = tmp_path / "x.safetensors"
    total, saving = numbers(SAVE, path, dialect, preset)
    assert total == 19 * 32 * MB
    assert saving <= 256 * MB
    result, loading, verifying = numbers(LOAD, path)
    assert result == total
    assert 0.9 * total <= loading <= total + 256 * MB
    assert verifying <= 256 * MB


ITERATE = (
    TOOLS
    + """
path, preset, count, items = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
x = tensor(items)
slimtensors.save({f"t{i}": x.roll(i) for i in range(count)}, path, preset=preset)
archive = slimtensors.open(path)
archive.get_tensor("t0")
before, most = status("RssFile"), {}
for way in ("one by one", "in order"):
    pairs = archive.items(threads=2)
    if way == "one by one":
        pairs = ((name, archive.get_tensor(name)) for name in archive)
    most[way] = 0
    for number, (name, y) in enumerate(pairs):
        if number % max(count // 50, 1) == 0:
            most[way] = max(most[way], status("RssFile") - before)
print(json.dumps(most))
"""
)


@pytest.mark.parametrize("preset", ["sparse", "dense"])
@pytest.mark.parametrize(("count", "size"), [(8, 32 * MB), (1300, 200_000)], ids=["large", "small"])
@pytest.mark.slow
def test_pages_of_the_file_are_released_after_use(tmp_path, preset, count, size):
    path = tmp_path / "x.safetensors"
    most = numbers(ITERATE, path, preset, count, size // 2)
    assert path.stat().st_size > 130 * MB
    assert most["one by one"] <= 16 * MB
    assert most["in order"] <= 100 * MB


def numbers(code: str, *args: object) -> Any:
    """Run code in a child process, to measure its memory; return the parsed output."""
    return json.loads(run(code, *args, timeout=120))
