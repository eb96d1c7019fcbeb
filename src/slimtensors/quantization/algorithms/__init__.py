"""Ways to choose the codes of a model's weights."""

from slimtensors.quantization.algorithms.gptq import gptq
from slimtensors.quantization.algorithms.hessian import Hessian, output_error
from slimtensors.quantization.algorithms.rtn import Rounded, rtn

__all__ = ["Hessian", "Rounded", "gptq", "output_error", "rtn"]
