"""Disks that are full and folders that are read-only: nothing is lost, and the error says where."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from reliability_tools import TESTS, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's ways to refuse writing")

pytestmark = pytest.mark.crash

TRAINING = """
import errno, json, os, resource, sys
from pathlib import Path
import torch
from training import Run
from slimtensors.checkpoint import checkpointing, points, verify_run

torch.set_num_threads(1)
folder = Path(sys.argv[1]) / "run"
failed = 0

def looped(training, **options):
    return checkpointing(folder, *training.parts(), dataloader=training.batches, every=1, **options)

def expect(error, *codes):
    global failed
    assert error.errno in codes, repr(error)
    assert str(folder / "step-") in str(error), error
    failed += 1
"""

FULL = (
    TRAINING
    + """
filler = Path(sys.argv[1]) / "filler"

def leave(free):
    \"\"\"Let only so many bytes more be written: to a file, or to the disk.\"\"\"
    if sys.argv[2] == "file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        return
    filler.unlink(missing_ok=True)
    disk = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - free)

training, done = Run(width=64), []
with looped(training, keep_last=3) as ckpt:
    for free in (1 << 20, 0, 4096, 1 << 20, 20_000, 50_000, 100_000, 1 << 20):
        leave(free)
        training.train(1)
        ckpt.step()
        try:
            ckpt.wait()
            done = [*done, ckpt._done][-3:]
        except OSError as error:
            expect(error, errno.ENOSPC, errno.EFBIG)
            found = {point.manifest.step for point in points(folder)}
            assert found >= set(done), (free, found, done)
            assert verify_run(folder), verify_run(folder)  # nothing is damaged, nothing left over

again = Run(width=64)
with looped(again) as ckpt:
    assert ckpt.start == done[-1]
assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), training.model.parameters()))
print(failed)
"""
)

READ_ONLY = (
    TRAINING
    + """
training = Run()
with looped(training, async_=False) as ckpt:
    ckpt.step()
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        ckpt.step()
    except OSError as error:
        assert isinstance(error, PermissionError), repr(error)
        assert str(folder) in str(error), error
        failed += 1
    assert verify_run(folder)
    assert [point.manifest.step for point in points(folder)] == [1]
print(failed)
"""
)


@linux
def test_a_file_that_may_not_grow_costs_no_checkpoint_but_its_own(tmp_path):
    assert int(run(FULL, tmp_path, "file")) >= 3


def can_mount() -> bool:
    """Tell whether we may mount a small disk for a process of our own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
def test_a_full_disk_costs_no_checkpoint_but_its_own(tmp_path):
    mount = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" -c "$3" "$1" disk'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 3


@linux
def test_a_folder_that_becomes_read_only_keeps_its_checkpoints():
    with tempfile.TemporaryDirectory() as name:  # one that another user may enter
        Path(name).chmod(0o755)
        assert run(READ_ONLY, name) == "1\n"
