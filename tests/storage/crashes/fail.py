"""Let system calls of operations fail: python fail.py FOLDER FAILURES.

The disk is full, a quota is exceeded, the file system is read-only, or access is denied. Print the
number of failures that were raised, by scenario, as JSON.
"""

import errno
import json
import random
import sys
from pathlib import Path

from control import FAIL, Workspace, find_leftovers, run_child
from scenarios import SCENARIOS

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]


def check(name, root, failures):
    scenario, generator = SCENARIOS[name], random.Random(name)
    workspace = Workspace(root, scenario)
    folder, result = workspace.folder, root / "result"
    total, raised = run_child(scenario.run, folder), 0

    def run(folder):
        try:
            scenario.run(folder)
        except OSError as error:
            result.write_text(json.dumps([error.errno, error.filename, str(error)]))

    for _ in range(failures):
        workspace.restore()
        result.unlink(missing_ok=True)
        call, code = generator.randint(1, total), generator.choice(ERRORS)
        assert run_child(run, folder, kill_at=call, how=FAIL + code) is not None
        found = scenario.identify(folder)
        assert found in ("old", "new"), (name, call, found)
        if not result.exists():  # cleaning up is left to the next run
            assert found == "new", (name, call)
            continue
        raised += 1
        number, file, message = json.loads(result.read_text())
        assert number == code, (name, call, code, message)
        assert str(file).startswith(str(folder)), (name, call, message)
        assert "slimtensors-tmp" not in file, (name, call, message)
        if found == "old" or not name.endswith("checkpoint"):
            run_child(scenario.run, folder)
            assert scenario.identify(folder) == "new", (name, call)
            assert find_leftovers(folder) == [], (name, call, find_leftovers(folder))
    return raised


root, failures = Path(sys.argv[1]), int(sys.argv[2])
each = -(-failures // len(SCENARIOS))
results = {name: check(name, root / name.replace(" ", "-"), each) for name in SCENARIOS}
print(json.dumps(results))
