"""Damage to any byte and any length of a small archive is detected."""

import os
import struct
from pathlib import Path

import pytest
import torch
from forging import DIALECTS, save_sample
from reliability_tools import assert_refused, sample, split
from strategies import bits, same_bits

import slimtensors
from slimtensors.errors import FormatError

pytestmark = pytest.mark.hostile


def outcome(path: Path) -> str:
    """Load a file that may be bad: `loaded` if it gives the sample, or what is wrong with that."""
    try:
        loaded = slimtensors.load(path, threads=1)
    except FormatError as error:
        return "refused" if str(path) in str(error) else f"does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want = sample()
    if loaded.keys() != want.keys():
        return f"other names: {list(loaded)}"
    same = all(same_bits(loaded[name], x) for name, x in want.items())
    return "loaded" if same else "other content"


@DIALECTS
def test_a_file_truncated_at_any_byte_is_rejected(path, dialect):
    raw = save_sample(path, dialect)
    found = {}
    for size in range(len(raw) - 1, -1, -1):
        os.truncate(path, size)
        found[size] = outcome(path)
    assert {size: what for size, what in found.items() if what != "refused"} == {}


@DIALECTS
def test_a_file_with_trailing_bytes_is_rejected(path, dialect):
    raw = save_sample(path, dialect)
    for extra in (b"\0", b" ", bytes(4096)):
        path.write_bytes(raw + extra)
        assert "belong to no tensor" in assert_refused(path)


@DIALECTS
@pytest.mark.slow
def test_any_flipped_bit_is_detected(path, dialect):
    """The only bytes that no checksum covers are `"format":"pt"`, which is for other programs.

    A flip there leaves a file that is either refused, or means exactly the same to us.
    """
    raw = save_sample(path, dialect)
    start = raw.index(b'"format":"pt"')
    harmless = range(start, start + len(b'"format":"pt"'))
    wrong = []
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(raw):
            for mask in (*(1 << i for i in range(8)), 0xFF):
                os.pwrite(file.fileno(), bytes([byte ^ mask]), at)
                what = outcome(path)
                if what != "refused" and not (at in harmless and what == "loaded"):
                    wrong.append((at, mask, raw[max(at - 20, 0) : at + 20], what))
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert wrong == []
    assert outcome(path) == "loaded"


@DIALECTS
def test_the_error_names_the_damaged_tensor(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    start = len(raw) - len(data)
    for name, entry in header.items():
        if name == "__metadata__" or entry["data_offsets"][0] == entry["data_offsets"][1]:
            continue
        for at in (entry["data_offsets"][0], entry["data_offsets"][1] - 1):
            broken = bytearray(raw)
            broken[start + at] ^= 0x10
            path.write_bytes(broken)
            owner = name.split(".")[0]
            assert_refused(path, tensor=f": {owner}: ")
            archive = slimtensors.open(path)
            others = [other for other in archive if sample()[other] is not sample()[owner]]
            for other in set(others) - {owner, "again" if owner == "sparse" else owner}:
                assert same_bits(archive.get_tensor(other), sample()[other])


@DIALECTS
def test_verify_lists_exactly_the_damaged_tensors(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    for name, entry in header.items():
        if name == "__metadata__" or entry["data_offsets"][0] == entry["data_offsets"][1]:
            continue
        broken = bytearray(raw)
        broken[len(raw) - len(data) + entry["data_offsets"][0]] ^= 1
        path.write_bytes(broken)
        found = slimtensors.verify(path)
        owner = name.split(".")[0]
        assert not found
        assert set(found.damaged) == ({owner, "again"} if owner == "sparse" else {owner}), name


def test_the_error_names_the_damaged_shard(tmp_path):
    tensors = {f"t{i}": bits(i, 500, torch.float32, 0.5) for i in range(6)}
    slimtensors.save(tensors, tmp_path, max_shard_size="3kB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        raw = shard.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        for cut in (0, 7, 8, 9, 8 + size - 1, 8 + size, 8 + size + 1, len(raw) - 1):
            shard.write_bytes(raw[:cut])
            assert_refused(tmp_path, where=shard)
        shard.write_bytes(raw)
    assert slimtensors.verify(tmp_path)
