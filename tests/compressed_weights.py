"""A compressed weight of each kind, and the class it has."""

import torch

from slimtensors.quantization import QuantizationArgs
from slimtensors.runtime import (
    CsrTensor,
    QuantizedConfig,
    QuantizedTensor,
    SparseTensor,
    coded_weight,
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    sparse_int8_weight,
)

NVFP4 = QuantizedConfig(QuantizationArgs(4, "float", strategy="tensor_group", group_size=16))

KINDS = {
    "int8": int8_weight_only(),
    "int8 dynamic": int8_dynamic_activation_int8_weight(),
    "int4": int4_weight_only(group_size=32),
    "float8": float8_weight_only(),
    "nvfp4": lambda weight: QuantizedTensor.quantize(weight, NVFP4),
    "sparse int8": sparse_int8_weight(),
    "sparse": SparseTensor.from_dense,
    "csr": CsrTensor.from_dense,
    "coded": coded_weight(),
}


def dense_weight(rows=64, columns=64, *, dtype=torch.bfloat16, seed=0):
    """Return a weight with 60 % zeros."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=random)
    return torch.where(torch.rand(rows, columns, generator=random) < 0.4, x, 0.0).to(dtype)
