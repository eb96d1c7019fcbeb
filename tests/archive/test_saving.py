"""Saving: values, paths and options."""

import pytest
import torch
from archive.made import sparse
from safetensors.torch import load_file, save_file
from strategies import same_bits, same_tensors
from torch import nn

import slimtensors
from slimtensors.archive import estimate
from slimtensors.errors import ConfigError, UnsupportedTensorError


def test_files_of_other_programs_load(tmp_path, tensors):
    save_file(tensors, tmp_path / "x", metadata={"format": "pt", "note": "mine"})
    back = slimtensors.load(tmp_path / "x")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())
    assert {t.codec for t in slimtensors.inspect(tmp_path / "x").tensors} == {"plain"}


def test_a_plain_file_of_ours_is_read_by_others(tmp_path, tensors):
    slimtensors.save(tensors, tmp_path / "x", preset="dense")
    back = load_file(tmp_path / "x")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())


def test_parameters_gradients_and_views_are_saved_as_their_values(path):
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[:, ::2] = 0
        layer.weight[:, 1] = 0
    x = torch.randn(32, 32, dtype=torch.complex64)
    x[:, ::2] = 0
    computed = layer.weight * 2
    tensors = {
        "parameter": layer.weight,
        "bias": layer.bias,
        "computed": computed,
        "buffer": nn.Buffer(torch.eye(64)),
        "conjugate": x.conj(),
        "conjugate across": x.t().conj(),
        "imaginary part": x.conj().imag,
        "real part": x.real,
        "across": layer.weight.t(),
        "every other": layer.weight[::2, ::2],
        "repeated": torch.eye(4)[:1].expand(64, 4),
        "one of two": torch.arange(2.0)[::2],
        "none of two": torch.arange(2.0)[2::2],
        "one column": torch.eye(64)[:1, 5:6],
    }
    assert tensors["imaginary part"].is_neg()
    slimtensors.save(tensors, path)
    back = slimtensors.load(path)
    assert same_tensors(back, tensors)
    assert not any(y.requires_grad or y.is_conj() or y.is_neg() for y in back.values())
    assert all(y.is_contiguous() for y in back.values())
    assert layer.weight.requires_grad


def test_a_module_loads_its_saved_state(path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Conv2d(3, 4, 3))
    slimtensors.save(model.state_dict(), path)
    model.load_state_dict(slimtensors.load(path), strict=True)


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(4).to_sparse(), "layout torch.sparse_coo cannot be stored; store x.to_dense"),
        (
            torch.quantize_per_tensor,
            "cannot store values of type builtins.builtin_function_or_method",
        ),
        (memoryview(b"x"), "cannot store values of type builtins.memoryview"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.ones(3).as_subclass(Odd), "tensor type Odd"),
    ],
)
def test_unsupported_values_raise_with_their_name_before_anything_is_written(path, value, words):
    path.write_text("old")
    with pytest.raises(UnsupportedTensorError, match=r"layer\.odd: ") as caught:
        slimtensors.save({"fine": torch.eye(64), "layer.odd": value}, path)
    assert words in str(caught.value)
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_an_invalid_name_raises(path, name):
    with pytest.raises(UnsupportedTensorError, match="name"):
        slimtensors.save({name: torch.ones(3)}, path)
    x = torch.ones(3)
    with pytest.raises(UnsupportedTensorError, match="name"):
        slimtensors.save({"tied": x, name: x}, path)


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_an_empty_state_is_saved(path, dialect):
    summary = slimtensors.save({}, path, dialect=dialect)
    assert slimtensors.load(path) == {}
    assert slimtensors.verify(path)
    assert summary.ratio == 1.0
    assert load_file(path) == {}


def test_saving_replaces_a_file_and_keeps_its_mode(tensors, path):
    path.write_text("something else")
    path.chmod(0o600)
    slimtensors.save(tensors, path)
    assert same_tensors(slimtensors.load(path), tensors)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_into_a_folder_writes_the_model_there(tensors, tmp_path):
    summary = slimtensors.save(tensors, tmp_path)
    assert summary.files == [str(tmp_path / "model.safetensors")]
    assert same_tensors(slimtensors.load(tmp_path), tensors)


def test_saving_into_a_missing_folder_is_an_error(tensors, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        slimtensors.save(tensors, tmp_path / "no" / "x.safetensors")


@pytest.mark.parametrize("limit", [None, "1GB"])
def test_an_unknown_url_scheme_raises_and_creates_no_folder(tensors, tmp_path, monkeypatch, limit):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nosuch://bucket/x"):
        slimtensors.save(tensors, "nosuch://bucket/x", max_shard_size=limit)
    assert list(tmp_path.iterdir()) == []


def test_paths_may_be_strings(tensors, path):
    slimtensors.save(tensors, str(path))
    assert same_tensors(slimtensors.load(str(path)), tensors)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread_raises(tensors, saved, path, threads):
    with pytest.raises(ConfigError, match=f"threads must be at least 1, got {threads}"):
        slimtensors.save(tensors, path, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        slimtensors.load(saved, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        slimtensors.verify(saved, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        estimate(tensors, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_does_not_change_the_file(tensors, tmp_path, threads):
    tensors |= {f"large {i}": sparse(600, 600, seed=i) for i in range(6)}
    slimtensors.save(tensors, tmp_path / "one", threads=1)
    slimtensors.save(tensors, tmp_path / "some", threads=threads)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "some").read_bytes()
    assert same_tensors(slimtensors.load(tmp_path / "some", threads=threads), tensors)


@pytest.mark.parametrize(
    ("size", "files"),
    [
        (20_000, 5),
        ("20000", 5),
        ("20kB", 5),
        ("20 KB", 5),
        ("0.02MB", 5),
        ("19.53125KiB", 5),
        ("40K", 3),
        ("1GB", 1),
        ("5TiB", 1),
    ],
)
def test_a_shard_size_can_be_a_number_or_a_string(tmp_path, size, files):
    tensors = {f"x{i}": torch.randn(64, 64) for i in range(5)}
    summary = slimtensors.save(tensors, tmp_path / "m", max_shard_size=size)
    assert len(summary.files) == files
    assert same_tensors(slimtensors.load(tmp_path / "m"), tensors)
    names = sorted(p.name for p in (tmp_path / "m").iterdir())
    if files > 1:
        assert names[0] == f"model-00001-of-0000{files}.safetensors"
        assert names[-1] == "model.safetensors.index.json"
        assert slimtensors.load(tmp_path / "m" / names[-1]).keys() == tensors.keys()


@pytest.mark.parametrize("size", ["", "5XB", "GB", "-5GB", "5GB5", "1e3", 0, -1, "0", "0.1"])
def test_an_invalid_shard_size_raises(tmp_path, tensors, size):
    with pytest.raises(ConfigError, match="size"):
        slimtensors.save(tensors, tmp_path / "m", max_shard_size=size)


def test_progress_counts_all_bytes(tensors, path):
    done = []
    slimtensors.save(tensors, path, progress=done.append)
    assert sum(done) == sum(x.nbytes for x in tensors.values())
    done.clear()
    slimtensors.verify(path, progress=done.append)
    assert sum(done) == sum(t.stored_bytes for t in slimtensors.inspect(path).tensors)
