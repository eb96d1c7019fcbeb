"""Publish the weights of a training loop: snapshot, then encode and upload in the background."""

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from slimtensors.archive.delta import choose_form, require_lossless
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.checkpoint.distributed.pieces import Box
from slimtensors.checkpoint.snapshot import Snapshot
from slimtensors.codecs import presets
from slimtensors.codecs.changes import encode_residual
from slimtensors.codecs.plan import Encoded
from slimtensors.errors import (
    ConfigError,
    FormatError,
    InUseError,
    MismatchError,
    RankError,
    UnsupportedTensorError,
)
from slimtensors.parallel import Each, check_threads
from slimtensors.storage import StrPath
from slimtensors.sync.follow import Follower, describe_differences, find_tied, model_tensors
from slimtensors.sync.manifest import (
    Files,
    PublishedPart,
    PublishedTensor,
    Version,
    VersionFile,
    check_boxes,
    digest_tensor,
    format_key,
)
from slimtensors.sync.ranks import Ranks, find_shard, join_ranks
from slimtensors.sync.store import Store
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Spec, as_bytes, ceil_div, check_storable

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
"""Bytes per comparison."""
_SIMILAR = 2.0
"""Factor by which the share of changed items may differ before a kind is chosen again."""


@contextmanager
def publishing(
    url: StrPath,
    model: nn.Module | Mapping[str, Tensor],
    keyframe_every: int = 50,
    *,
    keep: int | None = None,
    takeover: bool = False,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> "Iterator[Publisher]":
    """Publish versions of a model to a store that any number of followers read.

    At the end of the block, the last version is completed. If the store has versions already, the
    next one follows them. Sharded models (`DTensor`) are published by all ranks together.

    Args:
        url: folder or URL of the store.
        model: a model, or its tensors by name.
        keyframe_every: number of versions from one that can be read alone to the next.
        keep: number of newest versions to keep, and what they need; default: all.
        takeover: whether to replace a registered publisher, such as one that was killed.
        threads: number of threads; default: one per core.
        storage_options: passed to fsspec.

    Example:
        >>> import torch
        >>> from slimtensors.sync import publishing
        >>> state = {"w": torch.zeros(8)}
        >>> with publishing("memory://docs/training", state, keyframe_every=10) as out:
        ...     for step in range(3):
        ...         _ = state["w"].add_(1)
        ...         out.publish(step)
    """
    options = PublishOptions(keyframe_every, keep, threads)
    publisher = Publisher(Store(url, storage_options), model, options, takeover=takeover)
    try:
        yield publisher
    except BaseException:
        try:
            publisher.close()
        except Exception as error:  # the error of the block is more important
            _log.warning("%s: %s", url, error)
        raise
    publisher.close()


@dataclass(frozen=True)
class PublishOptions:
    """How versions are written."""

    keyframe_every: int = 50
    keep: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_threads(self.threads)
        for name in ("keyframe_every", "keep"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1) and (value is not None or name != "keep"):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class Published:
    """A version that was published."""

    version: Version
    dropped: int
    """Calls of `publish` since the previous version, replaced by newer ones."""
    requests: int
    """Requests of this process to the store for this version."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {**self.version.to_json(), "dropped": self.dropped, "requests": self.requests}


@dataclass(frozen=True)
class _Shard:
    """What this rank stores of a tensor."""

    name: str
    spec: Spec
    """Of the whole tensor."""
    box: Box


@dataclass
class _Job:
    """A snapshot to publish."""

    step: int
    tensors: Mapping[str, Tensor]
    """Name in the file -> copy of what this rank stores."""
    shards: Mapping[str, _Shard]
    tied: Mapping[str, str]
    snapshot: Snapshot
    is_keyframe: bool
    """Whether a keyframe was requested, also for another structure."""
    dropped: int
    digests: dict[str, str] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    files: dict[str, VersionFile] = field(default_factory=dict)
    """`delta` or `keyframe` -> file of this rank."""


class Publisher:
    """Writes versions to a store; created by `publishing`.

    Up to three copies of the state are in memory: the last version, the one being encoded, and one
    that waits.
    """

    def __init__(
        self,
        store: Store,
        model: nn.Module | Mapping[str, Tensor],
        options: PublishOptions,
        *,
        takeover: bool = False,
    ) -> None:
        self._store, self._model, self._options = store, model, options
        self._choose = require_lossless(presets.find("lossless"))
        self._ranks: Ranks = join_ranks(model_tensors(model))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pending: _Job | None = None
        self._error: Exception | None = None
        self._free: list[Snapshot] = []
        self._dropped = 0
        self._is_closed = False

        self._base: _Job | None = None
        """The last version, which the next one is compared with."""
        self._kinds: dict[str, tuple[str, float]] = {}
        """Kind of residual of each tensor, and the share of changed items it was chosen for."""
        self._newest: Version | None = None
        self._seal: str | None = None
        """SHA-256 of the newest manifest."""
        self._keyframes: dict[int, bool] = {}
        """Number of a version -> whether it is a keyframe, as far as known."""
        self.last: Published | None = None
        """The newest version of this publisher, None before the first."""
        self._owner: str | None = None
        try:
            self._open(takeover=takeover)
        except BaseException:
            self._unregister()
            raise
        self._specs: Mapping[str, Spec] | None = None
        if self._newest is not None:
            self._specs = self._newest.specs()
        """Structure of the last snapshot; None if any is accepted."""

    def _open(self, *, takeover: bool) -> None:
        """Register as the publisher and find the newest version; rank 0 does it for all."""
        start: Json = {}
        if self._ranks.rank == 0:
            try:
                self._owner = self._store.acquire(takeover=takeover)
                self._store.remove_incomplete()
                numbers = self._store.numbers()
                start = {"run": secrets.token_hex(16), "number": numbers[-1] if numbers else 0}
            except Exception as error:
                self._ranks.gather({"error": str(error)})
                raise
        start = self._ranks.gather(start)[0]
        if "error" in start:
            raise RankError(f"rank 0: {start['error']}")
        self._run = str(start["run"])
        if start["number"]:
            self._newest, self._seal = self._store.read(start["number"])
            self._run = self._newest.run

    @property
    def newest(self) -> Version | None:
        """The newest version of the store, also of an earlier publisher."""
        return self._newest

    def publish(self, step: int, *, keyframe: bool = False) -> None:
        """Copy the current tensors, and publish them in the background as the next version.

        While an earlier version is being written, only the newest copy waits; those that it
        replaces are dropped. Errors of the background work are raised by the next call.

        With `keyframe`, the version can be read alone, and names, dtypes and shapes may differ from
        those of the previous one. Otherwise, raises `MismatchError` if they do.
        """
        if self._is_closed:
            raise ConfigError(f"{self._store}: the publisher is closed")
        if type(step) is not int:
            raise ConfigError(f"step must be an integer, got {step!r}")
        tensors = model_tensors(self._model)
        specs = _check_tensors(tensors)
        state = self._ranks.max(2 if self._error else 1 if self._thread else 0)
        if state == 2:
            self.wait()
        if self._specs is not None and not keyframe:
            text = describe_differences(specs, self._specs, "missing", "new")
            if text:
                raise MismatchError(
                    f"{self._store}: the model differs from the last version: {text}; pass"
                    " keyframe=True to publish another structure"
                )
        tied = find_tied({name: _local(x) for name, x in tensors.items()})
        shards: dict[str, _Shard] = {}
        local: dict[str, Tensor] = {}
        for name, spec in specs.items():
            if name in tied:
                continue
            found = find_shard(name, tensors[name], self._ranks.rank)
            if found is not None:
                key = format_key(name, spec, found[0])
                if key in shards:
                    raise ConfigError(f"{key}: name of a tensor and of a part of another one")
                shards[key], local[key] = _Shard(name, spec, found[0]), found[1]
        with self._lock:
            waiting, self._pending = self._pending, None
            if waiting is not None:
                self._dropped = waiting.dropped + 1
                self._free.append(waiting.snapshot)
                keyframe = keyframe or waiting.is_keyframe
            snapshot = self._free.pop() if self._free else Snapshot()
        copies = snapshot.take(local).tensors
        self._specs = specs
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            job = _Job(step, copies, shards, tied, snapshot, keyframe, dropped)
            self._pending = job
            if self._ranks.count == 1 or state == 0:
                self._start()

    def wait(self) -> Published | None:
        """Wait until everything is published; return the newest version. Raise if it failed."""
        while True:
            with self._lock:
                self._start()
                thread = self._thread
            if thread is None:
                break
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.last

    def close(self) -> None:
        """Publish what waits, and unregister."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._unregister()

    def _unregister(self) -> None:
        if self._owner is not None:  # on rank 0
            self._store.release(self._owner)

    def _start(self) -> None:
        """Start a thread with the job that waits; called with the lock held."""
        if self._thread is None and self._pending is not None:
            # Taken now: ranks start a job together, but their threads later.
            job, self._pending = self._pending, None
            self._thread = threading.Thread(
                target=self._run_jobs, args=(job,), name="slimtensors-sync"
            )
            self._thread.start()

    def _run_jobs(self, first: _Job) -> None:
        job: _Job | None = first
        while job is not None:
            unused = job.snapshot
            try:
                unused = self._publish_job(job) or Snapshot()
            except Exception as error:
                self._error = error
                if self._base is job:
                    unused = Snapshot()
            with self._lock:
                self._free.append(unused)
                job = None
                if self._ranks.count == 1:  # ranks start the next job in `publish` or `wait`
                    job, self._pending = self._pending, None
                if job is None:
                    self._thread = None

    def _publish_job(self, job: _Job) -> Snapshot | None:
        """Publish a version; return the snapshot that is no longer needed."""
        before = self._store.traffic.copy()
        mine: Json
        failure: Exception | None = None
        try:
            self._encode(job)
            mine = _describe_job(job)
        except Exception as error:
            failure, mine = error, {"error": str(error)}
        reports = self._ranks.gather(mine)
        outcome: Json = {}
        if self._owner is not None and not any("error" in report for report in reports):
            try:
                version = self._build(job, reports)
                self._store.check_owner(self._owner)
                outcome = {"manifest": version.to_text(), "seal": self._store.commit(version)}
            except Exception as error:
                failure, outcome = error, {"error": str(error)}
        outcome = self._ranks.gather(outcome)[0]
        for rank, report in enumerate([*reports, outcome]):
            if "error" in report:
                rank %= len(reports)
                raise failure or RankError(f"rank {rank}: {report['error']}")
        version = Version.from_text(outcome["manifest"])
        previous, self._base = self._base, job
        self._newest, self._seal = version, outcome["seal"]
        self._keyframes[version.number] = version.keyframe is not None
        if self._ranks.rank == 0:
            self._remove_old(version.number)
        requests = self._store.traffic.since(before).requests
        self.last = Published(version, job.dropped, requests)
        return previous.snapshot if previous is not None else None

    def _encode(self, job: _Job) -> None:
        """Write the files of this rank."""
        number = self._newest.number + 1 if self._newest is not None else 1
        if self._base is None and self._newest is not None and self._ranks.count == 1:
            self._base = self._load_newest(job)
        base = self._base
        if base is not None and base.shards != job.shards:
            base = None
        token = f"{self._ranks.rank:05d}-{secrets.token_hex(8)}.safetensors"
        options = WriteOptions(preset=self._choose, threads=self._options.threads)

        def write_file(kind: str, source: ArchiveSource) -> None:
            def write_to(path: Path) -> None:
                write(source, path, options)

            job.files[kind] = self._store.write_file(number, f"{kind}-{token}", write_to)

        is_keyframe = (
            base is None
            or job.is_keyframe
            or number - self._find_keyframe(number - 1) >= self._options.keyframe_every
        )
        if is_keyframe:
            self._kinds.clear()
        if base is not None:
            write_file("delta", self._make_delta(job, base))
        if is_keyframe and (job.tensors or self._ranks.rank == 0):
            write_file("keyframe", self._make_keyframe(job))

    def _make_delta(self, job: _Job, base: _Job) -> ArchiveSource:
        entries: dict[str, list[str]] = {key: ["whole"] for key in job.tensors}

        def read(key: str, each: Each) -> Tensor | Encoded | None:
            x, y = job.tensors[key], base.tensors[key]
            digest = base.digests[key]
            changed = job.changed[key] = count_changes(x, y, each)
            if not changed:
                job.digests[key] = digest
                entries[key] = ["same", digest]
                return None
            job.digests[key] = digest_tensor(x, each)
            kind, r = self._make_residual(key, x, y, changed / x.numel(), each)
            if kind != "whole":
                entries[key] = [kind, digest]
            return r

        def make_item(key: str, x: Tensor) -> TensorSource:
            return TensorSource(key, Spec.of(x), lambda each: read(key, each), always_blob=True)

        items = [make_item(key, x) for key, x in job.tensors.items()]
        return ArchiveSource(items, delta={"tensors": entries, "tied": {}})

    def _make_residual(
        self, key: str, x: Tensor, y: Tensor, share: float, each: Each
    ) -> tuple[str, Tensor | Encoded]:
        """Return the kind and the residual; the kind of the last version if changes are as many."""
        known = self._kinds.get(key)
        if known is not None and 1 / _SIMILAR <= share / known[1] <= _SIMILAR:
            return known[0], encode_residual(known[0], x, y, each)
        kind, r = choose_form(key, x, y, self._choose, each)
        self._kinds[key] = kind, share
        return kind, r

    def _make_keyframe(self, job: _Job) -> ArchiveSource:
        def make_item(key: str, x: Tensor) -> TensorSource:
            def read(each: Each) -> Tensor:
                if key not in job.digests:
                    job.digests[key] = digest_tensor(x, each)
                    job.changed[key] = x.numel()
                return x

            return TensorSource(key, Spec.of(x), read)

        items = [make_item(key, x) for key, x in job.tensors.items()]
        return ArchiveSource(items, job.tied if self._ranks.count == 1 else {})

    def _build(self, job: _Job, reports: Sequence[Json]) -> Version:
        """Return the manifest from the reports of all ranks."""
        specs: dict[str, Spec] = {}
        parts: dict[str, list[PublishedPart]] = {}
        files: dict[str, dict[int, VersionFile]] = {}
        for rank, report in enumerate(reports):
            if report["step"] != job.step:
                raise MismatchError(
                    f"{self._store}: rank {rank} publishes step {report['step']}, rank 0 step"
                    f" {job.step}"
                )
            for name, spec, offset, shape, digest in report["shards"]:
                specs[name] = Spec.from_json(spec)
                part = PublishedPart(rank, Box(tuple(offset), tuple(shape)), digest)
                parts.setdefault(name, []).append(part)
            for kind, fields in report["files"].items():
                files.setdefault(kind, {})[rank] = VersionFile(*fields)
        for name, spec in specs.items():
            check_boxes(name, spec, [part.box for part in parts[name]])

        def find_files(kind: str) -> Files | None:
            return files.get(kind)

        return Version(
            run=self._run,
            number=self._newest.number + 1 if self._newest is not None else 1,
            step=job.step,
            tensors={name: PublishedTensor(specs[name], tuple(parts[name])) for name in specs},
            tied=job.tied,
            changed=sum(report["changed"] for report in reports),
            previous=self._seal,
            delta=find_files("delta"),
            keyframe=find_files("keyframe"),
        )

    def _load_newest(self, job: _Job) -> _Job | None:
        """Return the newest version of the store as a base, or None if it cannot be one."""
        assert self._newest is not None
        specs = {shard.name: shard.spec for shard in job.shards.values()}
        if {name: tensor.spec for name, tensor in self._newest.tensors.items()} != specs:
            return None
        try:
            update, tensors = Follower(self._store, self._options.threads).load()
        except (FormatError, FileNotFoundError) as error:
            _log.warning("%s; publishing a keyframe instead of a delta", error)
            return None
        if update.number != self._newest.number:
            raise InUseError(f"{self._store}: another process has published {update.number}")
        base = {key: tensors[key] for key in job.tensors}
        digests = {key: digest_tensor(x) for key, x in base.items()}
        return _Job(0, base, job.shards, {}, Snapshot(), False, 0, digests=digests)

    def _find_keyframe(self, number: int) -> int:
        """Return the newest keyframe up to a version; 0 if there is none."""
        while number >= 1:
            if number not in self._keyframes:
                try:
                    version, _ = self._store.read(number)
                except FileNotFoundError:
                    return 0
                self._keyframes[number] = version.keyframe is not None
            if self._keyframes[number]:
                return number
            number -= 1
        return 0

    def _remove_old(self, newest: int) -> None:
        """Remove versions that no kept one needs."""
        if self._options.keep is None:
            return
        try:
            start = self._find_keyframe(max(newest - self._options.keep + 1, 1))
            for number in self._store.numbers():
                if number < start:
                    self._store.remove_version(number)
        except (OSError, FormatError) as error:
            _log.warning("%s: old versions were not removed: %s", self._store, error)


def count_changes(x: Tensor, y: Tensor, each: Each) -> int:
    """Return the number of items whose bits differ."""
    size = x.element_size()
    width = min(size, 8)
    a, b = (as_bytes(t).numpy().view(f"u{width}") for t in (x, y))
    step = _CHUNK // width

    def count(i: int) -> int:
        piece = slice(i * step, (i + 1) * step)
        differs = a[piece] != b[piece]
        if size > width:
            differs = differs.reshape(-1, size // width).any(axis=1)
        return int(np.count_nonzero(differs))

    return sum(each(count, ceil_div(a.size, step)))


def _check_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return the specs of all tensors; raise if one cannot be published."""
    for name, x in tensors.items():
        if x.dtype in QUANTIZED_DTYPES:
            raise UnsupportedTensorError(
                f"{name}: torch's quantized tensors cannot be published; publish x.int_repr()"
            )
        check_storable(name, _local(x))
    return {name: Spec.of(x) for name, x in tensors.items()}


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _describe_job(job: _Job) -> Json:
    """Return what rank 0 needs to know about the files of a rank."""
    return {
        "step": job.step,
        "shards": [
            [s.name, s.spec.to_json(), s.box.offset, s.box.shape, job.digests[key]]
            for key, s in job.shards.items()
        ],
        "files": {kind: [f.name, f.size, f.sha256] for kind, f in job.files.items()},
        "changed": sum(job.changed.values()),
    }
