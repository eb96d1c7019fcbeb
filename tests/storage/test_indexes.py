"""Malformed indexes, and indexes with paths out of their folder."""

from pathlib import Path

import pytest
import torch
from forging import INDEX, write_index
from reliability_tools import assert_refused, sample

import slimtensors
from slimtensors.errors import FormatError

pytestmark = pytest.mark.hostile


@pytest.fixture
def secret(tmp_path) -> Path:
    """Return a valid file outside of the model folder."""
    (tmp_path / "model").mkdir()
    slimtensors.save(sample(), tmp_path / "secret.safetensors")
    return tmp_path / "secret.safetensors"


TRICKS = [
    "{secret}",
    "../secret.safetensors",
    "a/../../secret.safetensors",
    "./../secret.safetensors",
    "..",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\server\\share\\secret.safetensors",
    "file://{secret}",
    "file:{secret}",
    "memory://secret.safetensors",
    "s3://bucket/secret.safetensors",
    "https://127.0.0.1/secret.safetensors",
    "//{secret}",
    "",
    ".",
    "./",
    "/",
    "\0",
    "model.safetensors\0.json",
    "~root\0",
    None,
    True,
    7,
    1.5,
    [],
    ["a.safetensors"],
    {},
    {"a": "b"},
    "\ud800.safetensors",
]


@pytest.mark.parametrize("trick", TRICKS, ids=repr)
def test_no_name_in_an_index_leads_out_of_its_folder(secret, trick):
    folder = secret.parent / "model"
    (folder / "a").mkdir()
    name = trick.format(secret=secret) if isinstance(trick, str) else trick
    write_index(folder, {"x": name})
    assert_refused(folder, where=folder / INDEX)
    assert_refused(folder / INDEX)


@pytest.mark.parametrize("weight_map", [None, True, 7, "text", [], ["a.safetensors"], {}], ids=repr)
def test_an_invalid_weight_map_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    assert_refused(tmp_path / INDEX)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        "\ufeff{}",
        "[" * 10**5,
        '{"weight_map":' * 10**5,
        "9" * 5000,
    ],
    ids=lambda t: t[:9],
)
def test_an_invalid_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert_refused(tmp_path / INDEX)


def test_an_index_in_bad_utf8_is_refused(tmp_path):
    (tmp_path / INDEX).write_bytes(b'{"weight_map":{"x":"\xff"}}')
    assert_refused(tmp_path / INDEX)


def test_a_shard_that_is_missing_is_named(tmp_path):
    slimtensors.save(sample(), tmp_path / "a.safetensors")
    write_index(tmp_path, {"steps": "a.safetensors", "y": "gone.safetensors"})
    for kind in (FileNotFoundError, FormatError):
        with pytest.raises(kind, match=r"index\.json: .*gone\.safetensors is listed"):
            slimtensors.load(tmp_path)


def test_a_shard_with_a_name_that_is_too_long_is_refused(tmp_path):
    slimtensors.save(sample(), tmp_path / "a.safetensors")
    write_index(tmp_path, {"steps": "a.safetensors", "y": "y" * 300})
    assert_refused(tmp_path, where=INDEX)


def test_a_shard_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "sub").mkdir()
    write_index(tmp_path, {"x": "sub"})
    with pytest.raises((FormatError, OSError), match="sub"):
        slimtensors.load(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path):
    for shard in ("a", "b"):
        slimtensors.save(
            {"x": torch.ones(2), shard: torch.ones(1)}, tmp_path / f"{shard}.safetensors"
        )
    write_index(tmp_path, {"x": "a.safetensors", "b": "b.safetensors"})
    assert_refused(tmp_path, tensor="x", where=tmp_path / "b.safetensors")


def test_a_name_tied_in_one_shard_and_stored_in_another_is_refused(tmp_path):
    x = torch.ones(2)
    slimtensors.save({"x": x, "y": x}, tmp_path / "a.safetensors")
    slimtensors.save({"y": torch.zeros(2)}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    assert_refused(tmp_path, tensor="y", where=tmp_path)


def test_a_tensor_in_the_index_must_be_in_its_shard(tmp_path):
    """A shard of another model must not be accepted as a model with fewer tensors."""
    slimtensors.save(
        {f"t{i}": torch.ones(100) * i for i in range(8)},
        tmp_path,
        preset="dense",
        max_shard_size="1kB",
    )
    shards = sorted(tmp_path.glob("*.safetensors"))
    slimtensors.save({"other": torch.ones(5)}, shards[1])
    assert_refused(tmp_path, where=tmp_path)
