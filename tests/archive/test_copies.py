"""Tensors with the same bits in different memory."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reliability_tools import edit_manifest
from safetensors.torch import load_file
from strategies import bits, same_bits
from torch import nn

import slimtensors
from slimtensors.archive.copies import find_copies
from slimtensors.archive.write import WriteOptions, source_from_tensors, write
from slimtensors.tensor import DTYPES, bitwise_equal, clone_bits


def test_equal_tensors_are_found_once():
    x = torch.randn(16, 32)
    y = x.clone()
    y[7, 9] += 1  # not in a sample
    found = find_copies(
        {
            "a": x,
            "b": x.clone(),
            "turned": x.t().clone(),
            "flat": x.flatten().clone(),
            "other": y,
            "another": y.clone(),
            "parameter": nn.Parameter(x.clone()),
            "strided": x.t().contiguous().t(),
            "integers": x.view(torch.int32).clone(),
            "small": x[0].clone(),
            "small again": x[0].clone(),
        }
    )
    assert found == {"b": "a", "another": "other", "parameter": "a", "strided": "a"}


def test_bits_are_compared_and_not_values():
    zeros = torch.zeros(512)
    nan = torch.full((512,), float("nan"))
    payload = nan.clone().view(torch.int32).add_(1).view(torch.float32)
    state = {"zeros": zeros, "negative": -zeros, "nan": nan, "again": nan.clone(), "other": payload}
    assert find_copies(state) == {"again": "nan"}


@pytest.mark.parametrize("name", DTYPES)
def test_copies_of_every_dtype_are_found(name):
    x = bits(1, 4096, DTYPES[name], 0.5)
    y = bits(2, 4096, DTYPES[name], 0.5)
    z = clone_bits(x)
    assert same_bits(z, x)
    assert find_copies({"x": x, "y": y, "z": z}) == {"z": "x"}


def test_one_tensor_has_at_most_fifteen_copies():
    found = find_copies({str(i): torch.ones(256) for i in range(40)})
    assert sorted(found) == sorted(str(i) for i in range(40) if i not in (0, 16, 32))
    assert [list(found.values()).count(home) for home in ("0", "16", "32")] == [15, 15, 7]


@given(picks=st.lists(st.integers(0, 3), max_size=12))
def test_every_copy_has_the_bits_of_its_home(picks):
    kinds = [bits(seed, 2048, torch.float32, 0.5) for seed in range(4)]
    tensors = {str(i): kinds[pick].clone() for i, pick in enumerate(picks)}
    found = find_copies(tensors)
    assert all(bitwise_equal(tensors[name], tensors[home]) for name, home in found.items())
    assert len(tensors) - len(found) == len(set(picks))
    assert not set(found.values()) & found.keys()


def write_copies(path, **options):
    x = torch.randn(64, 64)
    tensors = {"a": x, "b": x.clone(), "c": torch.randn(8), "d": x}
    source = source_from_tensors(tensors, None).with_copies({"b": "a"})
    return tensors, write(source, path, WriteOptions(**options)).summary()


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "10kB"}])
def test_copies_are_loaded_into_memory_of_their_own(tmp_path, options):
    tensors, summary = write_copies(tmp_path / "x", **options)
    back = slimtensors.load(tmp_path / "x")
    assert all(same_bits(back[name], x) for name, x in tensors.items())
    assert back["d"] is back["a"]
    assert back["b"].data_ptr() != back["a"].data_ptr()
    assert slimtensors.verify(tmp_path / "x").tensors == 4
    listed = {t.name: t for t in summary.tensors}
    assert (listed["b"].codec, listed["b"].stored_bytes) == ("copy", 0)
    assert (listed["b"].note, listed["d"].codec) == ("same bits as a", "tied")
    found = slimtensors.inspect(tmp_path / "x")
    assert {t.name: t for t in found.tensors}.keys() == listed.keys()
    assert found.dense_bytes == summary.dense_bytes == 2 * 64 * 64 * 4 + 32
    assert found.stored_bytes == summary.stored_bytes < 64 * 64 * 4 + 100


def test_a_copy_of_an_archive_keeps_its_copies(tmp_path):
    tensors, _ = write_copies(tmp_path / "x")
    archive = slimtensors.open(tmp_path / "x")
    slimtensors.save(archive, tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    slimtensors.save(archive.select(["b", "c"]), tmp_path / "z")
    assert same_bits(slimtensors.load(tmp_path / "z")["b"], tensors["b"])
    bounds = {t.name: t.bound for t in archive.bounds().tensors}
    assert bounds["b"] is bounds["d"] is None
    assert bounds["a"] > 1


def test_files_for_other_programs_contain_every_copy(tmp_path):
    tensors, _ = write_copies(tmp_path / "x.safetensors")
    archive = slimtensors.open(tmp_path / "x.safetensors")
    slimtensors.decompress(archive, tmp_path / "plain.safetensors")
    slimtensors.save(archive, tmp_path / "ct.safetensors", dialect="compressed-tensors")
    for name in ("plain", "ct"):
        path = tmp_path / f"{name}.safetensors"
        found = load_file(path)
        assert found.keys() == {"a", "b", "c"}
        assert same_bits(found["b"], tensors["b"])
        assert slimtensors.load(path).keys() == tensors.keys()


def test_a_reader_of_version_1_refuses_a_file_with_copies(tmp_path):
    write_copies(tmp_path / "x")
    versions = []
    edit_manifest((tmp_path / "x").read_bytes(), lambda m: versions.append(m["version"]))
    assert versions == [2]


def test_plain_files_have_no_copies(tmp_path):
    x = torch.randn(64, 64)
    slimtensors.save({"a": x, "b": x.clone()}, tmp_path / "x")
    manifests = []
    edit_manifest((tmp_path / "x").read_bytes(), lambda m: manifests.append(json.dumps(m)))
    assert "copies" not in manifests[0]
