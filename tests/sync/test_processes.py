"""Several processes and machines: killed publishers, shards of two ranks, S3."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from process_tools import torchrun
from sync.tools import (
    assert_equal,
    assert_follows,
    copy_of,
    make_state,
    s3_bucket,
    step_,
    zeros,
)

from slimtensors.errors import InUseError
from slimtensors.storage import locate
from slimtensors.sync import following, publishing
from slimtensors.sync.store import Store

PROGRAMS = Path(__file__).parent / "programs"
TESTS = Path(__file__).parents[1]


def start(program, *words):
    paths = f"{TESTS}{os.pathsep}{TESTS.parent}"
    return subprocess.Popen(
        [sys.executable, PROGRAMS / program, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def make_model():
    return {f"t{i}": torch.full((4000,), -1.0) for i in range(6)}


def assert_whole(model, step):
    """Assert that all tensors are of the same step."""
    assert {float(value) for x in model.values() for value in x.unique()} == {float(step)}


@pytest.mark.slow
@pytest.mark.crash
def test_a_follower_never_sees_half_an_update_of_a_publisher_that_is_killed(tmp_path):
    run = tmp_path / "run"
    process = start("die.py", run, "v00000006/manifest.json")
    served, follower = make_model(), following(run)
    while process.poll() is None:
        try:
            update = follower.update(served)
            assert_whole(served, update.step)
        except FileNotFoundError:  # not started yet
            pass
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL
    assert list((run / "v00000006").glob("delta-*"))  # written, but not complete
    assert follower.update(served).number == 5
    assert_whole(served, 5)
    with pytest.raises(InUseError, match="takeover"), publishing(run, served):
        pass
    with publishing(run, served, takeover=True) as out:
        for x in served.values():
            x.fill_(9)
        out.publish(9)
    assert [v.step for v in following(run).versions()] == [1, 2, 3, 4, 5, 9]
    fresh = make_model()
    following(run).update(fresh)
    assert_whole(fresh, 9)


@pytest.mark.slow
def test_two_ranks_publish_their_shards_and_followers_receive_whole_tensors(tmp_path):
    done = torchrun(2, tmp_path, script=PROGRAMS / "shards.py")
    assert done.returncode == 0, done.stderr
    versions = following(tmp_path / "run").versions()
    assert [v.step for v in versions][:4] == [0, 1, 2, 3]
    assert versions[-1].step == 5
    assert [bool(v.keyframe) for v in versions[:4]] == [True, False, False, True]
    assert len(versions[1].delta) == 2
    assert len(versions[0].tensors["columns"].parts) == 2
    assert len(versions[0].tensors["copies"].parts) == 1
    kinds = {(tmp_path / f"refused-{rank}").read_text() for rank in range(2)}
    assert kinds == {"InUseError", "RankError"}
    # The newest version was checked above all others: read the fourth one as a follower did then.
    reference = torch.load(tmp_path / "3.pt")
    for version in versions[4:]:
        Store(tmp_path / "run").remove_version(version.number)
    served = zeros(reference)
    assert following(tmp_path / "run").update(served).from_keyframe
    assert_equal(served, reference)
    served = torch.load(tmp_path / "0.pt")
    Store(tmp_path / "run").remove_version(4)
    follower = following(tmp_path / "run")
    assert not follower.update(served).from_keyframe
    assert_equal(served, torch.load(tmp_path / "2.pt"))


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("s3fs")
    with s3_bucket() as (url, options):
        yield url, options


def test_versions_flow_through_s3(bucket):
    url, options = f"{bucket[0]}/{uuid.uuid4().hex}", bucket[1]
    state = make_state()
    served, follower = zeros(state), following(url, storage_options=options)
    with publishing(url, state, keyframe_every=2, keep=1, storage_options=options) as out:
        for step in range(3):
            step_(state, step)
            out.publish(step)
            published = out.wait()
            update = follower.update(served)
            assert_equal(served, state)
            # List, manifest, file; a keyframe has a file more.
            assert update.requests <= 3
            assert published.requests >= 3
        with (
            pytest.raises(InUseError, match="takeover"),
            publishing(url, state, storage_options=options),
        ):
            pass
    assert [v.number for v in follower.versions()] == [3]
    assert_follows(url, state, storage_options=options)
    assert len(follower.versions()) == 1


def test_s3_and_memory_and_folders_create_a_manifest_only_once(bucket, tmp_path):
    for url, options in (
        (f"{bucket[0]}/{uuid.uuid4().hex}", bucket[1]),
        (f"memory://{uuid.uuid4().hex}", None),
        (str(tmp_path / "run"), None),
    ):
        state = make_state()
        with publishing(url, state, storage_options=options) as out:
            out.publish(1)
            version = out.wait().version
        before = locate(f"{url}/v00000001/manifest.json", storage_options=options).read()
        store = Store(url, options)
        other = type(version)(**{**vars(version), "step": 5})
        results = []

        def commit(store=store, other=other, results=results):
            try:
                results.append(store.commit(other))
            except InUseError as error:
                results.append(str(error))

        threads = [threading.Thread(target=commit) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("published by another process" in result for result in results)
        assert len(results) == 3
        assert locate(f"{url}/v00000001/manifest.json", storage_options=options).read() == before


def test_an_interrupted_block_still_completes_the_last_version(tmp_path):
    state = make_state()

    def train():
        with publishing(tmp_path / "run", state) as out:
            out.publish(1)
            raise KeyboardInterrupt

    published = copy_of(state)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert_follows(tmp_path / "run", published)
    with publishing(tmp_path / "run", state):
        pass
