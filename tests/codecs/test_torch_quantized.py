"""Tensors and models of the torch quantized dtypes."""

import pytest
import torch
from torch import nn

import slimtensors
from slimtensors.codecs import TorchQuantized
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.tensor import Spec

pytestmark = pytest.mark.filterwarnings("ignore:.*(quantiz|ao):")

DTYPES = [torch.qint8, torch.quint8, torch.qint32]


def per_tensor(dtype):
    return torch.quantize_per_tensor(torch.randn(20, 30), 0.1, 3, dtype)


def per_channel(dtype, axis=1):
    scales = torch.rand(30, dtype=torch.float64) + 0.01
    return torch.quantize_per_channel(torch.randn(20, 30), scales, torch.arange(30), axis, dtype)


def same(a, b):
    return (
        a.dtype == b.dtype
        and torch.equal(a.int_repr(), b.int_repr())
        and a.qscheme() == b.qscheme()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_with_one_scale_round_trip(tmp_path, dtype):
    x = per_tensor(dtype)
    slimtensors.save({"x": x}, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")["x"]
    assert same(back, x)
    assert (back.q_scale(), back.q_zero_point()) == (x.q_scale(), x.q_zero_point())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_tensors_with_a_scale_per_channel_round_trip(tmp_path, dtype):
    x = per_channel(dtype)
    slimtensors.save({"x": x, "floats": float_parameters()}, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")
    assert same(back["x"], x)
    assert torch.equal(back["x"].q_per_channel_scales(), x.q_per_channel_scales())
    assert torch.equal(back["x"].q_per_channel_zero_points(), x.q_per_channel_zero_points())
    assert back["x"].q_per_channel_axis() == 1
    assert same(back["floats"], float_parameters())


def float_parameters():
    torch.manual_seed(0)
    return torch.quantize_per_channel(
        torch.randn(4, 8), torch.rand(4), torch.rand(4), 0, torch.quint8
    )


def test_sparse_integers_are_compressed(tmp_path):
    x = torch.randn(200, 300)
    x[torch.rand(200, 300) < 0.9] = 0
    q = torch.quantize_per_tensor(x, 0.02, 0, torch.qint8)
    summary = slimtensors.save({"x": q}, tmp_path / "x", preset="sparse")
    assert summary.tensors[0].codec == "torch-quantized(q=bitmask)"
    assert summary.ratio > 3
    assert same(slimtensors.load(tmp_path / "x")["x"], q)
    assert slimtensors.verify(tmp_path / "x", against=tmp_path / "x")


def test_the_other_dialect_names_the_tensor_that_it_cannot_store(tmp_path):
    with pytest.raises(UnsupportedTensorError, match=r"x: safetensors does not support qint8"):
        slimtensors.save(
            {"x": per_tensor(torch.qint8)}, tmp_path / "x", dialect="compressed-tensors"
        )


def test_parts_that_do_not_fit_are_corrupt():
    x = per_channel(torch.qint8)
    parts, like = TorchQuantized().encode(x), Spec.of(x)
    for change in (
        {"q": parts["q"][:1]},
        {"q": parts["q"].to(torch.uint8)},
        {"scale": parts["scale"][:2]},
        {"zero_point": parts["zero_point"][:2]},
        {"axis": torch.tensor(7)},
        {"axis": torch.tensor(-1)},
        {"axis": torch.tensor([1, 1])},
        {"axis": torch.tensor(1.0)},
        {"scale": parts["scale"].to(torch.int64)},
        {"scale": parts["scale"].to(torch.complex64)},
        {"zero_point": parts["zero_point"].to(torch.complex64)},
    ):
        with pytest.raises(CorruptFileError):
            TorchQuantized().decode(parts | change, like)
    del parts["axis"]
    with pytest.raises(CorruptFileError):
        TorchQuantized().decode(parts, like)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_a_dynamically_quantized_model_round_trips_with_the_same_outputs(tmp_path):
    model = quantized(small_model())
    state = model.state_dict()
    slimtensors.save(state, tmp_path / "model.safetensors")
    back = slimtensors.load(tmp_path / "model.safetensors")
    assert list(back) == list(state)
    assert back._metadata == state._metadata
    other = quantized(small_model())
    other.load_state_dict(back)
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(other(tokens), model(tokens))
