"""Matrix products as torch calls: which operand is the weight, and what its inputs are."""

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Function = Callable[..., Any]
Arguments = Mapping[str, Any]

_MATMULS: dict[Function, tuple[int, str, str]] = {
    torch.matmul: (0, "input", "other"),
    Tensor.matmul: (0, "self", "other"),
    Tensor.__matmul__: (0, "self", "other"),
    torch.mm: (0, "input", "mat2"),
    Tensor.mm: (0, "self", "mat2"),
    torch.bmm: (0, "input", "mat2"),
    Tensor.bmm: (0, "self", "mat2"),
    torch.addmm: (1, "mat1", "mat2"),
    Tensor.addmm: (1, "mat1", "mat2"),
    torch.baddbmm: (1, "batch1", "batch2"),
    Tensor.baddbmm: (1, "batch1", "batch2"),
}
"""Products of two matrices: position of the first among the arguments, and names of both."""


def _make_transparent(function: Function) -> Function:
    """Return a copy of a function whose calls of torch functions can be observed.

    The original passes itself as a whole to an active mode, and the calls within it are not seen.
    """
    original: FunctionType = function  # type: ignore[assignment]
    names = {**original.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


TRANSPARENT: dict[Function, Function] = {
    functional.multi_head_attention_forward: _make_transparent(
        functional.multi_head_attention_forward
    )
}
"""Functions that multiply several weights, and copies that show each product to a mode."""

_CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}

PRODUCTS: frozenset[Function] = frozenset(
    {functional.linear, functional.scaled_dot_product_attention, *_MATMULS, *_CONVOLUTIONS}
)
"""Functions that take most of the time of a model."""

_OPTIONS = ("bias", "stride", "padding", "dilation", "groups")


def find_address(x: Tensor) -> int:
    """Return the memory address of a tensor; 0 if it has none, as within `torch.vmap`."""
    try:
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def find_operands(
    function: Function, args: tuple[Any, ...], kwargs: Arguments
) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
    """Yield the possible weights of a call, each with a function that returns its inputs.

    Inputs are `[..., columns]`. Nothing is yielded unless the call is a product that is known here.
    """
    if function is functional.linear:
        x, weight = _get_pair(args, kwargs, 0, "input", "weight")
        if weight is not None:
            yield weight, lambda: x
    elif function in _MATMULS:
        a, b = _get_pair(args, kwargs, *_MATMULS[function])
        if a is not None and b is not None:
            yield b, lambda: a
            yield a, lambda: b.mT if b.dim() > 1 else b
    elif function in _CONVOLUTIONS:
        x, weight = _get_pair(args, kwargs, 0, "input", "weight")
        options = dict(zip(_OPTIONS, args[2:], strict=False)) | dict(kwargs)
        if weight is not None and options.get("groups", 1) == 1:
            yield weight, lambda: _extract_patches(x, weight, options)


def is_convolution(function: Function) -> bool:
    """Return True for a convolution, whose outputs are `[batch, rows, ...]`."""
    return function in _CONVOLUTIONS


def split_inputs(x: Tensor, weight: Tensor, shape: tuple[int, int, int]) -> list[Tensor] | None:
    """Return the inputs of each matrix of a product, as `[..., columns]`.

    `shape` is the number of matrices that begin where the weight begins, their rows and columns.
    None is returned if the product does not multiply all rows of a matrix with the same inputs.
    """
    count, rows, columns = shape
    if x.shape[-1] != columns:
        return None
    if weight.numel() == rows * columns:
        is_one = weight.dim() == 2 or weight.shape[0] in (1, rows)  # not in groups of rows
        return [x] if is_one else None
    if weight.dim() == 3 and weight.shape[0] == count and weight.numel() == count * rows * columns:
        return list(x) if x.dim() == 3 and len(x) == count else [x] * count
    return None


def _get_pair(
    args: tuple[Any, ...], kwargs: Arguments, position: int, first: str, second: str
) -> tuple[Any, Any]:
    a = args[position] if len(args) > position else kwargs.get(first)
    b = args[position + 1] if len(args) > position + 1 else kwargs.get(second)
    return (a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else (None, None)


def _extract_patches(x: Tensor, weight: Tensor, options: Arguments) -> Tensor:
    """Return the patches of a convolution's inputs that it multiplies by its flattened weight."""
    sizes = weight.shape[2:]
    if x.dim() < weight.dim():
        x = x[None]
    strides = _expand(options.get("stride", 1), len(sizes))
    dilations = _expand(options.get("dilation", 1), len(sizes))
    padding = options.get("padding", 0)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, sizes, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in _expand(0 if padding == "valid" else padding, len(sizes))]
    x = functional.pad(x, [p for side in reversed(sides) for p in side])
    for i, (size, stride, dilation) in enumerate(zip(sizes, strides, dilations, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.movedim(1, 1 + len(sizes)).flatten(1 + len(sizes))


def _expand(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count // len(value))
