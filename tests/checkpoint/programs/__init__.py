"""Programs that tests run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROGRAMS.parent.parent)}


def start_program(name, *args, timeout=60):
    """Run a program to its end and return the completed process."""
    command = [sys.executable, PROGRAMS / f"{name}.py", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False
    )


def run_program(name, *args, timeout=60):
    """Run a program, which must succeed, and return its output."""
    done = start_program(name, *args, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
