"""Kill a save after its first tensor: python killed_save.py PATH."""

import os
import signal
import sys

import torch

import slimtensors


def kill(done):
    os.kill(os.getpid(), signal.SIGKILL)


if os.fork() == 0:
    slimtensors.save({"x": torch.ones(9)}, sys.argv[1], progress=kill)
assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL
