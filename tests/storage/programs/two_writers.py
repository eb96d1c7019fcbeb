"""Save two models to one folder at a time: python two_writers.py FOLDER COUNT.

Print the value of the model that is in the folder at the end.
"""

import sys
from pathlib import Path

from sharded_states import Loop, read_value, save

folder, count = Path(sys.argv[1]), int(sys.argv[2])
loops = [Loop(lambda i, value=value: save(folder, value), count) for value in (1, 2)]
assert [loop.wait() for loop in loops] == [count, count]
print(read_value(folder))
