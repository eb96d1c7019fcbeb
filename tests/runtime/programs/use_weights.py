"""Load files with `torch.load(weights_only=True)`, use their weights, print each outcome as JSON.

Reads a JSON list of paths from stdin.
"""

import json
import sys

import torch
from torch.nn import functional

import slimtensors.runtime  # noqa: F401
from slimtensors.errors import SlimError


def use(weight: torch.Tensor) -> None:
    """Run every kernel that reads the parts of a weight."""
    weight.dequantize()
    if weight.dim() == 2:
        for count in (1, 3, 40):
            functional.linear(torch.ones(count, weight.shape[1], dtype=weight.dtype), weight)
        functional.embedding(torch.arange(min(2, weight.shape[0])), weight)
        weight[:1]


for path in json.load(sys.stdin):
    try:
        use(torch.load(path, weights_only=True)["w"])
        outcome = "used"
    except SlimError as error:
        outcome = f"SlimError: {error}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome), flush=True)
