"""Reading from fsspec file systems: in memory, HTTP, and S3 (moto)."""

import json
import threading
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from reliability_tools import build_file, sample
from strategies import bits, same_bits

import slimtensors
from slimtensors.errors import ConfigError, FormatError, MissingDependencyError

fsspec = pytest.importorskip("fsspec")

INDEX = "model.safetensors.index.json"


def assert_sample(url: str, options: dict | None = None) -> None:
    loaded = slimtensors.load(url, storage_options=options)
    assert loaded.keys() == sample().keys()
    assert all(same_bits(loaded[name], x) for name, x in sample().items())
    assert loaded["again"] is loaded["sparse"]
    assert slimtensors.verify(url, storage_options=options)
    assert len(slimtensors.inspect(url, storage_options=options).tensors) == len(sample())


def write_models(folder: Path, dialect: str) -> None:
    """Write one file, a folder with one file, and a folder with shards."""
    (folder / "one").mkdir(parents=True)
    slimtensors.save(sample(), folder / "file.safetensors", dialect=dialect)
    slimtensors.save(sample(), folder / "one", dialect=dialect)
    (folder / "one" / "config.json").write_text("{}")
    slimtensors.save(sample(), folder / "many", dialect=dialect, max_shard_size=400)
    assert len(list((folder / "many").glob("*.safetensors"))) > 1


PLACES = ["file.safetensors", "one", "many", f"many/{INDEX}", "one/", "many/"]


@pytest.fixture
def memory():
    """Return a file system and the URL of an empty folder in it."""
    files = fsspec.filesystem("memory")
    name = f"/{uuid.uuid4().hex}"
    files.mkdir(name)
    yield files, f"memory:/{name}"
    files.rm(name, recursive=True)


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_files_folders_and_indexes_are_read_from_memory(tmp_path, memory, dialect):
    files, url = memory
    write_models(tmp_path / "models", dialect)
    files.put(f"{tmp_path}/models/", f"{url}/models/", recursive=True)
    for place in PLACES:
        assert_sample(f"{url}/models/{place}")


@pytest.fixture(scope="module")
def bucket():
    """Yield the URL of a bucket on a local server, and its storage options."""
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="models")
    options = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
    }
    yield "s3://models", options
    client.close()
    server.stop()


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_files_folders_and_indexes_are_read_from_s3(tmp_path, bucket, dialect):
    url, options = bucket
    write_models(tmp_path / "models", dialect)
    files = fsspec.filesystem("s3", **options)
    files.put(f"{tmp_path}/models/", f"{url}/{dialect}/", recursive=True)
    for place in PLACES:
        assert_sample(f"{url}/{dialect}/{place}", options)


def test_one_tensor_of_a_large_file_on_s3_is_read_alone(tmp_path, bucket, monkeypatch):
    url, options = bucket
    tensors = large()
    slimtensors.save(tensors, tmp_path / "large.safetensors")
    files = fsspec.filesystem("s3", **options)
    files.put(str(tmp_path / "large.safetensors"), f"{url}/large.safetensors")
    fetched = count_bytes(monkeypatch, files)
    archive = slimtensors.open(f"{url}/large.safetensors", storage_options=options)
    assert same_bits(archive.get_tensor("t7"), tensors["t7"])
    assert 0 < sum(fetched) < (tmp_path / "large.safetensors").stat().st_size // 4


def large() -> dict[str, torch.Tensor]:
    """Return tensors of 4 MB each, half of them zeros."""
    return {f"t{i}": bits(i, 1 << 20, torch.float32, 0.5) for i in range(16)}


def count_bytes(monkeypatch, files) -> list[int]:
    """Return a list to which the size of every read from a file system is appended."""
    fetched: list[int] = []
    real = files.cat_ranges

    def counted(*args, **options):
        data = real(*args, **options)
        fetched.extend(map(len, data))
        return data

    monkeypatch.setattr(files, "cat_ranges", counted)  # fsspec keeps one per set of options
    return fetched


@pytest.fixture
def far(tmp_path, memory, monkeypatch):
    """Return large tensors, the URL and size of their file, and the sizes of all reads."""
    files, url = memory
    tensors = large()
    slimtensors.save(tensors, tmp_path / "large.safetensors")
    files.put(str(tmp_path / "large.safetensors"), f"{url}/large.safetensors")
    size = (tmp_path / "large.safetensors").stat().st_size
    return tensors, f"{url}/large.safetensors", size, count_bytes(monkeypatch, files)


AHEAD = 4 << 20
"""Bytes prefetched by a small read."""


def test_opening_a_large_file_fetches_little(far):
    tensors, url, _, fetched = far
    archive = slimtensors.open(url)
    assert archive.keys() == list(tensors)
    assert sum(fetched) <= AHEAD


def test_one_tensor_of_a_large_file_is_read_alone(far):
    tensors, url, size, fetched = far
    archive = slimtensors.open(url)
    stored = archive.info("t9").stored_bytes
    fetched.clear()
    assert same_bits(archive.get_tensor("t9"), tensors["t9"])
    assert stored <= sum(fetched) <= stored + AHEAD < size // 4


def test_describing_a_large_file_fetches_little(far):
    tensors, url, size, fetched = far
    summary = slimtensors.inspect(url)
    assert {s.codec for s in summary.tensors} == {"bitmask(values=huffman)"}
    assert len(summary.tensors) == len(tensors)
    assert sum(fetched) < size // 2


def test_a_large_file_is_fetched_about_once(far):
    tensors, url, size, fetched = far
    loaded = slimtensors.load(url, threads=3)
    assert all(same_bits(loaded[name], x) for name, x in tensors.items())
    assert size * 0.9 <= sum(fetched) <= size + 2 * AHEAD


def test_opening_a_file_of_another_program_fetches_little(memory, monkeypatch):
    """Flat bytes could be a compressed tensor; their first bytes decide."""
    files, url = memory
    size = 16 << 20
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    files.pipe(f"{url}/x.safetensors", build_file({"x": entry}, b"SLIM" + bytes(size - 4)))
    fetched = count_bytes(monkeypatch, files)
    assert slimtensors.open(f"{url}/x.safetensors").keys() == ["x"]
    assert sum(fetched) <= 2 * AHEAD


def test_tensors_are_saved_from_a_remote_archive(tmp_path, far):
    tensors, url, _, _ = far
    slimtensors.save(slimtensors.open(url), tmp_path / "near.safetensors")
    near = (tmp_path / "near.safetensors").read_bytes()
    assert near == (tmp_path / "large.safetensors").read_bytes()
    assert slimtensors.verify(tmp_path / "near.safetensors", against=url)
    assert len(slimtensors.load(tmp_path / "near.safetensors")) == len(tensors)


def test_missing_files_are_not_found(memory):
    _, url = memory
    for name in ("nothing.safetensors", "nothing.json"):
        with pytest.raises(FileNotFoundError, match="nothing"):
            slimtensors.load(f"{url}/{name}")


def test_a_missing_shard_is_not_found(memory):
    files, url = memory
    index = {"metadata": {}, "weight_map": {"x": "gone.safetensors"}}
    files.pipe(f"{url}/m/{INDEX}", json.dumps(index).encode())
    with pytest.raises(FileNotFoundError, match="gone"):
        slimtensors.load(f"{url}/m")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x.safetensors", "memory://x.safetensors", "a\\b", ""]
)
def test_no_name_in_a_remote_index_leads_out_of_its_folder(memory, name):
    files, url = memory
    files.pipe(f"{url}/x.safetensors", b"secret")
    index = {"metadata": {}, "weight_map": {"x": name}}
    files.pipe(f"{url}/m/{INDEX}", json.dumps(index).encode())
    with pytest.raises(FormatError, match=r"index\.json"):
        slimtensors.load(f"{url}/m")


def test_a_remote_file_cut_anywhere_is_refused_and_named(tmp_path, memory):
    files, url = memory
    slimtensors.save(sample(), tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    for size in (0, 1, 7, 8, 9, len(raw) // 2, len(raw) - 1):
        files.pipe(f"{url}/x.safetensors", raw[:size])
        with pytest.raises(FormatError, match=r"memory://.*x\.safetensors"):
            slimtensors.load(f"{url}/x.safetensors")


def test_damage_in_a_remote_file_names_the_tensor(tmp_path, memory):
    files, url = memory
    slimtensors.save(sample(), tmp_path / "x.safetensors")
    raw = bytearray((tmp_path / "x.safetensors").read_bytes())
    raw[-1] ^= 1
    files.pipe(f"{url}/x.safetensors", bytes(raw))
    with pytest.raises(FormatError, match=r"memory://.*x\.safetensors: flags: "):
        slimtensors.load(f"{url}/x.safetensors")


def test_an_unknown_protocol_is_named():
    with pytest.raises(ConfigError, match="nosuch"):
        slimtensors.load("nosuch://bucket/x.safetensors")


def test_a_file_system_that_is_not_installed_is_named():
    from fsspec.registry import known_implementations

    known_implementations["absent"] = {"class": "absentfs.Absent", "err": "Install absentfs"}
    try:
        with pytest.raises(MissingDependencyError, match="absentfs"):
            slimtensors.load("absent://bucket/x.safetensors")
    finally:
        del known_implementations["absent"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def http(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_and_indexes_are_read_over_http(tmp_path, http):
    tensors = {f"t{i}": bits(i, 500, torch.float32, 0.5) for i in range(6)}
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    slimtensors.save(tensors, tmp_path / "model", max_shard_size=2000)
    for path in ("x.safetensors", "model/model.safetensors.index.json"):
        back = slimtensors.load(f"{http}/{path}")
        assert all(same_bits(back[name], x) for name, x in tensors.items())


def test_missing_files_over_http_are_named(http):
    with pytest.raises(FileNotFoundError, match=r"http://127.*/nothing.safetensors"):
        slimtensors.load(f"{http}/nothing.safetensors")
