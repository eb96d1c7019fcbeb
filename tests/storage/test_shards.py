"""Model folders: shards, their index, and replacing a model."""

import json
from pathlib import Path

import pytest
import torch
from reliability_tools import leftovers, read_table, sample
from safetensors import safe_open
from safetensors.torch import load_file
from strategies import bits, same_bits, same_tensors

import slimtensors
from slimtensors.errors import ConfigError
from slimtensors.storage import parse_size

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def layers(seed: int, count: int = 12) -> dict[str, torch.Tensor]:
    """Return tensors of 8000 bytes; half of the items of every other one are zero."""
    return {
        f"layer{i}": bits(seed + i, 2000, torch.float32, 0.5 if i % 2 else 1.0).view(40, 50)
        for i in range(count)
    }


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_index(folder: Path) -> dict:
    return json.loads((folder / INDEX).read_text())


def list_shards(folder: Path) -> list[str]:
    return sorted(set(read_index(folder)["weight_map"].values()))


def assert_contains(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Assert that the folder contains exactly this model, and no files of another."""
    loaded = slimtensors.load(folder)
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], x) for name, x in tensors.items())
    expected = {INDEX, *list_shards(folder)} if (folder / INDEX).exists() else {SINGLE}
    assert set(files(folder)) == expected


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
@pytest.mark.parametrize("preset", ["dense", "sparse"])
def test_the_index_contains_the_file_of_every_stored_tensor(tmp_path, dialect, preset):
    tensors = layers(0)
    options = {"preset": preset, "dialect": dialect}
    slimtensors.save(tensors, tmp_path, max_shard_size="20kB", **options)
    index, stored, size = read_index(tmp_path), {}, 0
    for shard in list_shards(tmp_path):
        for name, x in load_file(tmp_path / shard).items():
            assert name not in stored
            stored[name] = shard
            size += x.nbytes
    assert len(list_shards(tmp_path)) > 2
    assert index["weight_map"] == stored
    assert index["metadata"] == {"total_size": size}
    assert_contains(tmp_path, tensors)
    assert same_tensors(slimtensors.load(tmp_path / INDEX), slimtensors.load(tmp_path))


def test_shards_are_named_as_transformers_names_them(tmp_path):
    slimtensors.save(layers(0, 6), tmp_path, preset="dense", max_shard_size="16kB")
    assert list_shards(tmp_path) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_no_shard_is_larger_than_allowed_unless_one_tensor_is(tmp_path):
    tensors = {**layers(0), "huge": torch.ones(10_000)}
    slimtensors.save(tensors, tmp_path, preset="dense", max_shard_size=20_000)
    for shard in list_shards(tmp_path):
        table = read_table(tmp_path / shard)
        data = max(entry["data_offsets"][1] for entry in table.values())
        assert data <= 20_000 or list(table) == ["huge"]


def test_the_index_lists_tensors_in_the_order_of_the_caller(tmp_path):
    tensors = {"z": torch.ones(900, dtype=torch.int8), **layers(0), "a": torch.ones(99).double()}
    slimtensors.save(tensors, tmp_path, preset="dense", max_shard_size="20kB")
    assert list(read_index(tmp_path)["weight_map"]) == list(tensors)


def test_plain_shards_are_read_by_safetensors_alone(tmp_path):
    tensors = layers(0)
    slimtensors.save(tensors, tmp_path, preset="dense", max_shard_size="20kB")
    for name, shard in read_index(tmp_path)["weight_map"].items():
        with safe_open(tmp_path / shard, framework="pt") as file:
            assert same_bits(file.get_tensor(name), tensors[name])


def test_a_model_that_fits_one_shard_is_one_file(tmp_path):
    slimtensors.save(layers(0), tmp_path / "new" / "folder", max_shard_size="1GB")
    assert files(tmp_path / "new" / "folder") == [SINGLE]


def test_an_existing_folder_takes_a_single_file(tmp_path):
    slimtensors.save(layers(0), tmp_path)
    assert files(tmp_path) == [SINGLE]
    assert_contains(tmp_path, layers(0))


SIZES = {"single": None, "few": "40kB", "many": "10kB"}


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("third", SIZES)
def test_a_folder_contains_exactly_the_last_model(tmp_path, first, second, third):
    for seed, size in ((0, first), (100, second), (200, third)):
        slimtensors.save(layers(seed), tmp_path, max_shard_size=SIZES[size])
        assert_contains(tmp_path, layers(seed))


def test_new_shards_never_overwrite_existing_files(tmp_path):
    slimtensors.save(layers(0, 6), tmp_path, preset="dense", max_shard_size="16kB")
    names = list_shards(tmp_path)
    (tmp_path / INDEX).unlink()  # the shards now belong to no model and must not be touched
    before = {name: (tmp_path / name).read_bytes() for name in names}
    slimtensors.save(layers(50, 6), tmp_path, preset="dense", max_shard_size="16kB")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert not set(list_shards(tmp_path)) & set(names)
    loaded = slimtensors.load(tmp_path)
    assert all(same_bits(loaded[name], x) for name, x in layers(50, 6).items())


def test_an_open_archive_can_read_shards_that_were_replaced(tmp_path):
    slimtensors.save(layers(0), tmp_path, max_shard_size="20kB")
    archive = slimtensors.open(tmp_path)
    slimtensors.save(layers(100), tmp_path, max_shard_size="20kB")
    assert all(same_bits(archive.get_tensor(name), x) for name, x in layers(0).items())


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"not ours")
    for size in ("20kB", None, "10kB"):
        slimtensors.save(layers(0), tmp_path, max_shard_size=size)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "other.safetensors").read_bytes() == b"not ours"


def test_an_invalid_index_is_replaced(tmp_path):
    (tmp_path / INDEX).write_text("{ not json")
    for size in ("20kB", None):
        slimtensors.save(layers(0), tmp_path, max_shard_size=size)
        assert_contains(tmp_path, layers(0))


def test_replacing_a_model_removes_only_safetensors_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weight_map = {"x": "config.json", "y": "tokenizer/vocab.txt"}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("a")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    slimtensors.save(layers(0), tmp_path)
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "tokenizer" / "vocab.txt").exists()


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_tied_tensors_are_stored_once_in_shards_and_loaded_as_one(tmp_path, dialect):
    tensors = layers(0)
    tensors |= {f"tied{i}": tensors[f"layer{i}"] for i in range(12)}
    slimtensors.save(tensors, tmp_path, dialect=dialect, max_shard_size="20kB")
    assert len(list_shards(tmp_path)) > 2
    assert {name.split(".")[0] for name in read_index(tmp_path)["weight_map"]} == layers(0).keys()
    loaded = slimtensors.load(tmp_path)
    assert loaded.keys() == tensors.keys()
    for i in range(12):
        assert loaded[f"tied{i}"] is loaded[f"layer{i}"]
        assert same_bits(loaded[f"tied{i}"], tensors[f"layer{i}"])


def test_the_parts_of_one_tensor_stay_in_one_shard(tmp_path):
    tensors = layers(0)
    slimtensors.save(tensors, tmp_path, dialect="compressed-tensors", max_shard_size="7kB")
    weight_map = read_index(tmp_path)["weight_map"]
    assert any(name.endswith(".bitmask") for name in weight_map)
    for name in tensors:
        homes = {shard for key, shard in weight_map.items() if key.split(".")[0] == name}
        assert len(homes) == 1


def test_every_small_limit_gives_a_whole_model(tmp_path):
    for limit in (1, 7, 16, 100, 481, 1000):
        slimtensors.save(sample(), tmp_path / str(limit), max_shard_size=limit)
        loaded = slimtensors.load(tmp_path / str(limit))
        assert loaded.keys() == sample().keys()
        assert all(same_bits(loaded[name], x) for name, x in sample().items())
        assert leftovers(tmp_path) == []


@pytest.mark.parametrize("size", [0, -1, "0", "lots", "5 parsecs", "", "-5GB"])
def test_an_invalid_shard_size_is_refused(tmp_path, size):
    with pytest.raises(ConfigError, match="size"):
        slimtensors.save(sample(), tmp_path / "folder", max_shard_size=size)
    assert not (tmp_path / "folder").exists()


def test_shards_do_not_replace_a_file(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(ConfigError, match="x is a file"):
        slimtensors.save(sample(), tmp_path / "x", max_shard_size="1MB")
    assert (tmp_path / "x").read_bytes() == b"old"


def test_sizes_with_units_are_parsed():
    sizes = {"5GB": 5 * 10**9, "512MiB": 512 << 20, "1.5 kB": 1500, "700": 700, 12: 12, None: None}
    assert {size: parse_size(size) for size in sizes} == sizes
