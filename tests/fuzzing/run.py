"""Fuzz all kinds of documents in several processes: `make fuzz`.

    python tests/fuzzing/run.py --count 1000000 --processes 2
    python tests/fuzzing/run.py --kinds recipes configs --count 1000 --seed 7

Prints every failure, and a table of outcomes by kind. Exits with 1 if anything failed: an error
that is not ours or does not name the file, a wrong result, a crash, too much time or memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("worker.py")
SHARES = {
    "blobs": 30,
    "manifests": 12,
    "trees": 10,
    "sparse": 8,
    "deltas": 6,
    "checkpoints": 8,
    "checkpoint states": 4,
    "distributed": 5,
    "configs": 8,
    "indexes": 4,
    "recipes": 1,
    "weights": 8,
    "modules": 5,
    "sources": 4,
    "reports": 3,
    "work folders": 3,
}
"""Relative number of cases; fewer of kinds that take long to read."""
BATCH = 20_000
"""Cases per child process; a new one starts with the same memory."""
PASSED = ("refused", "loaded")
_PATH = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


Batch = tuple[str, int, int]
"""Kind, first case, number of cases."""
Counts = dict[str, Counter[str]]
"""Number of each outcome, by kind."""


def fuzz(batches: Sequence[Batch], seed: str, seconds: float) -> tuple[Counts, list[str]]:
    """Run batches in a child process; after a crash, the rest in another one.

    Return the outcomes, and a description of each failure.
    """
    counts: Counts = {kind: Counter() for kind, _, _ in batches}
    failures: list[str] = []
    while batches and seconds > 0:
        with tempfile.NamedTemporaryFile() as progress:
            command = [WORKER, seed, seconds, progress.name, *map(json.dumps, batches)]
            done = subprocess.run(
                [sys.executable, *map(str, command)],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1"},
                check=False,
            )
            at = Path(progress.name).read_text().split()
        for line in done.stdout.splitlines():
            report = json.loads(line)
            if "counts" in report:
                counts[report["kind"]].update(report["counts"])
            else:
                failures.append(line)
        if done.returncode == 0:
            break
        index, number = map(int, at) if at else (0, batches[0][1])
        kind, first, count = batches[index]
        counts[kind].update({"crashed": 1, "not reported": number - first})
        reason = f"exit code {done.returncode}: {done.stderr[-2000:]}"
        failures.append(json.dumps({"case": f"{seed} {kind} {number}", "text": reason}))
        rest = (kind, number + 1, first + count - number - 1)
        batches = [rest, *batches[index + 1 :]] if rest[2] else batches[index + 1 :]
    return counts, failures


def format_counts(counts: Counts) -> str:
    """Return a table of outcomes by kind."""
    total = sum(counts.values(), Counter())
    columns = sorted(total)
    lines = [" ".join(f"{text:>17}" for text in ("kind", "cases", *columns))]
    for kind, one in (*counts.items(), ("all", total)):
        numbers = (one.total(), *(one[column] for column in columns))
        lines.append(f"{kind:>17} " + " ".join(f"{number:>17}" for number in numbers))
    return "\n".join(lines)


def divide(shares: dict[str, int], count: int) -> list[list[Batch]]:
    """Return the batches of each child process: some of every kind."""
    totals = {kind: max(1, count * share // sum(shares.values())) for kind, share in shares.items()}
    processes = -(-count // BATCH)

    def select(kind: str, i: int) -> Batch:
        first, last = (totals[kind] * n // processes for n in (i, i + 1))
        return kind, first, last - first

    return [[select(kind, i) for kind in shares] for i in range(processes)]


def main() -> int:
    """Fuzz the kinds that were selected; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="cases of all kinds")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--kinds", nargs="+", choices=SHARES, default=list(SHARES))
    options = parser.parse_args()
    shares = {kind: SHARES[kind] for kind in options.kinds}
    counts: Counts = {kind: Counter() for kind in shares}

    deadline = time.monotonic() + options.seconds

    def run(batches: Sequence[Batch]) -> None:
        found, failures = fuzz(batches, options.seed, deadline - time.monotonic())
        for kind, outcomes in found.items():
            counts[kind].update(outcomes)
        for line in failures:
            print(line, flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run, divide(shares, options.count)))
    print(format_counts(counts))
    return 1 if any(set(one) - {*PASSED} for one in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
