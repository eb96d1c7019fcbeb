"""Residuals: exact differences between a tensor and a similar one, its base."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import QUANTIZED_DTYPES, Spec, allocate, as_bytes, ceil_div

ResidualKind = Literal["whole", "difference", "by-exponent"]
"""The tensor itself; its difference from the base; the difference, sorted by base exponents."""
KINDS: tuple[ResidualKind, ...] = get_args(ResidualKind)

Cost = Callable[[Tensor], float]
"""Estimates the stored size of a tensor."""

_CHUNK = 1 << 20
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MANTISSA = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


def residual(
    kind: ResidualKind, x: Tensor, base: Tensor, *, by: Tensor | None = None, each: Each = serially
) -> Tensor:
    """Return the residual of `x` against `base`, which has the same dtype and shape.

    Changes of a weight correlate with its magnitude, so `by-exponent` groups weights by the
    exponents of `by`, or of `base`.
    """
    if kind == "whole":
        return x
    if kind == "difference":
        return difference(x, base, each)
    d = _subtract(x, base, _core.Order.OUTWARD, each)
    return group_bytes(d, base if by is None else by)


def apply_residual(
    kind: ResidualKind, r: Tensor, base: Tensor, *, by: Tensor | None = None, each: Each = serially
) -> Tensor:
    """Return the tensor with the residual `r` against `base`."""
    if kind == "whole":
        return r
    if kind == "difference":
        return add_difference(r, base, each)
    d = ungroup_bytes(r, base if by is None else by).view(base.shape)
    return _add(d, base, _core.Order.OUTWARD, each)


def choose_residual(
    x: Tensor, base: Tensor, cost: Cost, *, by: Tensor | None = None, each: Each = serially
) -> tuple[ResidualKind, Tensor]:
    """Return the cheapest kind of residual, and the residual."""
    best: tuple[ResidualKind, Tensor] = ("whole", x)
    smallest = cost(x)
    for kind in applicable_kinds(Spec.of(x)):
        r = residual(kind, x, base, by=by, each=each)
        if (size := cost(r)) < smallest:
            best, smallest = (kind, r), size
    return best


def applicable_kinds(spec: Spec) -> Iterator[ResidualKind]:
    """Yield the kinds that apply to tensors of this spec, besides `whole`."""
    plain = not spec.dtype.is_complex and spec.dtype not in QUANTIZED_DTYPES
    if plain and spec.numel and spec.dtype.itemsize in _UNSIGNED:
        yield "difference"
        if spec.dtype in _MANTISSA:
            yield "by-exponent"


def difference(x: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the difference of `x` and `base` as unsigned integers: 0 if equal, small if close."""
    return _subtract(x, base, _find_order(x.dtype), each)


def add_difference(d: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the tensor with the difference `d` from `base`."""
    return _add(d, base, _find_order(base.dtype), each)


def group_bytes(x: Tensor, by: Tensor) -> Tensor:
    """Return the items of `x`, flat, sorted by the exponents of the floats in `by`.

    Both have the same number of items, of the same width.
    """
    return _reorder(_core.group, x, by)


def ungroup_bytes(x: Tensor, by: Tensor) -> Tensor:
    """Return the items of `x`, flat, in their order before `group_bytes`."""
    return _reorder(_core.ungroup, x, by)


def _find_order(dtype: torch.dtype) -> _core.Order:
    return _core.Order.FLOATS if dtype.is_floating_point else _core.Order.INTEGERS


def _unsigned(spec: Spec) -> Spec:
    return Spec(_UNSIGNED[spec.dtype.itemsize], spec.shape)


def _subtract(x: Tensor, base: Tensor, order: _core.Order, each: Each) -> Tensor:
    return _process_chunks(_core.difference, x, base, _unsigned(Spec.of(x)), order, each)


def _add(d: Tensor, base: Tensor, order: _core.Order, each: Each) -> Tensor:
    if Spec.of(d) != _unsigned(Spec.of(base)):
        raise CorruptFileError(f"difference of {d.dtype} {tuple(d.shape)} does not fit its base")
    return _process_chunks(_core.add_difference, d, base, Spec.of(base), order, each)


def _process_chunks(
    work: Callable[[Tensor, Tensor, int, _core.Order, Tensor], None],
    first: Tensor,
    base: Tensor,
    like: Spec,
    order: _core.Order,
    each: Each,
) -> Tensor:
    out = allocate(like)
    arrays = [as_bytes(x) for x in (first, base, out)]

    def process_chunk(i: int) -> None:
        a, b, c = (array[i * _CHUNK : (i + 1) * _CHUNK] for array in arrays)
        work(a, b, like.dtype.itemsize, order, c)

    each(process_chunk, ceil_div(like.nbytes, _CHUNK))
    return out


def _reorder(
    work: Callable[[Tensor, Tensor, int, int, Tensor], None], x: Tensor, by: Tensor
) -> Tensor:
    if (
        by.dtype not in _MANTISSA
        or x.numel() != by.numel()
        or x.element_size() != by.element_size()
    ):
        raise CorruptFileError(
            f"{x.numel()} items of {x.dtype} do not fit {by.numel()} of {by.dtype}"
        )
    out = allocate(Spec(x.dtype, (x.numel(),)))
    work(as_bytes(x), as_bytes(by), by.element_size(), _MANTISSA[by.dtype], as_bytes(out))
    return out
