"""Training loops with checkpoints at URLs, and with a local and a remote run."""

import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
from checkpoint.programs import ENVIRONMENT, PROGRAMS
from remote_store import faulty_proxy, memory_store, s3_options, s3_server
from training import Run

from slimtensors.checkpoint import (
    checkpointing,
    find_incomplete,
    list_checkpoints,
    load_checkpoint,
    verify_run,
)
from slimtensors.errors import ConfigError, FormatError, InUseError


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("slimtensors.storage.retry._PAUSE", 0.001)


@pytest.fixture
def memory():
    with memory_store() as url:
        yield url


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as found:
        yield found


@pytest.fixture
def proxy(endpoint):
    with faulty_proxy(endpoint) as found:
        yield found


def start_loop(run, place, **options):
    return checkpointing(place, *run.parts(), dataloader=run.batches, **options)


def train(run, place, steps, **options):
    """Train up to a step, with checkpoints; return the losses."""
    losses = []
    with start_loop(run, place, **options) as ckpt:
        for _ in range(ckpt.start, steps):
            losses += run.train(1)
            ckpt.step(loss=losses[-1])
    return losses


def steps_of(place, **options):
    return [point.manifest.step for point in list_checkpoints(place, **options)]


@pytest.mark.parametrize("async_", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_at_a_url_resumes_bit_for_bit(memory, async_):
    whole = Run().train(12)
    seen = train(Run(), memory, 7, every=3, async_=async_)
    assert seen == whole[:7]
    assert steps_of(memory) == [3, 6]
    found = list_checkpoints(memory)
    assert [point.manifest.kind for point in found] == ["full", "delta"]
    resumed = train(Run(seed=5), memory, 12, every=3, async_=async_)
    assert resumed == whole[6:]
    assert verify_run(memory).checkpoints == 4
    with (
        pytest.raises(ConfigError, match="already contains step-00000012"),
        start_loop(Run(), memory, resume=False),
    ):
        pass


def test_nothing_stays_in_the_temporary_folder(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    with start_loop(
        Run(), memory, every=1, base="chain", keyframe_every=9, on_commit=seen.append
    ) as ckpt:
        for _ in range(4):
            ckpt.step()
        ckpt.wait()
        local = list_checkpoints(next(tmp_path.glob("slimtensors-run-*")))
        assert len(local) == 4  # bases of the next one
    assert list(tmp_path.glob("slimtensors*")) == []
    assert seen == [f"{memory}/step-{i:08d}" for i in range(1, 5)]


def test_retention_removes_remote_checkpoints_and_keeps_bases(memory):
    train(Run(), memory, 9, every=1, keep_last=2, keep_every=5, keyframe_every=4)
    found = list_checkpoints(memory)
    assert_kept(found, [5, 8, 9])
    assert verify_run(memory)


def assert_kept(points, steps):
    """Assert that a run contains these steps and the bases that they need, nothing else."""
    kept = [point for point in points if point.manifest.step in steps]
    assert [point.manifest.step for point in kept] == steps
    bases = {point.manifest.base.name for point in kept if point.manifest.base}
    assert {point.name for point in points} == {point.name for point in kept} | bases


def test_a_second_writer_is_refused(memory):
    second = start_loop(Run(), memory)
    with start_loop(Run(), memory), pytest.raises(InUseError, match="in use by process"), second:
        pass
    with start_loop(Run(), memory):
        pass


def test_new_metrics_replace_a_remote_checkpoint(memory):
    run = Run()
    with start_loop(run, memory, every=1, async_=False) as ckpt:
        run.train(1)
        ckpt.step(loss=1.0)
        ckpt.save(accuracy=0.5)
    assert [p.name for p in list_checkpoints(memory)] == ["step-00000001"]
    assert list_checkpoints(memory)[0].manifest.metrics == {"loss": 1.0, "accuracy": 0.5}
    assert verify_run(memory)


def test_a_damaged_remote_checkpoint_is_skipped_on_resume(memory, caplog):
    train(Run(), memory, 4, every=2, base=None)
    files = fsspec.filesystem("memory")
    path = f"{files._strip_protocol(memory)}/step-00000004/state.safetensors"
    raw = bytearray(files.cat(path))
    raw[-1] ^= 1
    files.pipe(path, bytes(raw))
    with start_loop(Run(), memory) as ckpt:
        assert ckpt.start == 2
    assert "cannot resume, trying an older checkpoint" in caplog.text


def test_options_without_a_remote_run_are_refused(tmp_path, memory):
    for options in ({"remote_every": 2}, {"local_bytes": 10}):
        with pytest.raises(ConfigError, match="require remote="):
            start_loop(Run(), tmp_path, **options)
    with pytest.raises(ConfigError, match="must be a local folder"):
        start_loop(Run(), memory, remote=memory)
    with pytest.raises(ConfigError, match="remote must be a URL"):
        start_loop(Run(), tmp_path, remote=str(tmp_path))
    with pytest.raises(ConfigError, match="keep_history is not supported"):
        start_loop(Run(), memory, keep_history=True)


def test_every_nth_checkpoint_and_the_last_are_uploaded(tmp_path, memory):
    train(Run(), tmp_path, 7, every=1, remote=memory, remote_every=3, keyframe_every=5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert_kept(list_checkpoints(memory), [3, 6, 7])
    assert verify_run(memory)
    for point in list_checkpoints(memory):
        local = load_checkpoint(tmp_path / point.name)
        assert load_checkpoint(str(point.path))["step"] == local["step"]


def test_a_loop_resumes_from_the_newest_checkpoint_of_both(tmp_path, memory):
    whole = Run().train(10)
    train(Run(), tmp_path / "a", 6, every=2, remote=memory)
    resumed = train(Run(seed=2), tmp_path / "b", 8, every=2, remote=memory)
    assert resumed == whole[6:8]  # from the remote checkpoint and its base
    with start_loop(Run(), tmp_path / "a", remote=memory) as ckpt:
        assert ckpt.start == 8
    train(Run(seed=2), tmp_path / "a", 10, every=2)
    with start_loop(Run(), tmp_path / "a", remote=memory) as ckpt:
        assert ckpt.start == 10  # local: the newest


def test_a_damaged_local_checkpoint_is_downloaded_again(tmp_path, memory):
    train(Run(), tmp_path, 4, every=2, remote=memory)
    state = tmp_path / "step-00000004" / "state.safetensors"
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(bytes(raw))
    with start_loop(Run(), tmp_path, remote=memory) as ckpt:
        assert ckpt.start == 4
    assert (tmp_path / "damaged-step-00000004").is_dir()


def test_local_checkpoints_are_evicted_once_they_are_uploaded(tmp_path, memory):
    train(Run(), tmp_path, 9, every=1, remote=memory, local_bytes=1, keyframe_every=4)
    assert steps_of(memory) == list(range(1, 10))
    assert steps_of(tmp_path) == [9]
    assert verify_run(memory)
    with start_loop(Run(), tmp_path, remote=memory, local_bytes=1) as ckpt:
        assert ckpt.start == 9


def test_what_is_not_uploaded_is_never_evicted(tmp_path, memory):
    train(Run(), tmp_path, 5, every=1, remote=memory, remote_every=3, local_bytes=1, base=None)
    assert steps_of(memory) == [3, 5]
    assert steps_of(tmp_path) == [1, 2, 4, 5]


@pytest.mark.long
def test_an_upload_that_fails_is_repeated(tmp_path, proxy, caplog):
    options = s3_options(proxy.endpoint)
    url = f"s3://models/{uuid.uuid4().hex}"
    run = Run()
    with start_loop(run, tmp_path, every=1, remote=url, storage_options=options) as ckpt:
        proxy.inject("error", "PUT", "state.safetensors", times=10**6)
        run.train(1)
        ckpt.step()
        ckpt.wait()
        wait_for(lambda: "upload failed" in caplog.text)
        proxy.faults.clear()
        run.train(1)
        ckpt.step()
    assert steps_of(url, storage_options=options) == [1, 2]
    assert verify_run(url, storage_options=options)


def wait_for(condition):
    event = threading.Event()
    while not condition():
        event.wait(0.01)


@pytest.mark.long
def test_a_loop_whose_uploads_fail_raises_at_the_end(tmp_path, proxy):
    options = s3_options(proxy.endpoint)
    url = f"s3://models/{uuid.uuid4().hex}"
    loop = start_loop(Run(), tmp_path, every=1, remote=url, storage_options=options)
    loop.__enter__()
    proxy.inject("error", "PUT", "state.safetensors", times=10**6)
    loop.step()
    with pytest.raises(OSError, match="Internal"):
        loop.__exit__(None, None, None)
    assert steps_of(tmp_path) == [1]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".step")] == []
    proxy.faults.clear()
    with start_loop(Run(), tmp_path, remote=url, storage_options=options) as ckpt:
        assert ckpt.start == 1


def test_no_remote_name_leads_out_of_the_folder(memory, tmp_path):
    train(Run(), tmp_path / "a", 2, every=2, remote=memory)
    files = fsspec.filesystem("memory")
    root = files._strip_protocol(memory)
    files.store[f"{root}/step-00000002/../../../evil"] = files.store[
        f"{root}/step-00000002/checkpoint.json"
    ]
    loop = start_loop(Run(), tmp_path / "b", remote=memory)
    try:
        with pytest.raises(FormatError, match="none of the 1 checkpoints"), loop:
            pass
        assert not (tmp_path / "evil").exists()
    finally:
        del files.store[f"{root}/step-00000002/../../../evil"]


@pytest.mark.long
@pytest.mark.parametrize("part", ["state.safetensors", "checkpoint.json"])
def test_a_process_killed_during_an_upload_resumes(tmp_path, proxy, part):
    """The first upload is stopped and its process killed; a second process finishes the run."""
    url = f"s3://models/{uuid.uuid4().hex}"
    options = s3_options(proxy.endpoint)
    reached, release = threading.Event(), threading.Event()

    def stop(method, path):
        if method == "PUT" and f"step-00000004/{part}" in path:
            reached.set()
            release.wait()

    proxy.on_request = stop
    arguments = [tmp_path / "run", url, json.dumps(options)]
    first = subprocess.Popen(
        [sys.executable, PROGRAMS / "killed_upload.py", *arguments], env=ENVIRONMENT
    )
    reached.wait()
    first.kill()
    first.wait()
    proxy.on_request = lambda method, path: None
    # The request of the dead process is never forwarded, as if its connection had been lost.
    proxy.inject("drop", "PUT", f"step-00000004/{part}", times=1)
    release.set()
    wait_for(lambda: not proxy.faults[0].times)
    assert steps_of(url, storage_options=options) == [2]
    assert find_incomplete(url, storage_options=options) == ["step-00000004"]
    run = Run(seed=1)
    train(run, tmp_path / "run", 8, every=2, remote=url, storage_options=options)
    assert steps_of(url, storage_options=options)[-1] == 8
    assert verify_run(url, storage_options=options)
    expected = Run()
    expected.train(8)
    newest = list_checkpoints(url, storage_options=options)[-1]
    state = load_checkpoint(str(newest.path), storage_options=options)
    assert state["model"]["norm.weight"].equal(expected.model.norm.weight)


@pytest.mark.long
def test_runs_survive_random_faults(tmp_path, proxy):
    options = s3_options(proxy.endpoint)
    whole = Run()
    losses = whole.train(12)
    for kind in ("error", "drop", "truncate", "stale"):
        url = f"s3://models/{uuid.uuid4().hex}"
        for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
            for _ in range(3):
                proxy.inject(kind, method)
        if kind == "stale":
            proxy.faults = [f for f in proxy.faults if f.method == "GET"]
            for fault in proxy.faults:
                fault.path = "list-type"
        seen = train(Run(), url, 6, every=2, keep_last=2, storage_options=options)
        proxy.inject(kind if kind != "stale" else "error", "GET", times=4)
        seen += train(Run(seed=1), url, 12, every=2, keep_last=2, storage_options=options)
        proxy.faults.clear()
        assert seen == losses
        assert verify_run(url, storage_options=options)


def test_the_local_run_is_named_by_a_path(tmp_path, memory):
    with start_loop(Run(), tmp_path, remote=memory, every=1, async_=False) as ckpt:
        assert ckpt.step().path == Path(tmp_path, "step-00000001")
    with start_loop(Run(), f"{memory}/x", every=1, async_=False) as ckpt:
        assert str(ckpt.step().path) == f"{memory}/x/step-00000001"
