"""Kill a checkpointed training loop at random times, and load all checkpoints after each kill.

Arguments: a folder, and the number of kills. Prints the last step and the number of loads.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from training import Run

from slimtensors.checkpoint import checkpointing, list_checkpoints, load_checkpoint

torch.set_num_threads(1)
folder, count = Path(sys.argv[1]), int(sys.argv[2])
run = Run()
run.train(1)
generator = random.Random(0)


def train(pipe):
    """Write one byte to the pipe after each step."""
    with checkpointing(folder, *run.parts(), every=1, keep_last=2, threads=1) as ckpt:
        while True:
            ckpt.step()
            os.write(pipe, b".")


last, loads, duration = 0, 0, 1e-3
for _ in range(count):
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        train(sender)
    os.read(receiver, 1)
    start = time.monotonic()
    for _ in range(generator.randrange(3)):
        os.read(receiver, 1)
        start, duration = time.monotonic(), time.monotonic() - start
    time.sleep(generator.uniform(0, 2 * duration))  # within the next two saves
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(receiver)
    os.close(sender)
    points = list_checkpoints(folder)
    for point in points:
        load_checkpoint(point.path, threads=1)
    newest = points[-1].manifest.step if points else 0
    assert newest >= last, (last, points)
    last = newest
    loads += len(points)
print(last, loads)
