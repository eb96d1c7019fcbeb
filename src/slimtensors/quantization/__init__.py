"""Quantization: weights and activations as small integers or floats."""

from typing import Any

from slimtensors.quantization.affine import Params
from slimtensors.quantization.algorithms import quantize_model
from slimtensors.quantization.apply import (
    apply_quantization_config,
    compress_quantized_weights,
    decompress_quantized_weights,
    freeze_module_quantization,
)
from slimtensors.quantization.args import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from slimtensors.quantization.codec import Quantized
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import Report

__all__ = [
    "ActivationOrdering",
    "Params",
    "QuantizationArgs",
    "QuantizationConfig",
    "QuantizationScheme",
    "QuantizationStatus",
    "QuantizationStrategy",
    "QuantizationType",
    "Quantized",
    "Report",
    "apply_quantization_config",
    "compress_quantized_weights",
    "decompress_quantized_weights",
    "freeze_module_quantization",
    "quantize_model",
]

_OF_TENSORS = (
    "coded_weight",
    "decode_ahead",
    "dequantize_",
    "float8_weight_only",
    "get_model_size_in_bytes",
    "int4_weight_only",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "quantize_",
    "sparse_int8_weight",
    "sparse_weight",
)


def __getattr__(name: str) -> Any:
    """Offer what users look for here, although it is built upon what is here."""
    if name not in _OF_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slimtensors import tensors

    return getattr(tensors, name)
