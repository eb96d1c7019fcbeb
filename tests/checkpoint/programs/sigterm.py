"""Receive SIGTERM during a training loop."""

import os
import signal
import sys

from training import Run

from slimtensors.checkpoint import checkpointing

run = Run()
with checkpointing(sys.argv[1], *run.parts(), every=1000) as ckpt:
    for step in range(5):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        run.train(1)
        ckpt.step()
    print("not terminated")
