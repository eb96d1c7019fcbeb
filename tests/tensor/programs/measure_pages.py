"""Print the peak number of bytes of a mapped file in memory, by way of reading it.

python measure_pages.py FILE PRESET COUNT ITEMS
"""

import json
import sys

from memory_tools import make_tensor, read_status

import slimtensors

path, preset, count, items = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
x = make_tensor(items)
slimtensors.save({f"t{i}": x.roll(i) for i in range(count)}, path, preset=preset)
archive = slimtensors.open(path)
archive.get_tensor("t0")
before, peaks = read_status("RssFile"), {}
for way in ("one by one", "in order"):
    pairs = archive.items(threads=2)
    if way == "one by one":
        pairs = ((name, archive.get_tensor(name)) for name in archive)
    peaks[way] = 0
    for number, (_name, _tensor) in enumerate(pairs):
        if number % max(count // 50, 1) == 0:
            peaks[way] = max(peaks[way], read_status("RssFile") - before)
print(json.dumps(peaks))
