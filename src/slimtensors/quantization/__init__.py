"""Quantization: weights and activations as small integers or floats."""

from slimtensors.quantization.args import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)

__all__ = [
    "ActivationOrdering",
    "QuantizationArgs",
    "QuantizationStrategy",
    "QuantizationType",
]
