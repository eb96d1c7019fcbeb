"""Groups of processes that train, save and load; each group is started once for many tests."""

import pytest
import torch
from ranks.one import SINGLE, load, save
from ranks.work import PIECE, start, told
from safetensors.torch import load_file
from strategies import same_bits

from slimtensors.checkpoint.distributed import consolidate
from slimtensors.checkpoint.distributed.manifest import read_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.filterwarnings(SINGLE),
]


def finished(processes):
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder where one process, then two, then three have saved."""
    folder = tmp_path_factory.mktemp("groups")
    finished(start("one", 1, folder))
    finished(start("two", 2, folder))
    finished(start("three", 3, folder))
    return folder


@pytest.fixture(scope="module")
def two(folder):
    return [told("two", rank, folder) for rank in range(2)]


@pytest.fixture(scope="module")
def three(folder):
    return [told("three", rank, folder) for rank in range(3)]


def test_training_goes_on_bit_for_bit(two):
    for rank in two:
        assert rank["wrong"] == 0
        assert rank["again"] == rank["on"]


def test_two_ranks_load_what_one_has_saved(two):
    assert [rank["one"] for rank in two] == [0, 0]


def test_rows_columns_and_copies_load_into_each_other(two, folder):
    for rank in two:
        assert rank["layouts"] == {"rows": 0, "columns": 0, "copies": 0}
    whole = torch.arange(300_000.0).view(300, 1000)
    out = load(folder / "layouts", {"rows": whole, "columns": whole, "copies": whole})
    assert all(torch.equal(x, whole) for x in out.values())
    about = read_manifest(folder / "layouts")
    assert [len(about.tensors[name].chunks) for name in ("rows", "columns", "copies")] == [2, 2, 1]


def test_one_process_loads_what_two_have_saved(folder):
    for name in ("base", "delta"):
        want = torch.load(folder / f"{name}.pt")
        state = {
            "model": {k.removeprefix("model."): x for k, x in want.items() if k[:6] == "model."}
        }
        out = load(folder / name, state)["model"]
        assert all(same_bits(x, want[f"model.{key}"]) for key, x in out.items())


def test_three_ranks_load_what_two_have_saved(three):
    for rank in three:
        assert rank["base"]["wrong"] == rank["delta"]["wrong"] == 0
        assert rank["columns"] == rank["copies"] == 0


def test_a_rank_decodes_little_more_than_it_holds(two, three):
    for rank in three:
        # At the most a piece too much at either end of each of twelve large tensors.
        assert rank["base"]["held"] <= rank["base"]["decoded"]
        assert rank["base"]["decoded"] < rank["base"]["held"] + 12 * 2 * PIECE
    for rank in two:  # of a difference the base too, and second moments again for the first ones
        assert rank["decoded"] <= 3 * rank["held"]


def test_a_difference_may_come_from_another_number_of_ranks(three, folder):
    assert [rank["third"] for rank in three] == [0, 0, 0]
    whole = torch.load(folder / "base.pt")
    state = {"model": {k.removeprefix("model."): x for k, x in whole.items() if k[:6] == "model."}}
    state["model"]["norm.bias"] = state["model"]["norm.bias"] + 1
    save(state, folder / "alone", base=folder / "base")
    out = load(folder / "alone", state)["model"]
    assert all(same_bits(x, state["model"][key]) for key, x in out.items())
    assert sum(read_manifest(folder / "alone").files.values()) < 200_000


def test_differences_and_profiles_make_checkpoints_smaller(folder):
    base, delta, small = (
        sum(read_manifest(folder / name).files.values()) for name in ("base", "delta", "small")
    )
    assert small < delta < base


def test_what_is_saved_on_the_side_is_the_state_of_the_call(two):
    assert [rank["async"] for rank in two] == [0, 0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("exists", "already exists and is not empty"),
        ("burnt", "the disk is on fire"),
        ("versions", "rank 1 has format 2, rank 0 has 1"),
        ("presets", "rank 1 has preset 'lossless', rank 0 has 'lossless-max'"),
        ("targets", "rank 1 has target"),
        ("missing", "rank-00001.safetensors: is missing; the checkpoint is not complete"),
        ("extra", "rank-00007.safetensors: belongs to another checkpoint"),
        ("mixed", "rank-00001.safetensors: was written by run"),
        ("flipped", "damaged"),
    ],
)
def test_every_rank_is_told_what_went_wrong_on_one(case, message, two):
    for rank in two:
        error = rank["errors"][case]
        assert message in error["text"]
        assert error["time"] < 60  # the time-out of the group


def test_a_save_that_fails_on_one_rank_leaves_nothing(two, folder):
    assert [rank["errors"]["left"] for rank in two] == [[], []]
    for name in ("burnt", "versions", "presets", "target0", "target1"):
        assert not (folder / name).exists()


def test_peak_memory_is_recorded(two, three):
    assert all(rank["peak"] > 0 for rank in (*two, *three))


def test_a_model_folder_comes_out_of_many_ranks(folder):
    consolidate(folder / "third", folder / "hf")
    want = torch.load(folder / "third.pt")
    found = load_file(folder / "hf" / "model.safetensors")
    assert found.keys() == {k.removeprefix("model.") for k in want if k.startswith("model.")}
    assert all(same_bits(x, want[f"model.{key}"]) for key, x in found.items())


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """Two groups that lose a rank: one is killed, one never answers again."""
    folders = {task: tmp_path_factory.mktemp(task) for task in ("killed", "stuck")}
    groups = {task: start(task, 2, path, timeout=15) for task, path in folders.items()}
    for first, second in groups.values():
        first.join(180)
        if second.is_alive():
            second.kill()
        second.join()
    return folders


@pytest.mark.parametrize("task", ["killed", "stuck"])
def test_a_lost_rank_fails_the_save_and_leaves_the_old_checkpoint(lost, task):
    error = told(task, 0, lost[task])
    assert error is not None
    assert error["time"] < 120
    assert told(task, 1, lost[task]) is None
    like = {"x": torch.zeros(6), "rows": torch.zeros(40)}
    out = load(lost[task] / "kept", like)
    assert torch.equal(out["x"], torch.arange(6.0))
    assert torch.equal(out["rows"], torch.arange(40.0))
    save(like, lost[task] / "kept", overwrite=True)  # what was left behind goes
    assert not list(lost[task].glob(".kept*"))
