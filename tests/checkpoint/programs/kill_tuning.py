"""Fine-tune a model with checkpoints as differences from its base, and be killed while saving.

Arguments: the run, and the folder of the pretrained model.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from tuning import Tuning

from slimtensors.checkpoint import checkpointing

torch.set_num_threads(1)
tuning = Tuning()


def kill(*args, **options):
    """End the process without any cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


options = {"every": 2, "keep_last": 2, "keyframe_every": 3, "async_": False}
with checkpointing(
    Path(sys.argv[1]), tuning.model, tuning.optimizer, pretrained=sys.argv[2], **options
) as ckpt:
    for step in range(12):
        if step == 7:
            Path.rename = kill  # the last step of a save
        tuning.train()
        ckpt.step()
