"""Checkpoints of one process: what they hold, how they are written, what is refused."""

import copy
import gc
import json
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.one import SINGLE, blank, later, load, save, state
from strategies import SAFETENSORS_DTYPES, same_bits, tensors
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from training import same_states

import slimtensors
from slimtensors.checkpoint import Filter
from slimtensors.checkpoint.distributed import StorageReader, StorageWriter
from slimtensors.checkpoint.distributed.manifest import Box, read_manifest
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.errors import ConfigError
from slimtensors.storage import replace_folder, temporary_name
from slimtensors.storage.atomic import REPLACED_SUFFIX
from slimtensors.tensor import Spec, _allocate_plain

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a checkpoint and one that is a difference from it."""
    folder = tmp_path_factory.mktemp("runs")
    first = state()
    save(first, folder / "first")
    save(later(first), folder / "second", base=folder / "first")
    return folder


def test_a_state_comes_back_with_everything_that_is_no_tensor(runs):
    assert same_states(load(runs / "first", state()), state())


@settings(max_examples=25, deadline=None)
@given(x=tensors(SAFETENSORS_DTYPES), base=st.booleans())
def test_every_dtype_and_shape_keeps_its_bits(x, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    save({"x": x}, folder / "a")
    if base:
        save({"x": x}, folder / "b", base=folder / "a")
    out = {"x": _allocate_plain(Spec.of(x))}
    path = folder / ("b" if base else "a")
    dcp.load(out, storage_reader=StorageReader(path), no_dist=True)
    assert same_bits(out["x"], x)


def test_a_difference_comes_back_exactly_and_is_small(runs):
    want = later(state())
    assert same_states(load(runs / "second", want), want)
    first, second = (sum(read_manifest(runs / n).files.values()) for n in ("first", "second"))
    assert second < 0.75 * first
    entries = slimtensors.open(runs / "second" / "rank-00000.safetensors").delta["checkpoint"]
    kinds = {name.rpartition("@")[0]: entry["as"] for name, entry in entries.items()}
    assert kinds["tensors.model.bias"] == "same"
    assert kinds["tensors.model.wide"] in ("difference", "by-exponent")
    moments = [e for name, e in entries.items() if "exp_avg_sq" in name]
    assert {e["times"] for e in moments} == {0.99**5}


def test_many_small_tensors_take_little_more_than_themselves(tmp_path):
    save({f"layer.{i}": torch.randn(4) for i in range(1000)}, tmp_path / "a")
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 500 * 1000


def test_a_writer_can_go_to_another_process(runs, tmp_path):
    writer = StorageWriter(runs / "sent", base=runs / "first")
    dcp.save(later(state()), storage_writer=writer, no_dist=True)
    again = copy.deepcopy(writer)  # what cannot be copied cannot be sent
    again.reset(runs / "received")
    dcp.save(later(state()), storage_writer=again, no_dist=True)
    assert same_states(load(runs / "received", state()), later(state()))


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


def test_what_cannot_be_stored_raises_with_its_path(tmp_path):
    value = {"model": {"w": torch.zeros(3)}, "extra": {"thing": object()}}
    with pytest.raises(CheckpointException, match=r"objects\.extra\.thing: a builtins\.object"):
        save(value, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_bytes_of_another_planner_are_stored_as_what_they_mean(tmp_path):
    class Own(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return super().transform_object(write_item, object)

    writer = StorageWriter(tmp_path / "a")
    dcp.save(state(), storage_writer=writer, planner=Own(), no_dist=True)
    assert same_states(load(tmp_path / "a", state()), state())


def test_a_profile_rounds_what_it_says_and_tells_the_error(runs, tmp_path):
    want = later(state())
    want["optim"]["state"]["wide"]["exp_avg"][3, 3] = torch.inf
    target = runs / "rounded"
    save(want, target, base=runs / "first", profile="optimizer-bf16")
    out = load(target, want)
    assert same_states(out["model"], want["model"])
    moments, wanted = (s["optim"]["state"]["wide"] for s in (out, want))
    error = (moments["exp_avg_sq"] - wanted["exp_avg_sq"]).norm() / wanted["exp_avg_sq"].norm()
    about = read_manifest(target)
    assert 0 < error <= about.errors["optim.state.wide.exp_avg_sq"] < 0.01
    assert "infinity" in about.kept_exact["optim.state.wide.exp_avg"]
    assert about.profile == "optimizer-bf16"
    assert same_bits(moments["exp_avg"][:700], wanted["exp_avg"][:700])  # the piece with it
    assert not same_bits(moments["exp_avg"][800:], wanted["exp_avg"][800:])


def test_a_preset_that_rounds_is_told_and_no_way_to_store_differences(runs, tmp_path):
    save(state()["model"], tmp_path / "a", preset="extreme")
    about = read_manifest(tmp_path / "a")
    assert 0 < about.errors["wide"] < 0.03
    assert about.profile == "extreme"
    with pytest.raises(CheckpointException, match="needs a lossless preset"):
        save(later(state()), runs / "never", base=runs / "first", preset="extreme")


def test_tensors_within_objects_are_never_rounded(tmp_path):
    x, values = torch.randn(64, 64), (torch.randn(64, 64),)
    save({"x": x, "values": values}, tmp_path / "a", preset="extreme")
    out = load(tmp_path / "a", {"x": x, "values": None})
    assert not same_bits(out["x"], x)
    assert same_bits(out["values"][0], values[0])


def test_a_filter_chooses_by_the_names_of_the_state(runs):
    want = later(state())
    chosen = Filter(names=("optim.*.exp_avg_sq",))
    save(want, runs / "some", base=runs / "first", profile="optimizer-bf16", lossy=chosen)
    assert list(read_manifest(runs / "some").errors) == ["optim.state.wide.exp_avg_sq"]
    with pytest.raises(CheckpointException, match="no tensor is called 'modle"):
        save(want, runs / "none", profile="optimizer-bf16", lossy=Filter(names=("modle.*",)))


def test_tied_tensors_are_stored_once(tmp_path):
    x = torch.randn(300, 300)
    save({"a": x, "b": x}, tmp_path / "tied")
    assert sum(read_manifest(tmp_path / "tied").files.values()) < 1.2 * x.nbytes
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


def test_files_are_closed_at_once_with_what_has_read_them(runs):
    shards = StoredShards(runs / "second")
    shards.region("model.wide", Box((0, 0), (2, 700)))
    seen = weakref.ref(shards)
    del shards
    assert seen() is None


def test_another_dtype_is_cast_as_torch_does(runs):
    out = {"model": {"wide": torch.zeros(1500, 700, dtype=torch.bfloat16)}}
    dcp.load(out, storage_reader=StorageReader(runs / "first"), no_dist=True)
    assert same_bits(out["model"]["wide"], state()["model"]["wide"].bfloat16())


def test_an_existing_checkpoint_is_refused_or_replaced_whole(tmp_path):
    save(state(), tmp_path / "a")
    with pytest.raises(CheckpointException, match="already exists and is not empty"):
        save(state(1), tmp_path / "a")
    assert same_states(load(tmp_path / "a", state()), state())
    save(state(1), tmp_path / "a", overwrite=True)
    assert same_states(load(tmp_path / "a", state()), state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_checkpoint_that_another_one_needs_is_not_replaced(tmp_path):
    save(state(), tmp_path / "a")
    save(later(state()), tmp_path / "b", base=tmp_path / "a")
    with pytest.raises(CheckpointException, match="because b is a difference from it"):
        save(state(1), tmp_path / "a", overwrite=True)
    assert same_states(load(tmp_path / "b", state()), later(state()))
    save(state(), tmp_path / "b", overwrite=True)
    save(state(1), tmp_path / "a", overwrite=True)


def test_a_complete_checkpoint_that_lost_its_name_is_not_removed(tmp_path):
    save(state(), tmp_path / "a")
    hidden = (tmp_path / "a").rename(temporary_name(tmp_path / "a", REPLACED_SUFFIX))
    writer = StorageWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="out of order"):
        dcp.save(state(1), storage_writer=writer, planner=Failing(), no_dist=True)
    assert same_states(load(hidden, state()), state())
    save(state(1), tmp_path / "a")
    save(state(2), tmp_path / "a", overwrite=True)
    assert not hidden.exists()


def test_a_folder_keeps_its_name_if_the_new_one_cannot_take_it(tmp_path):
    save(state(), tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "gone", tmp_path / "a")
    assert same_states(load(tmp_path / "a", state()), state())


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("42")
    with pytest.raises(CheckpointException, match=r"contains thesis\.tex"):
        save(state(), tmp_path / "a", overwrite=True)


class Failing(DefaultSavePlanner):
    """Cannot give the last tensor."""

    def resolve_data(self, write_item):
        if write_item.index.fqn.endswith("exp_avg_sq"):
            raise OSError("out of order")
        return super().resolve_data(write_item)


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    save(state(), tmp_path / "a")
    writer = StorageWriter(tmp_path / "a", overwrite=True)
    with pytest.raises(CheckpointException, match="out of order"):
        dcp.save(state(1), storage_writer=writer, planner=Failing(), no_dist=True)
    assert same_states(load(tmp_path / "a", state()), state())
    del writer
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path):
    left, other = temporary_name(tmp_path / "a"), temporary_name(tmp_path / "a.b")
    for folder in (left, other):
        folder.mkdir()
        (folder / "rank-00000.safetensors").touch()
    save({"x": torch.zeros(3)}, tmp_path / "a")
    assert not left.exists()
    assert other.exists()


class Losing(StorageWriter):
    """Forgets one item, as a thread does whose exception nobody sees."""

    def write_data(self, plan, planner):
        done = super().write_data(plan, planner)
        done.value().pop()
        return done


def test_items_that_got_lost_are_noticed(tmp_path):
    with pytest.raises(CheckpointException, match="1 items were planned and not written: dtype"):
        dcp.save(state(), storage_writer=Losing(tmp_path / "a"), no_dist=True)
    assert not (tmp_path / "a").exists()


def test_a_file_that_got_lost_is_noticed(tmp_path):
    class Removing(StorageWriter):
        def finish(self, metadata, results):
            next(tmp_path.glob(".a.*/rank-00000.safetensors")).write_bytes(b"short")
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="is not what its rank has written"):
        dcp.save(state(), storage_writer=Removing(tmp_path / "a"), no_dist=True)
    assert not (tmp_path / "a").exists()


def test_cached_plans_are_refused(tmp_path):
    for name, fine in (("a", True), ("b", False)):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = StorageWriter(tmp_path / name)
        if fine:
            dcp.save({"x": torch.zeros(3)}, storage_writer=writer, planner=planner, no_dist=True)
            continue
        with pytest.raises(CheckpointException, match="enable_plan_caching is not supported"):
            dcp.save({"x": torch.zeros(3)}, storage_writer=writer, planner=planner, no_dist=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "exacct"}, "did you mean 'exact'"),
        ({"profile": "history"}, "save only the model"),
        ({"lossy": Filter()}, "choose a profile"),
    ],
)
def test_bad_options_are_refused_at_once(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        StorageWriter(tmp_path / "a", **options)


def test_a_base_is_another_checkpoint_in_the_same_folder(runs, tmp_path):
    with pytest.raises(CheckpointException, match="in the same folder"):
        save(state(), tmp_path / "a", base=runs / "first")
    with pytest.raises(CheckpointException, match="in the same folder"):
        save(state(), runs / "first", base=runs / "first", overwrite=True)


def test_a_place_can_be_given_late(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "a", storage_writer=StorageWriter(), no_dist=True)
    out = blank(state())
    dcp.load(out, checkpoint_id=tmp_path / "a", storage_reader=StorageReader(), no_dist=True)
    assert same_states(out, state())
    with pytest.raises(CheckpointException, match="where to"):
        dcp.save(state(), storage_writer=StorageWriter(), no_dist=True)
    assert StorageWriter.validate_checkpoint_id("a")
    assert not StorageReader.validate_checkpoint_id("s3://a")


@pytest.mark.parametrize("kind", [StorageReader, StorageWriter])
def test_a_url_is_refused_at_once(kind):
    with pytest.raises(ConfigError, match="s3://a: is a URL; only local files and folders"):
        kind("s3://a")
    with pytest.raises(ConfigError, match="s3://a: is a URL"):
        kind().reset("s3://a")


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"x\ud800": torch.ones(3)}, "holds half a character: 'x"),
        ({"a": torch.ones(3), "b": "x\ud800"}, "b: holds half a character"),
    ],
)
def test_half_a_character_is_named_and_refused(tmp_path, bad, where):
    with pytest.raises(CheckpointException, match=where):
        save(bad, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_saving_without_coordination_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp.save(
            state(), storage_writer=StorageWriter(tmp_path), use_collectives=False, no_dist=True
        )
