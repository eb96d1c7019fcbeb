"""Quantization: weights and activations as small integers or floats."""

from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.scheme import QuantizationScheme

__all__ = [
    "ActivationOrdering",
    "Params",
    "QuantizationArgs",
    "QuantizationConfig",
    "QuantizationScheme",
    "QuantizationStatus",
    "QuantizationStrategy",
    "QuantizationType",
]
