"""Headers of safetensors files: other readers accept ours, and we accept theirs."""

import struct

import pytest
import torch
from reliability_tools import build_file, read_table, split
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategies import SAFETENSORS_DTYPES, bits, same_bits, same_tensors

import slimtensors
from slimtensors.errors import FormatError
from slimtensors.storage import FileOutput, HeaderEntry, TensorBytes
from slimtensors.storage.reader import MAX_HEADER, parse_header
from slimtensors.storage.writer import header_table, pack_header
from slimtensors.tensor import DTYPES, Spec, as_bytes

AWKWARD_NAMES = [
    "",
    " ",
    "a.b/c",
    "ключ",
    "\U0001f600",
    'say "x"',
    "back\\slash",
    "\x00\n\x7f",
    "w" * 999,
]


def every_dtype() -> dict[str, torch.Tensor]:
    return {name: bits(7, 24, dtype, 1.0).view(2, 12) for name, dtype in SAFETENSORS_DTYPES.items()}


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_safetensors_reads_every_dtype_that_we_write(tmp_path, dialect):
    tensors = every_dtype()
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, preset="dense", dialect=dialect)
    assert same_tensors(tensors, {name: load_file(path)[name] for name in tensors})
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata()["format"] == "pt"
        assert all(same_bits(file.get_tensor(name), x) for name, x in tensors.items())


def test_we_read_every_dtype_that_safetensors_writes(tmp_path):
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = slimtensors.load(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], x) for name, x in tensors.items())


def test_four_bit_items_are_counted_as_safetensors_counts_them(tmp_path):
    pairs = DTYPES.get("float4_e2m1fn_x2")
    if pairs is None:
        pytest.skip("this torch has no 4-bit floats")
    x = torch.arange(6, dtype=torch.uint8).view(2, 3).view(pairs)
    slimtensors.save({"x": x}, tmp_path / "x.safetensors", preset="dense")
    entry = read_table(tmp_path / "x.safetensors")["x"]
    assert entry == {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}
    assert same_bits(slimtensors.load(tmp_path / "x.safetensors")["x"], x)
    assert same_bits(load_file(tmp_path / "x.safetensors")["x"], x)


def test_a_scalar_of_four_bit_pairs_round_trips_although_safetensors_lacks_it(tmp_path):
    pairs = DTYPES.get("float4_e2m1fn_x2")
    if pairs is None:
        pytest.skip("this torch has no 4-bit floats")
    x = torch.tensor(0x5A, dtype=torch.uint8).view(pairs)
    slimtensors.save({"x": x}, tmp_path / "x.safetensors", preset="dense")
    assert same_bits(slimtensors.load(tmp_path / "x.safetensors")["x"], x)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["x"]


def test_dtypes_without_a_code_are_still_readable_files(tmp_path):
    others = {name: bits(3, 8, DTYPES[name], 1.0) for name in DTYPES.keys() - SAFETENSORS_DTYPES}
    path = tmp_path / "x.safetensors"
    slimtensors.save(others, path, preset="dense")
    loaded = slimtensors.load(path)
    assert all(same_bits(loaded[name], x) for name, x in others.items())
    assert {x.dtype for x in load_file(path).values()} == {torch.uint8}


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_the_header_lists_tensors_in_the_order_of_the_caller(tmp_path, dialect):
    names = ["b", "a", "z", "c", "y", "d"]
    dtypes = [torch.bool, torch.float64, torch.int8, torch.float32, torch.float16, torch.int64]
    tensors = {n: torch.ones(5, dtype=d) for n, d in zip(names, dtypes, strict=True)}
    slimtensors.save(tensors, tmp_path / "x.safetensors", dialect=dialect)
    assert list(read_table(tmp_path / "x.safetensors")) == names
    assert slimtensors.open(tmp_path / "x.safetensors").keys() == names
    assert list(slimtensors.load(tmp_path / "x.safetensors", threads=2)) == names


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_awkward_names_survive_and_safetensors_reads_them(tmp_path, dialect):
    tensors = {name: torch.tensor([i, 0, 0]) for i, name in enumerate(AWKWARD_NAMES)}
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, preset="dense", dialect=dialect)
    assert same_tensors(slimtensors.load(path), tensors)
    assert load_file(path).keys() == tensors.keys()


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_awkward_names_survive_for_compressed_and_tied_tensors(tmp_path, dialect):
    x = torch.zeros(64, 64)
    tensors = {name: x.clone() for name in AWKWARD_NAMES} | {f"tied {n}": x for n in AWKWARD_NAMES}
    slimtensors.save(tensors, tmp_path / "x.safetensors", dialect=dialect)
    loaded = slimtensors.load(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], x) for name in tensors)


def test_an_archive_of_no_tensors_is_a_file_like_any_other(tmp_path):
    slimtensors.save({}, tmp_path / "x.safetensors")
    assert slimtensors.load(tmp_path / "x.safetensors") == {}
    assert load_file(tmp_path / "x.safetensors") == {}


def test_the_data_starts_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 20):
        path = tmp_path / f"{length}.safetensors"
        slimtensors.save({"n" * length: torch.ones(1)}, path)
        (size,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert size % 8 == 0


@pytest.mark.parametrize("reserve", [0, 16, 100, 1000, 100_000])
def test_the_header_fits_whatever_was_reserved_for_it(tmp_path, reserve):
    tensors = {f"t{i}": torch.full((i,), i, dtype=torch.int32) for i in range(20)}
    path = tmp_path / "x.safetensors"
    with FileOutput(path, reserve=reserve) as output:
        for name, x in tensors.items():
            output.add([TensorBytes(name, Spec.of(x), [as_bytes(x)], None)])
        output.commit(list(tensors), lambda names, sums, table, generation: {"about": "a test"})
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert same_tensors(slimtensors.load(path), tensors)
    assert load_file(path).keys() == tensors.keys()


def test_names_that_json_makes_much_longer_move_the_data(tmp_path):
    tensors = {"\x01" * 4000: torch.arange(9), "\x02" * 4000: torch.zeros(100)}
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert same_tensors(slimtensors.load(tmp_path / "x.safetensors"), tensors)
    assert load_file(tmp_path / "x.safetensors").keys() == tensors.keys()


def test_packed_headers_are_unpacked():
    entries = {
        "b": HeaderEntry(Spec(torch.bfloat16, (2, 3)), 4, 16),
        "a": HeaderEntry(Spec(torch.int32, ()), 0, 4),
    }
    raw = pack_header(header_table(entries), {"k": "v"}, size=400)
    assert len(raw) == 400
    found = parse_header(raw, 416)
    assert (found.entries, found.metadata, found.size) == (entries, {"k": "v"}, 400)
    assert list(found.entries) == ["b", "a"]


def test_a_header_that_no_reader_would_accept_is_not_written():
    with pytest.raises(FormatError, match="use more shards"):
        pack_header("}" + " " * MAX_HEADER, {})


def test_metadata_of_other_programs_is_accepted(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={"format": "pt", "note": "ключ"})
    assert same_bits(slimtensors.load(path)["x"], torch.ones(2))
    raw = path.read_bytes()
    table, data = split(raw)
    path.write_bytes(build_file({"__metadata__": None, "x": table["x"]}, data))
    assert same_bits(slimtensors.load(path)["x"], torch.ones(2))
