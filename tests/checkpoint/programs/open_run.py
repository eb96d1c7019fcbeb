"""Open a run folder for checkpointing."""

import sys

from training import Run

from slimtensors.checkpoint import checkpointing

with checkpointing(sys.argv[1], Run().model):
    pass
