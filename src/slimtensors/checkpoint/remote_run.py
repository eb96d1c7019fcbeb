"""Remote checkpoints of a training loop: uploads, retention, and what stays on the local disk."""

import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimtensors.checkpoint.loop_folder import RunIntegrity, set_aside
from slimtensors.checkpoint.manifest import MANIFEST, is_checkpoint, read_manifest
from slimtensors.checkpoint.run import (
    LOCK,
    Point,
    Retention,
    RunPoint,
    include_bases,
    list_checkpoints,
    list_points,
)
from slimtensors.checkpoint.store import Saved
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.storage import (
    Folder,
    RemoteLocation,
    StrPath,
    is_inside,
    locate_folder,
    parse_size,
)
from slimtensors.storage.atomic import create_folder, remove_folder, temporary_folder
from slimtensors.storage.claim import Claim
from slimtensors.storage.files import link_or_copy
from slimtensors.storage.upload import (
    find_interrupted,
    remove_interrupted,
    remove_uploaded,
    upload_folder,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteOptions:
    """Where a loop uploads its checkpoints; `checkpointing` documents the options."""

    location: RemoteLocation
    every: int = 1
    local_bytes: int | None = None
    is_primary: bool = True
    """Whether there is no local run: checkpoints are uploaded at once, and evicted."""


def place_run(
    run: StrPath,
    remote: StrPath | None,
    remote_every: int,
    local_bytes: int | str | None,
    storage_options: dict[str, Any] | None,
) -> tuple[Path, RemoteOptions | None]:
    """Return the local folder of a run, and where to upload its checkpoints.

    The local folder of a run at a URL is a temporary one, which does not exist yet.
    """
    if type(remote_every) is not int or remote_every < 1:
        raise ConfigError(f"remote_every must be a positive integer, got {remote_every!r}")
    if remote is None and (remote_every != 1 or local_bytes is not None):
        raise ConfigError("remote_every and local_bytes require remote=")
    folder: Folder = locate_folder(run, storage_options if remote is None else None)
    if not isinstance(folder, Path):
        if remote is not None:
            raise ConfigError(f"{run} is a URL; with remote=, the run must be a local folder")
        name = f"slimtensors-run-{secrets.token_hex(8)}"
        return Path(tempfile.gettempdir(), name), RemoteOptions(folder)
    if remote is None:
        return folder, None
    target = locate_folder(remote, storage_options)
    if isinstance(target, Path):
        raise ConfigError(f"remote must be a URL, got {remote}")
    return folder, RemoteOptions(target, remote_every, parse_size(local_bytes), is_primary=False)


@dataclass(frozen=True)
class _Upload:
    """A checkpoint to upload."""

    name: str
    folder: Path
    """Links to the checkpoint and to its bases, which may be removed from the run meanwhile."""
    names: Sequence[str]
    """Names of these folders, the bases first."""
    close: Callable[[], None]
    retention: Retention


class RemoteRun:
    """The remote checkpoints of a loop; a context manager that claims the remote run."""

    def __init__(
        self,
        options: RemoteOptions,
        run: Path,
        is_own: Callable[[RunPoint], bool],
        retention: Retention,
    ) -> None:
        self.options = options
        self._run, self._is_own, self._retention = run, is_own, retention
        self._points: dict[str, RunPoint] = {}
        """The remote checkpoints by name, as of the claim and of what this process did since."""
        self._since_upload = 0
        self._newest: tuple[str, Retention] | None = None
        """The last checkpoint of this process, and the rules at that time."""
        self._pending: list[_Upload] = []
        self._pool: ThreadPoolExecutor | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        location = self.options.location
        location.make_folder()
        with ExitStack() as stack:
            self._claim = Claim(location / LOCK)
            stack.callback(self._claim.release)
            self._points = {point.name: point for point in list_points(location)}
            local_points = list_checkpoints(self._run)
            keep = {point.name for point in local_points} - self._points.keys()
            found = {folder.name for folder in find_interrupted(location)}
            remove_interrupted(location, manifest=MANIFEST, keep=keep)
            newest = max((point.order for point in self._points.values()), default=None)
            newer = [p for p in local_points if newest is None or p.order > newest]
            self._since_upload = len(newer)
            if self.options.is_primary:
                stack.callback(shutil.rmtree, self._run, ignore_errors=True)
            else:
                self._pool = ThreadPoolExecutor(1, "slimtensors-upload")
                stack.callback(self._pool.shutdown)
            stack.callback(self._close_pending)
            for name in sorted(found & keep):
                self._submit(name, self._retention)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Upload the newest checkpoint and those that are pending."""
        with self._resources:
            try:
                self._finish()
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"not all checkpoints were uploaded: {failure}")

    def points(self) -> list[RunPoint]:
        """Return the remote checkpoints, the newest last."""
        return sorted(self._points.values(), key=lambda point: point.order)

    def continue_from(self, point: Point, retention: Retention) -> None:
        """Upload this checkpoint at the end unless a newer one, or it already, was uploaded."""
        if not self._is_uploaded(point):
            self._newest = point.name, retention

    def add(self, saved: Saved, retention: Retention) -> Saved:
        """Upload a new local checkpoint if it is due.

        Without a local run, it is uploaded now; the result has the remote location.
        """
        name = saved.path.name
        self._newest = name, retention
        self._since_upload += 1
        if self._since_upload >= self.options.every:
            self._since_upload = 0
            self._submit(name, retention)
        if not self.options.is_primary:
            return saved
        return replace(saved, path=self.options.location / name)

    def _submit(self, name: str, retention: Retention) -> None:
        self._pending.append(self._link(name, retention))
        if self._pool is None:
            self._upload_pending()
        else:
            self._pool.submit(self._try_upload_pending)

    def _link(self, name: str, retention: Retention) -> _Upload:
        points = list_checkpoints(self._run)
        needed = include_bases([name], points)
        names = [p.name for p in points if p.name in needed and not self._is_uploaded(p)]
        names = [*(n for n in names if n != name), name]
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder(self._run / "upload"))
            for found in names:
                for path in sorted((self._run / found).rglob("*")):
                    target = folder / found / path.relative_to(self._run / found)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if path.is_file():
                        link_or_copy(path, target)
            return _Upload(name, folder, names, stack.pop_all().close, retention)

    def _is_uploaded(self, point: RunPoint) -> bool:
        found = self._points.get(point.name)
        return found is not None and found.manifest.id == point.manifest.id

    def _try_upload_pending(self) -> None:
        """Upload; after an error, the checkpoints stay pending for the next attempt."""
        try:
            self._upload_pending()
        except Exception as error:
            _log.warning(
                "%s: upload failed, repeated with the next checkpoint: %s",
                self.options.location,
                error,
            )

    def _upload_pending(self) -> None:
        while self._pending:
            upload = self._pending[0]
            is_last = len(self._pending) == 1
            if is_last or (self._run / upload.name).exists():  # else removed by retention
                self._claim.check()
                for name in upload.names:
                    self._upload(upload.folder / name)
                self._apply_retention(upload.retention)
            self._pending.pop(0)
            upload.close()

    def _upload(self, folder: Path) -> None:
        """Upload a checkpoint; one of the same name with other content is replaced."""
        target = self.options.location / folder.name
        point = RunPoint(target, read_manifest(folder))
        if self._is_uploaded(point):
            return
        if folder.name in self._points:
            # The name cannot be replaced in one step: until it is complete, a copy stands in.
            names = (f"{folder.name}-{i}" for i in range(2, 1000))
            spare = target.with_name(next(n for n in names if n not in self._points))
            upload_folder(folder, spare, manifest=MANIFEST)
            remove_uploaded(target, manifest=MANIFEST)
            upload_folder(folder, target, manifest=MANIFEST)
            remove_uploaded(spare, manifest=MANIFEST)
        else:
            upload_folder(folder, target, manifest=MANIFEST)
        self._points[folder.name] = point
        _log.info("%s: uploaded", target)

    def _apply_retention(self, retention: Retention) -> None:
        """Remove the remote checkpoints of this loop that no rule keeps."""
        points = self.points()
        own = [point for point in points if self._is_own(point)]
        keep = retention.select(own)
        keep |= include_bases([p.name for p in points if not self._is_own(p)], points)
        for point in reversed(own):  # a delta is removed before its base
            if point.name not in keep:
                remove_uploaded(self.options.location / point.name, manifest=MANIFEST)
                del self._points[point.name]

    def evict(self) -> None:
        """Remove local checkpoints until the rest fits the budget, the oldest first.

        Only uploaded ones are removed, never the newest, its keyframe, or the base of another.
        """
        limit = 0 if self.options.is_primary else self.options.local_bytes
        if limit is None:
            return
        points = [point for point in list_checkpoints(self._run) if self._is_own(point)]
        total = sum(point.manifest.bytes for point in points)
        keyframes = [point.name for point in points if point.manifest.base is None]
        while total > limit:
            point = self._choose_evicted(points, {*keyframes[-1:]})
            if point is None:
                return
            remove_folder(point.path)
            total -= point.manifest.bytes
            points.remove(point)

    def _choose_evicted(self, points: Sequence[Point], needed: set[str]) -> Point | None:
        found = list_checkpoints(self._run)
        needed |= {point.manifest.base.name for point in found if point.manifest.base}
        free = (p for p in points[:-1] if p.name not in needed and self._is_uploaded(p))
        return next(free, None)

    def _finish(self) -> None:
        """Upload the newest checkpoint and all that are pending; raise if that fails."""
        newest = self._newest
        if newest is not None and self._since_upload and is_checkpoint(self._run / newest[0]):
            self._submit(*newest)
        if self._pool is not None:
            self._pool.submit(self._upload_pending).result()
        self.evict()

    def _close_pending(self) -> None:
        for upload in self._pending:
            upload.close()

    def fetch(self, point: RunPoint, integrity: RunIntegrity) -> None:
        """Download a checkpoint and its bases; damaged local copies are set aside."""
        needed = include_bases([point.name], self.points())
        for found in sorted((self._points[name] for name in needed), key=lambda p: p.order):
            self._download(found, integrity)

    def _download(self, point: RunPoint, integrity: RunIntegrity) -> None:
        folder = self._run / point.name
        if problem := integrity.find_damage(folder):
            set_aside(folder, problem)
            integrity.forget(point)
        elif is_checkpoint(folder):
            if read_manifest(folder).id == point.manifest.id:
                return
            raise MismatchError(f"{folder} and {point.path} are different checkpoints")
        source = self.options.location / point.name
        with create_folder(folder) as new:
            for name in source.walk():
                if not is_inside(name):
                    raise FormatError(f"{source}: {name!r} is not a file in this folder")
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).download(new / name)
        _log.info("%s: downloaded", point.path)
