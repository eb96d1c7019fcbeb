"""Bring the numbers that share a scale together: along the last dimension."""

from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy


def gather_weight(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Return a weight as `[*shape of its scale, numbers]`; blocks are filled up with zeros."""
    experts = weight.shape[:-2]
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            return weight.reshape(*experts, 1, 1, -1) if experts else weight.reshape(1, -1)
        case QuantizationStrategy.CHANNEL:
            return weight.unsqueeze(-2)
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return weight.reshape(*weight.shape[:-1], -1, args.group_size or 1)
        case QuantizationStrategy.BLOCK:
            return _blocks(weight, args)
    raise ConfigError(f"weights have no scales per {args.strategy}")


def gather_activations(x: Tensor, args: QuantizationArgs) -> Tensor:
    """Return activations `[..., features]`, for heads `[batch, heads, tokens, features]`."""
    match args.strategy:
        case QuantizationStrategy.TENSOR | QuantizationStrategy.TENSOR_GROUP:
            return x.reshape(1, -1)
        case QuantizationStrategy.ATTN_HEAD:
            return x.transpose(0, 1).reshape(x.shape[1], 1, 1, -1)
        case QuantizationStrategy.TOKEN:
            return x.unsqueeze(-2)
        case QuantizationStrategy.GROUP:
            return x.reshape(*x.shape[:-1], -1, args.group_size or 1)
    raise ConfigError(f"activations have no scales per {args.strategy}")


def _blocks(weight: Tensor, args: QuantizationArgs) -> Tensor:
    height, width = args.block_structure or (1, 1)
    *experts, rows, columns = weight.shape
    down, across = -(-rows // height), -(-columns // width)
    whole = weight.new_zeros((*experts, down * height, across * width))
    whole[..., :rows, :columns] = weight
    cut = whole.reshape(*experts, down, height, across, width)
    return cut.transpose(-2, -3).flatten(-2)
