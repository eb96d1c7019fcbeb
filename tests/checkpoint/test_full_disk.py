"""Full disks and read-only folders: no checkpoint is lost, and errors name the path."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from checkpoint.programs import ENVIRONMENT, PROGRAMS, run_program

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux interfaces to limit space")

pytestmark = pytest.mark.crash


@linux
def test_a_file_size_limit_fails_only_the_current_save(tmp_path):
    assert int(run_program("full_disk", tmp_path, "file")) >= 3


def can_mount() -> bool:
    """Return True if this process may mount a small disk in a namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
def test_a_full_disk_fails_only_the_current_save(tmp_path):
    mount = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" "$3" "$1" disk'
    program = str(PROGRAMS / "full_disk.py")
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 3


@linux
def test_a_read_only_folder_keeps_its_checkpoints():
    with tempfile.TemporaryDirectory() as name:  # accessible to another user
        Path(name).chmod(0o755)
        run_program("read_only", name)
