"""Claims: files in remote storage that give one process the right to write, like a lock.

A claim contains who has created it and is written again while it is in use. It is abandoned if its
process is known to have ended, or if it has not been renewed for a minute by the clock of the
storage. Only abandoned claims are taken over. A process that lost its claim notices this before it
commits anything.
"""

import json
import logging
import os
import platform
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slimtensors.errors import InUseError, SlimError
from slimtensors.storage.atomic import machine_id
from slimtensors.storage.location import RemoteLocation

_log = logging.getLogger(__name__)

_LEASE = 60.0
"""Seconds without renewal after which a claim is abandoned."""
_RENEW = 15.0


@dataclass(frozen=True)
class _Owner:
    """The process that has created a claim."""

    host: str
    machine: str
    pid: int
    started: str
    """Boot and time of the process start; empty where the system does not report it."""
    token: str

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def is_gone(self) -> bool:
        """Return True if the process gave up, or if it ran on this machine and has ended."""
        if not self.token:
            return True
        if self.machine != machine_id():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return bool(self.started) and _read_start(self.pid) != self.started


def _read_start(pid: int) -> str:
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot}:{fields[19]}"
    return ""


def _read_owner(file: RemoteLocation) -> _Owner | None:
    """Return the owner of a claim; None if it does not exist. Damaged claims have no process."""
    try:
        raw = file.read()
    except FileNotFoundError:
        return None
    try:
        data = json.loads(raw)
        owner = _Owner(**{key: data[key] for key in _Owner.__dataclass_fields__})
        if all(isinstance(getattr(owner, key), str) for key in ("host", "machine", "started")):
            return _Owner(**{**asdict(owner), "pid": int(owner.pid), "token": str(owner.token)})
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return _Owner("an unknown host", "", 0, "", "unknown")


def find_owner(file: RemoteLocation) -> str:
    """Return who is using a claim, or an empty string if it is abandoned or does not exist."""
    owner = _read_owner(file)
    if owner is None or owner.is_gone() or _is_expired(file):
        return ""
    return f"process {owner.pid} on {owner.host}"


def _is_expired(file: RemoteLocation) -> bool:
    """Return True if a claim was not renewed in time, by the clock of the storage."""
    try:
        renewed = file.modified()
    except FileNotFoundError:
        return True
    probe = file.with_name(f"{file.name}-{secrets.token_hex(8)}")
    probe.write(b"")
    now = probe.modified()
    probe.unlink()
    return renewed is not None and now is not None and (now - renewed).total_seconds() > _LEASE


class Claim:
    """A claim of this process, renewed by a thread until it is released."""

    def __init__(self, file: RemoteLocation) -> None:
        """Create the claim; raise `InUseError` if another process has it."""
        self._file = file
        self._owner = _Owner(
            platform.node(),
            machine_id(),
            os.getpid(),
            _read_start(os.getpid()),
            secrets.token_hex(16),
        )
        self._create()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="slimtensors-claim", daemon=True)
        self._thread.start()

    def _create(self) -> None:
        for _ in range(4):
            with suppress(FileExistsError):
                self._file.create(self._owner.to_bytes())
            # Also read after an error: the request may have succeeded before it was repeated.
            owner = _read_owner(self._file)
            if owner == self._owner:
                return
            if user := find_owner(self._file):
                raise InUseError(
                    f"{self._file.parent()}: in use by {user}; if that has ended, wait a minute,"
                    f" or remove {self._file.name}"
                )
            if owner is not None:
                _log.warning("%s: abandoned, taken over", self._file)
                self._file.unlink()
        raise InUseError(f"{self._file.parent()}: in use by several processes")

    def check(self) -> None:
        """Raise `InUseError` if another process has taken over the claim."""
        owner = _read_owner(self._file)
        if owner is None:  # removed by hand
            raise InUseError(f"{self._file} was removed; another process may be writing")
        if owner != self._owner:
            raise InUseError(
                f"{self._file.parent()}: taken over by process {owner.pid} on {owner.host}, because"
                " this process did not respond for a minute"
            )

    def release(self) -> None:
        """Remove the claim, unless another process has it."""
        self._end(self._file.unlink)

    def abandon(self) -> None:
        """Leave the claim to the next process, because the work failed and left something."""
        left = replace(self._owner, token="")
        self._end(lambda: self._file.write(left.to_bytes()))

    def _end(self, write: Callable[[], None]) -> None:
        self._ended.set()
        with self._lock:
            try:
                self.check()
                write()
            except SlimError:
                return
            except OSError as error:  # the work is done; the claim expires
                _log.warning("%s: not removed: %s", self._file, error)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW):
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    self.check()
                    self._file.write(self._owner.to_bytes())
                except SlimError:  # reported by the next check of the user
                    return
                except OSError as error:
                    _log.warning("%s: not renewed: %s", self._file, error)


@contextmanager
def claim(file: RemoteLocation) -> Iterator[Claim]:
    """Return a context in which this process has a claim."""
    found = Claim(file)
    try:
        yield found
    finally:
        found.release()
