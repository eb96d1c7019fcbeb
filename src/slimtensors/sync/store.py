"""Versions of a model in a store: a folder, a bucket, or memory.

A store has one folder per version. A version exists once its manifest does, which is created last,
in one step, and never replaced.
"""

import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimtensors.errors import CorruptFileError, InUseError, report_malformed
from slimtensors.parallel import Workers
from slimtensors.storage import LocalLocation, RemoteLocation, StrPath, locate, sync_folder
from slimtensors.storage.atomic import make_folders, remove_folder, temporary_file
from slimtensors.storage.files import name_write_errors
from slimtensors.storage.retry import send
from slimtensors.sync.manifest import FORMAT, Version, VersionFile
from slimtensors.tensor import Json, ceil_div

MANIFEST = "manifest.json"
LEASE = "publisher.json"

_FOLDER = re.compile(r"v(\d{8})")
_RANGE = 16 << 20
"""Bytes per request when a large file is downloaded."""
_CONDITIONAL = {"s3", "s3a", "gs", "gcs"}
"""File systems whose servers refuse to replace a file on request."""
_LOCAL = {"file", "local"}

_memory_lock = threading.Lock()
"""Makes `exists` and `write` one step for the stores of this process."""


@dataclass
class Traffic:
    """Number of requests to a store, and bytes of files transferred."""

    requests: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, nbytes: int = 0, *, requests: int = 1) -> None:
        """Count requests; several threads may do so."""
        with self._lock:
            self.requests += requests
            self.bytes += nbytes

    def since(self, before: "Traffic") -> "Traffic":
        """Return the difference from an earlier copy."""
        return Traffic(self.requests - before.requests, self.bytes - before.bytes)

    def copy(self) -> "Traffic":
        """Return a copy."""
        return Traffic(self.requests, self.bytes)


class Store:
    """The versions of a model at a path or URL."""

    def __init__(self, url: StrPath, storage_options: dict[str, Any] | None = None) -> None:
        location = locate(url, storage_options=storage_options)
        if isinstance(location, RemoteLocation) and _LOCAL & set(location.protocols):
            location = LocalLocation(Path(location.path))  # writes files atomically
        self._location = location
        self.traffic = Traffic()

    def __str__(self) -> str:
        return str(self._location)

    def numbers(self) -> list[int]:
        """Return the numbers of all complete versions, sorted; one request."""
        found = [(folder, file) for folder, file in self._list() if file == MANIFEST]
        matches = (_FOLDER.fullmatch(folder) for folder, _ in found)
        return sorted(int(match[1]) for match in matches if match)

    def _list(self) -> list[tuple[str, str]]:
        """Return folder and name of all files in folders of the store."""
        self.traffic.add()
        location = self._location
        if isinstance(location, RemoteLocation):
            location.filesystem.invalidate_cache()  # other processes write there
            try:
                paths = location.walk()
            except FileNotFoundError:
                return []
            pairs = [path.rpartition("/") for path in paths]
            return [(folder, name) for folder, _, name in pairs if folder]
        assert isinstance(location, LocalLocation)
        found = []
        with name_write_errors(location.path):
            folders = location.path.iterdir() if location.path.is_dir() else iter(())
            for folder in folders:
                if _FOLDER.fullmatch(folder.name) and folder.is_dir():
                    try:
                        found += [(folder.name, path.name) for path in folder.iterdir()]
                    except FileNotFoundError:  # removed by retention
                        continue
        return found

    def read(self, number: int) -> tuple[Version, str]:
        """Return the manifest of a version and its SHA-256."""
        name = f"{format_folder(number)}/{MANIFEST}"
        place = f"{self}/{name}"
        raw = self._read(name)
        with report_malformed(place):
            version = Version.from_text(raw.decode())
            if version.number != number:
                raise CorruptFileError(f"this is the manifest of version {version.number}")
        return version, hashlib.sha256(raw).hexdigest()

    def _read(self, name: str) -> bytes:
        location = self._location.child(name)
        raw = location.read()
        self.traffic.add(len(raw))
        return raw

    def write_file(self, number: int, name: str, write: Callable[[Path], object]) -> VersionFile:
        """Add a file to a version that is not complete yet; `write` creates it at a local path."""
        location = self._location.child(format_folder(number)).child(name)
        if isinstance(location, LocalLocation):
            with name_write_errors(location.path):
                make_folders(location.path.parent)
                write(location.path)
                self.traffic.add(location.path.stat().st_size)
                return _describe_file(location.path)
        assert isinstance(location, RemoteLocation)
        with tempfile.TemporaryDirectory(prefix="slimtensors-") as folder:
            path = Path(folder) / name
            write(path)
            described = _describe_file(path)
            if not _CONDITIONAL & set(location.protocols):
                location.parent().make_folder()
            location.upload(path)
        self.traffic.add(described.size)
        return described

    def commit(self, version: Version) -> str:
        """Create the manifest of a version; return its SHA-256. Raise if the version exists."""
        raw = version.to_text().encode()
        name = f"{format_folder(version.number)}/{MANIFEST}"
        if not self._create(name, raw):
            raise InUseError(
                f"{self}: version {version.number} was published by another process in the meantime"
            )
        return hashlib.sha256(raw).hexdigest()

    def fetch(
        self, number: int, file: VersionFile, folder: Path, workers: Workers
    ) -> LocalLocation:
        """Return a file of a version, downloaded to `folder` if it is remote.

        Raises `CorruptFileError` if it is not the file that the manifest describes.
        """
        location = self._location.child(format_folder(number)).child(file.name)
        if isinstance(location, LocalLocation):
            local = location.path
            if not local.exists():
                raise FileNotFoundError(f"{location}: no such file or folder")
            self.traffic.add(file.size)
        else:
            assert isinstance(location, RemoteLocation)
            local = folder / f"{format_folder(number)}-{file.name}"
            self._download(location, file.size, local, workers)
        if _describe_file(local) != VersionFile(local.name, file.size, file.sha256):
            raise CorruptFileError(f"{location}: damaged: size or SHA-256 differs from {MANIFEST}")
        return LocalLocation(local)

    def _download(
        self, location: RemoteLocation, size: int, target: Path, workers: Workers
    ) -> None:
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

        def get(i: int) -> None:
            begin, end = i * _RANGE, min((i + 1) * _RANGE, size)
            data = send(
                str(location),
                lambda: location.filesystem.cat_file(location.path, start=begin, end=end),
            )
            if len(data) != end - begin:
                raise CorruptFileError(f"{location}: expected {end - begin} bytes, got {len(data)}")
            with name_write_errors(target):
                written = os.pwrite(descriptor, data, begin)
                if written != len(data):  # a disk that becomes full, the next call raises
                    os.pwrite(descriptor, data[written:], begin + written)
            self.traffic.add(len(data))

        try:
            workers.each(get, ceil_div(size, _RANGE))
        finally:
            os.close(descriptor)

    def remove_version(self, number: int) -> None:
        """Remove a version, its manifest first."""
        folder = self._location.child(format_folder(number))
        manifest = folder.child(MANIFEST)
        self.traffic.add(requests=2)
        if isinstance(folder, LocalLocation) and isinstance(manifest, LocalLocation):
            if folder.path.is_dir():
                manifest.path.unlink(missing_ok=True)
                remove_folder(folder.path)
            return
        assert isinstance(folder, RemoteLocation)
        assert isinstance(manifest, RemoteLocation)
        manifest.remove()
        folder.remove()

    def remove_incomplete(self) -> None:
        """Remove files of versions that a killed publisher has not completed."""
        found = self._list()
        complete = {folder for folder, name in found if name == MANIFEST}
        for folder in sorted({folder for folder, _ in found} - complete):
            match = _FOLDER.fullmatch(folder)
            if match:
                self.remove_version(int(match[1]))

    def _create(self, name: str, data: bytes) -> bool:
        """Create a file in one step; return False if it exists with another content."""
        self.traffic.add(len(data))
        location = self._location.child(name)
        if isinstance(location, LocalLocation):
            with name_write_errors(location.path):
                return _create_local(location.path, data)
        assert isinstance(location, RemoteLocation)
        if _CONDITIONAL & set(location.protocols):
            try:
                location.create(data)
            except FileExistsError:
                # A request that succeeded is repeated if its answer was lost.
                return location.read() == data
            return True
        with _memory_lock:
            if location.exists():
                return False
            location.parent().make_folder()
            location.write(data)
            return True

    def _replace(self, name: str, data: bytes) -> None:
        self.traffic.add(len(data))
        location = self._location.child(name)
        if isinstance(location, LocalLocation):
            with temporary_file(location.path) as (temporary, descriptor):
                os.write(descriptor, data)
                os.fsync(descriptor)
                temporary.replace(location.path)
            sync_folder(location.path.parent)
            return
        assert isinstance(location, RemoteLocation)
        location.write(data)

    def acquire(self, *, takeover: bool) -> str:
        """Register this process as the publisher; return its id. Raise if there is another one."""
        if isinstance(self._location, LocalLocation):
            with name_write_errors(self._location.path):
                make_folders(self._location.path)
        owner = secrets.token_hex(16)
        lease = {"owner": owner, "host": socket.gethostname(), "pid": os.getpid()}
        data = (json.dumps({"format": f"{FORMAT} publisher", "version": 1, **lease})).encode()
        if takeover:
            self._replace(LEASE, data)
        elif not self._create(LEASE, data):
            raise InUseError(
                f"{self}: {self._describe_owner()} publishes here; if it has ended, pass"
                " takeover=True (--takeover)"
            )
        return owner

    def check_owner(self, owner: str) -> None:
        """Raise if another publisher has taken over."""
        found = self._read_lease()
        if not found:
            raise InUseError(f"{self}: {LEASE} of this publisher was removed")
        if found.get("owner") != owner:
            raise InUseError(f"{self}: {self._describe_owner()} has taken over this store")

    def release(self, owner: str) -> None:
        """Remove the registration of a publisher."""
        if self._read_lease().get("owner") != owner:
            return
        self.traffic.add()
        location = self._location.child(LEASE)
        if isinstance(location, LocalLocation):
            location.path.unlink(missing_ok=True)
        else:
            assert isinstance(location, RemoteLocation)
            location.remove()

    def _read_lease(self) -> Json:
        try:
            data = json.loads(self._read(LEASE))
        except (FileNotFoundError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _describe_owner(self) -> str:
        lease = self._read_lease()
        if not lease:
            return "no process"
        return f"process {lease.get('pid')} on {lease.get('host')!a}"


def format_folder(number: int) -> str:
    """Return the name of the folder of a version."""
    return f"v{number:08d}"


def _describe_file(path: Path) -> VersionFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return VersionFile(path.name, path.stat().st_size, digest)


def _create_local(path: Path, data: bytes) -> bool:
    make_folders(path.parent)
    with temporary_file(path) as (temporary, descriptor):
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    sync_folder(path.parent)
    return True
