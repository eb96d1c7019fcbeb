"""Store sparse tensors in the dialects `slim` and `compressed-tensors`, and read both.

Follows the README of compressed-tensors, which dropped these formats in release 0.15.

Prints:

    slim: 1 tensor, 1 compressed: 524.3 kB -> 94.2 kB
    compressed-tensors: 142.7 kB, equal after loading: True
    a tensor whose name has no ".weight": True
"""

from pathlib import Path

import torch

import slimtensors
from slimtensors.compat.sparse_formats import load_compressed, save_compressed
from slimtensors.folder.config_json import BitmaskConfig

torch.manual_seed(0)
weight = torch.randn(512, 512, dtype=torch.bfloat16)
weight[torch.rand(512, 512) < 0.8] = 0

summary = slimtensors.save({"layer.weight": weight}, "slim.safetensors")
print(f"slim: {str(summary).partition(' (')[0]}")

config = BitmaskConfig()
save_compressed({"layer.weight": weight}, "sparse.safetensors", compression_format=config.format)
back = dict(load_compressed("sparse.safetensors", compression_config=config))
size = Path("sparse.safetensors").stat().st_size / 1e3
same = torch.equal(back["layer.weight"], weight)
print(f"compressed-tensors: {size:.1f} kB, equal after loading: {same}")

tensors = {"tensor_1": torch.Tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
save_compressed(tensors, "model.safetensors", compression_format=config.format)
back = dict(load_compressed("model.safetensors", compression_config=config))
same = torch.equal(back["tensor_1"], tensors["tensor_1"])
print(f'a tensor whose name has no ".weight": {same}')
