"""Quantize a model in place and save its state dict with torch.save and with slimtensors.

Follows torchao's page on serialization, on a CPU. The names in the state dict do not change, and
the quantized tensors load into a model on the meta device.

Prints:

    original model size: 4.0 MB
    quantized model size: 1.0625 MB
    type of weight before loading: Tensor
    type of weight after loading: QuantizedTensor
    equal after torch.save: True
    equal after slimtensors.save: True
"""

import torch

import slimtensors
from slimtensors.quantization import get_model_size_in_bytes, int4_weight_only, quantize_


class ToyLinearModel(torch.nn.Module):
    def __init__(self, m=64, n=32, k=64):
        super().__init__()
        self.linear1 = torch.nn.Linear(m, n, bias=False)
        self.linear2 = torch.nn.Linear(n, k, bias=False)

    def forward(self, x):
        return self.linear2(self.linear1(x))


torch.manual_seed(0)
m = ToyLinearModel(1024, 1024, 1024).eval().to(torch.bfloat16)
print(f"original model size: {get_model_size_in_bytes(m) / 1024 / 1024} MB")

quantize_(m, int4_weight_only())
print(f"quantized model size: {get_model_size_in_bytes(m) / 1024 / 1024} MB")
x = torch.randn(1, 1024, dtype=torch.bfloat16)
ref = m(x)

torch.save(m.state_dict(), "model.pt")
slimtensors.save(m.state_dict(), "model.safetensors")
with torch.device("meta"):
    m_loaded = ToyLinearModel(1024, 1024, 1024).eval().to(torch.bfloat16)

print("type of weight before loading:", type(m_loaded.linear1.weight.data).__name__)
m_loaded.load_state_dict(torch.load("model.pt"), assign=True)
print("type of weight after loading:", type(m_loaded.linear1.weight.data).__name__)
print("equal after torch.save:", torch.equal(m_loaded(x), ref))

state = slimtensors.load("model.safetensors", run_compressed=True)
m_loaded.load_state_dict(state, assign=True)
print("equal after slimtensors.save:", torch.equal(m_loaded(x), ref))
