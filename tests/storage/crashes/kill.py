"""Kill operations inside their system calls: python kill.py FOLDER KILLS.

Kills are spread over all calls: before it, after it, or with half of the bytes written. Print the
number of kills that hit, by scenario, as JSON.
"""

import json
import random
import sys
from pathlib import Path

from control import Workspace, find_leftovers, run_child
from scenarios import SCENARIOS


def check(name, root, kills):
    scenario, generator = SCENARIOS[name], random.Random(name)
    workspace = Workspace(root, scenario)
    folder = workspace.folder
    total, hits = run_child(scenario.run, folder), 0
    assert scenario.identify(folder) == "new"
    workspace.restore()
    while hits < kills:
        call, how = generator.randint(1, total), generator.randrange(3)
        if run_child(scenario.run, folder, kill_at=call, how=how) is not None:
            continue  # fewer calls, because an earlier run had done a part
        hits += 1
        found = scenario.identify(folder)
        assert found in ("old", "new"), (name, call, how, found)
        if generator.random() < 0.5 and found == "old":
            continue  # the next one finds the leftovers of several
        if found == "old" or not name.endswith("checkpoint"):  # else it exists already
            run_child(scenario.run, folder)
            assert scenario.identify(folder) == "new", (name, call, how)
            assert find_leftovers(folder) == [], (name, call, how, find_leftovers(folder))
        workspace.restore()
    return hits


root, kills = Path(sys.argv[1]), int(sys.argv[2])
each = -(-kills // len(SCENARIOS))
results = {name: check(name, root / name.replace(" ", "-"), each) for name in SCENARIOS}
print(json.dumps(results))
