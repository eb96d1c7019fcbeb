"""Compressed tensors in files: saving, loading and running them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reliability_tools import blob, blob_file, split, split_blob
from strategies import same_bits, same_results
from torch import nn

import slimtensors
from slimtensors.errors import CorruptFileError
from slimtensors.quantization import QuantizationArgs, formats
from slimtensors.quantization.affine import find_params
from slimtensors.runtime import (
    CompressedTensor,
    CsrTensor,
    QuantizedTensor,
    SparseTensor,
    float8_weight_only,
    from_module,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
    sparse_int8_weight,
)

KINDS = {
    "int8": int8_weight_only(),
    "int4": int4_weight_only(group_size=32),
    "int8 dynamic": int8_dynamic_activation_int8_weight(),
    "float8": float8_weight_only(),
    "sparse": SparseTensor.from_dense,
    "csr": CsrTensor.from_dense,
    "sparse int8": sparse_int8_weight(),
}


def matrix(rows=48, columns=64, *, keep=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return torch.where(torch.rand(rows, columns, generator=g) < keep, x, 0.0).bfloat16()


def state():
    tensors = {name: make(matrix(keep=0.05)) for name, make in KINDS.items()}
    return {**tensors, "bias": torch.randn(48), "tied": tensors["int8"].detach()}


def dense(x):
    return x.dequantize() if isinstance(x, CompressedTensor) else x


@pytest.mark.parametrize("shard", [None, "8KB"])
def test_a_file_loads_dense_or_compressed(tmp_path, shard):
    tensors = state()
    target = tmp_path / "file.safetensors" if shard is None else tmp_path
    slimtensors.save(tensors, target, max_shard_size=shard)
    plain = slimtensors.load(target)
    compressed = slimtensors.load(target, run_compressed=True)
    assert plain.keys() == compressed.keys() == tensors.keys()
    for name, x in tensors.items():
        assert type(plain[name]) is torch.Tensor
        assert same_bits(plain[name], dense(x))
        assert same_bits(dense(compressed[name]), dense(x))
        assert isinstance(compressed[name], CompressedTensor) == isinstance(x, CompressedTensor)
    assert compressed["tied"] is compressed["int8"]
    assert compressed["int8 dynamic"].config == tensors["int8 dynamic"].config
    assert isinstance(compressed["sparse int8"].codes, SparseTensor)
    assert isinstance(compressed["sparse"], CsrTensor)  # which it is fast enough for


def test_saving_again_gives_the_same_bytes(tmp_path):
    slimtensors.save(state(), tmp_path / "a", preset="sparse")
    again = slimtensors.load(tmp_path / "a", run_compressed=True)
    slimtensors.save(again, tmp_path / "b", preset="sparse")  # what runs as CSR is plain to it
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_codes_are_used_from_the_pages_of_the_file(tmp_path):
    file = tmp_path / "file.safetensors"
    weight = int8_weight_only()(matrix(512, 512))
    slimtensors.save({"norm": torch.ones(512).bfloat16(), "w": weight}, file)
    compressed = slimtensors.load(file, run_compressed=True)["w"]
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    assert any(begin <= compressed.codes.data_ptr() < end for begin, end in spans)
    assert compressed.codes.data_ptr() % 16 == 0  # torch's kernel wants that
    x = torch.randn(1, 512).bfloat16()
    expected = nn.functional.linear(x, weight)
    assert same_results(nn.functional.linear(x, compressed), expected)
    file.unlink()
    assert same_results(nn.functional.linear(x, compressed), expected)


def test_rounded_presets_run_compressed(tmp_path):
    weight = matrix(keep=0.5)
    slimtensors.save({"w": weight}, tmp_path / "file", preset="extreme")
    compressed = slimtensors.load(tmp_path / "file", run_compressed=True)["w"]
    assert isinstance(compressed, QuantizedTensor)
    assert same_bits(compressed.dequantize(), slimtensors.load(tmp_path / "file")["w"])


def test_damaged_files_raise_on_load(tmp_path):
    file = tmp_path / "file"
    slimtensors.save({"w": int8_weight_only()(matrix())}, file)
    raw = bytearray(file.read_bytes())
    raw[-200] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptFileError, match="w: checksum mismatch"):
        slimtensors.load(file, run_compressed=True)


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["int8", "int8 dynamic", "sparse", "sparse int8", "rounded"])
def test_missing_parts_raise_on_load(tmp_path, kind):
    weight = KINDS[kind](matrix(keep=0.5)) if kind in KINDS else matrix(keep=0.5)
    slimtensors.save({"w": weight}, tmp_path / "file", preset="extreme")
    header, payload = split_blob(split((tmp_path / "file").read_bytes())[1])
    for name in header["parts"]:
        parts = {key: part for key, part in header["parts"].items() if key != name}
        raw = blob({**header, "parts": parts}, payload)
        (tmp_path / "forged").write_bytes(blob_file(raw, "w"))
        for run_compressed in (False, True):
            with pytest.raises(CorruptFileError, match=r"forged: w: "):
                slimtensors.load(tmp_path / "forged", run_compressed=run_compressed)


@pytest.mark.hostile
def test_inputs_of_another_shape_than_their_weight_raise_on_load(tmp_path):
    slimtensors.save({"w": KINDS["int8 dynamic"](matrix())}, tmp_path / "file")
    header, payload = split_blob(split((tmp_path / "file").read_bytes())[1])
    raw = blob({**header, "shape": [48, 32]}, payload)
    (tmp_path / "file").write_bytes(blob_file(raw, "w"))
    with pytest.raises(CorruptFileError, match="do not fit"):
        slimtensors.load(tmp_path / "file", run_compressed=True)


def test_model_loads_into_meta_with_the_same_outputs(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16().eval()
    model[1].weight = model[0].weight
    quantize_(model, int4_weight_only(group_size=32))
    slimtensors.save(model.state_dict(), tmp_path / "file")
    with torch.device("meta"):
        loaded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16().eval()
    compressed = slimtensors.load(tmp_path / "file", run_compressed=True)
    assert compressed["1.weight"] is compressed["0.weight"]
    loaded.load_state_dict(compressed, assign=True)
    x = torch.randn(3, 64).bfloat16()
    assert same_results(loaded(x), model(x))


@pytest.mark.parametrize(
    ("format", "args"),
    [
        ("pack-quantized", QuantizationArgs(4, group_size=32)),
        ("pack-quantized", QuantizationArgs(4, group_size=32, symmetric=False)),
        ("pack-quantized", QuantizationArgs(3, group_size=-1)),
        ("pack-quantized", QuantizationArgs(8, group_size=-1)),
        ("int-quantized", QuantizationArgs(8, group_size=-1)),
        ("float-quantized", QuantizationArgs(8, "float")),
        ("float-quantized", QuantizationArgs(
            8, "float", block_structure=[16, 16], strategy="block")),
        ("nvfp4-pack-quantized", QuantizationArgs(
            4, "float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)),
        ("float-quantized", QuantizationArgs(8, "float", group_size=-1, symmetric=False)),
        ("mxfp4-pack-quantized", QuantizationArgs(
            4, "float", strategy="group", group_size=32, scale_dtype=torch.uint8)),
        ("mxfp6-pack-quantized", QuantizationArgs(
            6, "float", strategy="group", group_size=32, scale_dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_from_module_equals_the_dense_weight(format, args, tmp_path):
    weight = matrix(64, 64)
    stored_format = formats.find(format)
    parts = stored_format.compress(weight, find_params(weight, args), args)
    compressed = from_module(parts, format, args)
    assert same_bits(compressed.dequantize(), stored_format.decompress(parts, args))
    assert compressed.dtype is torch.bfloat16
    inputs = matrix(3, 64)
    want = torch.nn.functional.linear(inputs, compressed.dequantize())
    assert same_results(torch.nn.functional.linear(inputs, compressed), want)
    slimtensors.save({"weight": compressed}, tmp_path / "stored.safetensors")
    back = slimtensors.load(tmp_path / "stored.safetensors")["weight"]
    assert same_bits(back, compressed.dequantize())
    if "weight_packed" in parts and args.num_bits == 4:
        assert compressed.codes.data_ptr() == parts["weight_packed"].data_ptr()
    x = torch.randn(2, 64).bfloat16()
    expected = nn.functional.linear(x, compressed.dequantize())
    assert torch.allclose(nn.functional.linear(x, compressed), expected, rtol=0.02, atol=0.05)


X = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

MULTIPLY = Path(__file__).parent / "programs" / "multiply.py"


@pytest.mark.slow
def test_another_instruction_set_gives_the_same_results(tmp_path):
    tensors = {name: make(matrix(keep=0.5)) for name, make in KINDS.items()}
    slimtensors.save(tensors, tmp_path / "file")
    results = []
    for name, ours, onednn in (("default", "plain", "SSE41"), ("avx2", "avx2", "AVX2")):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": name, "SLIMTENSORS_CPU": ours}
        env["ONEDNN_MAX_CPU_ISA"] = onednn
        if ours == "avx2" and slimtensors._core.cpu() == "plain":
            pytest.skip("this machine has one instruction set")
        command = [sys.executable, MULTIPLY, tmp_path / "file", tmp_path / name]
        subprocess.run(command, check=True, env=env)
        results.append(torch.load(tmp_path / name))
    for name, (product, numbers) in results[0].items():
        other, same = results[1][name]
        assert same_bits(numbers, same)
        assert torch.allclose(product, other, rtol=2**-6, atol=0.05), name
        expected = nn.functional.linear(X, tensors[name])
        assert torch.allclose(product, expected, rtol=2**-6, atol=0.05), name
