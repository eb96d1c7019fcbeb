"""Read mutants of documents in limited memory and time; print what goes wrong.

Arguments: seed, seconds, a file that receives the current batch and case, and batches as JSON lists
of kind, first case and number of cases. Prints one JSON line per failure, and the counts of each
batch.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType

import torch
from fuzzing.kinds import KINDS, Kind, Mutant

from slimtensors.errors import SlimError

MEMORY = 256 << 20
"""Bytes that a case may take beyond what its document claims."""
SECONDS = 10
"""Seconds of processor time that a case may take."""
WAIT = 120
"""Seconds after which a case hangs, even on a busy machine."""


class TooSlowError(BaseException):
    """A case took longer than allowed."""


def raise_too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlowError


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def is_memory_error(error: BaseException | None) -> bool:
    """Return True if an error or one of its causes is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error)[:500]:
            return True
        error = error.__cause__
    return False


def run_case(kind: Kind, mutant: Mutant, random: Random) -> tuple[str, str]:
    """Return the outcome of a case and, if it is a failure, a description."""
    try:
        digest = kind.use(mutant, random)
    except SlimError as error:
        if is_memory_error(error):
            return "memory", repr(error)
        if kind.name_in_errors not in str(error):
            return "unnamed", f"{type(error).__name__}: {error}"
        return "refused", ""
    except TooSlowError:
        return "slow", traceback.format_exc(limit=-6)
    except AssertionError:
        return "wrong", traceback.format_exc(limit=-3)
    except MemoryError as error:
        return "memory", repr(error)
    except Exception as error:
        if is_memory_error(error):
            return "memory", repr(error)
        return "error", f"{error!r}\n{traceback.format_exc(limit=-6)}"[:3000]
    if not mutant.is_sealed and digest and digest != kind.original_digest(mutant):
        return "wrong", "other content without a valid checksum"
    return "loaded", ""


def run_limited(kind: Kind, mutant: Mutant, seed: str, limit: int) -> tuple[str, str]:
    """Run a case; if it needs more memory, run it again with what it claims in addition."""
    for claimed in (0, None):
        extra = kind.claim() if claimed is None else 0
        resource.setrlimit(resource.RLIMIT_AS, (limit + extra, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAIT)
        try:
            outcome = run_case(kind, mutant, Random(seed))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        if outcome[0] != "memory":
            break
    return outcome


def run_batch(
    seed: str, batch: tuple[str, int, int], deadline: float, report: Callable[[int], None]
) -> dict[str, int]:
    """Run the cases of one kind; return the number of each outcome."""
    name, first, count = batch
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        kind = KINDS[name](Path(folder))
        kind.prepare()
        limit = address_space() + MEMORY
        for number in range(first, first + count):
            if time.monotonic() > deadline:
                break
            report(number)
            case = f"{seed} {name} {number}"
            mutant = kind.mutate(Random(case))
            if not mutant.is_sealed:
                kind.original_digest(mutant)
            kind.write(mutant.files)
            outcome, text = run_limited(kind, mutant, case, limit)
            kind.restore(mutant)
            counts[outcome] = counts.get(outcome, 0) + 1
            if text:
                print(json.dumps({"case": case, "outcome": outcome, "text": text}), flush=True)
    return counts


def main(seed: str, seconds: str, progress: str, *batches: str) -> None:
    """Run all batches."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, raise_too_slow)
    signal.signal(signal.SIGPROF, raise_too_slow)
    deadline = time.monotonic() + float(seconds)
    with Path(progress).open("w") as file:
        for i, text in enumerate(batches):
            batch = json.loads(text)

            def report(number: int, i: int = i) -> None:
                os.pwrite(file.fileno(), b"%10d %10d" % (i, number), 0)

            counts = run_batch(seed, batch, deadline, report)
            print(json.dumps({"kind": batch[0], "counts": counts}), flush=True)


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
