"""Print the size of a model and the peak memory of saving it.

python measure_save.py FILE DIALECT PRESET
"""

import json
import sys

from memory_tools import make_tensor, measure_peak, read_status, warm_up

import slimtensors

path, dialect, preset = sys.argv[1:]
warm_up(path)
first = make_tensor(1 << 24).view(4096, 4096)
state = {f"layers.{i}.weight": first.roll(i, 0) for i in range(19)}
total = sum(x.nbytes for x in state.values())
peak, _ = measure_peak(lambda: slimtensors.save(state, path, dialect=dialect, preset=preset))
assert read_status("VmRSS") > total  # the model is in memory
print(json.dumps([total, peak]))
