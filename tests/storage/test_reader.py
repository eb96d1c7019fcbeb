"""Reading valid files, folders and indexes, and errors for missing ones."""

import json
from pathlib import Path

import pytest
import torch
from reliability_tools import sample
from safetensors.torch import load_file, save_file
from strategies import bits, same_bits, same_tensors

import slimtensors
from slimtensors.errors import FormatError
from slimtensors.storage.location import LocalLocation, MappedFile

INDEX = "model.safetensors.index.json"


def stock_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model as transformers would, with safetensors alone."""
    tensors = {f"t{i}": bits(i, 100, torch.bfloat16, 0.5) for i in range(6)}
    shards = {
        f"model-0000{i}-of-00003.safetensors": [f"t{2 * i - 2}", f"t{2 * i - 1}"] for i in (1, 2, 3)
    }
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_shards_of_other_programs_are_read(tmp_path):
    tensors = stock_shards(tmp_path)
    assert same_tensors(slimtensors.load(tmp_path), tensors)
    assert same_tensors(slimtensors.load(str(tmp_path / INDEX)), tensors)
    assert slimtensors.open(tmp_path).keys() == list(tensors)
    assert slimtensors.verify(tmp_path)


def test_a_folder_with_one_file_of_any_name_is_read(tmp_path):
    slimtensors.save(sample(), tmp_path / "adapter.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert slimtensors.load(tmp_path).keys() == sample().keys()


def test_a_folder_with_one_index_of_any_name_is_read(tmp_path):
    tensors = stock_shards(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "diffusion.safetensors.index.json")
    assert same_tensors(slimtensors.load(tmp_path), tensors)


def test_the_model_is_found_among_other_files(tmp_path):
    slimtensors.save(sample(), tmp_path / "model.safetensors")
    slimtensors.save({"x": torch.ones(1)}, tmp_path / "adapter.safetensors")
    assert slimtensors.load(tmp_path).keys() == sample().keys()


def test_the_error_for_a_folder_without_safetensors_lists_its_files(tmp_path):
    with pytest.raises(FormatError, match="contains no files") as caught:
        slimtensors.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FormatError, match=r"contains PyTorch weights \(pytorch_model\.bin"):
        slimtensors.load(tmp_path)


def test_a_folder_with_several_candidates_is_refused(tmp_path):
    for name in ("a", "b"):
        slimtensors.save(sample(), tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match=r"name one of a\.safetensors, b\.safetensors"):
        slimtensors.load(tmp_path)


@pytest.mark.parametrize("call", [slimtensors.load, slimtensors.open, slimtensors.verify])
def test_a_missing_file_is_not_found(tmp_path, call):
    with pytest.raises(FileNotFoundError, match="nothing"):
        call(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="nothing"):
        call(tmp_path / "nothing.json")


def test_an_unknown_name_is_a_key_error_with_name_and_file(tmp_path):
    slimtensors.save(sample(), tmp_path / "x.safetensors")
    archive = slimtensors.open(tmp_path / "x.safetensors")
    assert "nope" not in archive
    for ask in (archive.get_tensor, archive.info, archive.spec, lambda n: archive.select([n])):
        with pytest.raises(KeyError, match=r"x\.safetensors.*'nope'"):
            ask("nope")


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_a_tensor_can_be_described_without_decoding_it(tmp_path, dialect):
    slimtensors.save(sample(), tmp_path / "x.safetensors", dialect=dialect)
    archive = slimtensors.open(tmp_path / "x.safetensors")
    assert len(archive) == len(sample())
    for name, x in sample().items():
        spec, info = archive.spec(name), archive.info(name)
        assert (spec.dtype, spec.shape) == (x.dtype, tuple(x.shape))
        assert info.dense_bytes == x.nbytes
        assert info.shape == tuple(x.shape)
        assert info.file == str(tmp_path / "x.safetensors")
        assert same_bits(archive.get_tensor(name), x)


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_loaded_tensors_do_not_depend_on_the_file(tmp_path, dialect):
    tensors = {
        **sample(),
        "large": bits(0, 300_000, torch.float32, 0.5),
        "full": torch.ones(99_999),
    }
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, dialect=dialect)
    loaded = slimtensors.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place, where a mapping would see it
        file.write(b"\xff" * size)
    assert all(same_bits(loaded[name], x) for name, x in tensors.items())
    for x in loaded.values():
        x.zero_()  # and it can be written


def test_a_file_of_torch_save_is_recognized(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: .*torch\.save"):
        slimtensors.load(tmp_path / "x.pt")


def test_every_tensor_is_yielded_once_and_in_order(tmp_path):
    tensors = {f"t{i}": bits(i, 50_000 * (i % 3), torch.float32, 0.3) for i in range(30)}
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    archive = slimtensors.open(tmp_path / "x.safetensors")
    for threads in (1, 2, 7):
        items = list(archive.items(threads=threads))
        assert same_tensors(dict(items), tensors)
        assert len(items) == len(tensors)


def test_iterating_may_stop_at_any_time(tmp_path):
    tensors = {f"t{i}": torch.ones(200_000) for i in range(12)}
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    for stop in (1, 5):
        items = slimtensors.open(tmp_path / "x.safetensors").items(threads=2)
        assert [next(items)[0] for _ in range(stop)] == list(tensors)[:stop]
        items.close()


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_files_open_as_one_archive_with_the_file_of_each_entry(tmp_path, dialect):
    slimtensors.save(sample(), tmp_path / "model", dialect=dialect, max_shard_size=300)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 1
    archive = slimtensors.Archive.from_files(shards)
    assert set(archive) == set(sample())
    assert all(same_bits(archive.get_tensor(name), x) for name, x in sample().items())
    stored = {key for shard in shards for key in load_file(shard)}
    assert archive.owners.keys() == stored
    assert {*archive.owners.values(), *archive.tied()} == set(sample())
    assert any(key != name for key, name in archive.owners.items()) == (dialect != "slim")


def test_a_blob_can_be_written_again_unchanged(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save({"x": bits(0, 4096, torch.float32, 0.5), "y": torch.ones(3)}, path)
    archive = slimtensors.open(path)
    packed = archive.read_packed("x")
    assert str(packed.plan) == archive.info("x").codec
    (piece,) = packed.pieces
    assert torch.equal(piece.chunks[0], load_file(path)["x"])
    assert archive.read_packed("y") is None


def test_sequential_reads_prefetch_the_next_pages(tmp_path, monkeypatch):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(400 << 20)  # a hole, so nothing is written
    fetched = []

    def note(self, advice, begin, end):
        fetched.append((advice, begin >> 20, end >> 20))

    monkeypatch.setattr(MappedFile, "_advise", note)
    file = LocalLocation(path).open()
    mib = 1 << 20
    for i in range(0, 200, 10):
        file.read(i * mib, (i + 10) * mib)
    reached = 0
    for _, begin, end in fetched:
        assert begin == reached, "nothing twice, no gaps"
        reached = end
    assert 200 < reached <= 264
    assert len(fetched) < 10, "a call for several tensors, not one for each"
    fetched.clear()
    file.read(350 * mib, 360 * mib)
    assert fetched == [("MADV_WILLNEED", 350, 360)], "random access is not prefetched"
