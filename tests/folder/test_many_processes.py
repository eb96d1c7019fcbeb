"""Several processes write the same folder as one."""

import json
import os
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
from models import weights, write_folder
from process_tools import read_files, read_messages, run_ranks, torchrun
from reliability_tools import edit_manifest

import slimtensors
from slimtensors.errors import ConfigError, FormatError, MismatchError, RankError
from slimtensors.folder.compress import compress_folder, decompress_folder, match_globs
from slimtensors.folder.convert import Rewrite
from slimtensors.folder.processes import TorchProcessGroup
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import QuantizationConfig

WORK = ".small.slimtensors-work"


def large(rows=12_388):
    """Return tensors large enough to divide: dense, sparse, 2:4, and one that changes midway."""
    random = torch.Generator().manual_seed(0)
    dense = (torch.randn(rows, 1024, generator=random) * 0.02).bfloat16()
    zero = torch.rand(rows, 1024, generator=random) < 0.7
    halves = dense.clone().view(-1, 4)
    halves[:, 1::2] = 0
    changing = dense.clone()
    changing[: rows // 2][zero[: rows // 2]] = -0.0
    changing[: rows // 4] = 0
    return {
        "dense": dense,
        "sparse": torch.where(zero, 0, dense),
        "halves": halves.view(rows, 1024),
        "changing": changing,
        "small": torch.randn(64, 64, generator=random),
        "bias": torch.ones(64),
    }


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("one") / "model", table=large())


@pytest.mark.parametrize("preset", ["lossless", "sparse"])
def test_ranks_that_share_one_file_write_the_same_bytes_as_one_process(one_file, tmp_path, preset):
    alone = compress_folder(one_file, tmp_path / "one", preset=preset)
    many = partial(compress_folder, one_file, tmp_path / "small", preset=preset, threads=1)
    first, *others = run_ranks(3, lambda ranks: many(ranks=ranks))
    assert read_files(tmp_path / "small") == read_files(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert [(t.name, t.codec, t.note) for t in first.tensors] == [
        (t.name, t.codec, t.note) for t in alone.tensors
    ]
    assert all(rank.tensors for rank in others)
    assert {Path(t.file) for t in first.tensors} == {tmp_path / "small" / "model.safetensors"}


SHARED = {
    "extreme": {"preset": "extreme"},
    "compressed-tensors": {"dialect": "compressed-tensors"},
    "new files": {"max_shard_size": 9000},
    "some tensors": {"keep": match_globs(["*.1.*"], [])},
}


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_ranks_that_share_many_files_write_the_same_bytes_as_one_process(tmp_path, options):
    table = weights() | {"tied": weights()["model.embed_tokens.weight"]}
    source = write_folder(tmp_path / "model", table=table, shards=3)
    compress_folder(source, tmp_path / "one", **options)
    many = partial(compress_folder, source, tmp_path / "small", **options, threads=1)
    assert not [
        r for r in run_ranks(3, lambda ranks: many(ranks=ranks)) if isinstance(r, Exception)
    ]
    assert read_files(tmp_path / "small") == read_files(tmp_path / "one")
    back = partial(decompress_folder, tmp_path / "small", tmp_path / "back", threads=1)
    run_ranks(2, lambda ranks: back(ranks=ranks))
    decompress_folder(tmp_path / "one", tmp_path / "again")
    assert read_files(tmp_path / "back") == read_files(tmp_path / "again")


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_ranks_quantize_a_folder_to_the_same_bytes_as_one_process(tmp_path, dialect):
    random = torch.Generator().manual_seed(0)
    table = {
        f"layers.{i}.mlp.weight": torch.randn(1024, 8192, generator=random).bfloat16()
        for i in range(3)
    }
    source = write_folder(tmp_path / "model", table=table)
    config = QuantizationConfig.preset("W4A16", ignore=[])
    quantize_folder(source, tmp_path / "one", config, dialect=dialect)

    def work(ranks):
        how = Rewrite(threads=1, ranks=ranks)
        return quantize_folder(source, tmp_path / "small", config, dialect=dialect, how=how)

    assert not [r for r in run_ranks(2, work) if isinstance(r, Exception)]
    assert read_files(tmp_path / "small") == read_files(tmp_path / "one")


def test_a_preset_function_raises_with_several_processes(tmp_path):
    source = write_folder(tmp_path / "model")
    first, _ = run_ranks(
        2, lambda r: compress_folder(source, tmp_path / "x", preset=lambda n, x: None, ranks=r)
    )
    assert isinstance(first, ConfigError)
    assert "need a preset name" in str(first)


def interrupt(source, target, *, after, **options):
    """Interrupt a run after so many bytes."""
    done = 0

    def progress(count):
        nonlocal done
        done += count
        if done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_folder(source, target, progress=progress, threads=1, **options)


@pytest.fixture
def shards(tmp_path):
    """Return a folder of three files, and the files of an uninterrupted compression."""
    source = write_folder(tmp_path / "model", shards=3)
    compress_folder(source, tmp_path / "one")
    return source, read_files(tmp_path / "one")


OTHERS = {
    "config.json",
    "merges.bin",
    "model.safetensors.index.json",
    "onnx/deep/readme.txt",
    "tokenizer.json",
}
FIRST = "model-00001-of-00003.safetensors"


def test_an_interrupted_run_resumes_with_the_unfinished_files(shards, tmp_path, caplog):
    source, want = shards
    interrupt(source, tmp_path / "small", after=20_000)
    assert "finished files are kept" in caplog.text
    assert not (tmp_path / "small").exists()
    kept = (tmp_path / WORK / "files" / FIRST).stat()
    for left in (".x.slimtensors-tmp", "model-00002-of-00003.safetensors", "old.safetensors"):
        (tmp_path / WORK / "files" / left).write_bytes(b"leftover of a killed process")
    compress_folder(source, tmp_path / "small")
    assert read_files(tmp_path / "small") == want
    assert (tmp_path / "small" / FIRST).stat().st_ino == kept.st_ino
    assert not (tmp_path / WORK).exists()


def test_a_run_interrupted_in_its_first_file_leaves_nothing(shards, tmp_path):
    source, _ = shards
    interrupt(source, tmp_path / "small", after=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one"]


def test_a_damaged_finished_file_is_written_again(shards, tmp_path):
    source, want = shards
    interrupt(source, tmp_path / "small", after=20_000)
    damaged = tmp_path / WORK / "files" / FIRST
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    run_ranks(2, lambda ranks: compress_folder(source, tmp_path / "small", ranks=ranks))
    assert read_files(tmp_path / "small") == want


def test_a_run_with_other_options_or_weights_does_not_resume(shards, tmp_path):
    source, want = shards
    interrupt(source, tmp_path / "small", after=20_000)
    with pytest.raises(ConfigError, match=r"preset was lossless, now it is sparse.*-f"):
        compress_folder(source, tmp_path / "small", preset="sparse")
    os.utime(source / FIRST, (0, 0))
    with pytest.raises(ConfigError, match="weights was"):
        compress_folder(source, tmp_path / "small")
    compress_folder(source, tmp_path / "small", replace=True)
    assert read_files(tmp_path / "small") == want


def test_ranks_with_different_options_raise(tmp_path):
    source = write_folder(tmp_path / "model")
    presets = ["lossless", "sparse"]
    first, second = run_ranks(
        2,
        lambda r: compress_folder(source, tmp_path / "small", preset=presets[r.rank], ranks=r),
    )
    assert isinstance(second, MismatchError)
    assert "preset was lossless, now it is sparse" in str(second)
    assert isinstance(first, RankError)
    assert "rank 1 failed" in str(first)
    assert not (tmp_path / "small").exists()


def test_ranks_wait_for_each_other_at_every_barrier():
    store, came = torch.distributed.HashStore(), []

    def work(ranks):
        anew = TorchProcessGroup(store, ranks.rank, 2)
        for turn, run in enumerate([ranks, ranks, anew]):
            time.sleep(0.1 * ranks.rank)
            came.append(turn)
            run.barrier("made")
            assert came.count(turn) == 2

    assert run_ranks(2, work, store=store) == [None, None]


def test_all_ranks_wait_until_the_last_has_received_a_failure():
    begun = threading.Event()

    def work(ranks):
        if ranks.rank == 1:
            ranks.fail("no disk")
        else:
            if ranks.rank == 2:
                time.sleep(0.3)
                begun.set()
            with pytest.raises(RankError, match="rank 1 failed: no disk"):
                ranks.barrier("begun")
        assert begun.is_set()

    assert run_ranks(3, work) == [None] * 3


def test_a_missing_rank_times_out(tmp_path):
    source = write_folder(tmp_path / "model")

    def work(ranks):
        return compress_folder(source, tmp_path / "x", ranks=ranks) if ranks.rank == 0 else None

    lost, _ = run_ranks(2, work, timeout=0.3)
    assert isinstance(lost, RankError)
    assert "no progress from rank 1 for 0.3 s" in str(lost)


@pytest.fixture
def memory():
    """Return the URL of an empty folder."""
    fsspec = pytest.importorskip("fsspec")
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    fsspec.filesystem("memory").rm(name, recursive=True)


def remote_files(url):
    """Return the files of a remote folder by relative path."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return {name.removeprefix(f"{path}/"): system.cat_file(name) for name in system.find(path)}


def remove_generation(files):
    """Return the files without the generation of shards, which uploaded ones lack."""
    return {
        name: edit_manifest(raw, lambda manifest: manifest.pop("generation", None))
        if name.endswith(".safetensors")
        else raw
        for name, raw in files.items()
    }


def test_a_folder_is_compressed_to_a_url(shards, memory):
    source, want = shards
    summary = compress_folder(source, f"{memory}/small")
    assert remove_generation(remote_files(f"{memory}/small")) == remove_generation(want)
    assert [file.rpartition("/")[2] for file in summary.files] == sorted(set(want) - OTHERS)
    assert all(file.startswith("memory://") for file in summary.files)
    with pytest.raises(ConfigError, match=r"memory:.*/small already exists"):
        compress_folder(source, f"{memory}/small")
    compress_folder(source, f"{memory}/small", preset="sparse", replace=True)
    assert slimtensors.verify(f"{memory}/small", against=source)
    assert remote_files(f"{memory}/small") != want
    with pytest.raises(ConfigError, match=r"is or contains the source .*small; choose"):
        compress_folder(f"{memory}/small", f"{memory}/small", replace=True)
    assert slimtensors.verify(f"{memory}/small", against=source)


@pytest.mark.parametrize("inside", ["", "/model.safetensors.index.json", "/"])
def test_a_target_url_inside_the_source_folder_raises(shards, memory, inside):
    source, _ = shards
    compress_folder(source, f"{memory}/a")
    before = remote_files(f"{memory}/a")
    with pytest.raises(ConfigError, match=r"/a/b is inside .*/a"):
        compress_folder(f"{memory}/a{inside}", f"{memory}/a/b")
    assert remote_files(f"{memory}/a") == before
    with pytest.raises(ConfigError, match=r"/b is inside the source .*; choose"):
        compress_folder(f"{source}{inside}", f"file://{source}/b")
    compress_folder(f"{memory}/a{inside}", f"{memory}/ab")


def test_an_incomplete_remote_folder_raises_and_can_be_completed(shards, memory):
    source, want = shards
    interrupt(source, f"{memory}/small", after=20_000)
    assert FIRST in remote_files(f"{memory}/small")
    with pytest.raises(FormatError, match=r"small is incomplete.*continue"):
        slimtensors.load(f"{memory}/small")
    with pytest.raises(ConfigError, match="preset was"):
        compress_folder(source, f"{memory}/small", preset="sparse")
    compress_folder(source, f"{memory}/small")
    assert remove_generation(remote_files(f"{memory}/small")) == remove_generation(want)


def test_tensors_are_saved_to_a_url(memory):
    tensors = weights()
    slimtensors.save(tensors, f"{memory}/x.safetensors")
    slimtensors.save(tensors, f"{memory}/x.safetensors", preset="sparse")  # replaces it
    slimtensors.save(tensors, f"{memory}/many", max_shard_size=9000)
    for path in ("x.safetensors", "many"):
        loaded = slimtensors.load(f"{memory}/{path}")
        assert all(torch.equal(loaded[name], x) for name, x in tensors.items())
    with pytest.raises(ConfigError, match=r"many contains a model"):
        slimtensors.save(tensors, f"{memory}/many", max_shard_size=9000)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_next_run_resumes(tmp_path):
    source = write_folder(tmp_path / "model", shards=4, table=weights(5))
    compress_folder(source, tmp_path / "one")
    script = Path(__file__).with_name("killed_rank.py")
    done = torchrun(2, "compress", source, "-o", tmp_path / "small", script=script)
    assert done.returncode != 0
    (line,) = read_messages(done)
    assert line.startswith("slimtensors: rank 0: ")
    assert not (tmp_path / "small").exists()
    kept = {path.name: path.stat().st_ino for path in (tmp_path / WORK / "files").iterdir()}
    finished = {path.stem for path in (tmp_path / WORK / "records" / "files").iterdir()}
    assert 1 <= len(finished) <= 3
    done = torchrun(2, "compress", source, "-o", tmp_path / "small", "--json")
    assert (done.returncode, read_messages(done)) == (0, [])
    assert len(json.loads(done.stdout)["tensors"]) == 11  # one report, by rank 0
    assert read_files(tmp_path / "small") == read_files(tmp_path / "one")
    now = {path.name: path.stat().st_ino for path in (tmp_path / "small").iterdir()}
    assert all(now[name] == kept[name] for name in finished)


@pytest.mark.slow
def test_an_error_is_one_line_on_every_rank(tmp_path):
    source = write_folder(tmp_path / "model")
    target = write_folder(tmp_path / "target")
    done = torchrun(2, "compress", source, "-o", target)
    assert done.returncode != 0
    first, second = read_messages(done)
    assert first == f"slimtensors: rank 0: {target} already exists; use -f to replace it"
    assert second.startswith("slimtensors: rank 1: ")


@pytest.mark.slow
def test_torchrun_writes_to_s3(tmp_path):
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        url = environment["AWS_ENDPOINT_URL"]
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="models")
        table = large(rows=25_000)
        source = write_folder(tmp_path / "model", table={"x": table["dense"]})
        compress_folder(source, tmp_path / "one")
        done = torchrun(2, "compress", source, "-o", "s3://models/a/small", **environment)
        assert (done.returncode, read_messages(done)) == (0, []), done.stderr
        listed = client.list_objects_v2(Bucket="models", Prefix="a/small/")["Contents"]
        objects = {
            entry["Key"].removeprefix("a/small/"): client.get_object(
                Bucket="models", Key=entry["Key"]
            )["Body"].read()
            for entry in listed
        }
        assert objects == read_files(tmp_path / "one")
        client.close()
    finally:
        server.stop()
