"""Folders under construction: hidden until complete, local or remote, resumable."""

import json
import os
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from slimtensors import _core
from slimtensors.archive.generation import stamp_generation
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.write import WriteResult
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.statistics import Sparsity
from slimtensors.errors import ConfigError, FormatError, MismatchError, report_malformed
from slimtensors.storage import (
    INCOMPLETE,
    LocalLocation,
    Location,
    RemoteLocation,
    StrPath,
    check_separate,
    open_for_reading,
    read_bytes,
    remove_leftovers,
    temporary_folder,
    write_file_atomically,
)
from slimtensors.storage.atomic import check_replaceable, commit_folder, lock_folder, make_folders
from slimtensors.storage.files import copy_file
from slimtensors.tensor import Json

_CHUNK = 1 << 24
_WORK = ".slimtensors-work"

BuildKind = Literal["files", "parts"]
"""Files of the finished folder, or parts of files that are joined later."""


@dataclass(frozen=True)
class StoredPieces:
    """The entries that a tensor became in its file."""

    names: Sequence[str]
    nbytes: Sequence[int]
    checksums: Sequence[int | None]
    plan: Json | None
    is_one_tensor: bool


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of some rows of a tensor, from which presets choose a plan."""

    zero: int
    negative: int
    is_24: bool


@dataclass(frozen=True)
class Record:
    """The content of a finished file or part, stored as JSON until the folder is complete."""

    stored: Sequence[TensorSummary]
    pieces: Mapping[str, StoredPieces]
    files: Mapping[str, str]
    """File name -> fingerprint, to detect later changes."""
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    rows: Mapping[str, RowStatistics] = field(default_factory=dict)
    """Statistics of the tensor of which this part contains some rows."""

    @classmethod
    def from_result(
        cls, result: WriteResult, sparsity: Mapping[str, Sparsity], folder: Path
    ) -> "Record":
        """Return the record of files that were written to `folder`, without fingerprints."""

        def name(file: str) -> str:
            return Path(file).relative_to(folder).as_posix()

        summary = result.summary()
        return cls(
            [replace(tensor, file=name(tensor.file)) for tensor in summary.tensors],
            {
                tensor.item.name: StoredPieces(
                    [piece.name for piece in tensor.pieces],
                    [piece.spec.nbytes for piece in tensor.pieces],
                    [piece.checksum for piece in tensor.pieces],
                    tensor.packed.plan.to_json() if tensor.packed.plan else None,
                    tensor.packed.is_one_tensor,
                )
                for tensor in result.tensors
            },
            {name(file): "" for file in summary.files},
            {t.name: sparsity[t.name] for t in summary.tensors if t.name in sparsity},
        )

    def summary(self) -> Summary:
        """Return the summary of the files."""
        return Summary(self.stored, sorted(self.files))

    def plan(self, name: str) -> Plan | None:
        """Return the plan of a tensor."""
        plan = self.pieces[name].plan
        return Plan.from_json(plan) if plan is not None else None

    def to_text(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "Record":
        """Parse the JSON form."""
        with report_malformed("malformed record of finished files"):
            data: dict[str, Any] = json.loads(text)
            return cls(
                [TensorSummary(**{**t, "shape": tuple(t["shape"])}) for t in data["stored"]],
                {name: StoredPieces(**p) for name, p in data["pieces"].items()},
                data["files"],
                {name: _parse_sparsity(s) for name, s in data["sparsity"].items()},
                {name: RowStatistics(**r) for name, r in data["rows"].items()},
            )


def _parse_sparsity(data: Json) -> Sparsity:
    peaks = {int(group): most for group, most in data["peaks"].items()}
    return Sparsity(**{**data, "peaks": peaks})


Write = Callable[[Path], Record]
"""Writes files into a local folder and returns their record, without fingerprints."""


def open_build_folder(
    target: Location, sources: Sequence[StrPath], *, replace: bool
) -> "BuildFolder":
    """Return the build folder for `target`; `sources` must not be overwritten."""
    if isinstance(target, RemoteLocation):
        return RemoteBuildFolder(target, sources, replace=replace)
    assert isinstance(target, LocalLocation)
    return LocalBuildFolder(target.path, sources, replace=replace)


class BuildFolder(ABC):
    """A folder under construction by one or several processes.

    A job describes the run. Finished files have records, so that an interrupted run with the same
    job resumes with the remaining ones.
    """

    @abstractmethod
    def begin(self, job: Json | None) -> None:
        """Start a job, or resume it; raise if another job was started. None: not resumable."""

    def attach(self, job: Json | None) -> None:
        """Join the job that another process started; raise if it is a different one."""
        with report_malformed(f"{self}: malformed job"):
            started = json.loads(self._read_job())
        if difference := _compare_jobs(started, job):
            raise MismatchError(f"{self}: this rank runs another job: {difference}")

    def find(self, kind: BuildKind, key: str) -> Record | None:
        """Return the record of finished files that are unchanged; forget changed ones."""
        if not self.is_finished(kind, key):
            return None
        try:
            record = self.load(kind, key)
            is_unchanged = all(
                self._fingerprint(kind, file) == fingerprint
                for file, fingerprint in record.files.items()
            )
        except (OSError, FormatError):
            is_unchanged = False
        if is_unchanged:
            return record
        self._remove_record(kind, key)
        return None

    def load(self, kind: BuildKind, key: str) -> Record:
        """Return the record of finished files without checking the files."""
        return Record.from_text(self._read_record(kind, key))

    @abstractmethod
    def is_finished(self, kind: BuildKind, key: str) -> bool:
        """Return True if there is a record."""

    @abstractmethod
    def put(self, kind: BuildKind, key: str, write: Write) -> Record:
        """Call `write` to make files, store them, and store their record."""

    @abstractmethod
    def location(self, kind: BuildKind, file: str) -> Location:
        """Return the location of a file."""

    @abstractmethod
    def copy(self, name: str, original: Location) -> None:
        """Add a copy of a file to the folder."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Add a small file to the folder."""

    @abstractmethod
    def stamp(self, files: Sequence[str]) -> None:
        """Mark weight files as shards of one model, where files can still be changed."""

    @abstractmethod
    def commit(self) -> None:
        """Make the folder visible to readers."""

    @abstractmethod
    def drop(self) -> None:
        """Remove everything that was built."""

    @abstractmethod
    def close(self) -> None:
        """Release locks."""

    @abstractmethod
    def _read_job(self) -> bytes: ...

    @abstractmethod
    def _read_record(self, kind: BuildKind, key: str) -> bytes: ...

    @abstractmethod
    def _remove_record(self, kind: BuildKind, key: str) -> None: ...

    @abstractmethod
    def _fingerprint(self, kind: BuildKind, file: str) -> str: ...


class LocalBuildFolder(BuildFolder):
    """A hidden folder beside the target, on a disk that all processes share."""

    def __init__(self, target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
        self._given, self._target = target, Path(os.path.realpath(target))
        self._sources, self._replace = sources, replace
        self._work = self._target.with_name(f".{self._target.name}{_WORK}")
        self._is_resumable = True
        self._resources = ExitStack()

    def __str__(self) -> str:
        return str(self._work)

    def begin(self, job: Json | None) -> None:  # noqa: D102
        check_separate(LocalLocation(self._given), self._sources)
        check_replaceable(self._target, replace=self._replace)
        self._is_resumable = job is not None
        if self._is_resumable:
            make_folders(self._target.parent)
            with suppress(FileExistsError):
                self._work.mkdir(mode=0o700)
            self._check_work()
            remove_leftovers(self._target)
        else:
            self._work = self._resources.enter_context(temporary_folder(self._target))
        self._resources.enter_context(lock_folder(self._work))
        path = self._work / "job.json"
        if path.exists() and not _can_resume(self, job, self._read_job(), self._replace):
            shutil.rmtree(self._work / "records", ignore_errors=True)
        self._remove_unfinished()
        write_file_atomically(path, json.dumps(job).encode())

    def attach(self, job: Json | None) -> None:  # noqa: D102
        self._check_work()
        super().attach(job)

    def _check_work(self) -> None:
        """Raise if another user could have put files into the work folder."""
        status = self._work.lstat()
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not (stat.S_ISDIR(status.st_mode) and is_own):
            raise ConfigError(
                f"{self._work} is not a folder that only this user can write; remove it, or choose"
                " another target"
            )

    def is_finished(self, kind: BuildKind, key: str) -> bool:  # noqa: D102
        return self._record(kind, key).exists()

    def put(self, kind: BuildKind, key: str, write: Write) -> Record:  # noqa: D102
        folder = self._work / kind
        folder.mkdir(exist_ok=True)
        record = write(folder)
        if self._is_resumable:
            files = {file: self._fingerprint(kind, file) for file in record.files}
            record = replace(record, files=files)
        path = self._record(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, record.to_text().encode())
        return record

    def location(self, kind: BuildKind, file: str) -> Location:  # noqa: D102
        return LocalLocation(self._work / kind / file)

    def copy(self, name: str, original: Location) -> None:  # noqa: D102
        path = self._file(name)
        path.unlink(missing_ok=True)
        if isinstance(original, LocalLocation):
            copy_file(original.path, path)
        else:
            write_file_atomically(path, original.read())

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        write_file_atomically(self._file(name), data)

    def stamp(self, files: Sequence[str]) -> None:  # noqa: D102
        if len(files) > 1:
            stamp_generation([self._work / "files" / file for file in files])

    def commit(self) -> None:  # noqa: D102
        commit_folder(self._work / "files", self._target, replace=self._replace)
        self.drop()

    def drop(self) -> None:  # noqa: D102
        shutil.rmtree(self._work, ignore_errors=True)

    def close(self) -> None:  # noqa: D102
        self._resources.close()

    def _remove_unfinished(self) -> None:
        """Remove files without a record, left by a killed process."""
        for kind in ("files", "parts"):
            finished: set[Path] = set()
            for text in (self._work / "records" / kind).rglob("*.json"):
                with suppress(FormatError):  # removed by `find`
                    files = Record.from_text(read_bytes(text)).files
                    finished |= {self._work / kind / file for file in files}
            for path in (self._work / kind).rglob("*"):
                if path.is_file() and path not in finished:
                    path.unlink()

    def _file(self, name: str) -> Path:
        path = self._work / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _record(self, kind: BuildKind, key: str) -> Path:
        return self._work / "records" / kind / f"{key}.json"

    def _read_job(self) -> bytes:
        return read_bytes(self._work / "job.json")

    def _read_record(self, kind: BuildKind, key: str) -> bytes:
        return read_bytes(self._record(kind, key))

    def _remove_record(self, kind: BuildKind, key: str) -> None:
        self._record(kind, key).unlink()

    def _fingerprint(self, kind: BuildKind, file: str) -> str:
        """Return size and checksum."""
        total = 0
        with open_for_reading(self._work / kind / file) as stream:
            while chunk := stream.read(_CHUNK):
                total = _core.crc32c(chunk, total)
            return f"{stream.tell()}:{total:08x}"


class RemoteBuildFolder(BuildFolder):
    """The target itself, marked as incomplete until everything is uploaded.

    Each file is written locally, uploaded, and removed. A folder to be replaced is removed first.
    """

    def __init__(
        self, target: RemoteLocation, sources: Sequence[StrPath], *, replace: bool
    ) -> None:
        self._target, self._sources, self._replace = target, sources, replace
        self._mark, self._work = target.child(INCOMPLETE), target.child(_WORK)

    def __str__(self) -> str:
        return str(self._target)

    def begin(self, job: Json | None) -> None:  # noqa: D102
        check_separate(self._target, self._sources)
        if self._mark.exists():
            if not _can_resume(self, job, self._mark.read(), self._replace):
                self._clear(job)
        elif self._target.exists():
            self._check_replaceable()
            self._clear(job)
        self._mark.write(json.dumps(job).encode())

    def is_finished(self, kind: BuildKind, key: str) -> bool:  # noqa: D102
        return self._record(kind, key).exists()

    def put(self, kind: BuildKind, key: str, write: Write) -> Record:  # noqa: D102
        with tempfile.TemporaryDirectory(prefix="slimtensors-") as name:
            record = write(Path(name))
            for file in record.files:
                self.location(kind, file).upload(Path(name) / file)
        files = {file: self._fingerprint(kind, file) for file in record.files}
        record = replace(record, files=files)
        self._record(kind, key).write(record.to_text().encode())
        return record

    def location(self, kind: BuildKind, file: str) -> RemoteLocation:  # noqa: D102
        return self._target.child(file) if kind == "files" else self._work.child(f"parts/{file}")

    def copy(self, name: str, original: Location) -> None:  # noqa: D102
        if isinstance(original, LocalLocation):
            self._target.child(name).upload(original.path)
        else:
            self._target.child(name).write(original.read())

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        self._target.child(name).write(data)

    def stamp(self, files: Sequence[str]) -> None:
        """Do nothing: uploaded files would have to be uploaded again."""

    def commit(self) -> None:  # noqa: D102
        self._work.child("parts").remove()
        self._mark.remove()
        self._work.remove()

    def drop(self) -> None:  # noqa: D102
        self._target.remove()

    def close(self) -> None:  # noqa: D102
        pass

    def _check_replaceable(self) -> None:
        if not self._replace:
            raise ConfigError(f"{self} already exists; pass replace=True")
        if not self._target.is_folder():
            raise ConfigError(f"{self} is a file, not a folder")
        if not any(name.endswith(".safetensors") for name in self._target.walk()):
            raise ConfigError(f"{self} contains files but no model, and is not replaced")

    def _clear(self, job: Json | None) -> None:
        """Remove all files except the mark, so that the rest is never read as a model."""
        self._mark.write(json.dumps(job).encode())
        for name in self._target.walk():
            if name != INCOMPLETE:
                self._target.child(name).remove()

    def _record(self, kind: BuildKind, key: str) -> RemoteLocation:
        return self._work.child(f"records/{kind}/{key}.json")

    def _read_job(self) -> bytes:
        return self._mark.read()

    def _read_record(self, kind: BuildKind, key: str) -> bytes:
        return self._record(kind, key).read()

    def _remove_record(self, kind: BuildKind, key: str) -> None:
        self._record(kind, key).remove()

    def _fingerprint(self, kind: BuildKind, file: str) -> str:
        return self.location(kind, file).stamp()


def _can_resume(folder: BuildFolder, job: Json | None, text: bytes, replace: bool) -> bool:
    """Return True if this job was started before; raise if it was another one to be kept."""
    try:
        before = json.loads(text)
    except (ValueError, RecursionError):
        before = None  # killed while writing it
    difference = _compare_jobs(before, job)
    if difference and isinstance(before, dict) and not replace:
        raise ConfigError(
            f"{folder} contains finished files of another run: {difference};"
            " remove it, or pass replace=True (-f)"
        )
    return not difference


def _compare_jobs(before: Json | None, now: Json | None) -> str:
    """Return how two jobs differ; empty if they are equal."""
    now = json.loads(json.dumps(now))
    if before == now:
        return ""
    old, new = before if isinstance(before, dict) else {}, now or {}
    if old == new:
        return f"it was {str(before)[:200]}"
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"{key} was {str(old.get(key))[:200]}, now it is {str(new.get(key))[:200]}"
