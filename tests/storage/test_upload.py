"""Uploads in parts, and reads of many ranges."""

import hashlib
import random
import uuid

import pytest
import torch
from remote_store import faulty_proxy, memory_store, s3_options, s3_server

from slimtensors.errors import CorruptFileError
from slimtensors.storage import locate
from slimtensors.storage.multipart import abort_uploads, upload_file

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("slimtensors.storage.retry._PAUSE", 0.001)


@pytest.fixture
def memory():
    with memory_store() as url:
        yield locate(f"{url}/file")


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as found:
        yield found


def random_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()


def test_an_interrupted_upload_sends_only_the_missing_parts(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("slimtensors.storage.multipart._PART", 5 * MIB)  # the minimum of S3
    path = tmp_path / "file"
    path.write_bytes(random_bytes(11 * MIB))
    with faulty_proxy(endpoint) as proxy:
        url = f"s3://models/{uuid.uuid4().hex}/file"
        target = locate(url, storage_options=s3_options(proxy.endpoint))
        proxy.inject("error", "PUT", "partNumber=2", times=100)
        with pytest.raises(OSError, match="Internal"):
            upload_file(path, target)
        assert not target.exists()
        proxy.faults.clear()
        proxy.requests.clear()
        upload_file(path, target)
        assert count_parts(proxy) == 1
        digest = hashlib.sha256(path.read_bytes()).digest()
        assert hashlib.sha256(target.read()).digest() == digest
        proxy.requests.clear()
        upload_file(path, target)  # found by its hash
        assert [method for method, _ in proxy.requests] == ["HEAD", "HEAD"]
        path.write_bytes(random_bytes(11 * MIB))
        proxy.inject("error", "POST", "uploadId", times=1)
        proxy.inject("drop", "PUT", "partNumber=1", times=1)
        upload_file(path, target)
        assert target.read() == path.read_bytes()


def count_parts(proxy):
    return sum(method == "PUT" and "partNumber" in path for method, path in proxy.requests)


def test_parts_of_other_folders_are_not_discarded(endpoint, tmp_path):
    name = uuid.uuid4().hex
    mine = locate(f"s3://models/{name}/a", storage_options=s3_options(endpoint))
    others = locate(f"s3://models/{name}/ab", storage_options=s3_options(endpoint))
    for folder in (mine, others):
        bucket, _, key = (folder / "file").path.partition("/")
        folder.filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    abort_uploads(mine)
    found = mine.filesystem.call_s3("list_multipart_uploads", Bucket="models", Prefix=name)
    assert [row["Key"] for row in found["Uploads"]] == [f"{name}/ab/file"]


def watch_requests(file, monkeypatch):
    """Return a list of the sizes of the requests that are made at a time."""
    batches = []
    real = file.filesystem.cat_ranges

    def watched(paths, starts, ends, **options):
        batches.append([end - start for start, end in zip(starts, ends, strict=True)])
        return real(paths, starts, ends, **options)

    monkeypatch.setattr(file.filesystem, "cat_ranges", watched)
    return batches


def test_ranges_arrive_in_order_with_limited_requests(memory, monkeypatch):
    raw = random_bytes(40 * MIB)
    memory.write(raw)
    rng = random.Random(0)
    ranges = [(0, 20 * MIB), (5, 5), (30 * MIB, 30 * MIB + 7)]
    ranges += [
        (i, i + rng.randrange(3 * MIB)) for i in (rng.randrange(37 * MIB) for _ in range(20))
    ]
    batches = watch_requests(memory, monkeypatch)
    found = list(memory.open().read_ranges(ranges, in_flight=16 * MIB))
    assert [bytes(data) for data in found] == [raw[begin:end] for begin, end in ranges]
    assert max(map(sum, batches)) <= 16 * MIB
    assert max(map(max, batches)) <= 8 * MIB


def test_ranges_that_are_close_are_read_together(memory, monkeypatch):
    raw = random_bytes(MIB)
    memory.write(raw)
    ranges = [(i, i + 16) for i in range(0, MIB, 10_000)]
    batches = watch_requests(memory, monkeypatch)
    found = list(memory.open().read_ranges(ranges))
    assert [bytes(data) for data in found] == [raw[begin:end] for begin, end in ranges]
    assert len(batches) == 1
    assert len(batches[0]) == 1


def test_local_files_are_read_by_ranges_too(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    found = locate(path).open().read_ranges([(90, 95), (0, 3)])
    assert [bytes(data) for data in found] == [bytes(range(90, 95)), bytes(range(3))]


def test_short_answers_are_requested_again_and_then_reported(memory, monkeypatch):
    raw = random_bytes(1000)
    memory.write(raw)
    real, left = memory.filesystem.cat_ranges, [3]

    def cut(*args, **options):
        left[0] -= 1
        return [data[:-1] if left[0] > 0 else data for data in real(*args, **options)]

    monkeypatch.setattr(memory.filesystem, "cat_ranges", cut)
    assert bytes(memory.open().read(10, 900)) == raw[10:900]
    left[0] = 10**6
    with pytest.raises(CorruptFileError, match="expected 500 bytes, got 499"):
        list(memory.open().read_ranges([(0, 500)]))
