"""Print the size of a model and the peak memory of loading and of verifying it.

python measure_load.py FILE
"""

import json
import sys

from memory_tools import measure_peak, warm_up

import slimtensors

path = sys.argv[1]
warm_up(path)
verifying, report = measure_peak(lambda: slimtensors.verify(path))
assert report
loading, loaded = measure_peak(lambda: slimtensors.load(path))
print(json.dumps([sum(x.nbytes for x in loaded.values()), loading, verifying]))
