"""Serialization of optimized models: torchao's document, on the CPU, with other imports."""

import tempfile

import torch

from slimtensors.quantization import get_model_size_in_bytes, int4_weight_only, quantize_
from slimtensors.runtime import QuantizedTensor


class ToyLinearModel(torch.nn.Module):
    def __init__(self, m=64, n=32, k=64):
        super().__init__()
        self.linear1 = torch.nn.Linear(m, n, bias=False)
        self.linear2 = torch.nn.Linear(n, k, bias=False)

    def example_inputs(self, batch_size=1, dtype=torch.float32, device="cpu"):
        return (torch.randn(batch_size, self.linear1.in_features, dtype=dtype, device=device),)

    def forward(self, x):
        x = self.linear1(x)
        x = self.linear2(x)
        return x  # noqa: RET504


def test_the_whole_document(capsys):
    dtype = torch.bfloat16
    m = ToyLinearModel(1024, 1024, 1024).eval().to(dtype).to("cpu")
    print(f"original model size: {get_model_size_in_bytes(m) / 1024 / 1024} MB")

    example_inputs = m.example_inputs(dtype=dtype, device="cpu")
    quantize_(m, int4_weight_only())
    print(f"quantized model size: {get_model_size_in_bytes(m) / 1024 / 1024} MB")

    ref = m(*example_inputs)
    with tempfile.NamedTemporaryFile() as f:
        torch.save(m.state_dict(), f)
        f.seek(0)
        state_dict = torch.load(f)

    with torch.device("meta"):
        m_loaded = ToyLinearModel(1024, 1024, 1024).eval().to(dtype)

    # `linear.weight` is nn.Parameter, so we check the type of `linear.weight.data`
    print(
        f"type of weight before loading: {type(m_loaded.linear1.weight.data), type(m_loaded.linear2.weight.data)}"  # noqa: E501
    )
    m_loaded.load_state_dict(state_dict, assign=True)
    print(
        f"type of weight after loading: {type(m_loaded.linear1.weight), type(m_loaded.linear2.weight)}"  # noqa: E501
    )

    res = m_loaded(*example_inputs)
    assert torch.equal(res, ref)

    assert capsys.readouterr().out.splitlines() == [
        "original model size: 4.0 MB",
        "quantized model size: 1.0625 MB",
        "type of weight before loading: (<class 'torch.Tensor'>, <class 'torch.Tensor'>)",
        f"type of weight after loading: {(QuantizedTensor, QuantizedTensor)}",
    ]
