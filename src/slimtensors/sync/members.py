"""The members of a pool: their files, and the digests of the tensors in them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimtensors.archive.dialects.entries import check_version
from slimtensors.archive.originals import Originals, pack_text, text_limit, unpack_text
from slimtensors.checkpoint.documents import Fields, is_sealed, parse_object, seal
from slimtensors.errors import CorruptFileError, report_malformed
from slimtensors.storage import is_inside
from slimtensors.sync.objects import is_digest
from slimtensors.tensor import Json, Spec

VERSION = 1
"""Format version of pools and members."""
_FORMAT = "slimtensors pool member"
_SEAL = ',\n  "crc32c": '


@dataclass(frozen=True)
class MemberFile:
    """A file of a member: the digest of its content, or those of its tensors."""

    size: int
    digest: str | None = None
    header: bytes = b""
    """First bytes of a safetensors file: length of the header, and the header with padding."""
    tensors: Sequence[str] = ()
    """Digests of its tensors in the order of their offsets."""

    @cached_property
    def named(self) -> dict[str, tuple[str, Spec]]:
        """Digest and spec of each tensor by name, in the order of their offsets."""
        entries = Originals({"header": self.header}).entries["header"]
        ordered = sorted(entries, key=lambda name: (entries[name].begin, entries[name].end))
        if len(ordered) != len(self.tensors):
            raise CorruptFileError("the number of tensors differs from the header")
        pairs = zip(ordered, self.tensors, strict=True)
        return {name: (digest, entries[name].spec) for name, digest in pairs}

    def to_json(self) -> Json:
        """Return the JSON form."""
        if self.digest is not None:
            return {"bytes": self.size, "digest": self.digest}
        header = pack_text(self.header)
        return {"bytes": self.size, "header": header, "tensors": list(self.tensors)}

    @classmethod
    def from_fields(cls, fields: Fields) -> "MemberFile":
        """Parse the JSON form."""
        size = fields.integer("bytes", low=0)
        if "digest" in fields.data:
            fields.check_keys(("bytes", "digest"))
            return cls(size, _check_digest(fields, "digest", fields.text("digest")))
        fields.check_keys(("bytes", "header", "tensors"))
        text = fields.text("header")
        header = unpack_text(text, text_limit(len(text) + 40 * len(fields.items("tensors"))))
        tensors = [_check_digest(fields, "tensors", x) for x in fields.items("tensors")]
        return cls(size, None, header, tensors)


@dataclass(frozen=True)
class Member:
    """A model in a pool."""

    name: str
    files: Mapping[str, MemberFile]
    bases: Sequence[str] = ()
    """Digests of tensors of other models that are needed to decode its own."""
    base: str | None = None
    """Name of the member from which it was stored as a difference, at that time."""

    @property
    def size(self) -> int:
        """Size of its files."""
        return sum(file.size for file in self.files.values())

    @property
    def tensors(self) -> set[str]:
        """Digests of its tensors."""
        return {digest for file in self.files.values() for digest in file.tensors}

    @property
    def blobs(self) -> set[str]:
        """Digests of its other files."""
        return {file.digest for file in self.files.values() if file.digest is not None}

    @cached_property
    def named(self) -> dict[str, tuple[str, Spec]]:
        """Digest and spec of all tensors by name."""
        found: dict[str, tuple[str, Spec]] = {}
        for file in self.files.values():
            if file.digest is None:
                found |= file.named
        return found

    def to_text(self) -> str:
        """Return JSON with a checksum at the end."""
        data: Json = {
            "format": _FORMAT,
            "version": VERSION,
            "base": self.base,
            "files": {name: file.to_json() for name, file in self.files.items()},
            "bases": list(self.bases),
        }
        text = json.dumps(data, indent=1, ensure_ascii=False)
        return seal(text.removesuffix("\n}"), _SEAL)

    @classmethod
    def from_text(cls, name: str, text: str) -> "Member":
        """Parse and check the JSON form."""
        fields = parse_object(text, _FORMAT, strict=lambda version: True)
        check_version(fields.integer("version"), VERSION)
        if not is_sealed(text, _SEAL):
            raise CorruptFileError("checksum mismatch; the file is damaged")
        fields.check_keys(("format", "version", "base", "files", "bases", "crc32c"))
        files = fields.table("files", lambda rows, key: MemberFile.from_fields(rows.child(key)))
        for file in files:
            if not is_inside(file):
                raise CorruptFileError(f"{file!r} is not a path inside the folder")
        for file, described in files.items():
            with report_malformed(file):
                _ = described.named if described.digest is None else None
        bases = [_check_digest(fields, "bases", x) for x in fields.items("bases")]
        base = None if fields.data["base"] is None else fields.text("base")
        return cls(name, files, bases, base)

    def has(self, name: str, spec: Spec) -> bool:
        """Return True if this model has a tensor of this name, dtype and shape."""
        found = self.named.get(name)
        return found is not None and found[1] == spec


def _check_digest(fields: Fields, key: str, value: object) -> str:
    if not is_digest(value):
        raise CorruptFileError(fields.explain(key, "32 hexadecimal digits"))
    return str(value)
