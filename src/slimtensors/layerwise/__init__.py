"""Run a model block by block and rewrite its weights: quantize, prune, smooth."""

from slimtensors.layerwise.allocation import (
    by_outliers,
    find_layers,
    fitting_layers,
    per_block,
    per_target,
)
from slimtensors.layerwise.engine import Progress
from slimtensors.layerwise.gptq import Rounded, gptq, rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.layerwise.prune import (
    Magnitude,
    PruningMethod,
    PruningTarget,
    SparseGPT,
    Wanda,
    prune_model,
)
from slimtensors.layerwise.quantize import (
    GPTQ,
    RTN,
    QuantizationMethod,
    quantize_model,
)
from slimtensors.layerwise.report import LayerReport, ModelReport
from slimtensors.layerwise.smoothing import AWQ, Smoothing, SmoothQuant
from slimtensors.layerwise.sparsegpt import sparsegpt
from slimtensors.layerwise.structure import (
    Blocks,
    Groups,
    Rows,
    Structure,
    Unstructured,
    parse_structure,
)

__all__ = [
    "AWQ",
    "GPTQ",
    "RTN",
    "Blocks",
    "Groups",
    "Hessian",
    "LayerReport",
    "Magnitude",
    "ModelReport",
    "Progress",
    "PruningMethod",
    "PruningTarget",
    "QuantizationMethod",
    "Rounded",
    "Rows",
    "SmoothQuant",
    "Smoothing",
    "SparseGPT",
    "Structure",
    "Unstructured",
    "Wanda",
    "by_outliers",
    "find_layers",
    "fitting_layers",
    "gptq",
    "output_error",
    "parse_structure",
    "per_block",
    "per_target",
    "prune_model",
    "quantize_model",
    "rtn",
    "sparsegpt",
]
