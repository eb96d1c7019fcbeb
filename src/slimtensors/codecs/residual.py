"""Residuals: what there is to store of a tensor for whoever has another one like it. Exact."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import QUANTIZED_DTYPES, Spec, allocate, as_bytes, ceil_div

Kind = Literal["whole", "difference", "by-exponent"]
"""The tensor itself; its difference from the base; that, sorted by the exponents of the base."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Cost = Callable[[Tensor], float]
"""Estimates what storing a tensor takes."""

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
    kind: Kind, x: Tensor, base: Tensor, *, by: Tensor | None = None, each: Each = serially
) -> Tensor:
    """Return what a reader needs who has `base`, which has the dtype and shape of `x`.

    How much a weight changes depends on how large it is, which its base tells. So `by-exponent`
    puts those together that change alike; `by` names another tensor than `base` to tell it.
    """
    if kind == "whole":
        return x
    if kind == "difference":
        return difference(x, base, each)
    d = _subtract(x, base, _core.Order.OUTWARD, each)
    return group_bytes(d, base if by is None else by)


def apply_residual(
    kind: Kind, r: Tensor, base: Tensor, *, by: Tensor | None = None, each: Each = serially
) -> Tensor:
    """Return the tensor of which `r` is the residual."""
    if kind == "whole":
        return r
    if kind == "difference":
        return add_difference(r, base, each)
    d = ungroup_bytes(r, base if by is None else by).view(base.shape)
    return _add(d, base, _core.Order.OUTWARD, each)


def choose_residual(
    x: Tensor, base: Tensor, cost: Cost, *, by: Tensor | None = None, each: Each = serially
) -> tuple[Kind, Tensor]:
    """Return the kind of residual that costs least, and the residual."""
    best: tuple[Kind, Tensor] = ("whole", x)
    least = cost(x)
    for kind in applicable_kinds(Spec.of(x)):
        r = residual(kind, x, base, by=by, each=each)
        if (price := cost(r)) < least:
            best, least = (kind, r), price
    return best


def applicable_kinds(spec: Spec) -> Iterator[Kind]:
    """Yield the kinds, besides `whole`, that there are of such tensors."""
    plain = not spec.dtype.is_complex and spec.dtype not in QUANTIZED_DTYPES
    if plain and spec.numel and spec.dtype.itemsize in _UNSIGNED:
        yield "difference"
        if spec.dtype in _MANTISSA:
            yield "by-exponent"


def difference(x: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return how `x` differs from `base`, as integers: 0 where equal, small where close."""
    return _subtract(x, base, _order(x.dtype), each)


def add_difference(d: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the tensor whose difference from `base` is `d`."""
    return _add(d, base, _order(base.dtype), each)


def group_bytes(x: Tensor, by: Tensor) -> Tensor:
    """Return the items of `x`, flat, sorted by the exponents of the floats of `by`.

    Both have as many items, of the same width.
    """
    return _reordered(_core.group, x, by)


def ungroup_bytes(x: Tensor, by: Tensor) -> Tensor:
    """Return the items of `x`, flat, in the order that they had before `grouped`."""
    return _reordered(_core.ungroup, x, by)


def _order(dtype: torch.dtype) -> _core.Order:
    return _core.Order.FLOATS if dtype.is_floating_point else _core.Order.INTEGERS


def _unsigned(spec: Spec) -> Spec:
    return Spec(_UNSIGNED[spec.dtype.itemsize], spec.shape)


def _subtract(x: Tensor, base: Tensor, order: _core.Order, each: Each) -> Tensor:
    return _by_chunks(_core.difference, x, base, _unsigned(Spec.of(x)), order, each)


def _add(d: Tensor, base: Tensor, order: _core.Order, each: Each) -> Tensor:
    if Spec.of(d) != _unsigned(Spec.of(base)):
        raise CorruptFileError(f"a difference of {d.dtype} {tuple(d.shape)} does not fit its base")
    return _by_chunks(_core.add_difference, d, base, Spec.of(base), order, each)


def _by_chunks(
    work: Callable[[Tensor, Tensor, int, _core.Order, Tensor], None],
    first: Tensor,
    base: Tensor,
    like: Spec,
    order: _core.Order,
    each: Each,
) -> Tensor:
    out = allocate(like)
    arrays = [as_bytes(x) for x in (first, base, out)]

    def one(i: int) -> None:
        a, b, c = (array[i * _CHUNK : (i + 1) * _CHUNK] for array in arrays)
        work(a, b, like.dtype.itemsize, order, c)

    each(one, ceil_div(like.nbytes, _CHUNK))
    return out


def _reordered(
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
