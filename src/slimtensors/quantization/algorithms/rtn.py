"""Round to nearest: each weight for itself, without a look at what flows through the layer."""

from typing import NamedTuple

from torch import Tensor

from slimtensors.quantization.affine import Params, fake_quantize
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.observers import observe_weight


class Rounded(NamedTuple):
    """A weight of which every number can be said by a code, and what turns codes into numbers."""

    weight: Tensor
    params: Params


def rtn(weight: Tensor, args: QuantizationArgs, *, params: Params | None = None) -> Rounded:
    """Round every weight to the nearest code of its scale. Zeros stay zeros."""
    params = observe_weight(weight, args) if params is None else params
    return Rounded(fake_quantize(weight, params, args), params)
