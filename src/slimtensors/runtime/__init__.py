"""Tensor subclasses that stay compressed while a model runs, and their kernels."""

from slimtensors.runtime import operations  # noqa: F401  # registers them
from slimtensors.runtime.coded import CodedTensor, coded_weight, decode_ahead
from slimtensors.runtime.compressed import CompressedTensor, rebuild
from slimtensors.runtime.convert import (
    Compression,
    broadcast_,
    dequantize_,
    float8_weight_only,
    get_model_size_in_bytes,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    is_linear,
    is_linear_or_embedding,
    quantize_,
    sparse_int8_weight,
    sparse_weight,
)
from slimtensors.runtime.quantized import QuantizedConfig, QuantizedTensor
from slimtensors.runtime.serialization import from_module
from slimtensors.runtime.sparse import CsrTensor, SparseTensor
from slimtensors.runtime.views import ViewTensor

__all__ = [
    "CodedTensor",
    "CompressedTensor",
    "Compression",
    "CsrTensor",
    "QuantizedConfig",
    "QuantizedTensor",
    "SparseTensor",
    "ViewTensor",
    "broadcast_",
    "coded_weight",
    "decode_ahead",
    "dequantize_",
    "float8_weight_only",
    "from_module",
    "get_model_size_in_bytes",
    "int4_weight_only",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "is_linear",
    "is_linear_or_embedding",
    "quantize_",
    "rebuild",
    "sparse_int8_weight",
    "sparse_weight",
]
