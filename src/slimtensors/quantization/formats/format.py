"""What a format is, and what all formats check."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from slimtensors.errors import CorruptFileError
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.spec import Each, Spec, serially


class Format(Protocol):
    """How codes and params of a weight are stored: as tensors named by suffixes of the module."""

    @property
    def name(self) -> str:
        """What configs call it."""
        ...

    def store(self, codes: Tensor, params: Params, args: QuantizationArgs) -> dict[str, Tensor]:
        """Return the stored tensors of codes that are there already."""
        ...

    def parse(self, parts: Mapping[str, Tensor], args: QuantizationArgs) -> tuple[Tensor, Params]:
        """Return codes and params; raise `CorruptFileError` if the tensors do not fit together."""
        ...

    def compress(
        self, weight: Tensor, params: Params, args: QuantizationArgs, each: Each = serially
    ) -> dict[str, Tensor]:
        """Round a weight to codes and return the stored tensors, dividing the work by `each`."""
        ...

    def decompress(
        self,
        parts: Mapping[str, Tensor],
        args: QuantizationArgs,
        each: Each = serially,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the dense weight, in the memory of `out` if given."""
        ...


def part(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    """Return a stored tensor that must be there."""
    if suffix not in parts:
        raise CorruptFileError(f"lacks {suffix}; there is {', '.join(sorted(parts)) or 'nothing'}")
    return parts[suffix]


def column_groups(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each column, if groups are not neighbours."""
    order = parts.get("weight_g_idx")
    if order is None or bool((order < 0).any()):  # how older releases say that it is unused
        return None
    return order


def check_params(shape: tuple[int, ...], params: Params, args: QuantizationArgs) -> Params:
    """Return the params of a weight of this shape if they fit it."""
    wanted = scale_shape(shape, args)
    if args.strategy is QuantizationStrategy.TENSOR:  # one number, whatever its dimensions
        zero = params.zero_point
        params = replace(
            params,
            scale=_shaped(params.scale, wanted),
            zero_point=None if zero is None else _shaped(zero, wanted),
        )
    for what, given in (("weight_scale", params.scale), ("weight_zero_point", params.zero_point)):
        if given is not None and tuple(given.shape) != wanted:
            raise CorruptFileError(
                f"{what} of shape {tuple(given.shape)}, but a weight of {shape} needs {wanted}"
            )
    order = params.g_idx
    if order is not None and (order.shape != shape[-1:] or order.is_floating_point()):
        raise CorruptFileError(f"g_idx of {Spec.of(order)} for {shape[-1]} columns")
    if order is not None and not 0 <= int(order.min()) <= int(order.max()) < wanted[-1]:
        raise CorruptFileError(f"g_idx names groups outside of the {wanted[-1]} that have scales")
    return params


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape) if x.numel() == math.prod(shape) else x


def scale_shape(shape: tuple[int, ...], args: QuantizationArgs) -> tuple[int, ...]:
    """Return the shape that the scales of a weight have."""
    *experts, rows, columns = shape
    match args.strategy:
        case QuantizationStrategy.CHANNEL:
            return *experts, rows, 1
        case QuantizationStrategy.GROUP | QuantizationStrategy.TENSOR_GROUP:
            return *experts, rows, -(-columns // (args.group_size or 1))
        case QuantizationStrategy.BLOCK:
            height, width = args.block_structure or (1, 1)
            return *experts, -(-rows // height), -(-columns // width)
    return (*experts, 1, 1) if experts else (1,)
