"""Checkpoints at URLs: saved, loaded, listed, verified and repaired, in memory and on S3 (moto)."""

import json
import uuid

import fsspec
import pytest
import torch
from remote_store import ended_process, faulty_proxy, memory_store, s3_options, s3_server
from strategies import same_bits

from slimtensors import checkpoint
from slimtensors.cli import main
from slimtensors.errors import ConfigError, InUseError, MismatchError
from slimtensors.storage import locate
from slimtensors.storage.atomic import machine_id
from slimtensors.storage.claim import claim

MARK = ".slimtensors-unfinished.json"


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as found:
        yield found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("slimtensors.storage.retry._PAUSE", 0.001)


@pytest.fixture
def proxy(endpoint):
    with faulty_proxy(endpoint) as found:
        yield found


@pytest.fixture
def memory():
    with memory_store() as url:
        yield url


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.long)])
def place(request, memory):
    """Return a URL and storage options."""
    if request.param == "memory":
        return memory, {}
    endpoint = request.getfixturevalue("endpoint")
    return f"s3://models/{uuid.uuid4().hex}", s3_options(endpoint)


def make_state(step, size=1000):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=g) + step * 1e-4
    return {
        "model": {"w": weight, "b": torch.zeros(3)},
        "step": step,
        "metrics": {"loss": 1 / step},
    }


def assert_state(state, step, size=1000):
    expected = make_state(step, size)
    assert state["step"] == step
    assert same_bits(state["model"]["w"], expected["model"]["w"])


def files_in(url, options):
    files = fsspec.filesystem(url.partition("://")[0], **options)
    files.invalidate_cache()
    root = files._strip_protocol(url)
    return files, root


def test_a_checkpoint_and_its_delta_survive_a_round_trip(place):
    url, options = place
    first = checkpoint.save_checkpoint(make_state(1), f"{url}/one", storage_options=options)
    second = checkpoint.save_checkpoint(
        make_state(2), f"{url}/two", base=f"{url}/one", storage_options=options
    )
    assert (first.manifest.kind, second.manifest.kind) == ("full", "delta")
    assert second.manifest.bytes < first.manifest.bytes
    assert str(second.path).endswith("/two")
    for name, step in (("one", 1), ("two", 2)):
        loaded = checkpoint.load_checkpoint(f"{url}/{name}", storage_options=options)
        assert_state(loaded, step)
    found = checkpoint.list_checkpoints(url, storage_options=options)
    assert [(point.name, point.manifest.step) for point in found] == [("one", 1), ("two", 2)]
    result = checkpoint.verify_run(url, storage_options=options)
    assert result
    assert result.checkpoints == 2
    with pytest.raises(ConfigError, match="base of two"):
        checkpoint.remove_checkpoint(f"{url}/one", storage_options=options)
    checkpoint.remove_checkpoint(f"{url}/two", storage_options=options)
    checkpoint.remove_checkpoint(f"{url}/one", storage_options=options)
    files, root = files_in(url, options)
    assert not files.exists(root) or files.find(root) == []


def test_a_target_with_other_content_is_refused(place):
    url, options = place
    checkpoint.save_checkpoint(make_state(1), f"{url}/one", storage_options=options)
    files, root = files_in(url, options)
    files.pipe(f"{root}/other/notes.txt", b"mine")
    for name in ("one", "other"):
        with pytest.raises(ConfigError, match=f"{name} already exists and is not empty"):
            checkpoint.save_checkpoint(make_state(2), f"{url}/{name}", storage_options=options)
    assert_state(checkpoint.load_checkpoint(f"{url}/one", storage_options=options), 1)
    assert files.cat(f"{root}/other/notes.txt") == b"mine"


def test_a_delta_without_its_base_is_refused(memory):
    checkpoint.save_checkpoint(make_state(1), f"{memory}/one")
    checkpoint.save_checkpoint(make_state(2), f"{memory}/two", base=f"{memory}/one")
    with pytest.raises(ConfigError, match="same parent folder"):
        checkpoint.save_checkpoint(make_state(3), f"{memory}/more/three", base=f"{memory}/one")
    files, root = files_in(memory, {})
    files.rm(f"{root}/one", recursive=True)
    with pytest.raises(MismatchError, match="delta of one"):
        checkpoint.load_checkpoint(f"{memory}/two")
    assert list(checkpoint.verify_run(memory).damaged) == ["two"]


def test_a_missing_checkpoint_is_named(place):
    url, options = place
    with pytest.raises(FileNotFoundError, match="none: no such checkpoint"):
        checkpoint.load_checkpoint(f"{url}/none", storage_options=options)


def test_storage_options_of_a_local_path_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="storage_options are for URLs"):
        checkpoint.load_checkpoint(tmp_path, storage_options={"key": "x"})


def test_the_manifest_is_uploaded_last_and_removed_first(proxy):
    options = s3_options(proxy.endpoint)
    url = f"s3://models/{uuid.uuid4().hex}"
    checkpoint.save_checkpoint(make_state(1), f"{url}/one", storage_options=options)
    written = [path.partition("?")[0] for method, path in proxy.requests if method == "PUT"]
    names = [path.rpartition("/")[2] for path in written]
    assert names == [MARK, "state.safetensors", "checkpoint.json"]
    proxy.requests.clear()
    checkpoint.remove_checkpoint(f"{url}/one", storage_options=options)
    removed = [path.rpartition("/")[2] for method, path in proxy.requests if method == "DELETE"]
    assert removed == ["checkpoint.json", "state.safetensors", MARK]


def leave_upload(url, options, **owner):
    """Leave what a save that was killed before its manifest leaves; return its owner."""
    checkpoint.save_checkpoint(make_state(1), url, storage_options=options)
    files, root = files_in(url, options)
    files.rm_file(f"{root}/checkpoint.json")
    data = {"host": "here", "machine": machine_id(), "pid": ended_process(), "started": ""}
    data |= {"token": "t"} | owner
    files.pipe(f"{root}/{MARK}", json.dumps(data).encode())


def test_leftovers_of_a_killed_save_are_removed_by_the_next_one(place):
    url, options = place
    leave_upload(f"{url}/one", options)
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load_checkpoint(f"{url}/one", storage_options=options)
    assert checkpoint.find_incomplete(url, storage_options=options) == ["one"]
    assert checkpoint.find_unreadable(url, storage_options=options) == {}
    assert not checkpoint.verify_run(url, storage_options=options)
    checkpoint.save_checkpoint(make_state(2), f"{url}/two", storage_options=options)
    files, root = files_in(url, options)
    assert sorted(path.rpartition("/")[2] for path in files.find(f"{root}/one")) == []
    assert checkpoint.verify_run(url, storage_options=options).checkpoints == 1


def test_the_same_checkpoint_can_be_saved_again_after_a_kill(place):
    url, options = place
    leave_upload(f"{url}/one", options)
    checkpoint.save_checkpoint(make_state(3), f"{url}/one", storage_options=options)
    assert_state(checkpoint.load_checkpoint(f"{url}/one", storage_options=options), 3)


def test_uploads_of_others_are_neither_removed_nor_replaced(place):
    url, options = place
    leave_upload(f"{url}/one", options, machine="elsewhere")
    assert checkpoint.find_incomplete(url, storage_options=options) == []
    assert checkpoint.repair_run(url, storage_options=options) == []
    with pytest.raises(InUseError, match=r"in use by process .* on here"):
        checkpoint.save_checkpoint(make_state(2), f"{url}/one", storage_options=options)
    files, root = files_in(url, options)
    assert files.exists(f"{root}/one/state.safetensors")


def test_a_claim_of_another_machine_expires(memory):
    leave_upload(f"{memory}/one", {}, machine="elsewhere")
    files, root = files_in(memory, {})
    age(files, f"{root}/one/{MARK}")
    assert checkpoint.find_incomplete(memory) == ["one"]
    assert checkpoint.repair_run(memory) == ["one"]
    assert files.find(f"{root}/one") == []


def age(files, path):
    """Make a file in memory look as if it was written an hour ago."""
    stored = files.store[path]
    stored.modified = stored.modified.replace(year=stored.modified.year - 1)


def test_a_process_notices_that_its_claim_was_taken_over(memory):
    file = locate(f"{memory}/x/.lock")
    with claim(file) as held:
        held.check()
        with pytest.raises(InUseError, match="in use by process"), claim(file):
            pass
        age(file.filesystem, file.path)
        with claim(file), pytest.raises(InUseError, match="taken over by process"):
            held.check()
        with pytest.raises(InUseError, match="was removed"):
            held.check()


def test_damage_and_faults_are_told_apart(proxy, endpoint):
    options = s3_options(proxy.endpoint)
    url = f"s3://models/{uuid.uuid4().hex}"
    for kind in ("error", "drop"):
        proxy.inject(kind, "PUT")
        proxy.inject(kind, "PUT", "checkpoint.json")
    proxy.inject("error", "PUT", "state.safetensors")
    checkpoint.save_checkpoint(make_state(1), f"{url}/one", storage_options=options)
    for kind in ("error", "truncate", "drop"):
        proxy.inject(kind, "GET", "state.safetensors")
        proxy.inject(kind, "GET", "list-type")
    proxy.inject("error", "HEAD")
    assert_state(checkpoint.load_checkpoint(f"{url}/one", storage_options=options), 1)
    assert not any(fault.times for fault in proxy.faults if "list" not in fault.path)
    files, root = files_in(url, s3_options(endpoint))
    raw = bytearray(files.cat(f"{root}/one/state.safetensors"))
    raw[-1] ^= 1
    files.pipe(f"{root}/one/state.safetensors", bytes(raw))
    assert list(checkpoint.verify_run(url, storage_options=options).damaged) == ["one"]


@pytest.mark.long
def test_a_save_that_fails_for_good_leaves_no_checkpoint(proxy):
    options = s3_options(proxy.endpoint)
    url = f"s3://models/{uuid.uuid4().hex}"
    proxy.inject("error", "PUT", "checkpoint.json", times=100)
    with pytest.raises(OSError, match="Internal"):
        checkpoint.save_checkpoint(make_state(1), f"{url}/one", storage_options=options)
    proxy.faults.clear()
    with pytest.raises((ValueError, FileNotFoundError)):
        checkpoint.load_checkpoint(f"{url}/one", storage_options=options)
    checkpoint.save_checkpoint(make_state(2), f"{url}/one", storage_options=options)
    assert_state(checkpoint.load_checkpoint(f"{url}/one", storage_options=options), 2)


def test_the_command_line_reads_remote_runs(memory, capsys):
    checkpoint.save_checkpoint(make_state(1), f"{memory}/one")
    checkpoint.save_checkpoint(make_state(2), f"{memory}/two", base=f"{memory}/one")
    assert main(["inspect", memory]) == 0
    assert "two" in capsys.readouterr().out
    assert main(["inspect", f"{memory}/one"]) == 0
    assert "model.w" in capsys.readouterr().out
    assert main(["verify", memory]) == 0
    assert capsys.readouterr().out == "2 checkpoints intact\n"
    assert main(["verify", f"{memory}/two"]) == 0
    leave_upload(f"{memory}/three", {})
    assert main(["verify", memory]) == 3
    assert main(["repair", memory, "--delete"]) == 0
    assert main(["verify", memory]) == 0
