"""Quantize a Llama to 4-bit integers with calibration data, for transformers and vLLM.

Follows the README of compressed-tensors: calibrate, freeze, compress, save. Model and data are
random; replace them with your own.

Prints:

    quantized layers: 14
    dense: 2.1 MB, W4A16: 0.7 MB
    the loaded model computes the same logits: True
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slimtensors import ModelCompressor
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    compress_quantized_weights,
    freeze_module_quantization,
)
from slimtensors.transformers.auto import SparseAutoModelForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
model.save_pretrained("dense")

plan = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
plan.quantization_status = QuantizationStatus.CALIBRATION
apply_quantization_config(model, plan)
with torch.no_grad():
    for _ in range(4):
        model(torch.randint(0, 256, (1, 64)))
model.apply(freeze_module_quantization)
expected = model(torch.arange(16)[None]).logits
model.apply(compress_quantized_weights)

state = ModelCompressor(quantization_config=plan).compress(model)
print("quantized layers:", sum(name.endswith("weight_packed") for name in state))
model.save_pretrained("w4a16", state_dict=state)

dense, small = (Path(x, "model.safetensors").stat().st_size / 1e6 for x in ("dense", "w4a16"))
print(f"dense: {dense:.1f} MB, W4A16: {small:.1f} MB")

loaded = SparseAutoModelForCausalLM.from_pretrained("w4a16")
same = torch.allclose(loaded(torch.arange(16)[None]).logits, expected, atol=1e-5)
print("the loaded model computes the same logits:", same)
