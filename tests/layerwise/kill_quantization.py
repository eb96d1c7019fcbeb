"""Run quantizations that kill themselves: `python kill_quantization.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
from test_quantize_model import SMOOTHINGS, quantize_until_killed

torch.set_num_threads(1)  # forking is safe only without worker threads
for name, smoothing in SMOOTHINGS.items():
    if (child := os.fork()) == 0:
        quantize_until_killed(Path(sys.argv[1]) / name, smoothing)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
