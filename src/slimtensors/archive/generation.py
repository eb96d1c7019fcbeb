"""Give the files of a model that were written one by one the generation that shards share."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimtensors.archive.dialects import KEY, read_manifest
from slimtensors.storage import LocalLocation, StoredFile, open_file, pack_header
from slimtensors.storage.atomic import replace_file, temporary_file
from slimtensors.storage.files import name_write_errors
from slimtensors.tensor import ceil_div

_HEAD = 16
"""First bytes of a blob, which contain its checksum."""
_ALIGN = 64


def stamp_generation(paths: Sequence[Path]) -> None:
    """Write a hash of the content of these files into each of them, and sync them to disk.

    Files without a manifest, and files that were written together, stay as they are.
    """
    files = [open_file(LocalLocation(path)) for path in paths]
    manifests = [read_manifest(file) for file in files]
    if any(manifest is None or manifest.generation is not None for manifest in manifests):
        return
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.text).digest())
        for entry in file.header.entries.values():
            digest.update(bytes(file.read(entry, _HEAD)))
    for path, file in zip(paths, files, strict=True):
        _stamp(path, file, digest.hexdigest()[:32])


def _stamp(path: Path, file: StoredFile, generation: str) -> None:
    manifest, metadata = read_manifest(file), file.header.metadata
    assert manifest is not None, path
    size, _ = json.loads(metadata[KEY])["table"]
    table = file.text[-size:].decode()
    metadata = {**metadata, KEY: replace(manifest, generation=generation).to_text(table)}
    header = pack_header(table, metadata, size=file.header.size)
    if len(header) == file.header.size:
        _overwrite_start(path, header)
        return
    header = pack_header(table, metadata, size=ceil_div(len(header), _ALIGN) * _ALIGN)
    with temporary_file(path) as (temporary, descriptor):
        with os.fdopen(descriptor, "wb", closefd=False) as out:
            out.write(header)
            out.write(file.source.read(file.header.size, file.source.size))
            out.flush()
            os.fsync(descriptor)
        replace_file(temporary, path)


def _overwrite_start(path: Path, header: bytes) -> None:
    with name_write_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "wb") as out:
            out.write(header)
            out.flush()
            os.fsync(descriptor)
