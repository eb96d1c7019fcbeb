"""An interrupted save leaves either the complete old model or the complete new one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_tools import ENVIRONMENT, leftovers, run_program, sample
from strategies import bits

import slimtensors
from slimtensors.errors import SlimError

pytestmark = pytest.mark.crash

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux process control")

PROGRAMS = Path(__file__).parent / "programs"
KINDS = ["file", "single to shards", "shards to single", "shards to shards"]


@pytest.fixture
def quick(tmp_path) -> Iterator[Path]:
    """Yield a folder in memory, where `fsync` is free; it matters only for power failures."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def run_each_kind(name: str, folder: Path, *args: object, command: Sequence[object] = ()) -> Any:
    """Run a program that checks each kind of replacement; return the parsed results."""
    output = run_program(PROGRAMS / name, folder, *args, command=command, timeout=150)
    results = json.loads(output)
    assert [kind for kind, _ in results] == KINDS
    return results


@linux
@pytest.mark.slow
def test_killing_a_process_while_it_saves_leaves_a_whole_model(quick):
    for kind, (found, last) in run_each_kind("kill_saves.py", quick):
        assert len(found) == 40, kind
        assert set(found) <= {"old", "new"}, kind
        assert last == "new", kind


@linux
@pytest.mark.slow
def test_killing_a_process_at_any_line_of_the_writer_leaves_a_whole_model(quick):
    for kind, lines in run_each_kind("kill_at_line.py", quick):
        assert lines > 50, kind


@linux
@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_writer_leaves_a_whole_model_and_nothing_else(quick):
    """Python may interrupt between any two lines.

    A temporary file can be left behind only between its creation and its registration.
    """
    for kind, (lines, left) in run_each_kind("interrupt_at_line.py", quick):
        assert lines > 50, kind
        allowed = {"__init__", "__enter__", "create_temporary_file", "create_temporary_folder"}
        allowed |= {
            "lock_replacement",
            "_open_lock",
            "create_file",
            "_lock_new",
            "_is_same",
            "temporary_file",
            "temporary_folder",
        }
        assert {where.split()[1] for where in left} <= allowed, kind


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_while_saving_leaves_the_old_model_and_nothing_else(tmp_path, kind):
    command = [sys.executable, PROGRAMS / "slow_save.py", tmp_path / "model", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as child:
        assert child.stdout.readline() == "saving\n"
        assert leftovers(tmp_path)  # the save has started
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "old\n")
    assert leftovers(tmp_path) == []


@linux
def test_ctrl_c_in_threads_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save(sample(), path)
    before = path.read_bytes()
    tensors = {f"t{i}": bits(i, 1 << 20, torch.float32, 0.5) for i in range(8)}

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slimtensors.save(tensors, path, threads=3, progress=interrupt)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@linux
def test_a_file_that_may_not_grow_leaves_the_old_model_and_nothing_else(quick):
    for kind, (failed, last) in run_each_kind("full_disk.py", quick, "file"):
        assert failed > 3, kind
        assert last == "new", kind


def can_mount() -> bool:
    """Return True if a small disk can be mounted for a child process."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    script = "mount -t tmpfs -o size=64k tmpfs /mnt"
    return (
        subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_old_model_and_nothing_else(tmp_path):
    mount = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, tmp_path]
    for kind, (failed, last) in run_each_kind("full_disk.py", tmp_path, "disk", command=command):
        assert failed > 3, kind
        assert last == "new", kind


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_is_not_replaced(tmp_path):
    with pytest.raises(SlimError, match="/dev/full"):
        slimtensors.save(sample(), "/dev/full")


@linux
def test_a_folder_that_may_not_be_written_keeps_its_file():
    with tempfile.TemporaryDirectory() as name:  # accessible to another user
        folder, path = Path(name), Path(name) / "model.safetensors"
        run_program(PROGRAMS / "save_old.py", path, "file")
        before = path.read_bytes()
        folder.chmod(0o555)
        try:
            assert run_program(PROGRAMS / "read_only.py", path) == "old\n"
            assert path.read_bytes() == before
            assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
        finally:
            folder.chmod(0o755)
