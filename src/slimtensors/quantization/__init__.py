"""Quantization: weights and activations as small integers or floats."""

from slimtensors.quantization.affine import Params
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
]
