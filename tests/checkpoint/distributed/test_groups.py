"""Process groups that train, save and load; each group is started once for many tests."""

import pytest
import torch
from checkpoint.distributed.one import SINGLE, load, save
from checkpoint.distributed.work import PIECE, read_report, start
from safetensors.torch import load_file
from strategies import same_bits

from slimtensors.checkpoint.distributed import consolidate
from slimtensors.checkpoint.distributed.manifest import read_distributed_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.filterwarnings(SINGLE),
]


def wait_for(processes):
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with checkpoints of one, two and three processes."""
    folder = tmp_path_factory.mktemp("groups")
    wait_for(start("one", 1, folder))
    wait_for(start("two", 2, folder))
    wait_for(start("three", 3, folder))
    return folder


@pytest.fixture(scope="module")
def two(folder):
    return [read_report("two", rank, folder) for rank in range(2)]


@pytest.fixture(scope="module")
def three(folder):
    return [read_report("three", rank, folder) for rank in range(3)]


def test_training_resumes_bit_for_bit(two):
    for rank in two:
        assert rank["wrong"] == 0
        assert rank["again"] == rank["on"]


def test_two_ranks_load_a_checkpoint_of_one(two):
    assert [rank["one"] for rank in two] == [0, 0]


def test_row_column_and_replicated_layouts_load_into_each_other(two, folder):
    for rank in two:
        assert rank["layouts"] == {"rows": 0, "columns": 0, "copies": 0}
    whole = torch.arange(300_000.0).view(300, 1000)
    out = load(folder / "layouts", {"rows": whole, "columns": whole, "copies": whole})
    assert all(torch.equal(x, whole) for x in out.values())
    manifest = read_distributed_manifest(folder / "layouts")
    assert [len(manifest.tensors[name].chunks) for name in ("rows", "columns", "copies")] == [
        2,
        2,
        1,
    ]


def test_one_process_loads_a_checkpoint_of_two(folder):
    for name in ("base", "delta"):
        want = torch.load(folder / f"{name}.pt")
        state = {
            "model": {k.removeprefix("model."): x for k, x in want.items() if k[:6] == "model."}
        }
        out = load(folder / name, state)["model"]
        assert all(same_bits(x, want[f"model.{key}"]) for key, x in out.items())


def test_three_ranks_load_a_checkpoint_of_two(three):
    for rank in three:
        assert rank["base"]["wrong"] == rank["delta"]["wrong"] == 0
        assert rank["columns"] == rank["copies"] == 0


def test_a_rank_decodes_little_more_than_its_shards(two, three):
    for rank in three:
        # At most one extra piece at either end of each of twelve large tensors.
        assert rank["base"]["shard_bytes"] <= rank["base"]["decoded"]
        assert rank["base"]["decoded"] < rank["base"]["shard_bytes"] + 12 * 2 * PIECE
    for rank in two:  # a delta also decodes the base, and second moments twice
        assert rank["decoded"] <= 3 * rank["shard_bytes"]


def test_a_delta_may_be_saved_by_another_number_of_ranks(three, folder):
    assert [rank["third"] for rank in three] == [0, 0, 0]
    whole = torch.load(folder / "base.pt")
    state = {"model": {k.removeprefix("model."): x for k, x in whole.items() if k[:6] == "model."}}
    state["model"]["norm.bias"] = state["model"]["norm.bias"] + 1
    save(state, folder / "alone", base=folder / "base")
    out = load(folder / "alone", state)["model"]
    assert all(same_bits(x, state["model"][key]) for key, x in out.items())
    assert sum(read_distributed_manifest(folder / "alone").files.values()) < 200_000


def test_deltas_and_profiles_make_checkpoints_smaller(folder):
    base, delta, small = (
        sum(read_distributed_manifest(folder / name).files.values())
        for name in ("base", "delta", "small")
    )
    assert small < delta < base


def test_async_save_stores_the_state_at_the_time_of_the_call(two):
    assert [rank["async"] for rank in two] == [0, 0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("exists", "Checkpoint already exists and overwrite=False"),
        ("burnt", "the disk is on fire"),
        ("versions", "rank 1 has format 2, rank 0 has 1"),
        ("presets", "rank 1 has preset 'lossless', rank 0 has 'lossless-max'"),
        ("targets", "rank 1 has target"),
        ("missing", "rank-00001.safetensors not found; the checkpoint is incomplete"),
        ("mixed", "rank-00001.safetensors is part of run"),
        ("flipped", "damaged"),
    ],
)
def test_every_rank_raises_the_error_of_one(case, message, two):
    for rank in two:
        error = rank["errors"][case]
        assert message in error["text"]
        assert error["time"] < 60  # the timeout of the group


def test_a_save_that_fails_on_one_rank_leaves_no_files(two, folder):
    assert [rank["errors"]["left"] for rank in two] == [[], []]
    for name in ("burnt", "versions", "presets", "target0", "target1"):
        assert not (folder / name).exists()


def test_peak_memory_is_recorded(two, three):
    assert all(rank["peak"] > 0 for rank in (*two, *three))


def test_consolidate_reads_the_files_of_several_ranks(folder):
    consolidate(folder / "third", folder / "hf")
    want = torch.load(folder / "third.pt")
    found = load_file(folder / "hf" / "model.safetensors")
    assert found.keys() == {k.removeprefix("model.") for k in want if k.startswith("model.")}
    assert all(same_bits(x, want[f"model.{key}"]) for key, x in found.items())


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """Run two groups that lose a rank: one is killed, one hangs."""
    folders = {task: tmp_path_factory.mktemp(task) for task in ("killed", "stuck")}
    groups = {task: start(task, 2, path, timeout=15) for task, path in folders.items()}
    for first, second in groups.values():
        first.join(180)
        if second.is_alive():
            second.kill()
        second.join()
    return folders


@pytest.mark.parametrize("task", ["killed", "stuck"])
def test_a_lost_rank_fails_the_save_and_keeps_the_old_checkpoint(lost, task):
    error = read_report(task, 0, lost[task])
    assert error is not None
    assert error["time"] < 120
    assert read_report(task, 1, lost[task]) is None
    like = {"x": torch.zeros(6), "rows": torch.zeros(40)}
    out = load(lost[task] / "kept", like)
    assert torch.equal(out["x"], torch.arange(6.0))
    assert torch.equal(out["rows"], torch.arange(40.0))
    save(like, lost[task] / "kept", overwrite=True)  # removes leftovers
    assert not list(lost[task].glob(".kept*"))
