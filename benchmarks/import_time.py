"""Time of `import slimtensors` compared with `import torch`, which it includes.

Each process imports one after the other and prints the CPU time so far; the result is the median
ratio over all processes, without the first, which compiles bytecode. An import that creates enough
objects to trigger a full garbage collection also pays for scanning those of torch: 90 ms.
"""

import json
import os
import statistics
import subprocess
import sys

from measure import Report, Timing, options

CODE = """
import json, time
wall, cpu, told = time.perf_counter(), time.process_time(), []
for module in {modules}:
    __import__(module)
    told.append([time.perf_counter() - wall, time.process_time() - cpu])
print(json.dumps(told))
"""
MODULES = ("torch", "slimtensors", "slimtensors.cli")


def main() -> None:
    given = options(__doc__.splitlines()[0]).parse_args()
    report = Report("import_time", quick=given.quick)
    imported()
    runs = [imported() for _ in range(2 if given.quick else 10)]
    timings = {
        f"import {module}": Timing(*map(list, zip(*told, strict=True)))
        for module, told in zip(MODULES, zip(*runs, strict=True), strict=True)
    }
    report.table("import", timings, against="import torch")
    ratio = statistics.median(ours / torchs for (_, torchs), (_, ours), _ in runs)
    report.at_most("of import torch", ratio, 1.15)
    report.finish()


def imported() -> list[tuple[float, float]]:
    """Return wall and CPU time of a new process after each import."""
    command = [sys.executable, "-c", CODE.format(modules=MODULES)]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=variables)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
