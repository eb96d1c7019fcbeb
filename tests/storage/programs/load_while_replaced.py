"""Load a model while another process replaces it: python load_while_replaced.py FOLDER COUNT.

Load at least COUNT times, and until both values were found. Print how often each was, by kind of
replacement.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from sharded_states import WRITERS, Loop, read_value

results = {}
for kind, write in WRITERS.items():
    folder = Path(sys.argv[1]) / kind.replace(" ", "-")
    folder.mkdir()
    write(folder, 1)
    loop = Loop(lambda i, write=write, folder=folder: write(folder, 1 + i % 2))
    found = Counter()
    while found.total() < int(sys.argv[2]) or len(found) < 2:
        found[read_value(folder)] += 1
    loop.stop()
    results[kind] = found
print(json.dumps(results))
