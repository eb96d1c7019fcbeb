"""Codes of quantized weights in the layout in which checkpoints store the weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.codecs import Huffman
from slimtensors.codecs.plan import Encoded, Plan, decode
from slimtensors.errors import ConfigError
from slimtensors.parallel import Each
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.checkpoint_layout import StoredTensor
from slimtensors.quantization.codec import Quantized
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.state import Quantization, select_parts
from slimtensors.tensor import bitwise_equal, to_cpu


@dataclass(frozen=True)
class WeightCodes:
    """Codes and params of a quantized weight, as a matrix or a stack of matrices."""

    codes: Tensor
    params: Params
    args: QuantizationArgs

    @classmethod
    def read(cls, state: Quantization, weight: Weight) -> "WeightCodes":
        """Return the codes of a weight of a frozen or compressed layer."""
        args = state.plan.weight_args
        assert args is not None, "only layers with weight_args list weights"
        parts = {name: to_cpu(x) for name, x in select_parts(weight, state.tensors()).items()}
        codes, params = formats.find(state.plan.format).parse(parts, args)
        return cls(codes, params, args)


ReadCodes = Callable[[str], WeightCodes]
"""Returns the codes of a parameter."""


def encode_stored(
    tensor: StoredTensor, read: ReadCodes, dense: Tensor, each: Each
) -> Encoded | None:
    """Return a tensor of a checkpoint as codes, or None if they cannot represent it bit by bit.

    Args:
        tensor: layout of the tensor.
        read: returns the codes of its sources.
        dense: its values.
        each: runs parts of the work.
    """
    found = _arrange(tensor, [read(source) for source in tensor.sources])
    if found is None or found.codes.shape != dense.shape:
        return None
    codec = Quantized.in_whole_bytes(found.args)
    plain = codec.encoded(found.codes, found.params, dense.dtype)
    if not bitwise_equal(decode(plain, each), dense):
        return None
    return codec.encoded(found.codes, found.params, dense.dtype, then={"q": Plan(Huffman())})


def _arrange(tensor: StoredTensor, sources: Sequence[WeightCodes]) -> WeightCodes | None:
    """Return the codes of a stored tensor from those of its sources, or None if impossible."""
    if tensor.rows is None and not tensor.transposed:
        return sources[0]
    numbers = tensor.rows
    if numbers is None:
        shape = sources[0].codes.shape[:-1]
        numbers = torch.arange(math.prod(shape)).view(shape)
    elif len(sources) == 1:
        sources, numbers = _select_matrix(sources[0], numbers)
    rows = [found for source in sources if (found := _split_rows(source)) is not None]
    if len(rows) < len(sources) or any(each.args != rows[0].args for each in rows):
        return None
    if len(rows) > 1 and rows[0].params.global_scale is not None:
        return None
    found = _select_rows(_join(rows), numbers)
    found = replace(found, codes=found.codes.view(sources[0].codes.dtype))
    return _transpose(found) if tensor.transposed else found


def _select_matrix(weight: WeightCodes, numbers: Tensor) -> tuple[Sequence[WeightCodes], Tensor]:
    """Return the only matrix of a stack that contains the given rows, and their numbers in it.

    Return the stack and the same numbers if there is no such matrix.
    """
    height = weight.codes.shape[-2]
    i = int(numbers.flatten()[0]) // height
    if weight.codes.dim() == 2 or bool((numbers // height != i).any()):
        return [weight], numbers
    zero, global_scale = weight.params.zero_point, weight.params.global_scale
    params = Params(
        weight.params.scale[i],
        None if zero is None else zero[i],
        None if global_scale is None else global_scale[i].reshape(1),
    )
    return [WeightCodes(weight.codes[i], params, weight.args)], numbers - i * height


def _split_rows(weight: WeightCodes) -> WeightCodes | None:
    """Return codes `[rows, columns]` with scales `[rows, groups]`; None if rows share more."""
    codes, params, args = weight.codes, weight.params, weight.args
    if params.g_idx is not None or (params.global_scale is not None and codes.dim() != 2):
        return None
    rows, columns = codes.shape[-2:]
    width, height = columns, 1
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        width = args.group_size or columns
    elif args.strategy is QuantizationStrategy.BLOCK:
        height, width = args.block_structure or (1, 1)
    elif args.strategy is QuantizationStrategy.TENSOR:
        height = rows
    if columns % width:
        return None

    def expand(x: Tensor) -> Tensor:
        x = x.reshape(*codes.shape[:-2], -1, columns // width)
        return x.repeat_interleave(height, -2)[..., :rows, :].flatten(0, -2)

    if args.strategy is not QuantizationStrategy.TENSOR_GROUP:
        size = None if width == columns else width
        strategy = QuantizationStrategy.GROUP if size else QuantizationStrategy.CHANNEL
        args = replace(args, strategy=strategy, group_size=size, block_structure=None)
    zero = None if params.zero_point is None else expand(params.zero_point)
    split = Params(expand(params.scale), zero, params.global_scale)
    # As bytes: torch cannot index 8-bit floats.
    return WeightCodes(codes.flatten(0, -2).view(torch.uint8), split, replace(args, actorder=None))


def _select_rows(weight: WeightCodes, numbers: Tensor) -> WeightCodes:
    params = weight.params
    zero = None if params.zero_point is None else params.zero_point[numbers]
    selected = Params(params.scale[numbers], zero, params.global_scale)
    return WeightCodes(weight.codes[numbers], selected, weight.args)


def _join(sources: Sequence[WeightCodes]) -> WeightCodes:
    """Return the rows of several weights as those of one."""
    if len(sources) == 1:
        return sources[0]
    zeros = [each.params.zero_point for each in sources if each.params.zero_point is not None]
    scale = torch.cat([each.params.scale for each in sources])
    params = Params(scale, torch.cat(zeros) if zeros else None)
    return WeightCodes(torch.cat([each.codes for each in sources]), params, sources[0].args)


def _transpose(weight: WeightCodes) -> WeightCodes | None:
    """Return codes `[inputs, outputs]`: groups of a row become blocks one column wide."""
    codes, params, args = weight.codes, weight.params, weight.args
    zero = params.zero_point
    if params.global_scale is not None:
        return None
    try:
        blocks = replace(
            args,
            strategy=QuantizationStrategy.BLOCK,
            block_structure=[args.group_size or codes.shape[-1], 1],
            group_size=None,
        )
    except ConfigError:
        return None
    transposed = Params(
        params.scale.transpose(-1, -2), None if zero is None else zero.transpose(-1, -2)
    )
    return WeightCodes(codes.transpose(-1, -2).contiguous(), transposed, blocks)
