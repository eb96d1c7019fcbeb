"""Files of compressed-tensors releases load here, and our files equal theirs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from strategies import raw_bytes, same_bits

import slimtensors

pytestmark = pytest.mark.interop

GOLDEN = Path(__file__).parent.parent / "golden" / "compressed_tensors"
SPARSE = ("bitmask-*dense.safetensors", "24-*dense.safetensors")
DENSE = sorted(path for kind in SPARSE for path in GOLDEN.rglob(kind))
FILES = [path.with_name(path.name.replace("-dense", "")) for path in DENSE]
PARTS = ("shape", "compressed", "bitmask", "row_offsets")

every_file = pytest.mark.parametrize(
    ("path", "dense"),
    list(zip(FILES, DENSE, strict=True)),
    ids=[str(path.relative_to(GOLDEN)) for path in FILES],
)


def test_golden_files_of_all_releases_exist():
    releases = {path.parent.name for path in FILES}
    assert releases == {"0.3.3", "0.6.0", "0.8.1", "0.9.4", "0.11.0", "0.14.0.1"}
    assert sum(path.name.startswith("24") for path in FILES) == 3


@every_file
def test_their_files_load_to_the_original_tensors(path, dense):
    want = load_file(dense)
    for back in (slimtensors.load(path), dict(slimtensors.load_compressed(path))):
        assert back.keys() == want.keys()
        assert all(same_bits(back[name], x) for name, x in want.items())


@every_file
def test_their_files_verify_against_the_original_tensors(path, dense):
    found = slimtensors.verify(path, against=dense)
    assert found, found
    assert found.tensors == len(load_file(dense))


@every_file
def test_inspect_lists_tensors_not_parts_of_their_files(path, dense):
    want = load_file(dense)
    stored = set(load_file(path))
    for tensor in slimtensors.inspect(path).tensors:
        assert tensor.shape == tuple(want[tensor.name].shape)
        assert tensor.dtype == str(want[tensor.name].dtype).removeprefix("torch.")
        in_parts = tensor.name not in stored
        sparse = "bitmask24" if path.name.startswith("24") else "bitmask"
        assert tensor.codec == (sparse if in_parts else "plain")
        assert tensor.dense_bytes == want[tensor.name].nbytes
    assert sum(t.stored_bytes for t in slimtensors.inspect(path).tensors) == sum(
        x.nbytes for x in load_file(path).values()
    )


@every_file
def test_their_configs_are_parsed(path, dense):
    config_file = path.with_name(path.stem + "-config.json")
    if not config_file.exists():
        config_file = path.with_name("bitmask-model-config.json")
    config = json.loads(config_file.read_text())
    for key in ("quantization_config", "compression_config"):
        config = config.get(key, config)
    names = ("format", "sparsity_structure", "global_sparsity")
    section = {name: config["sparsity_config"][name] for name in names}
    kind = slimtensors.Sparse24BitmaskConfig if "24" in path.name else slimtensors.BitmaskConfig
    assert kind.from_dict(section).to_dict() == section
    back = dict(slimtensors.load_compressed(path, compression_config=kind.from_dict(section)))
    assert back.keys() == load_file(dense).keys()


@every_file
def test_their_files_can_be_stored_again_in_both_dialects(path, dense, tmp_path):
    for dialect in ("slim", "compressed-tensors"):
        with slimtensors.open(path) as archive:
            slimtensors.save(archive, tmp_path / dialect, dialect=dialect)
        assert slimtensors.verify(tmp_path / dialect, against=dense)


# An independent reader of that layout: numpy only, as compressed-tensors 0.14 reads it.


def decode_bitmask(parts):
    """Scatter the values over the bits, row by row, each row from its own offset."""
    shape = parts["shape"].tolist()
    width = shape[-1]
    bits = np.unpackbits(parts["bitmask"], axis=-1, bitorder="little")[:, :width].astype(bool)
    values = parts["compressed"]
    out = np.zeros((bits.shape[0], width, values.shape[-1]), np.uint8)
    for row, offset in enumerate(parts["row_offsets"].tolist()):
        count = int(bits[row].sum())
        out[row, bits[row]] = values[offset : offset + count]
    return out.reshape(*shape, -1)


def decode_24(parts):
    """Scatter two values over every four items."""
    rows, width = parts["shape"][:, 0].tolist()
    bits = np.unpackbits(parts["bitmask"], axis=-1, bitorder="little")[:, :width].astype(bool)
    assert (bits.reshape(rows, -1, 4).sum(2) == 2).all()
    out = np.zeros((rows, width, parts["compressed"].shape[-1]), np.uint8)
    out[bits] = parts["compressed"].reshape(-1, parts["compressed"].shape[-1])
    return out


def stored_parts(path, name):
    """Return the parts of a tensor as numpy arrays, with values as rows of bytes."""
    with safe_open(path, "pt") as file:
        found = {part: file.get_tensor(f"{name}.{part}") for part in part_names(file, name)}
    values = found.pop("compressed")
    raw = np.frombuffer(raw_bytes(values), np.uint8)
    parts = {part: x.numpy() for part, x in found.items()}
    return {**parts, "compressed": raw.reshape(*values.shape, values.element_size())}


def part_names(file, name):
    return [part for part in PARTS if f"{name}.{part}" in set(file.keys())]


def two_four(rows, columns):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    order = torch.rand(rows, columns // 4, 4).argsort(-1)
    return torch.where((order < 2).view(rows, columns), x, 0.0)


def half(*shape):
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.where(torch.rand(shape, generator=g) < 0.3, torch.randn(shape, generator=g), 0.0)
    x[0] = 0
    x[-1, ..., 0] = -0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(60, 61), (64, 64), (40, 120), (3, 900), (9, 10, 73)])
def test_independent_reader_reads_our_bitmask_tensors(tmp_path, dtype, shape):
    x = (half(*shape) * 3).to(dtype)
    slimtensors.save_compressed({"layer.weight": x}, tmp_path / "x", "sparse-bitmask")
    parts = stored_parts(tmp_path / "x", "layer.weight")
    assert parts.keys() == set(PARTS)
    assert decode_bitmask(parts).tobytes() == raw_bytes(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("columns", [4, 8, 20, 64])
def test_independent_reader_reads_our_two_of_four_tensors(tmp_path, dtype, columns):
    x = (two_four(200, columns) * 9).to(dtype)
    x[1], x[2, 1:] = 0, 0
    slimtensors.save_compressed({"layer.weight": x}, tmp_path / "x", "sparse-24-bitmask")
    parts = stored_parts(tmp_path / "x", "layer.weight")
    assert parts.keys() == {"shape", "compressed", "bitmask"}
    assert parts["shape"].shape == (2, 1)
    assert parts["compressed"].shape[:2] == (200, columns // 2)
    assert decode_24(parts).tobytes() == raw_bytes(x)


@every_file
def test_our_parts_equal_theirs(path, dense, tmp_path):
    """Byte for byte, where both store a matrix in parts.

    Of a 2:4 group with fewer than two values each stores other zeros: rows 1 and 2 of these files.
    """
    want = load_file(path)
    form = "sparse-24-bitmask" if path.name.startswith("24") else "sparse-bitmask"
    slimtensors.save_compressed(load_file(dense), tmp_path / "x", form)
    ours = load_file(tmp_path / "x")
    compared = 0
    for name, x in load_file(dense).items():
        theirs = name if f"{name}.bitmask" in want else name.removesuffix(".weight")
        if x.dim() != 2 or f"{name}.bitmask" not in ours or f"{theirs}.bitmask" not in want:
            continue
        for part in PARTS:
            if f"{theirs}.{part}" in want:
                compared += 1
                a, b = ours[f"{name}.{part}"], want[f"{theirs}.{part}"]
                assert a.shape == b.shape
                if path.name.startswith("24") and part != "shape":
                    a, b = (torch.cat([y[:1], y[3:]]) for y in (a, b))
                assert same_bits(a, b), (name, part)
    assert compared


def test_independent_reader_reads_their_files():
    path = GOLDEN / "0.8.1" / "bitmask.safetensors"
    for name, x in load_file(GOLDEN / "0.8.1" / "bitmask-dense.safetensors").items():
        if x.dim() == 2:
            assert decode_bitmask(stored_parts(path, name)).tobytes() == raw_bytes(x)
