"""Uploads of large files to S3 in parts, several at a time; interrupted ones are resumed."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slimtensors.errors import CorruptFileError
from slimtensors.storage.location import RemoteLocation
from slimtensors.storage.retry import send
from slimtensors.tensor import ceil_div

_PART = 16 << 20
"""Bytes of a part; each thread has one in memory."""
_THREADS = 4
_MAX_PARTS = 10_000
"""Limit of S3."""


def upload_file(path: Path, target: RemoteLocation) -> None:
    """Upload a local file, unless an interrupted upload already stored the same content."""
    size = path.stat().st_size
    if not _has_parts(target):
        target.upload(path)
    elif not _is_same(path, target, size):
        if size > _PART:
            _upload_parts(path, target, size)
        else:
            target.upload(path)
    if (found := target.size()) != size:
        raise CorruptFileError(f"{target}: expected {size} bytes after the upload, got {found}")


def abort_uploads(folder: RemoteLocation) -> None:
    """Discard the parts of interrupted uploads of the files in a folder."""
    if _has_parts(folder):
        bucket, prefix = _split(folder)
        for key, upload in _list_uploads(folder, bucket, f"{prefix}/"):
            _call(folder, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)


def _is_same(path: Path, target: RemoteLocation, size: int) -> bool:
    """Return True if the target has the content of a file, by size and ETag.

    The ETag is a hash of the content or of its parts, unless the server encrypts with own keys.
    """
    try:
        info = send(str(target), lambda: target.filesystem.info(target.path, refresh=True))
    except FileNotFoundError:
        return False
    return info["size"] == size and str(info.get("ETag", "")).strip('"') == _compute_tag(path, size)


def _compute_tag(path: Path, size: int) -> str:
    length = _part_length(size)
    with path.open("rb") as file:
        digests = [_md5(file.read(length)) for _ in range(0, size, length)]
    if size <= _PART:
        return (digests[0] if digests else _md5(b"")).hex()
    return f"{_md5(b''.join(digests)).hex()}-{len(digests)}"


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _part_length(size: int) -> int:
    return max(_PART, ceil_div(size, _MAX_PARTS))


def _upload_parts(path: Path, target: RemoteLocation, size: int) -> None:
    bucket, key = _split(target)
    length = _part_length(size)
    uploads = [upload for found, upload in _list_uploads(target, bucket, key) if found == key]
    if uploads:
        upload, stored = uploads[-1], _list_parts(target, bucket, key, uploads[-1])
    else:
        made = _call(target, "create_multipart_upload", Bucket=bucket, Key=key)
        upload, stored = made["UploadId"], {}
    names = {"Bucket": bucket, "Key": key, "UploadId": upload}

    def send_part(number: int) -> dict[str, Any]:
        with path.open("rb") as file:
            file.seek((number - 1) * length)
            data = file.read(length)
        tag = stored.get(number)
        if tag is None or tag.strip('"') != _md5(data).hex():
            tag = _call(target, "upload_part", **names, PartNumber=number, Body=data)["ETag"]
        return {"PartNumber": number, "ETag": tag}

    with ThreadPoolExecutor(_THREADS, "slimtensors-upload") as pool:
        parts = list(pool.map(send_part, range(1, ceil_div(size, length) + 1)))
    try:
        _call(target, "complete_multipart_upload", **names, MultipartUpload={"Parts": parts})
    except FileNotFoundError:  # repeated after a first request that had succeeded
        if not _is_same(path, target, size):
            raise
    target.filesystem.invalidate_cache()


def _list_uploads(place: RemoteLocation, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield key and id of each upload that was neither completed nor aborted."""
    start: dict[str, str] = {}
    while True:
        page = _call(place, "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **start)
        yield from ((row["Key"], row["UploadId"]) for row in page.get("Uploads") or [])
        if not page.get("IsTruncated"):
            return
        start = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }


def _list_parts(place: RemoteLocation, bucket: str, key: str, upload: str) -> dict[int, str]:
    """Return the ETag of each stored part by its number."""
    tags: dict[int, str] = {}
    marker = 0
    while True:
        names = {"Bucket": bucket, "Key": key, "UploadId": upload}
        page = _call(place, "list_parts", **names, PartNumberMarker=marker)
        tags |= {row["PartNumber"]: row["ETag"] for row in page.get("Parts") or []}
        if not page.get("IsTruncated"):
            return tags
        marker = page["NextPartNumberMarker"]


def _call(place: RemoteLocation, method: str, **options: Any) -> Any:
    return send(str(place), lambda: place.filesystem.call_s3(method, **options))


def _split(place: RemoteLocation) -> tuple[str, str]:
    bucket, key, _ = place.filesystem.split_path(place.path)
    return str(bucket), str(key)


def _has_parts(place: RemoteLocation) -> bool:
    return "s3" in place.protocols and hasattr(place.filesystem, "call_s3")
