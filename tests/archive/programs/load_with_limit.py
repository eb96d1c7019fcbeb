"""Load files with limited memory; print the outcome of each as JSON.

Arguments: the number of bytes, and a valid file. Reads a JSON list of paths from stdin.
"""

import json
import resource
import sys
from pathlib import Path

import torch

import slimtensors

torch.set_num_threads(1)
slimtensors.load(sys.argv[2])  # import and warm up everything before the limit
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in json.load(sys.stdin):
    try:
        slimtensors.load(path, threads=1)
        outcome = "loaded"
    except slimtensors.errors.FormatError as error:
        outcome = f"FormatError: {error}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome))
