"""Quantization: weights and activations as small integers or floats.

from slimtensors.quantization import QuantizationConfig, apply_quantization_config

config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
apply_quantization_config(model, config)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import (
    ActivationOrdering,
    DynamicType,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from slimtensors.quantization.codec import Quantized
from slimtensors.quantization.config import (
    DEFAULT_QUANTIZATION_FORMAT,
    DEFAULT_QUANTIZATION_METHOD,
    LIFECYCLE_ORDER,
    QuantizationConfig,
    QuantizationStatus,
)
from slimtensors.quantization.forward import (
    calculate_qparams,
    calculate_range,
    dequantize,
    fake_quantize,
    quantize,
)
from slimtensors.quantization.scheme import (
    CompressionFormat,
    QuantizationScheme,
    is_preset_scheme,
    preset_name_to_scheme,
)

if TYPE_CHECKING:
    from slimtensors.layerwise.quantize import quantize_model
    from slimtensors.quantization.apply import (
        apply_quantization_config,
        apply_quantization_status,
        compress_quantized_weights,
        decompress_quantized_weights,
        disable_quantization,
        enable_quantization,
        freeze_module_quantization,
        is_model_quantized,
        is_module_quantized,
        set_module_for_calibration,
    )
    from slimtensors.quantization.layers import is_cached_attention_module
    from slimtensors.quantization.state import Report
    from slimtensors.quantization.state_dict import load_pretrained_quantization_parameters

__all__ = [
    "DEFAULT_QUANTIZATION_FORMAT",
    "DEFAULT_QUANTIZATION_METHOD",
    "LIFECYCLE_ORDER",
    "ActivationOrdering",
    "CompressionFormat",
    "DynamicType",
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
    "apply_quantization_status",
    "calculate_qparams",
    "calculate_range",
    "coded_weight",
    "compress_quantized_weights",
    "decode_ahead",
    "decompress_quantized_weights",
    "dequantize",
    "dequantize_",
    "disable_quantization",
    "enable_quantization",
    "fake_quantize",
    "float8_weight_only",
    "freeze_module_quantization",
    "get_model_size_in_bytes",
    "int4_weight_only",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "is_cached_attention_module",
    "is_model_quantized",
    "is_module_quantized",
    "is_preset_scheme",
    "load_pretrained_quantization_parameters",
    "preset_name_to_scheme",
    "quantize",
    "quantize_",
    "quantize_model",
    "set_module_for_calibration",
    "sparse_int8_weight",
    "sparse_weight",
]

_RUNTIME = "slimtensors.runtime"
_APPLY = "slimtensors.quantization.apply"
_ON_DEMAND = {
    "Report": "slimtensors.quantization.state",
    "apply_quantization_config": _APPLY,
    "apply_quantization_status": _APPLY,
    "coded_weight": _RUNTIME,
    "compress_quantized_weights": _APPLY,
    "decode_ahead": _RUNTIME,
    "decompress_quantized_weights": _APPLY,
    "dequantize_": _RUNTIME,
    "disable_quantization": _APPLY,
    "enable_quantization": _APPLY,
    "float8_weight_only": _RUNTIME,
    "freeze_module_quantization": _APPLY,
    "get_model_size_in_bytes": _RUNTIME,
    "int4_weight_only": _RUNTIME,
    "int8_dynamic_activation_int8_weight": _RUNTIME,
    "int8_weight_only": _RUNTIME,
    "is_cached_attention_module": "slimtensors.quantization.layers",
    "is_model_quantized": _APPLY,
    "is_module_quantized": _APPLY,
    "load_pretrained_quantization_parameters": "slimtensors.quantization.state_dict",
    "quantize_": _RUNTIME,
    "quantize_model": "slimtensors.layerwise",
    "set_module_for_calibration": _APPLY,
    "sparse_int8_weight": _RUNTIME,
    "sparse_weight": _RUNTIME,
}
"""Modules of names that are imported on first use: they need torch.nn or higher layers."""

_TORCHAO_NAMES = (
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FqnToConfig",
    "Int4CPULayout",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MappingType",
    "ModuleFqnToConfig",
    "PerAxis",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlainLayout",
    "TensorCoreTiledLayout",
    "UIntXWeightOnlyConfig",
    "ZeroPointDomain",
    "float8_dynamic_activation_float8_weight",
    "int8_dynamic_activation_int4_weight",
    "uintx_weight_only",
)
"""Names of torchao.quantization: configurations of `quantize_` and their options."""
__all__ += _TORCHAO_NAMES
_ON_DEMAND |= dict.fromkeys(_TORCHAO_NAMES, _RUNTIME)


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_ON_DEMAND]
