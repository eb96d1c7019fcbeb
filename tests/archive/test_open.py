"""`open`, `inspect`, `verify` and loading."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from archive.made import sparse, stored, two_four
from safetensors.torch import save_file
from strategies import raw_bytes, same_bits, same_tensors

import slimtensors
from slimtensors.archive import estimate
from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.tensor import Spec


def test_an_open_archive_lists_its_tensors(saved, tensors):
    with slimtensors.open(saved) as archive:
        assert archive.keys() == list(tensors)
        assert list(archive) == list(tensors)
        assert len(archive) == len(tensors)
        assert "norm" in archive
        assert "nrom" not in archive
        assert archive.path == str(saved)
        for name, x in tensors.items():
            assert archive.spec(name) == Spec.of(x)
            assert same_bits(archive.get_tensor(name), x)


def test_an_open_archive_reports_how_each_tensor_is_stored(saved):
    with slimtensors.open(saved) as archive:
        weight = archive.info("a.weight")
        assert (weight.codec, weight.dtype, weight.shape) == ("bitmask", "float32", (64, 64))
        assert weight.dense_bytes == 4 * 64 * 64
        assert weight.stored_bytes < weight.dense_bytes / 4
        assert weight.bits_per_item == 8 * weight.stored_bytes / 64**2
        assert weight.file == str(saved)
        assert archive.info("b.weight").codec == "bitmask24"
        assert archive.info("norm").codec == "plain"
        assert archive.info("none").bits_per_item == 0


def test_an_unknown_name_is_a_key_error_with_the_file_name(saved):
    with slimtensors.open(saved) as archive:
        for ask in (archive.get_tensor, archive.info, archive.spec):
            with pytest.raises(KeyError, match=r"x\.safetensors: no tensor named 'nrom'"):
                ask("nrom")
        with pytest.raises(KeyError, match="'nrom'"):
            archive.select(["norm", "nrom"])


def test_a_selection_is_an_archive_of_some_tensors(saved, tensors, tmp_path):
    with slimtensors.open(saved) as archive:
        part = archive.select(["norm", "a.weight"])
        assert part.keys() == ["norm", "a.weight"]
        assert len(archive) == len(tensors)
        assert same_tensors(dict(part.items()), {n: tensors[n] for n in ["norm", "a.weight"]})
        slimtensors.save(part, tmp_path / "part")
        with pytest.raises(KeyError):
            part.get_tensor("dense")
    assert list(slimtensors.load(tmp_path / "part")) == ["norm", "a.weight"]


def test_a_selection_keeps_ties_without_the_stored_name(path, tmp_path):
    x = sparse()
    slimtensors.save({"a": x, "b": x, "c": x}, path)
    with slimtensors.open(path) as archive:
        assert archive.tied() == {"b": "a", "c": "a"}
        slimtensors.save(archive.select(["c", "b"]), tmp_path / "part")
    back = slimtensors.load(tmp_path / "part")
    assert same_tensors(back, {"c": x, "b": x})
    assert back["b"].data_ptr() == back["c"].data_ptr()


def test_opening_reads_no_tensors(saved):
    raw = bytearray(saved.read_bytes())
    raw[-100] ^= 1
    saved.write_bytes(raw)
    with slimtensors.open(saved) as archive:
        assert len(archive) == 6
        assert len(archive.summary().tensors) == 6
    with pytest.raises(CorruptFileError):
        slimtensors.load(saved)


def test_a_tensor_outlives_its_archive_and_is_writable(saved, tensors):
    with slimtensors.open(saved) as archive:
        back = {name: archive.get_tensor(name) for name in archive}
        again = archive.get_tensor("norm")
    back["norm"].add_(1)
    assert same_bits(again, tensors["norm"])
    saved.unlink()
    del back["norm"]
    assert all(same_bits(x, tensors[name]) for name, x in back.items())


def test_a_missing_file_is_a_file_not_found_error_with_its_name(tmp_path):
    for ask in (slimtensors.load, slimtensors.open, slimtensors.inspect, slimtensors.verify):
        with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
            ask(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_save_estimate_and_inspect_return_equal_summaries(path, tensors, dialect):
    del tensors["0-d"]
    tensors["tied"] = tensors["a.weight"]
    saved = slimtensors.save(tensors, path, dialect=dialect)
    seen = slimtensors.inspect(path)
    would = estimate(tensors, dialect=dialect)
    facts = [
        [(t.name, t.dtype, t.shape, t.codec, t.dense_bytes, t.stored_bytes) for t in s.tensors]
        for s in (saved, seen, would)
    ]
    assert facts[0] == facts[1] == facts[2]
    assert saved.files == seen.files == [str(path)]
    assert would.files == []
    assert stored(saved, "tied").note == stored(seen, "tied").note == "tied to a.weight"


def test_estimate_writes_nothing(tmp_path, tensors, monkeypatch):
    monkeypatch.chdir(tmp_path)
    estimate(tensors)
    assert not list(tmp_path.iterdir())


def test_summary_totals_are_the_sums_of_its_tensors(saved, tensors):
    summary = slimtensors.inspect(saved)
    assert summary.dense_bytes == sum(x.nbytes for x in tensors.values())
    assert summary.stored_bytes < saved.stat().st_size
    assert summary.ratio == summary.dense_bytes / summary.stored_bytes
    assert str(summary).startswith("6 tensors, 2 compressed: 33.2 kB -> ")


def test_tied_tensors_count_once(path):
    x = sparse()
    summary = slimtensors.save({"a": x, "b": x}, path)
    assert summary.dense_bytes == x.nbytes
    assert stored(summary, "b").stored_bytes == 0
    assert stored(summary, "b").dense_bytes == x.nbytes


def test_verify_succeeds_on_undamaged_files(saved, tensors, tmp_path):
    save_file(tensors, tmp_path / "plain")
    expected = {"ok": True, "tensors": 6, "damaged": {}, "different": {}}
    assert slimtensors.verify(saved)
    assert slimtensors.verify(saved).to_json() == expected
    found = slimtensors.verify(saved, against=tmp_path / "plain")
    assert found
    assert (found.tensors, found.damaged, found.different) == (6, {}, {})
    assert found.to_json() == expected | {"equal": 6, "files": "unknown"}


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_verify_reports_the_tensor_of_every_flipped_byte(tmp_path, dialect):
    tensors = {"a": sparse(16, 16), "b": torch.ones(16), "c": two_four(16, 16), "tied": None}
    tensors["tied"] = tensors["a"]
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, dialect=dialect)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in range(start, len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        found = slimtensors.verify(path, threads=1)
        assert not found, at
        assert found.damaged.keys() in ({"a", "tied"}, {"b"}, {"c"}), at
        assert all(f"{path}: {name}: " in text for name, text in found.damaged.items())


def test_verify_reports_how_two_archives_differ(tmp_path, tensors):
    other = {name: x.clone() for name, x in tensors.items()}
    other["a.weight"][0, :2] += 1
    other["dense"] = other["dense"].double()
    other["norm"] = other["norm"][:32]
    other["new"] = other.pop("0-d")
    slimtensors.save(tensors, tmp_path / "x")
    slimtensors.save(other, tmp_path / "y")
    found = slimtensors.verify(tmp_path / "x", against=tmp_path / "y")
    assert not found
    assert found.damaged == {}
    assert found.different == {
        "0-d": f"only in {tmp_path / 'x'}",
        "new": f"only in {tmp_path / 'y'}",
        "a.weight": "2 of 4096 items differ",
        "dense": "float32 [8, 8], expected float64 [8, 8]",
        "norm": "bfloat16 [64], expected bfloat16 [32]",
    }


def test_verify_compares_signed_zeros_and_nan_payloads(tmp_path):
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    slimtensors.save({"zero": torch.zeros(2), "nan": nan}, tmp_path / "x")
    slimtensors.save({"zero": torch.tensor([0.0, -0.0]), "nan": nan.flip(0)}, tmp_path / "y")
    found = slimtensors.verify(tmp_path / "x", against=tmp_path / "y")
    assert found.different == {"zero": "1 of 2 items differ", "nan": "2 of 2 items differ"}
    assert slimtensors.verify(tmp_path / "x", against=tmp_path / "x")


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_tensors_are_loaded_to_the_requested_device(saved, tensors, device):
    back = slimtensors.load(saved, device=device)
    assert {x.device.type for x in back.values()} == {"meta"}
    assert {n: Spec.of(x) for n, x in back.items()} == {n: Spec.of(x) for n, x in tensors.items()}
    with slimtensors.open(saved) as archive:
        assert archive.get_tensor("norm", device=device).device.type == "meta"
        assert {x.device.type for _, x in archive.items(device=device)} == {"meta"}
    assert {x.device.type for _, x in slimtensors.load_compressed(saved, device=device)} == {"meta"}


def test_an_unknown_device_is_an_error(saved):
    with pytest.raises(RuntimeError, match="nowhere"):
        slimtensors.load(saved, device="nowhere")


def test_tied_tensors_stay_tied_on_a_device(path):
    x = sparse()
    slimtensors.save({"a": x, "b": x}, path)
    back = slimtensors.load(path, device="meta")
    assert back["a"] is back["b"]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("sparse-bitmask", "bitmask"),
        ("sparse_bitmask", "bitmask"),
        ("sparse-24-bitmask", "bitmask24"),
        ("dense", "plain"),
        ("dense_sparsity", "plain"),
    ],
)
def test_formats_have_the_names_of_compressed_tensors(path, name, codec):
    x = two_four()
    summary = slimtensors.save_compressed({"x": x}, path, name)
    assert summary.tensors[0].codec == codec
    assert same_tensors(dict(slimtensors.load_compressed(path)), {"x": x})


def test_loading_compressed_is_lazy_and_in_order(saved, tensors):
    loading = slimtensors.load_compressed(saved)
    assert iter(loading) is loading
    name, x = next(loading)
    assert name == "a.weight"
    assert same_bits(x, tensors[name])
    loading.close()


def test_a_sparsity_config_contains_its_format():
    assert slimtensors.BitmaskConfig().format == "sparse-bitmask"
    assert slimtensors.Sparse24BitmaskConfig().to_dict() == {
        "format": "sparse-24-bitmask",
        "sparsity_structure": "2:4",
        "global_sparsity": 0.0,
    }
    assert slimtensors.SparsityConfig().format == "dense_sparsity"
    old = {"format": "sparse_bitmask", "global_sparsity": "0.5"}
    assert slimtensors.BitmaskConfig.from_dict(old).global_sparsity == 0.5


@pytest.mark.parametrize("shape", [(0,), (), (64, 64)])
def test_loading_half_precision_complex_numbers_does_not_warn(tmp_path, shape):
    slimtensors.save({"x": torch.zeros(shape, dtype=torch.int32).view(torch.complex32)}, tmp_path)
    code = f"import slimtensors; slimtensors.load({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_released_pages_are_read_again(tmp_path):
    tensors = {f"{i}": torch.full((100_000,), i, dtype=torch.int64) for i in range(20)}
    slimtensors.save(tensors, tmp_path / "x")
    with slimtensors.open(tmp_path / "x") as archive:
        for _ in range(2):
            for name, x in tensors.items():
                assert raw_bytes(archive.get_tensor(name)) == raw_bytes(x)


def test_a_folder_without_a_model_is_a_format_error_that_lists_its_files(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(FormatError, match=r"contains PyTorch weights \(pytorch_model\.bin"):
        slimtensors.load(tmp_path)
    Path(tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match="contains no files"):
        slimtensors.load(tmp_path)
