"""Checkpoint a training run while space runs out; print the number of failed saves.

Arguments: a folder, and `file` to limit the size of files or `disk` to fill the disk.
"""

import errno
import os
import resource
import sys
from pathlib import Path

import torch
from training import Run

from slimtensors.checkpoint import checkpointing, list_checkpoints, verify_run

torch.set_num_threads(1)
folder = Path(sys.argv[1]) / "run"
filler = Path(sys.argv[1]) / "filler"
failed = 0


def start_loop(training, **options):
    return checkpointing(folder, *training.parts(), dataloader=training.batches, every=1, **options)


def limit_space(free):
    """Limit the size of files, or the free space of the disk."""
    if sys.argv[2] == "file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        return
    filler.unlink(missing_ok=True)
    disk = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - free)


def check_error(error):
    assert error.errno in (errno.ENOSPC, errno.EFBIG), repr(error)
    assert str(folder / "step-") in str(error), error


training, done = Run(width=64), []
with start_loop(training, keep_last=3) as ckpt:
    for free in (1 << 20, 0, 4096, 1 << 20, 20_000, 50_000, 100_000, 1 << 20):
        limit_space(free)
        training.train(1)
        ckpt.step()
        try:
            ckpt.wait()
            done = [*done, ckpt._done][-3:]
        except OSError as error:
            check_error(error)
            failed += 1
            found = {point.manifest.step for point in list_checkpoints(folder)}
            assert found >= set(done), (free, found, done)
            assert verify_run(folder), verify_run(folder)  # neither damage nor leftovers

again = Run(width=64)
with start_loop(again) as ckpt:
    assert ckpt.start == done[-1]
pairs = zip(again.model.parameters(), training.model.parameters(), strict=True)
assert all(torch.equal(a, b) for a, b in pairs)
print(failed)
