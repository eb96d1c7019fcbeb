"""Shards of one save: the generation they share, readers and writers at the same time."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from reliability_tools import edit_manifest, leftovers, run_program, split

import slimtensors
from slimtensors.errors import FormatError, MixedShardsError
from slimtensors.folder.compress import compress_folder

PROGRAMS = Path(__file__).parent / "programs"


def make_state(value: int, count: int = 6) -> dict[str, torch.Tensor]:
    return {f"x{i}": torch.full((100,), value * 10 + i) for i in range(count)}


def save(folder: Path, value: int, **options: object) -> None:
    slimtensors.save(make_state(value), folder, preset="dense", max_shard_size=1600, **options)


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def read_manifest(path: Path) -> dict:
    return json.loads(split(path.read_bytes())[0]["__metadata__"]["slimtensors"])


def test_all_shards_of_a_model_have_the_same_generation(tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 1)
    save(tmp_path / "c", 2)
    found = {
        name: {read_manifest(path)["generation"] for path in shards(tmp_path / name)}
        for name in "abc"
    }
    assert all(len(generations) == 1 for generations in found.values())
    assert found["a"] == found["b"]
    assert found["a"] != found["c"]
    assert {read_manifest(path)["version"] for path in shards(tmp_path / "a")} == {2}


def test_the_generation_depends_on_every_tensor_and_tied_name(tmp_path):
    x, y = torch.zeros(200), torch.arange(200.0)
    states = [{"x": x, "y": y}, {"x": x, "y": y + 1}, {"x": x, "y": y, "z": x}, {"y": y, "x": x}]
    found = set()
    for i, state in enumerate(states):
        slimtensors.save(state, tmp_path / str(i), max_shard_size=100)
        found |= {read_manifest(path)["generation"] for path in shards(tmp_path / str(i))}
    assert len(found) == len(states)


def test_a_single_file_has_no_generation(tmp_path):
    slimtensors.save(make_state(1), tmp_path / "x.safetensors")
    slimtensors.save(make_state(1), tmp_path / "folder", max_shard_size="1MB")
    for path in (tmp_path / "x.safetensors", tmp_path / "folder" / "model.safetensors"):
        assert read_manifest(path)["version"] == 1
        assert "generation" not in read_manifest(path)


@pytest.mark.parametrize("other", ["another save", "no generation"])
def test_a_shard_of_another_save_is_refused(tmp_path, other):
    save(tmp_path / "a", 1)
    first, second, third = shards(tmp_path / "a")
    if other == "another save":
        save(tmp_path / "b", 2)
        shutil.copy(shards(tmp_path / "b")[1], second)
    else:
        second.write_bytes(edit_manifest(second.read_bytes(), lambda m: m.pop("generation")))
    for open_model in (
        lambda: slimtensors.load(tmp_path / "a"),
        lambda: slimtensors.Archive.from_files([first, second, third]),
    ):
        with pytest.raises(MixedShardsError, match=f"{second.name}.*{first.name}"):
            open_model()
    assert len(slimtensors.load(second)) == 2  # alone it is whole


def test_shards_of_version_1_still_load(tmp_path):
    save(tmp_path, 1)
    for path in shards(tmp_path):
        path.write_bytes(
            edit_manifest(path.read_bytes(), lambda m: (m.pop("generation"), m.update(version=1)))
        )
    loaded = slimtensors.load(tmp_path)
    assert all(torch.equal(loaded[name], x) for name, x in make_state(1).items())


def check_readers(folder: Path, count: int) -> None:
    output = run_program(PROGRAMS / "load_while_replaced.py", folder, count, timeout=600)
    for kind, found in json.loads(output).items():
        assert set(found) == {"1", "2"}, kind
        assert sum(found.values()) >= count, kind


def test_a_compressed_folder_has_one_generation(tmp_path):
    save(tmp_path / "model", 1)
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("a", "b"):
        compress_folder(tmp_path / "model", tmp_path / name)
    found = {read_manifest(path).get("generation") for path in shards(tmp_path / "a")}
    assert len(found) == 1
    assert None not in found
    for a, b in zip(shards(tmp_path / "a"), shards(tmp_path / "b"), strict=True):
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.crash
def test_a_reader_never_gets_shards_of_two_models(tmp_path):
    check_readers(tmp_path, 100)


@pytest.mark.crash
@pytest.mark.long
def test_no_reader_of_thousands_gets_shards_of_two_models(tmp_path):
    check_readers(tmp_path, 5000)


@pytest.mark.crash
def test_two_writers_of_one_folder_leave_one_whole_model_and_no_other_files(tmp_path):
    value = int(run_program(PROGRAMS / "two_writers.py", tmp_path / "model", 40))
    loaded = slimtensors.load(tmp_path / "model")
    assert all(torch.equal(loaded[name], x) for name, x in make_state(value).items())
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    listed = {*index["weight_map"].values(), "model.safetensors.index.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == listed
    assert leftovers(tmp_path) == []


def test_many_shards_need_few_descriptors(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    used = max(int(path.name) for path in descriptors.iterdir()) if descriptors.exists() else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    try:
        slimtensors.save(make_state(1, 200), tmp_path, preset="dense", max_shard_size=800)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(shards(tmp_path)) == 200


def test_a_folder_that_is_replaced_while_it_is_opened_is_opened_again(tmp_path, monkeypatch):
    """The first shard is opened, then another process saves, then the others are opened."""
    from slimtensors.storage import reader

    save(tmp_path, 1)
    open_file, opened = reader.open_file, []

    def open_and_save(where, key=None):
        opened.append(open_file(where, key))
        if len(opened) == 1:
            save(tmp_path, 2)
        return opened[-1]

    monkeypatch.setattr(reader, "open_file", open_and_save)
    assert torch.equal(slimtensors.load(tmp_path)["x0"], make_state(2)["x0"])


def test_a_shard_that_is_missing_is_reported_once_and_named(tmp_path):
    save(tmp_path, 1)
    shards(tmp_path)[1].unlink()
    with pytest.raises((FileNotFoundError, FormatError), match="model-00002"):
        slimtensors.load(tmp_path)
