"""Kills inside system calls, failing ones, power failures: all is left old, or all new."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from reliability_tools import ENVIRONMENT, run_program

CRASHES = Path(__file__).parent / "crashes"

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library for Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of a process whose system calls can be killed or logged."""
    library = tmp_path_factory.mktemp("library") / "syscalls.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library]
    subprocess.run([*command, CRASHES / "syscalls.c", "-ldl"], check=True)
    return {**ENVIRONMENT, "LD_PRELOAD": str(library)}


@pytest.fixture
def folder(tmp_path):
    """Yield a folder in memory, where `fsync` is free, or any other if there is none."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(os.path.realpath(name))


def run_crashes(name, environment, *args, timeout=120):
    """Run a program of this folder; return the number of crashes by scenario."""
    output = run_program(CRASHES / name, *args, env=environment, timeout=timeout)
    results = json.loads(output)
    assert len(results) == 11
    return results.values()


def test_a_process_killed_inside_a_system_call_leaves_everything_old_or_new(folder, environment):
    assert sum(run_crashes("kill.py", environment, folder, 44)) == 44


def test_a_failing_system_call_names_the_path_and_leaves_everything_old_or_new(folder, environment):
    assert sum(run_crashes("fail.py", environment, folder, 40)) > 20


def test_a_power_failure_leaves_everything_old_or_new(folder, environment):
    assert sum(run_crashes("power_loss.py", environment, folder, 6, 1)) > 40


@pytest.mark.long
def test_a_thousand_kills_inside_system_calls_lose_nothing(folder, environment):
    assert sum(run_crashes("kill.py", environment, folder, 1000, timeout=3000)) >= 1000


@pytest.mark.long
def test_a_thousand_failing_system_calls_lose_nothing(folder, environment):
    assert sum(run_crashes("fail.py", environment, folder, 1000, timeout=3000)) > 500


@pytest.mark.long
def test_a_power_failure_at_any_moment_loses_nothing(folder, environment):
    assert sum(run_crashes("power_loss.py", environment, folder, 1000, 30, timeout=3000)) > 500
