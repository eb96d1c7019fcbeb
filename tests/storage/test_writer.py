"""Writing a file: deterministic bytes, alignment, and replacing an existing file."""

import hashlib
import os
import stat
from pathlib import Path

import pytest
import torch
from reliability_tools import ENVIRONMENT, leftovers, read_table, run_program, sample
from safetensors.torch import load_file
from strategies import SAFETENSORS_DTYPES, bits, same_bits, same_tensors

import slimtensors
from slimtensors.errors import ConfigError

DIALECTS = pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])

SAVE_SAMPLE = Path(__file__).parent / "programs" / "save_sample.py"


def large() -> dict[str, torch.Tensor]:
    """Return tensors of several chunks each, so that threads share the work."""
    return {
        f"layer{i}": bits(i, 3_000_000, dtype, density).view(-1, 1000)
        for i, (dtype, density) in enumerate(
            [(torch.bfloat16, 0.5), (torch.float32, 1.0), (torch.int8, 0.1), (torch.bfloat16, 0.0)]
        )
    }


@DIALECTS
def test_the_same_tensors_give_the_same_bytes_on_any_number_of_threads(tmp_path, dialect):
    tensors = large()
    hashes = set()
    for i, threads in enumerate([1, 1, 2, 5, None]):
        path = tmp_path / f"{i}.safetensors"
        slimtensors.save(tensors, path, dialect=dialect, threads=threads)
        hashes.add(hashlib.sha256(path.read_bytes()).hexdigest())
        if i == 0:
            assert same_tensors(slimtensors.load(path), tensors)
    assert len(hashes) == 1


@DIALECTS
def test_the_same_tensors_give_the_same_bytes_in_any_process(tmp_path, dialect):
    slimtensors.save(sample(), tmp_path / "here", dialect=dialect)
    for seed, threads in (("1", 1), ("2", 3)):
        environment = {**ENVIRONMENT, "PYTHONHASHSEED": seed}
        run_program(SAVE_SAMPLE, tmp_path / seed, dialect, threads, env=environment)
        assert (tmp_path / seed).read_bytes() == (tmp_path / "here").read_bytes()


def test_shards_are_the_same_bytes_on_any_number_of_threads(tmp_path):
    tensors = large()
    for folder, threads in (("a", 1), ("b", 4)):
        slimtensors.save(tensors, tmp_path / folder, max_shard_size="5MB", threads=threads)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len(names) > 2
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("preset", ["dense", "sparse"])
def test_every_plain_tensor_is_aligned_in_the_slim_dialect(tmp_path, preset):
    tensors = {
        f"{name}-{count}": bits(count, count, dtype, 0.4 if count == 257 else 1.0)
        for count in (1, 3, 257)
        for name, dtype in SAFETENSORS_DTYPES.items()
    }
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, preset=preset)
    start = len(path.read_bytes()) - max(e["data_offsets"][1] for e in read_table(path).values())
    assert start % 8 == 0
    plain = [s.name for s in slimtensors.inspect(path).tensors if s.codec == "plain"]
    assert len(plain) > 20
    for name in plain:
        begin, _ = read_table(path)[name]["data_offsets"]
        assert (start + begin) % tensors[name].element_size() == 0, name


def test_the_parts_of_every_compressed_tensor_are_aligned(tmp_path):
    tensors = {
        f"{name}-{count}": bits(count, count, dtype, 0.2)
        for count in (555, 1001)
        for name, dtype in SAFETENSORS_DTYPES.items()
    }
    path = tmp_path / "x.safetensors"
    summary = slimtensors.save(tensors, path, preset="sparse")
    coded = [s.name for s in summary.tensors if s.codec != "plain"]
    assert len(coded) > 10
    assert all(read_table(path)[name]["data_offsets"][0] % 8 == 0 for name in coded)


@DIALECTS
def test_tied_tensors_are_stored_once_and_loaded_as_one(tmp_path, dialect):
    x = bits(0, 4096, torch.float32, 0.3).view(64, 64)
    y = torch.arange(10.0)
    tensors = {"x": x, "y": y, "x2": x, "x3": x.view(64, 64), "y2": torch.nn.Parameter(y)}
    path = tmp_path / "x.safetensors"
    summary = slimtensors.save(tensors, path, dialect=dialect)
    assert {s.name for s in summary.tensors if s.codec == "tied"} == {"x2", "x3", "y2"}
    assert {name.split(".")[0] for name in read_table(path)} == {"x", "y"}
    loaded = slimtensors.load(path)
    assert loaded.keys() == tensors.keys()
    assert loaded["x"] is loaded["x2"] is loaded["x3"]
    assert loaded["y"] is loaded["y2"]
    assert same_bits(loaded["x2"], x)
    archive = slimtensors.open(path)
    assert archive.tied() == {"x2": "x", "x3": "x", "y2": "y"}
    assert same_bits(archive.get_tensor("x3"), x)


def test_views_that_only_overlap_are_not_tied(tmp_path):
    x = torch.arange(16.0)
    tensors = {
        "whole": x,
        "head": x[:4],
        "square": x.view(4, 4),
        "turned": x.view(4, 4).T,
        "bits": x.view(torch.int32),
        "none": x[:0],
        "none too": x[:0],
    }
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    loaded = slimtensors.load(tmp_path / "x.safetensors")
    assert same_tensors(loaded, tensors)
    assert len({id(value) for value in loaded.values()}) == len(tensors)


def test_lazy_conjugates_and_negatives_are_resolved(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"z": z, "conjugate": z.conj(), "imaginary": z.conj().imag}
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    loaded = slimtensors.load(tmp_path / "x.safetensors")
    assert same_bits(loaded["conjugate"], z.conj().resolve_conj())
    assert same_bits(loaded["imaginary"], z.conj().imag.resolve_neg())


def test_saving_follows_symlinks(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    for value in (1.0, 2.0):  # the first creates what the link points to
        slimtensors.save({"x": torch.tensor(value)}, link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert slimtensors.load(target)["x"] == value
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "far",
        "link.safetensors",
        "real.safetensors",
    ]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_replaced_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "x.safetensors"
    slimtensors.save({"x": torch.ones(1)}, path)
    path.chmod(mode)
    slimtensors.save({"x": torch.zeros(1)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_default_mode(tmp_path):
    (tmp_path / "other").touch()
    slimtensors.save({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_an_open_archive_can_read_a_file_that_was_replaced(tmp_path):
    path = tmp_path / "x.safetensors"
    old = {"x": torch.arange(100_000)}
    slimtensors.save(old, path)
    archive = slimtensors.open(path)
    slimtensors.save({"y": torch.zeros(3)}, path)
    assert same_bits(archive.get_tensor("x"), old["x"])
    assert list(slimtensors.load(path)) == ["y"]


def test_a_file_that_is_not_regular_is_not_replaced(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="fifo"):
        slimtensors.save({"x": torch.ones(1)}, fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["fifo"]


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        slimtensors.save({"x": torch.ones(1)}, tmp_path / "nowhere" / "x.safetensors")


def test_two_tensors_that_would_get_the_same_stored_name_are_refused(tmp_path):
    x = torch.zeros(64, 64)
    tensors = {"x": x, "x.bitmask": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"x\.bitmask"):
        slimtensors.save(tensors, tmp_path / "x.safetensors", dialect="compressed-tensors")
    assert list(tmp_path.iterdir()) == []
    slimtensors.save(tensors, tmp_path / "x.safetensors", dialect="slim")
    assert same_tensors(slimtensors.load(tmp_path / "x.safetensors"), tensors)


def test_bytes_that_look_like_a_compressed_tensor_are_loaded_as_bytes(tmp_path):
    slimtensors.save({"x": torch.zeros(500)}, tmp_path / "inner.safetensors")
    inner = load_file(tmp_path / "inner.safetensors")["x"]
    assert inner.dtype is torch.uint8
    assert bytes(inner[:4].tolist()) == b"SLIM"
    for preset in ("dense", "sparse"):
        for dialect in ("slim", "compressed-tensors"):
            path = tmp_path / f"{preset}-{dialect}.safetensors"
            slimtensors.save({"x": inner}, path, preset=preset, dialect=dialect)
            assert same_bits(slimtensors.load(path)["x"], inner)


def test_nothing_but_the_file_is_left_in_the_folder(tmp_path):
    slimtensors.save(sample(), tmp_path / "x.safetensors")
    assert leftovers(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
