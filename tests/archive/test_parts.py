"""Inconsistent parts of compressed-tensors, with and without a manifest."""

import pytest
import torch
from forging import INDEX, TB, foreign, write_index_of
from reliability_tools import assert_refused, build_file, edit_manifest, split
from strategies import same_bits

import slimtensors
from slimtensors.errors import CorruptFileError

pytestmark = pytest.mark.hostile


def test_the_unchanged_forged_parts_are_valid(path):
    path.write_bytes(foreign())
    want = torch.zeros(2, 8)
    want[0, 0], want[1, 7] = 1, 2
    assert same_bits(slimtensors.load(path)["m.weight"], want)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": torch.tensor([2, 9])},
        {"shape": torch.tensor([3, 8])},
        {"shape": torch.tensor([-2, -8])},
        {"shape": torch.tensor([2**40, 2**40])},
        {"shape": torch.tensor([TB])},
        {"shape": torch.tensor([2.0, 8.0])},
        {"shape": torch.tensor([2, 8], dtype=torch.int32)},
        {"shape": torch.tensor([], dtype=torch.int64)},
        {"shape": torch.ones(100, dtype=torch.int64)},
        {"compressed": torch.tensor([1.0])},
        {"compressed": torch.tensor([1.0, 2.0, 3.0])},
        {"compressed": torch.tensor([], dtype=torch.float32)},
        {"bitmask": torch.tensor([[3], [128]], dtype=torch.uint8)},
        {"bitmask": torch.tensor([[1], [-128]], dtype=torch.int8)},
        {"bitmask": torch.tensor([[1]], dtype=torch.uint8)},
        {"bitmask": torch.tensor([], dtype=torch.uint8)},
        {"bitmask": torch.tensor([257.0])},
    ],
    ids=repr,
)
def test_inconsistent_parts_are_rejected(path, change):
    path.write_bytes(foreign(**change))
    assert_refused(path, tensor="m.weight")


def test_nonzero_padding_bits_of_a_mask_are_rejected(path):
    parts = {
        "shape": torch.tensor([2, 4]),
        "bitmask": torch.tensor([[0x11], [0]], dtype=torch.uint8),
    }
    path.write_bytes(foreign(**parts))
    assert_refused(path, tensor="m.weight", kind=CorruptFileError)


def test_a_tensor_stored_plain_and_in_parts_is_rejected(path):
    path.write_bytes(foreign())
    header, data = split(path.read_bytes())
    header["m.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    path.write_bytes(build_file(header, data))
    assert_refused(path, tensor="m.weight")


def test_a_tensor_in_parts_in_two_shards_is_rejected(tmp_path):
    """One shard has a manifest, the other has none; both contain `m.weight`."""
    x = torch.zeros(64, 64)
    slimtensors.save({"m.weight": x}, tmp_path / "a.safetensors", dialect="compressed-tensors")
    raw = foreign()
    header, data = split(raw)
    names = {key: key.replace("m.weight.", "m.") for key in header}
    (tmp_path / "b.safetensors").write_bytes(
        build_file({names[k]: v for k, v in header.items()}, data)
    )
    write_index_of(tmp_path, "a.safetensors", "b.safetensors")
    assert_refused(tmp_path / INDEX, tensor="m.weight", where=tmp_path)


def test_parts_listed_by_the_manifest_of_another_shard_are_rejected(tmp_path):
    slimtensors.save({"y": torch.ones(2)}, tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    raw = edit_manifest(raw, lambda m: m.update(plans={"m.weight": "bitmask"}))
    (tmp_path / "a.safetensors").write_bytes(raw)
    (tmp_path / "b.safetensors").write_bytes(foreign())
    write_index_of(tmp_path, "a.safetensors", "b.safetensors")
    assert_refused(tmp_path / INDEX, where=tmp_path)
