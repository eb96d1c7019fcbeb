"""Multiply by compressed weights and save the products and the dense weights.

python multiply.py FILE OUTPUT
"""

import sys

import torch

import slimtensors

weights = slimtensors.load(sys.argv[1], run_compressed=True)
x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
results = {
    name: (torch.nn.functional.linear(x, weight), weight.dequantize())
    for name, weight in weights.items()
}
torch.save(results, sys.argv[2])
