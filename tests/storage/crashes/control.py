"""Run an operation in a process that is killed inside a system call, or whose calls are logged.

The process must be started with the library of `syscalls.c` preloaded.
"""

import ctypes
import os
import shutil
import signal
import traceback
from pathlib import Path

BEFORE, HALFWAY, AFTER, FAIL = range(4)
"""When the process is killed; or the call fails with the error number `how - FAIL`."""


def run_child(operation, folder, *, kill_at=0, how=BEFORE, log=None):
    """Return the number of calls of a complete run, or None if it was killed in one of them."""
    library = ctypes.CDLL(None)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if log else -1
            library.syscalls_start(os.fsencode(folder), ctypes.c_long(kill_at), how, file)
            operation(folder)
            os.write(sender, str(library.syscalls_count()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(sender)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = os.read(receiver, 20)
    os.close(receiver)
    assert status in (0, -signal.SIGKILL), status
    return int(text) if status == 0 else None


def find_leftovers(folder):
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


class Workspace:
    """A folder in the state before the operation, which can be restored."""

    def __init__(self, root, scenario):
        self._pristine, self.folder = Path(root) / "pristine", Path(root) / "work"
        self._pristine.mkdir(parents=True)
        scenario.prepare(self._pristine)
        self.restore()

    def restore(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._pristine, self.folder)
