"""Ways to choose the codes of a model's weights."""

from slimtensors.quantization.algorithms.driver import Progress, put_results, quantize_model
from slimtensors.quantization.algorithms.gptq import gptq
from slimtensors.quantization.algorithms.hessian import Hessian, output_error
from slimtensors.quantization.algorithms.methods import GPTQ, RTN, Method
from slimtensors.quantization.algorithms.report import LayerReport, ModelReport
from slimtensors.quantization.algorithms.rtn import Rounded, rtn
from slimtensors.quantization.algorithms.smoothing import AWQ, Smoothing, SmoothQuant

__all__ = [
    "AWQ",
    "GPTQ",
    "RTN",
    "Hessian",
    "LayerReport",
    "Method",
    "ModelReport",
    "Progress",
    "Rounded",
    "SmoothQuant",
    "Smoothing",
    "gptq",
    "output_error",
    "put_results",
    "quantize_model",
    "rtn",
]
