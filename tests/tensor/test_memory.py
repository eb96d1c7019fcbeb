"""Peak memory of saving and loading: the tensors and a few in flight, never a second model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from reliability_tools import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory statistics of Linux")

MB = 1 << 20

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("dialect", "preset"),
    [("slim", "sparse"), ("slim", "dense"), ("compressed-tensors", "bitmask")],
)
@pytest.mark.slow
def test_saving_and_loading_take_at_most_256_mb_more_than_the_tensors(tmp_path, dialect, preset):
    path = tmp_path / "x.safetensors"
    total, saving = measure("measure_save.py", path, dialect, preset)
    assert total == 19 * 32 * MB
    assert saving <= 256 * MB
    result, loading, verifying = measure("measure_load.py", path)
    assert result == total
    assert 0.9 * total <= loading <= total + 256 * MB
    assert verifying <= 256 * MB


@pytest.mark.parametrize("preset", ["sparse", "dense"])
@pytest.mark.parametrize(("count", "size"), [(8, 32 * MB), (1300, 200_000)], ids=["large", "small"])
@pytest.mark.slow
def test_pages_of_the_file_are_released_after_use(tmp_path, preset, count, size):
    path = tmp_path / "x.safetensors"
    most = measure("measure_pages.py", path, preset, count, size // 2)
    assert path.stat().st_size > 130 * MB
    assert most["one by one"] <= 16 * MB
    assert most["in order"] <= 100 * MB


def measure(name: str, *args: object) -> Any:
    """Run a program that measures its memory; return its parsed output."""
    return json.loads(run_program(PROGRAMS / name, *args, timeout=120))
