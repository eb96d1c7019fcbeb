"""Decompressing gives back the file that was compressed, byte for byte."""

import base64
import json
import struct
import zlib

import pytest
import torch
from models import weights
from reliability_tools import edit_manifest
from safetensors.torch import load_file, save_file
from strategies import same_tensors

import slimtensors
from slimtensors.archive.originals import find_originals, pack_text
from slimtensors.codecs.plan import Plan
from slimtensors.errors import FormatError

TABLE = {
    "b": ("F32", [2, 3], [8, 32]),
    "a": ("BF16", [4], [0, 8]),
    "empty": ("I64", [0, 7], [32, 32]),
    "scalar": ("F64", [], [33, 41]),
    "flag": ("BOOL", [1], [32, 33]),
}


def write_raw(path, header, data):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entries(table):
    keys = ("dtype", "shape", "data_offsets")
    return {name: dict(zip(keys, values, strict=True)) for name, values in table.items()}


def odd_headers():
    table = entries(TABLE)
    metadata = {"__metadata__": {"zeta": "ü \n", "alpha": '{"a": 1}'}}
    yield "metadata last", json.dumps({**table, **metadata}).encode()
    yield "unpadded", json.dumps(metadata | table, separators=(",", ":")).encode()
    yield "whitespace", json.dumps(metadata | table, indent=3).encode() + b" " * 1000
    swapped = {name: dict(reversed(entry.items())) for name, entry in table.items()}
    yield "keys swapped", json.dumps(swapped, ensure_ascii=False).encode()
    yield "no metadata", json.dumps(table).encode()
    yield "large metadata", json.dumps({"__metadata__": {"x": "word " * 5000}} | table).encode()
    yield "escaped names", json.dumps(table).replace('"a"', '"\\u0061"').encode()


@pytest.mark.parametrize(
    "header", [pytest.param(header, id=name) for name, header in odd_headers()]
)
@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_unusual_headers_come_back(tmp_path, header, dialect):
    data = torch.randn(8).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    data += bytes(24 - 8) + b"\1" + struct.pack("<d", -0.0)
    source = write_raw(tmp_path / "source.safetensors", header, data)
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    slimtensors.save(slimtensors.open(source), small, dialect=dialect)
    slimtensors.decompress(small, back)
    assert back.read_bytes() == source.read_bytes()
    assert slimtensors.verify(small, against=source).files == "identical"


@pytest.mark.parametrize("preset", ["lossless", "lossless-max", "sparse", "dense"])
def test_a_file_comes_back_from_every_lossless_preset(tmp_path, preset):
    source = tmp_path / "source.safetensors"
    save_file(weights(), source, metadata={"by": "me"})
    slimtensors.save(slimtensors.open(source), tmp_path / "small", preset=preset)
    slimtensors.decompress(tmp_path / "small", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_several_rounds_give_back_the_first_file(tmp_path):
    source = tmp_path / "source.safetensors"
    save_file(weights(), source, metadata={"by": "me"})
    slimtensors.save(slimtensors.open(source), tmp_path / "1", preset="sparse")
    slimtensors.save(slimtensors.open(tmp_path / "1"), tmp_path / "2", dialect="compressed-tensors")
    slimtensors.save(slimtensors.open(tmp_path / "2"), tmp_path / "3")
    slimtensors.decompress(tmp_path / "3", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_plain_file_is_decompressed_to_itself(tmp_path):
    source = tmp_path / "source.safetensors"
    x = torch.ones(3)
    slimtensors.save({"a": x, "b": x, "step": 3}, source, preset="dense")
    slimtensors.decompress(source, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    slimtensors.decompress(tmp_path / "small", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == source.read_bytes()


def test_equal_tensors_that_a_file_stores_twice_come_back(tmp_path):
    source = tmp_path / "source.safetensors"
    save_file({"a": torch.eye(64), "b": torch.eye(64)}, source)
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    slimtensors.decompress(tmp_path / "small", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_an_alias_that_the_original_stores_as_a_tensor_comes_back(tmp_path):
    source, small = tmp_path / "source.safetensors", tmp_path / "small"
    save_file({"a": torch.eye(64), "b": torch.eye(64)}, source)
    kept = find_originals(slimtensors.open(source)).to_json()
    x = torch.eye(64)
    slimtensors.save({"a": x, "b": x}, small)
    change = {"version": 2, "source": kept}
    small.write_bytes(edit_manifest(small.read_bytes(), lambda m: m.update(change)))
    slimtensors.decompress(small, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_tensors_in_memory_are_stored_in_version_1(tmp_path):
    slimtensors.save(weights(), tmp_path / "x")
    manifest = json.loads(slimtensors.open(tmp_path / "x").files[0].header.metadata["slimtensors"])
    assert manifest["version"] == 1
    slimtensors.decompress(tmp_path / "x", tmp_path / "y")
    found = slimtensors.verify(tmp_path / "y", against=tmp_path / "x")
    assert found
    assert found.files == "unknown"


def test_rounded_tensors_keep_no_header(tmp_path):
    source = tmp_path / "source.safetensors"
    save_file({"w": torch.randn(64, 64)}, source)
    slimtensors.save(slimtensors.open(source), tmp_path / "x", preset=Plan(slimtensors.Int(8)))
    manifest = json.loads(slimtensors.open(tmp_path / "x").files[0].header.metadata["slimtensors"])
    assert manifest.keys().isdisjoint({"source"})


def test_some_tensors_are_written_without_the_original_header(tmp_path):
    source = tmp_path / "source.safetensors"
    save_file(weights(), source, metadata={"by": "me"})
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    with slimtensors.open(tmp_path / "small") as archive:
        slimtensors.decompress(archive.select(["model.layers.0.norm.weight"]), tmp_path / "some")
    assert list(load_file(tmp_path / "some")) == ["model.layers.0.norm.weight"]


def test_a_restored_file_is_identical(tmp_path):
    base, new = tmp_path / "base.safetensors", tmp_path / "new.safetensors"
    save_file(weights(), base)
    changed = {name: x + 1 if "mlp" in name else x for name, x in weights().items()}
    save_file(changed, new, metadata={"z": "1", "a": "2"})
    slimtensors.save(slimtensors.open(base), tmp_path / "small-base")
    slimtensors.diff(new, base, tmp_path / "delta")
    slimtensors.restore(tmp_path / "delta", tmp_path / "small-base", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == new.read_bytes()
    slimtensors.restore(tmp_path / "delta", base, tmp_path / "small", preset="lossless")
    slimtensors.decompress(tmp_path / "small", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == new.read_bytes()


def test_verify_reports_another_header(tmp_path):
    source, other = tmp_path / "source.safetensors", tmp_path / "other.safetensors"
    save_file(weights(), source, metadata={"by": "me"})
    save_file(weights(), other, metadata={"by": "you"})
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    assert slimtensors.verify(tmp_path / "small", against=other).files == "different"
    assert slimtensors.verify(source, against=source).files == "identical"


def header_of(table, **change):
    raw = json.dumps(table).encode()
    return struct.pack("<Q", change.get("length", len(raw))) + raw


W = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}
X = "x.safetensors"
HOSTILE = {
    "not base64": {"files": {X: "%%%%"}},
    "not zlib": {"files": {X: "AAAA"}},
    "truncated stream": {"files": {X: pack_text(header_of({"w": W}))[:-8]}},
    "two streams": {"files": {X: base64.b64encode(zlib.compress(b"a") * 2).decode()}},
    "bomb": {"files": {X: pack_text(header_of({"w": W}).ljust(1 << 24))}},
    "bombs": {"files": {f"{i}.safetensors": pack_text(b" " * (1 << 19)) for i in range(8)}},
    "no files": {"index": {"x.json": pack_text(b"{}")}},
    "a list": {"files": []},
    "a number": {"files": {X: 3}},
    "another ending": {"files": {"x.py": pack_text(header_of({"w": W}))}},
    "absolute name": {"files": {"/etc/x.safetensors": pack_text(header_of({"w": W}))}},
    "name outside": {"files": {"../x.safetensors": pack_text(header_of({"w": W}))}},
    "wrong length": {"files": {X: pack_text(header_of({"w": W}, length=3))}},
    "empty": {"files": {X: pack_text(b"")}},
    "not JSON": {"files": {X: pack_text(struct.pack("<Q", 2) + b"{x")}},
    "deep": {"files": {X: pack_text(struct.pack("<Q", 100000) + b"[" * 100000)}},
    "another name": {"files": {X: pack_text(header_of({"v": W}))}},
    "another dtype": {"files": {X: pack_text(header_of({"w": W | {"dtype": "I32"}}))}},
    "another shape": {"files": {X: pack_text(header_of({"w": W | {"shape": [2, 4]}}))}},
    "a gap": {"files": {X: pack_text(header_of({"w": W | {"data_offsets": [8, 40]}}))}},
    "twice": {"files": dict.fromkeys([X, "y.safetensors"], pack_text(header_of({"w": W})))},
    "many files without tensors": {
        "files": {
            X: pack_text(header_of({"w": W})),
            **dict.fromkeys((f"{i}{X}" for i in range(100)), pack_text(header_of({}))),
        }
    },
    "bad index": {
        "files": {X: pack_text(header_of({"w": W}))},
        "index": {"x.json": pack_text(b'{"weight_map": {"w": "y.safetensors"}}')},
    },
    "index outside": {
        "files": {X: pack_text(header_of({"w": W}))},
        "index": {"x.json": pack_text(b'{"weight_map": {"w": "../x.safetensors"}}')},
    },
    "index with another ending": {
        "files": {X: pack_text(header_of({"w": W}))},
        "index": {"x.py": pack_text(b'{"weight_map": {"w": "x.safetensors"}}')},
    },
}


@pytest.mark.hostile
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_forged_description_is_refused(tmp_path, source):
    path = tmp_path / "forged.safetensors"
    slimtensors.save({"w": torch.zeros(8)}, path)
    change = {"version": 2, "source": source}
    path.write_bytes(edit_manifest(path.read_bytes(), lambda m: m.update(change)))
    with pytest.raises(FormatError, match="forged"):
        slimtensors.decompress(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert list(slimtensors.verify(path).damaged) == ["<source>"]
    assert slimtensors.load(path)["w"].shape == (8,)


def test_a_description_of_some_tensors_is_ignored(tmp_path):
    path = tmp_path / "x"
    slimtensors.save({"w": torch.zeros(8), "v": torch.zeros(8)}, path)
    change = {"version": 2, "source": {"files": {X: pack_text(header_of({"w": W}))}}}
    path.write_bytes(edit_manifest(path.read_bytes(), lambda m: m.update(change)))
    slimtensors.decompress(path, tmp_path / "back")
    assert same_tensors(load_file(tmp_path / "back"), slimtensors.load(path))


def test_a_header_that_readers_would_refuse_is_not_kept(tmp_path, caplog):
    table = {"__metadata__": {"x": "a" * (8 << 20)}, "w": W}
    source = write_raw(tmp_path / "source", json.dumps(table).encode(), bytes(32))
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    assert "too large to keep" in caplog.text
    slimtensors.decompress(tmp_path / "small", tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=source)


def test_a_file_with_another_ending_comes_back(tmp_path):
    source = write_raw(tmp_path / "weights.st", json.dumps({"w": W}).encode(), bytes(32))
    slimtensors.save(slimtensors.open(source), tmp_path / "small")
    slimtensors.decompress(tmp_path / "small", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
