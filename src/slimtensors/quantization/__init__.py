"""Quantization: weights and activations as small integers or floats."""

from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)

__all__ = [
    "ActivationOrdering",
    "Params",
    "QuantizationArgs",
    "QuantizationStrategy",
    "QuantizationType",
]
