"""Pools: folders in which many models share tensors.

    POOL/pool.json              format and version
    POOL/members/NAME.json      files of a model, and the digests of its tensors
    POOL/tensors/ab/ab….safetensors, POOL/files/ab/ab…

There is no lock. Objects are immutable, so that any number of processes may add to a pool at once.
A member announces the objects that it needs before it looks for them (as a hidden file in
`members`), and they are removed only while no member, complete or announced, needs them.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from torch import Tensor

from slimtensors.archive import Progress
from slimtensors.archive.decompress import make_exact_sources
from slimtensors.archive.delta_manifest import tensor_digest
from slimtensors.archive.dialects.entries import check_version
from slimtensors.archive.originals import Originals
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.checkpoint.documents import (
    is_plain_name,
    parse_object,
    read_document,
)
from slimtensors.errors import (
    ConfigError,
    FormatError,
    MissingFileError,
    report_malformed,
    suggest,
)
from slimtensors.parallel import Workers
from slimtensors.storage import (
    HeaderEntry,
    LocalLocation,
    StoredFile,
    StrPath,
    is_inside,
    local_path,
    open_file,
    read_bytes,
    remove_leftovers,
    sync_folder,
    write_json,
)
from slimtensors.storage.atomic import create_folder, make_folders, temporary_file
from slimtensors.storage.files import TEMPORARY_SUFFIX, copy_file
from slimtensors.storage.separate import check_separate
from slimtensors.sync.members import VERSION, Member, MemberFile
from slimtensors.sync.objects import (
    MAX_DEPTH,
    FileObjects,
    TensorObjects,
    file_digest,
    is_digest,
    link,
    measure_residual,
)
from slimtensors.tensor import Spec, view_as

_FORMAT = "slimtensors pool"
_WEIGHTS = ".safetensors"
_TEMPORARY = re.compile(rf"\.(.+)\.[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)

_MIN_SHARE = 0.1
"""Smallest share of its bytes that a model has in common with its base, by name and shape."""
_COMPARED_MODELS = 8
"""Number of members that are compared with a new model to find its base."""
_COMPARED_TENSORS = 3
_MIN_COMPARED, _MAX_COMPARED = 1 << 14, 1 << 24
"""Bytes of the tensors that are compared."""


@dataclass(frozen=True)
class Added:
    """What `Pool.add` did."""

    member: Member
    stored_bytes: int
    """Bytes that were written; tensors and files that the pool contained take none."""
    new_tensors: int = 0
    left_out: Sequence[str] = ()
    """Hidden files, which are not stored."""


@dataclass
class Checked:
    """The result of `Pool.verify`."""

    members: int = 0
    objects: int = 0
    damaged: list[str] = field(default_factory=list)
    """One message for each problem."""


@dataclass(frozen=True)
class _Job:
    """A model that is being added."""

    member: Member
    source: Path
    opened: Mapping[str, StoredFile]
    """Its safetensors files."""
    left_out: Sequence[str]
    workers: Workers
    progress: Progress | None

    def report(self, nbytes: int) -> None:
        """Report progress."""
        if self.progress:
            self.progress(nbytes)

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        for file in self.opened.values():
            if entry := file.header.entries.get(name):
                return view_as(file.read(entry), entry.spec).clone()
        raise KeyError(name)


class Pool:
    """A folder in which many models share tensors. Tensors are stored once, or as differences.

    Example:
        >>> from pathlib import Path
        >>> import slimtensors, torch
        >>> from slimtensors.sync import Pool
        >>> _ = torch.manual_seed(0)
        >>> base = torch.randn(256, 256, dtype=torch.bfloat16)
        >>> for name, weight in {"base": base, "tuned": base * 1.01}.items():
        ...     Path(name).mkdir()
        ...     _ = slimtensors.save({"w": weight}, f"{name}/model.safetensors", preset="dense")
        >>> pool = Pool("pool")
        >>> _ = pool.add("base")
        >>> pool.add("tuned").member.base
        'base'
        >>> pool.get("tuned", "again")
        >>> bool(slimtensors.verify("again", against="tuned"))
        True
    """

    def __init__(self, path: StrPath) -> None:
        self.path = local_path(path)
        self.tensors = TensorObjects(self.path / "tensors", _WEIGHTS)
        self.files = FileObjects(self.path / "files")
        self._members = self.path / "members"

    def check_exists(self) -> None:
        """Raise unless this is a pool of a supported version."""
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: no such pool")
        path = self.path / "pool.json"
        try:
            text = read_document(path)
        except FileNotFoundError:
            raise FormatError(f"{self.path} is not a pool (pool.json not found)") from None
        with report_malformed(str(path)):
            fields = parse_object(text, _FORMAT, strict=lambda version: True)
            check_version(fields.integer("version"), VERSION)

    def names(self) -> list[str]:
        """Return the names of all members, sorted."""
        self.check_exists()
        found = (path.stem for path in self._members.glob("*.json"))
        return sorted(name for name in found if is_plain_name(name))

    def member(self, name: str) -> Member:
        """Read the description of a member."""
        self.check_exists()
        path = self._member_path(name)
        try:
            text = read_document(path)
        except FileNotFoundError:
            hint = suggest(name, self.names())
            raise ConfigError(f"{self.path} has no member {name!r}; {hint}") from None
        with report_malformed(str(path)):
            return Member.from_text(name, text)

    def members(self) -> list[Member]:
        """Read the descriptions of all members that exist."""
        found = []
        for name in self.names():
            with suppress(ConfigError):  # removed in the meantime
                found.append(self.member(name))
        return found

    def _readable_members(self) -> Iterator[Member]:
        for name in self.names():
            with suppress(ConfigError, FormatError):  # `verify` reports damaged ones
                yield self.member(name)

    def add(
        self,
        model: StrPath,
        *,
        name: str | None = None,
        base: str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Added:
        """Add a model folder. Nothing changes if the pool contains the same model by this name.

        Args:
            model: folder to add; it is not changed. Hidden files are left out.
            name: name in the pool; default: the name of the folder.
            base: member from which differences are stored; default: the most similar one.
            threads: number of threads; default: one per core.
            progress: called with the number of bytes just processed, twice those of the model.
        """
        source = local_path(model).resolve()
        if not source.is_dir():
            problem = "is a file; a pool stores folders" if source.exists() else "no such folder"
            raise ConfigError(f"{model}: {problem}")
        name = source.name if name is None else name
        if not is_plain_name(name) or not is_plain_name(f"{name}.json"):
            raise ConfigError(f"{name!r} cannot be the name of a member; pass another name")
        check_separate(LocalLocation(self.path), [source])
        self._create()
        with Workers(threads) as workers:
            job = _open(name, source, workers, progress)
            if (found := self._find_equal(job.member)) is not None:
                return Added(found, 0, left_out=job.left_out)
            return self._add(job, self._choose_base(job, base))

    def get(
        self,
        name: str,
        target: StrPath,
        *,
        replace: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a member to a folder. All files are identical to those that were added.

        Args:
            name: name of the member.
            target: folder to write.
            replace: whether to replace an existing folder.
            threads: number of threads; default: one per core.
            progress: called with the number of bytes just processed.
        """
        member = self.member(name)
        options = WriteOptions(preset="dense", threads=threads, progress=progress)
        with create_folder(target, replace=replace, sources=[self.path]) as folder:
            for key, file in member.files.items():
                path = folder / key
                path.parent.mkdir(parents=True, exist_ok=True)
                if file.digest is None:
                    with report_malformed(f"{self._member_path(name)}: {key}"):
                        source = self._make_source(file)
                    write(source, path, options)
                    continue
                self.files.check(file.digest)
                copy_file(self.files.find(file.digest), path)
                if progress:
                    progress(file.size)

    def remove(self, name: str) -> int:
        """Remove a member, and all objects that no other member needs; return the bytes freed."""
        self.member(name)
        self._member_path(name).unlink(missing_ok=True)
        sync_folder(self._members)
        return self.clean()

    def clean(self) -> int:
        """Remove objects that no member needs, such as those of killed processes."""
        self.check_exists()
        for path in self._members.glob(f".*{TEMPORARY_SUFFIX}"):
            if match := _TEMPORARY.fullmatch(path.name):
                remove_leftovers(self._members / match[1])
        needed = self._find_needed()
        return sum(
            objects.remove(objects.digests() - needed, self._find_needed)
            for objects in (self.tensors, self.files)
        )

    def verify(self, *, threads: int | None = None, progress: Progress | None = None) -> Checked:
        """Read and decode everything that members need, and check all digests.

        `progress` receives stored bytes.
        """
        result = Checked()
        tensors: set[str] = set()
        files: set[str] = set()
        for name in self.names():
            result.members += 1
            try:
                member = self.member(name)
            except FormatError as error:
                result.damaged.append(str(error))
                continue
            tensors |= member.tensors.union(member.bases)
            files |= member.blobs
        with Workers(threads) as workers:

            def check(digest: str) -> str:
                try:
                    if digest in tensors:
                        self.tensors.load(digest, workers.each)
                    else:
                        self.files.check(digest)
                except (FormatError, OSError) as error:
                    return str(error)
                return ""

            ordered = [*sorted(tensors), *sorted(files - tensors)]
            for digest, problem in zip(
                ordered, workers.in_order(check, ordered, self._size), strict=True
            ):
                result.objects += 1
                if problem:
                    result.damaged.append(problem)
                if progress:
                    progress(self._size(digest))
        return result

    def stored_bytes(self) -> int:
        """Return the size of all files of the pool."""
        self.check_exists()
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def own_bytes(self) -> dict[str, int]:
        """Return, for each member, the bytes that its removal would free."""
        members = self.members()
        users: dict[str, set[str]] = {}
        for member in members:
            for digest in {*member.tensors, *member.bases, *member.blobs}:
                users.setdefault(digest, set()).add(member.name)
        own = dict.fromkeys((member.name for member in members), 0)
        for digest, names in users.items():
            if len(names) == 1:
                own[min(names)] += self._size(digest)
        return own

    def _size(self, digest: str) -> int:
        for path in (self.tensors.path(digest), self.files.path(digest)):
            with suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    def _member_path(self, name: str) -> Path:
        if not is_plain_name(name):
            raise ConfigError(f"{name!r} cannot be the name of a member")
        return self._members / f"{name}.json"

    def _create(self) -> None:
        """Create the pool unless it exists."""
        if self.path.is_dir() and (self.path / "pool.json").exists():
            self.check_exists()
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(f"{self.path} exists and is not a pool")
        make_folders(self._members)
        write_json(self.path / "pool.json", {"format": _FORMAT, "version": VERSION})

    def _find_equal(self, new: Member) -> Member | None:
        """Return the member of this name if it has the same files; raise if it has others."""
        if not self._member_path(new.name).exists():
            return None
        member = self.member(new.name)
        if member.files == new.files:
            return member
        raise ConfigError(
            f"{self.path} contains another model called {new.name!r}; pass another name"
        )

    def _choose_base(self, job: _Job, base: str | None) -> Member | None:
        """Return the member that a new model is most similar to, or the one that was named."""
        if base is not None:
            return self.member(base)
        named = job.member.named.items()
        missing = {name: x for name, x in named if x[0] not in self.tensors}
        least = _MIN_SHARE * sum(spec.nbytes for _, spec in missing.values())
        matches: dict[frozenset[str], tuple[int, Member]] = {}
        for member in self._readable_members():
            common = [name for name, (_, spec) in missing.items() if member.has(name, spec)]
            size = sum(missing[name][1].nbytes for name in common)
            if common and size >= least:
                matches.setdefault(
                    frozenset(member.named[name][0] for name in common), (size, member)
                )
        ordered = sorted(matches.values(), key=lambda match: (-match[0], match[1].name))
        candidates = [member for _, member in ordered[:_COMPARED_MODELS]]
        if len(candidates) < 2:
            return next(iter(candidates), None)
        return min(candidates, key=lambda member: self._compare(job, member, missing))

    def _compare(self, job: _Job, member: Member, missing: Mapping[str, tuple[str, Spec]]) -> float:
        """Return the size of some tensors as differences from a member, relative to the whole."""
        sizes = {name: spec.nbytes for name, (_, spec) in missing.items() if member.has(name, spec)}
        fitting = [name for name, size in sizes.items() if _MIN_COMPARED <= size <= _MAX_COMPARED]
        chosen = sorted(fitting or sizes, key=lambda name: (-sizes[name], name))
        each, ratios = job.workers.each, []
        for name in chosen[:_COMPARED_TENSORS]:
            y = self.tensors.load(member.named[name][0], each)
            ratios.append(measure_residual(job.read(name), y, each))
        return sum(ratios) / len(ratios)

    def _add(self, job: "_Job", base: Member | None) -> Added:
        """Store what is missing, and the description of the member last."""
        member, bases = job.member, self._find_bases(job.member, base) if base else {}
        target = self._member_path(member.name)
        stored: dict[str, int] = {}
        with temporary_file(target) as (_, announcement):
            self._announce(announcement, {*member.tensors, *member.blobs, *bases.values()})
            for key, file in member.files.items():
                if file.digest is None:
                    stored |= self._put_tensors(job, key, bases)
                else:
                    stored[file.digest] = self.files.add(file.digest, job.source / key)
                    job.report(file.size)
            needed = self._announce(announcement, member.tensors)
            is_used = base is not None and not needed.isdisjoint(base.tensors - member.tensors)
            member = replace(
                member,
                bases=sorted(needed - member.tensors),
                base=base.name if base and is_used else None,
            )
            self._publish(member)
        new = sum(1 for digest in member.tensors if stored.get(digest))
        return Added(member, sum(stored.values()), new, job.left_out)

    def _put_tensors(self, job: "_Job", key: str, bases: Mapping[str, str]) -> dict[str, int]:
        """Store the tensors of a file; return the bytes written for each."""
        stored_file = job.opened[key]
        named = job.member.files[key].named
        entries = {named[name][0]: x for name, x in stored_file.header.entries.items()}

        def put(digest: str) -> int:
            if digest in self.tensors:
                return 0
            x = view_as(stored_file.read(entries[digest]), entries[digest].spec)
            written = self.tensors.add(digest, x, bases.get(digest), job.workers.each)
            stored_file.release(entries[digest])
            return written

        found: dict[str, int] = {}
        with report_malformed(stored_file.name):
            results = job.workers.in_order(put, entries, lambda digest: entries[digest].spec.nbytes)
            for digest, written in zip(entries, results, strict=True):
                found[digest] = written
                job.report(entries[digest].spec.nbytes)
        return found

    def _find_bases(self, member: Member, base: Member) -> dict[str, str]:
        """Return the tensor of the base for each tensor that the pool does not contain."""
        found: dict[str, str] = {}
        for name, (digest, spec) in member.named.items():
            if not base.has(name, spec) or digest in self.tensors:
                continue
            other = base.named[name][0]
            with suppress(MissingFileError):  # the base was removed in the meantime
                chain = self.tensors.bases(other)
                found[digest] = chain[-1] if len(chain) == MAX_DEPTH else other
        return found

    def _announce(self, descriptor: int, digests: Collection[str]) -> set[str]:
        """Write the names of objects that a new member needs, before they are looked for.

        Return them with all bases of those that are stored.
        """
        known: set[str] = set()
        needed = set(digests)
        while needed - known:
            os.write(descriptor, "".join(f"{digest}\n" for digest in needed - known).encode())
            os.fsync(descriptor)
            known = set(needed)
            for digest in known:
                if digest in self.tensors:
                    needed.update(self.tensors.bases(digest))
        return needed

    def _publish(self, member: Member) -> None:
        """Make a member visible, once all that it needs is stored."""
        for digest in member.tensors.union(member.bases):
            self.tensors.find(digest)
        for digest in member.blobs:
            self.files.find(digest)
        target = self._member_path(member.name)
        with temporary_file(target) as (path, descriptor):
            os.write(descriptor, member.to_text().encode())
            os.fsync(descriptor)
            if not link(path, target):
                self._find_equal(member)  # raises if another process added another model
        sync_folder(self._members)

    def _find_needed(self) -> set[str]:
        """Return the digests of all objects that a member needs, also one that is being added."""
        needed: set[str] = set()
        # Hidden files first: a member is published before its announcement is removed.
        for path in self._members.glob(f".*{TEMPORARY_SUFFIX}"):
            with suppress(FileNotFoundError):
                needed.update(filter(is_digest, read_bytes(path).decode(errors="replace").split()))
        for member in self.members():
            needed.update(member.tensors, member.bases, member.blobs)
        return needed

    def _make_source(self, file: MemberFile) -> ArchiveSource:
        """Return the content of a safetensors file, to be written byte for byte."""

        def make_item(name: str, digest: str, spec: Spec) -> TensorSource:
            return TensorSource(name, spec, lambda each: self.tensors.load(digest, each))

        items = [make_item(name, *found) for name, found in file.named.items()]
        exact = make_exact_sources(ArchiveSource(items), Originals({_WEIGHTS: file.header}))
        return exact[_WEIGHTS]


def _open(name: str, source: Path, workers: Workers, progress: Progress | None) -> _Job:
    """Open a model folder and compute the digests of everything in it."""
    keys: list[str] = []
    left_out: list[str] = []
    for key in LocalLocation(source).walk():
        is_hidden = any(part.startswith(".") for part in PurePath(key).parts)
        (left_out if is_hidden and key != ".gitattributes" else keys).append(key)
    for key in keys:
        if not is_inside(key):
            raise ConfigError(f"{source}: the name {key!r} is not portable; rename the file")
    weights = [key for key in keys if key.endswith(_WEIGHTS)]
    if not weights:
        raise ConfigError(f"{source}: no safetensors files found; convert the model first")
    opened = {key: open_file(LocalLocation(source / key), key) for key in weights}
    job = _Job(Member(name, {}), source, opened, left_out, workers, progress)
    files = {key: _describe(job, key) for key in keys}
    return replace(job, member=Member(name, files))


def _describe(job: _Job, key: str) -> MemberFile:
    path = job.source / key
    file = job.opened.get(key)
    if file is None:
        described = MemberFile(path.stat().st_size, file_digest(path))
        job.report(described.size)
        return described
    entries = sorted(file.header.entries.values(), key=lambda entry: (entry.begin, entry.end))

    def digest(entry: HeaderEntry) -> str:
        found = tensor_digest(view_as(file.read(entry), entry.spec))
        file.release(entry)
        return found

    digests = []
    results = job.workers.in_order(digest, entries, lambda entry: entry.spec.nbytes)
    for entry, found in zip(entries, results, strict=True):
        digests.append(found)
        job.report(entry.spec.nbytes)
    return MemberFile(file.source.size, None, file.raw_header, digests)
