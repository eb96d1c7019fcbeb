"""Pools of models (docs/format-pool.md)."""

import base64
import hashlib
import json
import zlib

from independent.reader.container import open_archive
from independent.reader.crc32c import crc32c
from independent.reader.deltas import add_difference, compute_digest
from independent.reader.tensor import check


def restore(pool, name):
    """Return the files of a member by path."""
    text = (pool / "members" / f"{name}.json").read_text(encoding="utf-8")
    member = json.loads(text)
    body = text[: text.rindex('"crc32c"')].rstrip().removesuffix(",")
    check(crc32c(body.encode()) == member["crc32c"], f"checksum of {name}")
    found = {}
    for path, file in member["files"].items():
        if "digest" in file:
            raw = (pool / "files" / file["digest"][:2] / file["digest"]).read_bytes()
            check(hashlib.sha256(raw).hexdigest()[:32] == file["digest"], path)
        else:
            header = zlib.decompress(base64.b64decode(file["header"]))
            raw = header + b"".join(load(pool, digest).data for digest in file["tensors"])
        check(len(raw) == file["bytes"], f"size of {path}")
        found[path] = raw
    return found


def load(pool, digest):
    """Return the tensor with this digest."""
    archive = open_archive(pool / "tensors" / digest[:2] / f"{digest}.safetensors")
    if "delta" in archive.manifest:
        kind, base = archive.manifest["delta"]["tensors"][digest]
        x = add_difference(kind, archive.tensors()[digest], load(pool, base))
    else:
        x = archive.tensors()[digest]
    check(compute_digest(x) == digest, digest)
    return x
