"""Save into a folder that becomes read-only, which must raise."""

import os
import sys
from pathlib import Path

import pytest
import torch
from training import Run

from slimtensors.checkpoint import checkpointing, list_checkpoints, verify_run

torch.set_num_threads(1)
folder = Path(sys.argv[1]) / "run"
training = Run()
with checkpointing(
    folder, *training.parts(), dataloader=training.batches, every=1, async_=False
) as ckpt:
    ckpt.step()
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    with pytest.raises(PermissionError, match=str(folder)):
        ckpt.step()
    assert verify_run(folder)
    assert [point.manifest.step for point in list_checkpoints(folder)] == [1]
