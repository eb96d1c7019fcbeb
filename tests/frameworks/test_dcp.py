"""torch.distributed.checkpoint with our storage classes and with torch's: the same results."""

import argparse
import collections
import datetime
import io
import os
import pathlib
import pickle
import uuid
import warnings

import pytest
import torch
from slimtensors.distributed import StorageReader, StorageWriter
from strategies import same_bits
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful

from slimtensors.checkpoint import Filter
from slimtensors.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

STORAGES = {"torch": (FileSystemWriter, FileSystemReader), "ours": (StorageWriter, StorageReader)}


@pytest.fixture(params=list(STORAGES))
def storage(request):
    """Return the writer and the reader class of torch, and then ours."""
    return STORAGES[request.param]


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(6, 4, generator=generator), "bias": torch.zeros(4)},
        "moments": [torch.randn(3, generator=generator), torch.tensor(seed)],
        "step": seed,
    }


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    return [blank(part) for part in value] if type(value) is list else None


def save(state, writer, **options):
    return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(reader, like, **options):
    state = blank(like)
    dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state


def same(a, b):
    """Return True if two states agree in structure, types, values and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    return a == b


def find_error(action):
    """Return the first line of the error that a rank reports."""
    with pytest.raises(CheckpointException) as caught:
        action()
    error, _ = caught.value.failures[0]
    return type(error), str(error)


# Folders with other files


def add_files(folder):
    (folder / "logs").mkdir(parents=True)
    files = {"config.json": b"{}", "model.safetensors": b"x", "logs/a.txt": b"log", ".hidden": b""}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def read_others(folder, files):
    return {name: (folder / name).read_bytes() for name in files}


def test_a_save_into_a_folder_with_other_files_keeps_them(storage, tmp_path):
    writer, reader = storage
    files = add_files(tmp_path / "a")
    for seed in range(3):
        save(make_state(seed), writer(tmp_path / "a"))
        assert read_others(tmp_path / "a", files) == files
        assert same(load(reader(tmp_path / "a"), make_state()), make_state(seed))


def test_replacing_a_checkpoint_removes_only_its_own_files(tmp_path):
    save(make_state(), StorageWriter(tmp_path / "a"))
    other = tmp_path / "a" / "rank-00009.safetensors"
    other.write_bytes(b"a file of the user with a name like ours")
    for seed in range(3):
        save(make_state(seed), StorageWriter(tmp_path / "a"))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names[0] == "distributed.json"
    assert names[1].startswith("rank-00000-")
    assert names[2:] == [other.name]


def test_files_that_are_added_during_the_save_are_kept(storage, tmp_path):
    writer, reader = storage
    folder = tmp_path / "a"

    class AddingPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")
            return super().resolve_data(write_item)

    save(make_state(), writer(folder), planner=AddingPlanner())
    assert (folder / "config.json").read_text() == "{}"
    assert same(load(reader(folder), make_state()), make_state())


EXISTS = r"Checkpoint already exists and .*overwrite=False"


def test_an_existing_checkpoint_is_an_error_without_overwrite(storage, tmp_path):
    writer, reader = storage
    save(make_state(), writer(tmp_path / "a"))
    with pytest.raises(CheckpointException, match=EXISTS):
        save(make_state(1), writer(tmp_path / "a", overwrite=False))
    assert same(load(reader(tmp_path / "a"), make_state()), make_state())


@pytest.mark.parametrize("is_second", [False, True])
def test_a_checkpoint_of_torch_in_the_folder_is_not_hidden_behind_ours(tmp_path, is_second):
    if is_second:
        save(make_state(2), StorageWriter(tmp_path / "a"))
    save(make_state(), FileSystemWriter(tmp_path / "a"))
    with pytest.raises(CheckpointException, match=r"Checkpoint already exists: .*FileSystemWriter"):
        save(make_state(1), StorageWriter(tmp_path / "a"))
    assert same(load(FileSystemReader(tmp_path / "a"), make_state()), make_state())


def test_a_folder_that_exists_stays_the_same_folder(storage, tmp_path, monkeypatch):
    writer, reader = storage
    monkeypatch.chdir(tmp_path)  # a mount point, or a folder in a read-only one, is like this
    for seed in range(2):
        save(make_state(seed), writer("."))
        assert same(load(reader("."), make_state()), make_state(seed))
    assert tmp_path.samefile(".")


def test_a_checkpoint_of_torch_is_refused_with_the_name_of_its_reader(tmp_path):
    save(make_state(), FileSystemWriter(tmp_path / "a"))
    _, message = find_error(lambda: load(StorageReader(tmp_path / "a"), make_state()))
    assert "is a checkpoint of FileSystemWriter; use FileSystemReader" in message


# Values


def make_values():
    stream = io.BytesIO(b"some bytes")
    stream.seek(3)
    utc = datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC)
    return {
        "stream": stream,
        "long stream": io.BytesIO(bytes(range(256)) * 1000),
        "bytes": b"\0\xff",
        "loader": {"state": bytearray(b"x"), "seen": {1, 2}, "frozen": frozenset("ab")},
        "window": collections.deque([1.5, 2.5], maxlen=4),
        "range": range(1, 9, 2),
        "path": pathlib.Path("data") / "train",
        "times": (utc, datetime.timedelta(days=1, microseconds=3)),
        "complex": 1 - 2j,
        "args": argparse.Namespace(lr=0.1, paths=[pathlib.PurePosixPath("x")]),
        "weight": torch.ones(2),
    }


def test_values_that_are_not_tensors_come_back_as_natively(storage, tmp_path):
    writer, reader = storage
    save(make_values(), writer(tmp_path / "a"))
    assert same(load(reader(tmp_path / "a"), make_values()), make_values())


def test_nothing_pickled_reaches_the_disk(tmp_path):
    class PicklingPlanner(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return super().transform_object(write_item, object)

    values = make_values()
    del values["window"]  # weights_only=True does not support deques
    save(values, StorageWriter(tmp_path / "a"), planner=PicklingPlanner())
    for path in (tmp_path / "a").iterdir():
        raw = path.read_bytes()
        assert not any(
            magic in raw for magic in (b"PK\x03\x04", b"\x80\x02}", b"pathlib", b"ctorch")
        )
    assert same(load(StorageReader(tmp_path / "a"), values), values)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


@pytest.mark.parametrize("is_pickle", [True, False])
def test_bytes_of_a_planner_that_need_pickle_are_refused(tmp_path, is_pickle):
    class EvilPlanner(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return io.BytesIO(pickle.dumps(Evil()) if is_pickle else b"words")

    kind, message = find_error(
        lambda: save({"a": {"x": 1}}, StorageWriter(tmp_path / "a"), planner=EvilPlanner())
    )
    assert kind.__name__ == "UnsupportedTensorError"
    assert message.startswith("a.x: the bytes of planner EvilPlanner are not a file of torch.save")
    assert not (tmp_path / "a").exists()


def test_a_planner_that_replaces_objects_is_respected(storage, tmp_path):
    class ReplacingPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            if write_item.index.fqn == "step":
                found = io.BytesIO()
                torch.save("replaced", found)
            return found

    writer, reader = storage
    save(make_state(), writer(tmp_path / "a"), planner=ReplacingPlanner())
    assert load(reader(tmp_path / "a"), make_state())["step"] == "replaced"


# Metadata


def test_the_metadata_of_a_save_and_of_a_load_agree_with_torch(tmp_path):
    found = {}
    for name, (writer, reader) in STORAGES.items():
        writer = writer(tmp_path / name)
        saved = save(make_state(), writer)
        opened = reader(tmp_path / name)
        loaded = opened.read_metadata()
        for metadata in (saved, loaded):
            assert metadata.storage_meta.checkpoint_id == tmp_path / name
            assert metadata.storage_meta.save_id == writer.save_id
        assert saved.storage_meta.load_id is None
        assert loaded.storage_meta.load_id == opened.load_id
        found[name] = [describe_metadata(metadata) for metadata in (saved, loaded)]
        found[name].append({(index.fqn, index.offset) for index in saved.storage_data})
    assert found["ours"] == found["torch"]


def describe_metadata(metadata):
    items = {}
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            items[name] = "bytes"
        else:
            chunks = [(chunk.offsets, chunk.sizes) for chunk in item.chunks]
            items[name] = (item.properties.dtype, item.size, chunks)
    return metadata.version, items, metadata.planner_data


def test_every_save_and_every_load_has_an_id_of_its_own(storage, tmp_path):
    writer, reader = (kind(tmp_path / "a") for kind in storage)
    saves, loads = set(), set()
    for seed in range(3):
        saves.add(
            save(make_state(seed), writer, checkpoint_id=tmp_path / str(seed)).storage_meta.save_id
        )
        reader.reset(tmp_path / str(seed))
        loads.add(reader.read_metadata().storage_meta.load_id)
    assert len(saves) == len(loads) == 3


def test_the_metadata_of_a_save_names_the_files_on_disk(tmp_path):
    for seed in range(2):
        saved = save(make_state(seed), StorageWriter(tmp_path / "a"))
        files = {item.file for item in saved.storage_data.values()}
        assert files == {path.name for path in (tmp_path / "a").glob("*.safetensors")}


def test_a_writer_that_is_not_reset_gives_every_checkpoint_an_id(tmp_path):
    writer = StorageWriter(tmp_path / "a")
    first, second = (save(make_state(seed), writer).storage_meta.save_id for seed in range(2))
    assert first != second == writer.save_id
    assert StorageReader(tmp_path / "a").read_metadata().storage_meta.save_id == second


# Planners


def make_caching_planner():
    """Return a function that makes planners whose cache no other test uses."""
    kind = type(f"Planner{uuid.uuid4().hex}", (DefaultSavePlanner,), {})
    return lambda: kind(enable_plan_caching=True)


def test_cached_plans_save_the_current_state(storage, tmp_path):
    writer, reader = storage
    make_planner = make_caching_planner()
    states = [make_state(seed) for seed in range(3)]
    states.append({**make_state(3), "more": torch.ones(2)})
    states.append({**make_state(4), "more": torch.ones(2)})
    for i, state in enumerate(states):
        saved = save(state, writer(tmp_path / str(i)), planner=make_planner())
        assert saved.storage_meta.checkpoint_id == tmp_path / str(i)
    for i, state in enumerate(states):
        assert same(load(reader(tmp_path / str(i)), state), state)


def test_cached_plans_work_with_one_writer_and_with_deltas(tmp_path):
    make_planner = make_caching_planner()
    writer = StorageWriter(tmp_path / "0")
    for i in range(3):
        save(make_state(i), writer, checkpoint_id=tmp_path / str(i), planner=make_planner())
    base = tmp_path / "2"
    save(make_state(5), StorageWriter(tmp_path / "5", base=base), planner=make_planner())
    for i in (0, 1, 2, 5):
        assert same(load(StorageReader(tmp_path / str(i)), make_state()), make_state(i))


def test_cached_plans_of_a_failed_save_do_not_affect_the_next(tmp_path):
    make_planner = make_caching_planner()
    (tmp_path / "file").touch()
    save(make_state(), StorageWriter(tmp_path / "0"), planner=make_planner())
    with pytest.raises(CheckpointException, match="is a file, not a folder"):
        save(make_state(1), StorageWriter(tmp_path / "file"), planner=make_planner())
    save(make_state(2), StorageWriter(tmp_path / "2"), planner=make_planner())
    assert same(load(StorageReader(tmp_path / "2"), make_state()), make_state(2))


def test_a_filter_that_selects_nothing_is_an_error_with_cached_plans_too(tmp_path):
    make_planner = make_caching_planner()
    save(make_state(), StorageWriter(tmp_path / "0"), planner=make_planner())
    lossy = Filter(names=("nothing.*",))
    writer = StorageWriter(tmp_path / "1", profile="optimizer-bf16", lossy=lossy)
    with pytest.raises(CheckpointException, match="no tensor name matches 'nothing"):
        save(make_state(), writer, planner=make_planner())
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"dedup_save_to_lowest_rank": True},
    ],
    ids=str,
)
def test_options_of_the_planners_work_as_natively(tmp_path, options):
    state = make_state() | {"args": {"lr": (0.1, 1), "names": ["a"]}}
    flat = {key: options[key] for key in options if key.startswith("flatten")}
    found = {}
    for name, (writer, reader) in STORAGES.items():
        save(state, writer(tmp_path / name), planner=DefaultSavePlanner(**options))
        planner = DefaultLoadPlanner(**flat)
        load(reader(tmp_path / name), state, planner=planner)
        found[name] = planner.state_dict
    assert same(found["ours"], found["torch"])
    assert "step" in found["ours"]


def test_a_partial_load_leaves_missing_keys_as_they_are(storage, tmp_path):
    writer, reader = storage
    save(make_state(1), writer(tmp_path / "a"))
    state = make_state() | {"new": torch.full((2,), 7.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=reader(tmp_path / "a"), planner=planner, no_dist=True)
    assert same(state, make_state(1) | {"new": torch.full((2,), 7.0)})


BAD_LOADS = {
    "missing key": {"model": {"other": torch.zeros(1)}},
    "other size": {"model": {"weight": torch.zeros(3, 3)}},
}


@pytest.mark.parametrize("wrong", BAD_LOADS.values(), ids=list(BAD_LOADS))
def test_a_load_that_does_not_fit_fails_with_the_error_of_torch(tmp_path, wrong):
    errors = {}
    for name, (writer, reader) in STORAGES.items():
        save(make_state(), writer(tmp_path / name))
        opened = reader(tmp_path / name)
        errors[name] = find_error(lambda opened=opened: load(opened, wrong))
    assert errors["ours"] == errors["torch"]


def test_a_missing_checkpoint_is_reported_as_natively(storage, tmp_path):
    _, reader = storage
    kind, message = find_error(lambda: load(reader(tmp_path / "none"), make_state()))
    assert kind is AssertionError
    assert message.startswith("metadata is None; global metadata read failed: ")


def test_a_state_loads_without_a_template(storage, tmp_path):
    writer, reader = storage
    save(make_state(2), writer(tmp_path / "a"))
    found = _load_state_dict_from_keys(storage_reader=reader(tmp_path / "a"))
    assert same(found, make_state(2))
    found = _load_state_dict_from_keys("model", storage_reader=reader(tmp_path / "a"))
    assert same(found, {"model": make_state(2)["model"]})


# Arguments of `save` and `load`


class Counter(Stateful):
    """A part of the program with a state of its own."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "history": torch.arange(4)}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_stateful_objects_are_saved_and_restored(storage, tmp_path):
    writer, reader = storage
    model = nn.Linear(3, 3)
    save({"model": model, "counter": Counter(4)}, writer(tmp_path / "a"))
    other, counter = nn.Linear(3, 3), Counter(4)
    counter.count = 0
    state = {"model": other, "counter": counter}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, storage_reader=reader(tmp_path / "a"), planner=planner, no_dist=True)
    assert counter.count == 4
    assert same_bits(other.weight.detach(), model.weight.detach())


def test_checkpoint_id_replaces_the_path(storage, tmp_path):
    writer, reader = storage
    save(make_state(1), writer(tmp_path / "unused"), checkpoint_id=tmp_path / "a")
    assert not (tmp_path / "unused").exists()
    found = load(reader(tmp_path / "unused"), make_state(), checkpoint_id=str(tmp_path / "a"))
    assert same(found, make_state(1))


def test_one_process_may_save_without_collectives(storage, tmp_path):
    writer, reader = storage
    save(make_state(1), writer(tmp_path / "a"), use_collectives=False)
    assert same(load(reader(tmp_path / "a"), make_state()), make_state(1))


NATIVE_OPTIONS = [
    {"single_file_per_rank": True},
    {"sync_files": True},
    {"thread_count": 2},
    {"per_thread_copy_ahead": 10_000_000},
    {"cache_staged_state_dict": False},
    {"overwrite": True},
]


@pytest.mark.parametrize("options", NATIVE_OPTIONS, ids=str)
def test_options_of_the_writer_work_as_natively(storage, tmp_path, options):
    writer, reader = storage
    save(make_state(1), writer(tmp_path / "a", **options))
    assert same(load(reader(tmp_path / "a"), make_state()), make_state(1))


def test_options_of_the_files_of_torch_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="serialization_format"):
        StorageWriter(tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ConfigError, match="sync_files=False is not supported"):
        StorageWriter(tmp_path / "a", sync_files=False)


def test_a_group_of_some_ranks_saves_alone(storage, tmp_path):
    writer, reader = storage
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        state = blank(make_state())
        dcp.save(make_state(3), storage_writer=writer(tmp_path / "a"), process_group=group)
        dcp.load(state, storage_reader=reader(tmp_path / "a"), process_group=group)
    finally:
        dist.destroy_process_group()
    assert same(state, make_state(3))
