"""Tensors and files of a pool, stored once under the digest of their content.

An object is immutable: the first writer of a digest wins, and all others keep what exists. A tensor
is an archive with one entry, whole or as the residual from another tensor of the pool.
"""

import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.delta import choose_form, estimate_bytes
from slimtensors.archive.delta_manifest import DeltaManifest, tensor_digest
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.codecs import presets
from slimtensors.codecs.changes import decode_residual
from slimtensors.codecs.plan import Encoded
from slimtensors.errors import (
    CorruptFileError,
    MismatchError,
    MissingFileError,
    report_malformed,
)
from slimtensors.parallel import Each
from slimtensors.storage import (
    LocalLocation,
    open_for_reading,
    sync_folder,
    temporary_folder,
    temporary_name,
)
from slimtensors.storage.atomic import make_folders
from slimtensors.storage.files import copy_file
from slimtensors.tensor import Spec, bitwise_equal

MAX_DEPTH = 4
"""Largest number of tensors to decode before a tensor, each the base of the next one."""

_DIGEST = re.compile("[0-9a-f]{32}")
_REMOVED = ".slimtensors-removed"
"""Suffix of an object whose removal has begun; it is restored if a new member needs it."""
_CHUNK = 1 << 22


def is_digest(text: object) -> bool:
    """Return True if this is a digest in hexadecimal digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def file_digest(path: Path) -> str:
    """Return the first 128 bits of SHA-256 over the content of a file."""
    digest = hashlib.sha256()
    with open_for_reading(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Objects:
    """A folder of immutable files: `ab/abcdef….safetensors` or, of plain files, `ab/abcdef…`."""

    folder: Path
    suffix: str = ""

    def path(self, digest: str) -> Path:
        """Return where the object is stored, if it is."""
        return self.folder / digest[:2] / f"{digest}{self.suffix}"

    def find(self, digest: str) -> Path:
        """Return the path of an object; raise if the pool does not contain it."""
        path = self.path(digest)
        if not path.is_file():
            for removed in path.parent.glob(f".{glob.escape(path.name)}.*{_REMOVED}"):
                with suppress(FileNotFoundError):  # removed in the meantime
                    link(removed, path)
        if not path.is_file():
            raise MissingFileError(f"{path}: needed by a member of the pool, but not found")
        return path

    def __contains__(self, digest: str) -> bool:
        with suppress(MissingFileError):
            return bool(self.find(digest))
        return False

    def digests(self) -> set[str]:
        """List all objects."""
        paths = self.folder.glob(f"[0-9a-f][0-9a-f]/*{self.suffix}")
        names = (path.name.removesuffix(self.suffix) for path in paths)
        return {name for name in names if is_digest(name)}

    def put(self, digest: str, create: Callable[[Path], object]) -> int:
        """Store an object, which `create` writes to a path, unless it exists; return its bytes."""
        if digest in self:
            return 0
        target = self.path(digest)
        with temporary_folder(target) as folder:
            make_folders(target.parent)
            made = folder / target.name
            create(made)
            size = made.stat().st_size
            is_new = link(made, target)
        sync_folder(target.parent)
        return size if is_new else 0

    def remove(self, digests: Iterable[str], find_needed: Callable[[], set[str]]) -> int:
        """Remove objects, except those in `find_needed()` by then; return the bytes removed.

        An object is renamed first. Writers announce what they need before they look for it: they
        either find the new name missing, or are seen here.
        """
        removed = {}
        for digest in digests:
            path = self.path(digest)
            hidden = temporary_name(path, _REMOVED)
            with suppress(FileNotFoundError):  # another process removes it, too
                path.rename(hidden)
                removed[hidden] = digest
        removed |= {path: path.name[1:33] for path in self._interrupted() if path not in removed}
        needed = find_needed() if removed else set()
        freed = 0
        for hidden, digest in removed.items():
            with suppress(FileNotFoundError):
                if digest in needed:
                    link(hidden, self.path(digest))
                else:
                    freed += hidden.stat().st_size
                hidden.unlink()
        return freed

    def _interrupted(self) -> Iterator[Path]:
        """Yield the objects that a killed process was about to remove."""
        return self.folder.glob(f"[0-9a-f][0-9a-f]/.*{_REMOVED}")


def link(source: Path, target: Path) -> bool:
    """Give a complete file another name; return False if that name is taken."""
    try:
        target.hardlink_to(source)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            return False
        source.rename(target)
    return True


class FileObjects(Objects):
    """Files of any content, such as tokenizers."""

    def add(self, digest: str, source: Path) -> int:
        """Store a file unless it is stored; return the bytes written."""

        def create(path: Path) -> None:
            copy_file(source, path)
            if file_digest(path) != digest:
                raise MismatchError(f"{source} changed while it was added")

        return self.put(digest, create)

    def check(self, digest: str) -> None:
        """Raise if the content of a file has changed."""
        path = self.find(digest)
        if file_digest(path) != digest:
            raise CorruptFileError(f"{path}: content differs from its name; the file is damaged")


class TensorObjects(Objects):
    """Tensors, coded losslessly: whole, or as the residual from another tensor."""

    def base(self, digest: str) -> str | None:
        """Return the tensor that is needed to decode a tensor."""
        entry = _entry(self._open(digest), digest)
        return entry[1] if entry else None

    def bases(self, digest: str) -> list[str]:
        """Return all tensors that are needed to decode a tensor, the nearest first."""
        found: list[str] = []
        while (base := self.base(found[-1] if found else digest)) is not None:
            found.append(base)
            if len(found) > MAX_DEPTH:
                raise CorruptFileError(f"{self.path(digest)}: more than {MAX_DEPTH} bases")
        return found

    def load(self, digest: str, each: Each) -> Tensor:
        """Decode a tensor and check its digest."""
        x = self._decode(digest, each, MAX_DEPTH)
        if tensor_digest(x) != digest:
            path = self.path(digest)
            raise CorruptFileError(f"{path}: content differs from its name; the file is damaged")
        return x

    def _decode(self, digest: str, each: Each, depth: int) -> Tensor:
        archive = self._open(digest)
        entry = _entry(archive, digest)
        x = archive.load_one(digest, each)
        if entry is None:
            return x
        if not depth:
            raise CorruptFileError(f"{archive.path}: more than {MAX_DEPTH} bases")
        kind, base = entry
        with report_malformed(archive.path, computes=True):
            y = self._decode(base, each, depth - 1)
            return decode_residual(kind, x, y, each)

    def add(self, digest: str, x: Tensor, base: str | None, each: Each) -> int:
        """Store a tensor unless it is stored; return the bytes written.

        It becomes a residual from `base`, a tensor of the same dtype and shape, if that is smaller.
        """
        return self.put(digest, lambda path: self._write(path, digest, x, base, each))

    def _write(self, path: Path, digest: str, x: Tensor, base: str | None, each: Each) -> None:
        if tensor_digest(x) != digest:
            raise MismatchError("a tensor changed while it was added")
        delta: dict[str, Any] | None = None
        r: Tensor | Encoded = x
        if base is not None and base in self:
            y = self.load(base, each)
            if y.dtype == x.dtype and y.shape == x.shape and not bitwise_equal(x, y):
                kind, r = choose_form(digest, x, y, presets.lossless, each)
                if kind != "whole":
                    delta = {"tensors": {digest: [kind, base]}, "tied": {}}
        item = TensorSource(digest, Spec.of(x), lambda _: r, always_blob=delta is not None)
        options = WriteOptions(preset="lossless", threads=1)
        write(ArchiveSource([item], delta=delta), path, options)

    def _open(self, digest: str) -> Archive:
        archive = Archive.from_location(LocalLocation(self.find(digest)))
        if archive.keys() != [digest]:
            raise CorruptFileError(f"{archive.path}: expected the tensor {digest}")
        return archive


def measure_residual(x: Tensor, y: Tensor, each: Each) -> float:
    """Return the size of `x` as a residual from `y`, as a fraction of its size in memory."""
    _, r = choose_form("", x, y, presets.lossless, each)
    if isinstance(r, Encoded):
        return sum(leaf.nbytes for _, leaf in r.leaves()) / x.nbytes
    return estimate_bytes("", r, presets.lossless) / x.nbytes


def _entry(archive: Archive, digest: str) -> tuple[str, str] | None:
    """Return the kind of residual and the digest of its base; None if the tensor is whole."""
    if archive.delta is None:
        return None
    match DeltaManifest.from_archive(archive).tensors.get(digest):
        case [str(kind), str(base)] if kind != "same" and is_digest(base):
            return kind, base
    raise CorruptFileError(f"{archive.path}: malformed delta")
