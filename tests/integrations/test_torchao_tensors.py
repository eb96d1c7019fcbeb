"""torchao tensors in our files, and our tensors converted to torchao."""

import pytest
import torch
from torch import nn

import slimtensors
from slimtensors.errors import UnsupportedTensorError
from slimtensors.integrations.torchao import from_torchao, to_torchao
from slimtensors.quantization import (
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
)
from slimtensors.runtime import QuantizedTensor

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
torchao = pytest.importorskip("torchao", exc_type=ImportError)


def configs():
    from torchao import quantization as q

    return {
        "int8": q.Int8WeightOnlyConfig(),
        "float8": q.Float8WeightOnlyConfig(),
        "int4": q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(32)),
        "int3": q.IntxWeightOnlyConfig(torch.int3, q.PerGroup(32)),
        "int8 dynamic": q.Int8DynamicActivationInt8WeightConfig(),
        "int4 dynamic": q.Int8DynamicActivationIntxWeightConfig(torch.int4, q.PerGroup(32)),
    }


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16().eval()


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def error(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("name", ["int8", "float8", "int4", "int3", "int8 dynamic", "int4 dynamic"])
def test_torchao_tensors_round_trip_through_our_files(name, tmp_path):
    theirs = model()
    torchao.quantization.quantize_(theirs, configs()[name])
    slimtensors.save(from_torchao(theirs.state_dict()), tmp_path / "file")
    compressed = slimtensors.load(tmp_path / "file", run_compressed=True)
    assert error(compressed["0.weight"].dequantize(), theirs[0].weight.dequantize()) < 0.003
    with torch.device("meta"):
        ours = model()
    ours.load_state_dict(compressed, assign=True)
    expected = theirs(X)
    assert error(ours(X), expected) < 0.02
    assert error(to_torchao(ours)(X), expected) < 0.002
    assert type(ours[0].weight) is type(theirs[0].weight)


@pytest.mark.parametrize(
    "config",
    [
        int8_weight_only(),
        int4_weight_only(group_size=32),
        float8_weight_only(),
        int8_dynamic_activation_int8_weight(),
    ],
)
def test_our_tensors_convert_to_torchao(config):
    ours = model()
    quantize_(ours, config)
    expected = ours(X)
    assert error(to_torchao(ours)(X), expected) < 0.02
    back = from_torchao(ours.state_dict())
    assert isinstance(back["0.weight"], QuantizedTensor)


def test_layouts_of_torchao_kernels_raise():
    opaque = type("Int4PreshuffledTensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    with pytest.raises(UnsupportedTensorError, match=r"w: Int4PreshuffledTensor .* dequantize"):
        from_torchao({"w": torch.zeros(2, 2).as_subclass(opaque)})
