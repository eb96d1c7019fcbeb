"""One writer per folder: a lock that goes when its process does, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimtensors.errors import InUseError

_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise `InUseError` if another process has it."""
    with (folder / _FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InUseError(f"{folder}: process {owner} is writing there") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
