"""Store a pruned and dynamically quantized BERT without pickle, HDF5 or taking tensors apart.

What the notebook "Saving PruneBERT" does by hand: int8 weights of which 6 % are left, with scales
and dtypes beside them. Here a small BERT with random weights is pruned instead.

Prints:

    dense: 3.2 MB
    int8, 6 % left: 0.09 MB, 37 times smaller
    every tensor is whole: True
    the model answers as before: True
"""

import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

import slimtensors

warnings.filterwarnings("ignore", message=".*torch.(ao|quantize_per_tensor)")
torch.manual_seed(0)
config = BertConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=64,
)
model = BertForQuestionAnswering(config).eval()
for linear in model.bert.encoder.modules():
    if isinstance(linear, nn.Linear):
        weight = linear.weight.data
        weight[weight.abs() < weight.abs().flatten().quantile(0.94)] = 0


def quantized(model):
    how = {nn.Linear: torch.ao.quantization.default_dynamic_qconfig}
    return torch.ao.quantization.quantize_dynamic(model, how, dtype=torch.qint8)


def of_encoder(state):
    return {name: x for name, x in state.items() if "embedding" not in name}


small = quantized(model)
slimtensors.save(of_encoder(model.state_dict()), "dense.safetensors", preset="dense")
slimtensors.save(of_encoder(small.state_dict()), "encoder.safetensors", preset="extreme")
dense, stored = (Path(f"{x}.safetensors").stat().st_size for x in ("dense", "encoder"))
print(f"dense: {dense / 1e6:.1f} MB")
print(f"int8, 6 % left: {stored / 1e6:.2f} MB, {dense / stored:.0f} times smaller")

slimtensors.save(small.state_dict(), "everything.safetensors")
state = slimtensors.load("everything.safetensors")
print("every tensor is whole:", bool(slimtensors.verify("everything.safetensors")))

again = quantized(BertForQuestionAnswering(config).eval())
again.load_state_dict(state)
tokens = torch.randint(0, 256, (2, 32))
same = torch.equal(again(tokens).start_logits, small(tokens).start_logits)
print("the model answers as before:", same)
