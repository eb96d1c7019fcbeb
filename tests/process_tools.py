"""Run several ranks: as threads of this process, or as processes started by torchrun."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from slimtensors.folder.processes import TorchProcessGroup

TESTS = Path(__file__).parent


def run_ranks(count, work, *, timeout=30, store=None):
    """Call `work` in one thread per rank; return the result or exception of each."""
    from torch.distributed import HashStore

    store, results = store or HashStore(), {}

    def one(rank):
        ranks = TorchProcessGroup(store, rank, count, timeout=timeout)
        try:
            results[rank] = work(ranks)
        except Exception as error:
            ranks.fail(error)
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(count)]


def torchrun(count, *words, script=None, cwd=None, **environment):
    """Run the command line, or a script, in `count` processes."""
    program = [str(script)] if script else ["-m", "slimtensors"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={count}", *program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def read_messages(done):
    """Return the error messages of our processes, without those of torchrun."""
    return sorted(line for line in done.stderr.splitlines() if line.startswith("slimtensors: "))


def read_files(folder):
    """Return the content of all files in a folder by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
