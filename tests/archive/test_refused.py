"""Failed saves raise with a name and change nothing."""

import os

import pytest
import torch
from reliability_tools import leftovers, sample

import slimtensors
from slimtensors.errors import SlimError, UnsupportedTensorError


class Special(torch.Tensor):
    """A tensor subclass that archives do not support."""


def resized(size: int) -> torch.Tensor:
    x = torch.ones(1000)
    x.untyped_storage().resize_(size)
    return x


CANNOT_BE_STORED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(Special),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "freed": lambda: resized(0),
    "shrunk": lambda: resized(16),
    "shrunk by one": lambda: resized(3999),
    "memoryview": lambda: memoryview(b"x"),
    "inside": lambda: [{"x": torch.eye(3).to_sparse()}],
}


@pytest.mark.filterwarnings("ignore:.*(CSR|nested tensors|quantiz):UserWarning")
@pytest.mark.parametrize("kind", CANNOT_BE_STORED)
@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
@pytest.mark.parametrize("shards", [None, "1MB"])
def test_an_unsupported_tensor_raises_before_anything_is_written(tmp_path, kind, dialect, shards):
    path = tmp_path / "model"
    tensors = {"good": torch.ones(3), "bad.one": CANNOT_BE_STORED[kind](), "last": torch.ones(3)}

    def told(done: int) -> None:
        pytest.fail("something was written")

    options = {"dialect": dialect, "max_shard_size": shards, "progress": told}
    with pytest.raises(UnsupportedTensorError, match=r"bad\.one"):
        slimtensors.save(tensors, path, **options)
    assert list(tmp_path.iterdir()) == []
    slimtensors.save(sample(), path, max_shard_size=shards)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UnsupportedTensorError, match=r"bad\.one"):
        slimtensors.save(tensors, path, **options)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("__metadata__", "__metadata__"),
        ("x\ud800", r"\\ud800"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tied", [False, True])
def test_an_invalid_name_raises_before_anything_is_written(tmp_path, name, said, tied):
    x = torch.ones(3)
    with pytest.raises(SlimError, match=said):
        slimtensors.save({"good": x, name: x if tied else x.clone()}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "nope"},
        {"dialect": "nope"},
        {"threads": 0},
        {"max_shard_size": "many"},
        {"preset": slimtensors.chain(slimtensors.Bitmask(), nope=slimtensors.Dense())},
        {"preset": slimtensors.Plan(slimtensors.Bitmask24())},
        {"preset": slimtensors.Plan(slimtensors.Dense()), "dialect": "compressed-tensors"},
    ],
    ids=lambda options: "-".join(options),
)
def test_an_invalid_option_changes_nothing(tmp_path, options):
    path = tmp_path / "x.safetensors"
    slimtensors.save(sample(), path)
    before = path.read_bytes()
    with pytest.raises(SlimError):
        slimtensors.save({"x": torch.arange(1.0, 65.0).view(8, 8)}, path, **options)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_error_while_choosing_a_plan_changes_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save(sample(), path)
    before = path.read_bytes()

    def choose(name: str, x: torch.Tensor) -> None:
        if name == "flags":
            raise LookupError(name)

    for threads in (1, 3):
        with pytest.raises(LookupError, match="flags"):
            slimtensors.save(sample(), path, preset=choose, threads=threads)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_damaged_source_does_not_change_the_target(tmp_path):
    source, target = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    slimtensors.save(sample(), source)
    slimtensors.save(sample(), target)
    before = target.read_bytes()
    with source.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(SlimError, match=r"source\.safetensors: flags"):
        slimtensors.save(slimtensors.open(source), target)
    assert target.read_bytes() == before
    assert leftovers(tmp_path) == []
