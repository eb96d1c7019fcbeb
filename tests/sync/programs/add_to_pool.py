"""Add models to a pool: POOL MODEL...; with DELAY, wait that many seconds before each tensor."""

import os
import sys
import time

from slimtensors.sync import Pool
from slimtensors.sync.objects import TensorObjects

if delay := float(os.environ.get("DELAY", "0")):
    add = TensorObjects.add

    def add_slowly(self, *arguments):
        print("adding", flush=True)
        time.sleep(delay)
        return add(self, *arguments)

    TensorObjects.add = add_slowly

for model in sys.argv[2:]:
    Pool(sys.argv[1]).add(model, threads=1)
