"""Distributed checkpoints at URLs, in memory and on S3 (moto)."""

import json
import uuid

import fsspec
import pytest
import torch
from checkpoint.distributed.one import SINGLE
from checkpoint.distributed.work import read_report, start
from remote_store import memory_store, s3_options, s3_server
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from slimtensors.checkpoint.distributed import (
    StorageReader,
    StorageWriter,
    consolidate,
    inspect,
    verify,
)
from slimtensors.cli import main
from slimtensors.storage import locate
from slimtensors.storage.claim import claim

pytestmark = pytest.mark.filterwarnings(SINGLE)

MARK = ".slimtensors-unfinished.json"


@pytest.fixture
def memory():
    with memory_store() as url:
        yield url


def make_state(step):
    return {"model": {"w": torch.arange(3000.0) + step}, "step": step}


def save(step, url, **options):
    dcp.save(make_state(step), storage_writer=StorageWriter(url, **options), no_dist=True)


def load(url):
    state = make_state(0)
    dcp.load(state, storage_reader=StorageReader(url), no_dist=True)
    return state


def assert_loaded(url, step):
    state = load(url)
    assert state["step"] == step
    assert state["model"]["w"].equal(make_state(step)["model"]["w"])


def names_in(url):
    files = fsspec.filesystem("memory")
    return sorted(path.rpartition("/")[2] for path in files.find(files._strip_protocol(url)))


def test_a_remote_checkpoint_is_saved_loaded_and_replaced(memory, tmp_path, capsys):
    save(1, f"{memory}/a")
    assert_loaded(f"{memory}/a", 1)
    first = names_in(f"{memory}/a")
    save(2, f"{memory}/a")
    assert_loaded(f"{memory}/a", 2)
    second = names_in(f"{memory}/a")
    assert (len(first), len(second)) == (2, 2)
    assert set(first) & set(second) == {"distributed.json"}
    assert verify(f"{memory}/a")
    assert [t.name for t in inspect(f"{memory}/a").tensors] == ["model.w"]
    assert main(["inspect", f"{memory}/a"]) == 0
    assert "model.w" in capsys.readouterr().out
    assert main(["verify", f"{memory}/a"]) == 0
    assert len(consolidate(f"{memory}/a", tmp_path / "model").tensors) == 1


def test_an_existing_checkpoint_can_be_protected(memory):
    save(1, f"{memory}/a")
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save(2, f"{memory}/a", overwrite=False)
    assert MARK not in names_in(f"{memory}/a")
    assert_loaded(f"{memory}/a", 1)


def test_a_base_cannot_be_overwritten(memory):
    save(1, f"{memory}/a")
    save(2, f"{memory}/b", base=f"{memory}/a")
    assert_loaded(f"{memory}/b", 2)
    with pytest.raises(CheckpointException, match="it is the base of b"):
        save(3, f"{memory}/a")
    with pytest.raises(CheckpointException, match="same folder"):
        save(3, f"{memory}/more/c", base=f"{memory}/a")


def test_a_second_writer_is_refused(memory):
    save(1, f"{memory}/a")
    with (
        claim(locate(f"{memory}/a/{MARK}")),
        pytest.raises(CheckpointException, match="in use by process"),
    ):
        save(2, f"{memory}/a")
    assert_loaded(f"{memory}/a", 1)


class StoppingPlanner(dcp.DefaultSavePlanner):
    """A planner that fails after the folder was claimed."""

    def resolve_data(self, write_item):
        raise OSError("lost")


def test_a_failed_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(memory):
    save(1, f"{memory}/a")
    for url in (f"{memory}/a", f"{memory}/new"):
        with pytest.raises(CheckpointException, match="lost"):
            dcp.save(
                make_state(2),
                storage_writer=StorageWriter(url),
                planner=StoppingPlanner(),
                no_dist=True,
            )
    assert_loaded(f"{memory}/a", 1)
    with pytest.raises(CheckpointException, match="not a distributed checkpoint"):
        load(f"{memory}/new")
    leftover = f"{memory}/a/rank-00007-{'0' * 16}.safetensors"
    fsspec.filesystem("memory").pipe(leftover, b"of a killed save")
    save(3, f"{memory}/a")
    assert_loaded(f"{memory}/a", 3)
    assert len(names_in(f"{memory}/a")) == 2


@pytest.mark.long
def test_two_ranks_save_to_s3_and_one_loads(tmp_path):
    with s3_server() as endpoint:
        url, options = f"s3://models/{uuid.uuid4().hex}", s3_options(endpoint)
        (tmp_path / "remote.json").write_text(json.dumps([url, options]))
        processes = start("remote", 2, tmp_path, timeout=300)
        for process in processes:
            process.join()
        assert [read_report("remote", rank, tmp_path) for rank in range(2)] == [True, True]
        state = {"rows": torch.zeros(4000), "copy": torch.zeros(3), "step": 0}
        reader = StorageReader(f"{url}/b", storage_options=options)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert state["rows"].equal(torch.arange(4000.0) + 0.5)
        assert state["step"] == 2
        assert verify(f"{url}/b", storage_options=options)
