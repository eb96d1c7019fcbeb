"""Distributed checkpoints of one process: content, atomic writes, invalid options."""

import copy
import gc
import json
import weakref

import pytest
import torch
from checkpoint.distributed.one import SINGLE, blank, later, load, save, state
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SAFETENSORS_DTYPES, same_bits, tensors
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from training import equal_states

import slimtensors
from slimtensors.checkpoint import Filter
from slimtensors.checkpoint.distributed import StorageReader, StorageWriter
from slimtensors.checkpoint.distributed.manifest import read_distributed_manifest
from slimtensors.checkpoint.distributed.pieces import Box
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.errors import ConfigError
from slimtensors.storage import replace_folder, temporary_name
from slimtensors.storage.atomic import REPLACED_SUFFIX
from slimtensors.tensor import Spec, _allocate_plain

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a checkpoint and a delta of it."""
    folder = tmp_path_factory.mktemp("runs")
    first = state()
    save(first, folder / "first")
    save(later(first), folder / "second", base=folder / "first")
    return folder


def test_a_state_round_trips_with_values_that_are_not_tensors(runs):
    assert equal_states(load(runs / "first", state()), state())


@settings(max_examples=25, deadline=None)
@given(x=tensors(SAFETENSORS_DTYPES), base=st.booleans())
def test_every_dtype_and_shape_is_bitwise_equal(x, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    save({"x": x}, folder / "a")
    if base:
        save({"x": x}, folder / "b", base=folder / "a")
    out = {"x": _allocate_plain(Spec.of(x))}
    path = folder / ("b" if base else "a")
    dcp.load(out, storage_reader=StorageReader(path), no_dist=True)
    assert same_bits(out["x"], x)


def test_a_delta_is_exact_and_small(runs):
    want = later(state())
    assert equal_states(load(runs / "second", want), want)
    first, second = (
        sum(read_distributed_manifest(runs / n).files.values()) for n in ("first", "second")
    )
    assert second < 0.75 * first
    entries = slimtensors.open(runs / "second" / "rank-00000.safetensors").delta["checkpoint"]
    kinds = {name.rpartition("@")[0]: entry["as"] for name, entry in entries.items()}
    assert kinds["tensors.model.bias"] == "same"
    assert kinds["tensors.model.wide"] in ("difference", "by-exponent")
    moments = [e for name, e in entries.items() if "exp_avg_sq" in name]
    assert {e["times"] for e in moments} == {0.99**5}


def test_many_small_tensors_have_little_overhead(tmp_path):
    save({f"layer.{i}": torch.randn(4) for i in range(1000)}, tmp_path / "a")
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 500 * 1000


def test_a_writer_can_be_copied_to_another_process(runs, tmp_path):
    writer = StorageWriter(runs / "sent", base=runs / "first")
    dcp.save(later(state()), storage_writer=writer, no_dist=True)
    again = copy.deepcopy(writer)  # as sending it would
    again.reset(runs / "received")
    dcp.save(later(state()), storage_writer=again, no_dist=True)
    assert equal_states(load(runs / "received", state()), later(state()))


def test_metadata_is_json_and_nothing_is_pickled(runs):
    for path in (runs / "first").iterdir():
        raw = path.read_bytes()
        assert b"\x80\x02" not in raw[:2]
        assert path.suffix in (".json", ".safetensors")
    data = json.loads((runs / "first" / "distributed.json").read_text())
    assert data["tensors"]["model.wide"]["chunks"] == [[[0, 0], [1500, 700], 0]]
    whole = slimtensors.load(runs / "first" / "rank-00000.safetensors")
    assert whole["objects"]["rng"] == (3, (1, 2, 3), None)
    assert same_bits(whole["tensors"]["model.bias@0"], state()["model"]["bias"])


def test_an_unsupported_value_raises_with_its_path(tmp_path):
    value = {"model": {"w": torch.zeros(3)}, "extra": {"thing": object()}}
    with pytest.raises(
        CheckpointException,
        match=r"[ \n]extra\.thing: cannot store values of type builtins\.object",
    ):
        save(value, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_bytes_of_a_custom_planner_are_unpickled_safely(tmp_path):
    class CustomPlanner(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return super().transform_object(write_item, object)

    writer = StorageWriter(tmp_path / "a")
    dcp.save(state(), storage_writer=writer, planner=CustomPlanner(), no_dist=True)
    assert equal_states(load(tmp_path / "a", state()), state())


def test_a_profile_rounds_only_its_roles_and_reports_the_error(runs, tmp_path):
    want = later(state())
    want["optim"]["state"]["wide"]["exp_avg"][3, 3] = torch.inf
    target = runs / "rounded"
    save(want, target, base=runs / "first", profile="optimizer-bf16")
    out = load(target, want)
    assert equal_states(out["model"], want["model"])
    moments, expected = (s["optim"]["state"]["wide"] for s in (out, want))
    error = (moments["exp_avg_sq"] - expected["exp_avg_sq"]).norm() / expected["exp_avg_sq"].norm()
    manifest = read_distributed_manifest(target)
    assert 0 < error <= manifest.errors["optim.state.wide.exp_avg_sq"] < 0.01
    assert "infinity" in manifest.kept_exact["optim.state.wide.exp_avg"]
    assert manifest.profile == "optimizer-bf16"
    assert same_bits(moments["exp_avg"][:700], expected["exp_avg"][:700])  # the piece with infinity
    assert not same_bits(moments["exp_avg"][800:], expected["exp_avg"][800:])


def test_a_lossy_preset_is_reported_and_raises_for_deltas(runs, tmp_path):
    save(state()["model"], tmp_path / "a", preset="extreme")
    manifest = read_distributed_manifest(tmp_path / "a")
    assert 0 < manifest.errors["wide"] < 0.03
    assert manifest.profile == "extreme"
    with pytest.raises(CheckpointException, match="needs a lossless preset"):
        save(later(state()), runs / "never", base=runs / "first", preset="extreme")


def test_tensors_inside_objects_are_never_rounded(tmp_path):
    x, values = torch.randn(64, 64), (torch.randn(64, 64),)
    save({"x": x, "values": values}, tmp_path / "a", preset="extreme")
    out = load(tmp_path / "a", {"x": x, "values": None})
    assert not same_bits(out["x"], x)
    assert same_bits(out["values"][0], values[0])


def test_a_filter_selects_by_names_of_the_state(runs):
    want = later(state())
    chosen = Filter(names=("optim.*.exp_avg_sq",))
    save(want, runs / "some", base=runs / "first", profile="optimizer-bf16", lossy=chosen)
    assert list(read_distributed_manifest(runs / "some").errors) == ["optim.state.wide.exp_avg_sq"]
    with pytest.raises(CheckpointException, match="no tensor name matches 'modle"):
        save(want, runs / "none", profile="optimizer-bf16", lossy=Filter(names=("modle.*",)))


def test_tied_tensors_are_stored_once(tmp_path):
    x = torch.randn(300, 300)
    save({"a": x, "b": x}, tmp_path / "tied")
    assert sum(read_distributed_manifest(tmp_path / "tied").files.values()) < 1.2 * x.nbytes
    out = load(tmp_path / "tied", {"a": x, "b": x})
    assert same_bits(out["a"], x)
    assert same_bits(out["b"], x)


def test_a_part_of_a_state_reads_only_its_pieces(runs):
    for name in ("first", "second"):
        out = {"model": {"bias": torch.zeros(7, dtype=torch.bfloat16)}}
        reader = StorageReader(runs / name)
        dcp.load(out, storage_reader=reader, no_dist=True)
        assert reader.decoded_bytes in (14, 28)
        assert same_bits(out["model"]["bias"], state()["model"]["bias"])


def test_files_are_closed_with_their_reader(runs):
    shards = StoredShards(runs / "second")
    shards.load_region("model.wide", Box((0, 0), (2, 700)))
    seen = weakref.ref(shards)
    del shards
    assert seen() is None


def test_another_dtype_is_cast_as_torch_does(runs):
    out = {"model": {"wide": torch.zeros(1500, 700, dtype=torch.bfloat16)}}
    dcp.load(out, storage_reader=StorageReader(runs / "first"), no_dist=True)
    assert same_bits(out["model"]["wide"], state()["model"]["wide"].bfloat16())


def test_an_existing_checkpoint_raises_or_is_replaced(tmp_path):
    save(state(), tmp_path / "a")
    with pytest.raises(CheckpointException, match="Checkpoint already exists and overwrite=False"):
        save(state(1), tmp_path / "a", overwrite=False)
    assert equal_states(load(tmp_path / "a", state()), state())
    save(state(1), tmp_path / "a")
    assert equal_states(load(tmp_path / "a", state()), state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_base_of_another_checkpoint_is_not_overwritten(tmp_path):
    save(state(), tmp_path / "a")
    save(later(state()), tmp_path / "b", base=tmp_path / "a")
    with pytest.raises(CheckpointException, match="it is the base of b"):
        save(state(1), tmp_path / "a", overwrite=True)
    assert equal_states(load(tmp_path / "b", state()), later(state()))
    save(state(), tmp_path / "b", overwrite=True)
    save(state(1), tmp_path / "a", overwrite=True)


def test_a_complete_checkpoint_under_a_temporary_name_is_kept(tmp_path):
    save(state(), tmp_path / "a")
    hidden = (tmp_path / "a").rename(temporary_name(tmp_path / "a", REPLACED_SUFFIX))
    writer = StorageWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="out of order"):
        dcp.save(state(1), storage_writer=writer, planner=FailingPlanner(), no_dist=True)
    assert equal_states(load(hidden, state()), state())
    save(state(1), tmp_path / "a")
    save(state(2), tmp_path / "a", overwrite=True)
    assert not hidden.exists()


def test_a_failed_replacement_keeps_the_old_folder(tmp_path):
    save(state(), tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "gone", tmp_path / "a")
    assert equal_states(load(tmp_path / "a", state()), state())


def test_a_file_in_place_of_the_folder_raises(tmp_path):
    (tmp_path / "a").write_text("42")
    with pytest.raises(CheckpointException, match="a is a file, not a folder"):
        save(state(), tmp_path / "a")


class FailingPlanner(DefaultSavePlanner):
    """A planner that fails for the last tensor."""

    def resolve_data(self, write_item):
        if write_item.index.fqn.endswith("exp_avg_sq"):
            raise OSError("out of order")
        return super().resolve_data(write_item)


def test_a_failed_save_leaves_only_the_old_checkpoint(tmp_path):
    save(state(), tmp_path / "a")
    writer = StorageWriter(tmp_path / "a", overwrite=True)
    with pytest.raises(CheckpointException, match="out of order"):
        dcp.save(state(1), storage_writer=writer, planner=FailingPlanner(), no_dist=True)
    assert equal_states(load(tmp_path / "a", state()), state())
    del writer
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_a_killed_save_are_removed_by_the_next(tmp_path):
    left, other = temporary_name(tmp_path / "a"), temporary_name(tmp_path / "a.b")
    for folder in (left, other):
        folder.mkdir()
        (folder / "rank-00000.safetensors").touch()
    save({"x": torch.zeros(3)}, tmp_path / "a")
    assert not left.exists()
    assert other.exists()


class LosingWriter(StorageWriter):
    """A writer that loses one item."""

    def write_data(self, plan, planner):
        done = super().write_data(plan, planner)
        done.value().pop()
        return done


def test_missing_items_raise(tmp_path):
    with pytest.raises(CheckpointException, match="1 planned items were not written: dtype"):
        dcp.save(state(), storage_writer=LosingWriter(tmp_path / "a"), no_dist=True)
    assert not (tmp_path / "a").exists()


def test_a_changed_file_raises(tmp_path):
    class TruncatingWriter(StorageWriter):
        def finish(self, metadata, results):
            next(tmp_path.glob(".a.*/rank-00000.safetensors")).write_bytes(b"short")
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="was changed after its rank wrote it"):
        dcp.save(state(), storage_writer=TruncatingWriter(tmp_path / "a"), no_dist=True)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "exacct"}, "did you mean 'exact'"),
        ({"profile": "history"}, "save only the model"),
        ({"lossy": Filter()}, "the profile is exact"),
        ({"single_file_per_rank": False}, "single_file_per_rank=False is not supported: each rank"),
        ({"sync_files": False}, "sync_files=False is not supported: files are always synced"),
        ({"per_thread_copy_ahead": 0}, "per_thread_copy_ahead=0 is not supported"),
        ({"cache_staged_state_dict": True}, "cache_staged_state_dict=True .*DefaultStager"),
        ({"threads": 1, "thread_count": 1}, "threads or thread_count, not both"),
    ],
)
def test_invalid_options_raise(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        StorageWriter(tmp_path / "a", **options)


def test_a_base_must_be_another_checkpoint_in_the_same_folder(runs, tmp_path):
    with pytest.raises(CheckpointException, match="in the same folder"):
        save(state(), tmp_path / "a", base=runs / "first")
    with pytest.raises(CheckpointException, match="in the same folder"):
        save(state(), runs / "first", base=runs / "first", overwrite=True)


def test_checkpoint_id_sets_the_path(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "a", storage_writer=StorageWriter(), no_dist=True)
    out = blank(state())
    dcp.load(out, checkpoint_id=tmp_path / "a", storage_reader=StorageReader(), no_dist=True)
    assert equal_states(out, state())
    with pytest.raises(CheckpointException, match="no target given"):
        dcp.save(state(), storage_writer=StorageWriter(), no_dist=True)
    assert StorageWriter.validate_checkpoint_id("a")
    assert StorageReader.validate_checkpoint_id("s3://a")


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"x\ud800": torch.ones(3)}, "text is not valid Unicode: 'x"),
        ({"a": torch.ones(3), "b": "x\ud800"}, "b: text is not valid Unicode"),
    ],
)
def test_unpaired_surrogates_raise_with_their_path(tmp_path, bad, where):
    with pytest.raises(CheckpointException, match=where):
        save(bad, tmp_path / "a")
    assert not (tmp_path / "a").exists()
