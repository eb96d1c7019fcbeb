"""Train with a remote run until killed: killed_upload.py RUN REMOTE OPTIONS."""

import json
import signal
import sys

from training import Run

from slimtensors.checkpoint import checkpointing

run, remote, options = sys.argv[1:]
loop = Run()
parts = {"dataloader": loop.batches, "remote": remote, "storage_options": json.loads(options)}
with checkpointing(run, *loop.parts(), every=2, **parts) as ckpt:
    for _ in range(6):
        loop.train(1)
        ckpt.step()
    signal.pause()
