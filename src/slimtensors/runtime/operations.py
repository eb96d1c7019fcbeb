"""Operators on compressed tensors: rows and columns, views, copies, comparisons, factories.

An operator that is not implemented, or that returns `DENSE`, runs on dense copies.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.errors import UnsupportedOperationError
from slimtensors.runtime.compressed import CompressedTensor, parse_traced_spec, rebuild_traced
from slimtensors.runtime.dispatch import DENSE, implements, to_dense
from slimtensors.runtime.views import ViewTensor
from slimtensors.tensor import KERNEL_FLOATS, Spec, bitwise_equal

_aten = torch.ops.aten


@implements(_aten.embedding.default)
def _embedding(
    weight: CompressedTensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    flat = indices.reshape(-1)
    if weight.is_traced():
        rows: Tensor = _rows_op(flat, *weight.traced_arguments())
    else:
        rows = _take_rows(weight, flat)
    return rows.view(*indices.shape, weight.shape[-1])


@torch.library.custom_op("slimtensors::rows", mutates_args=())
def _rows_op(index: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    return _take_rows(rebuild_traced(form, leaves), index)


def _take_rows(weight: CompressedTensor, index: Tensor) -> Tensor:
    """Return dense rows; refuse negative indices, which parts would count from their end."""
    if not index.is_meta and index.numel() and int(index.min()) < 0:
        raise IndexError(
            f"index {int(index.min())} is out of bounds for dimension 0 with size {len(weight)}"
        )
    return weight.take_rows(index)


@_rows_op.register_fake
def _(index: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    spec = parse_traced_spec(form)
    return index.new_empty((index.numel(), spec.shape[-1]), dtype=spec.dtype)


@implements(_aten.index.Tensor)
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Look rows up as `F.embedding` does."""
    is_matrix = isinstance(x, CompressedTensor) and x.dim() == 2
    index = indices[0] if len(indices) == 1 else None
    if not is_matrix or index is None or index.dtype not in (torch.int64, torch.int32):
        return DENSE  # type: ignore[no-any-return]
    assert isinstance(x, CompressedTensor)
    count = x.shape[0]
    return _embedding(x, torch.where((index < 0) & (index >= -count), index + count, index))


def _make_meta(x: Tensor) -> Tensor:
    """Return a tensor of the same shape, on which torch checks the arguments of an operator."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


@implements(_aten.slice.Tensor)
def _slice(
    x: CompressedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    items = slice(*slice(start, end, step).indices(x.shape[dim]))
    if dim % x.dim() == 0:
        out = x.slice_rows(items)
    elif x.dim() == 2:
        out = x.slice_columns(items)
    else:
        out = None
    if out is None:
        return DENSE  # type: ignore[no-any-return]
    out.is_copy = not _share_memory(x, out)
    return out


def _share_memory(a: CompressedTensor, b: CompressedTensor) -> bool:
    if a.has_no_values():
        return True
    first, second = next(a.leaves())[1], next(b.leaves())[1]
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@implements(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(x: CompressedTensor, sizes: int | list[int], dim: int = 0) -> list[Tensor]:
    counts = [part.shape[dim] for part in _make_meta(x).split(sizes, dim)]  # type: ignore[no-untyped-call]
    starts = accumulate(counts, initial=0)
    return [x.narrow(dim, start, count) for start, count in zip(starts, counts, strict=False)]


@implements(_aten.select.int)
def _select(x: CompressedTensor, dim: int, index: int) -> Tensor:
    _make_meta(x).select(dim, index)
    if dim % x.dim():
        return DENSE  # type: ignore[no-any-return]
    return x.take_row(index)


@implements(_aten.unbind.int)
def _unbind(x: CompressedTensor, dim: int = 0) -> list[Tensor]:
    return [x.select(dim, i) for i in range(x.shape[dim])]


@implements(_aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = next(x for x in tensors if isinstance(x, CompressedTensor))
    kinds = {(type(x), x.dtype, x.device, x.dim()) for x in tensors}
    if len(kinds) > 1 or first.dim() != 2:
        return DENSE  # type: ignore[no-any-return]
    torch.cat([_make_meta(x) for x in tensors], dim)
    out = type(first).concatenate(tensors, dim % 2)  # type: ignore[arg-type]
    return DENSE if out is None else out


@implements(_aten.t.default)
def _transpose(x: CompressedTensor) -> Tensor:
    out = ViewTensor.transpose_matrix(x)
    return DENSE if out is None else out


@implements(_aten.transpose.int)
def _transpose_dims(x: CompressedTensor, first: int, second: int) -> Tensor:
    _make_meta(x).transpose(first, second)
    if first % x.dim() == second % x.dim():
        return x.alias()
    return _transpose(x)


@implements(_aten.permute.default)
def _permute(x: CompressedTensor, dims: Sequence[int]) -> Tensor:
    _make_meta(x).permute(list(dims))
    order = [dim % x.dim() for dim in dims]
    return x.alias() if order == sorted(order) else _transpose(x)


@implements(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def _view(x: CompressedTensor, size: Sequence[int]) -> Tensor:
    shape = _make_meta(x).reshape(list(size)).shape
    out = ViewTensor.reshape_tensor(x, tuple(shape))
    return DENSE if out is None else out


@implements(_aten.as_strided.default)
def _as_strided(
    x: CompressedTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    same = tuple(size) == tuple(x.shape) and tuple(stride) == x.stride()
    return x.alias() if same and not storage_offset else DENSE


@implements(_aten.detach.default, _aten.alias.default)
def _alias(x: CompressedTensor) -> Tensor:
    return x.alias()


@implements(_aten.clone.default)
def _clone(x: CompressedTensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    if memory_format is torch.contiguous_format and not x.is_contiguous():
        return DENSE  # type: ignore[no-any-return]
    return x.map_leaves(torch.clone)


@implements(_aten._to_copy.default)
def _to_copy(
    x: CompressedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: object,
) -> Tensor:
    if dtype not in (None, x.dtype, *KERNEL_FLOATS, torch.float64):
        return DENSE  # type: ignore[no-any-return]
    out = x.cast(dtype or x.dtype)
    return out.map_leaves(lambda part: part.to(device=device, non_blocking=non_blocking, copy=True))


@implements(_aten.copy_.default)
def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(to, CompressedTensor):
        return to.copy_(source.dequantize(), non_blocking)
    if to.is_copy:
        raise UnsupportedOperationError(
            f"a slice of a {type(to).__name__} is a copy: writing to it would not change the weight"
        )
    leaves, sources = dict(to.leaves()), dict[str, Tensor]()
    if isinstance(source, CompressedTensor) and to.form() == source.form():
        sources = dict(source.leaves())
    if _list_specs(leaves) != _list_specs(sources):  # before a part of them is copied
        raise UnsupportedOperationError(
            f"copy_ of {_describe(source)} into {_describe(to)}: the parts differ in kind or size;"
            " assign the weight (load_state_dict(assign=True)), or dequantize() the destination"
        )
    for name, leaf in leaves.items():
        leaf.copy_(sources[name], non_blocking)
    to.invalidate()
    return to


def _describe(x: Tensor) -> str:
    kind = x.describe() if isinstance(x, CompressedTensor) else "dense"
    return f"{kind} {x.dtype} {tuple(x.shape)}"


def _list_specs(leaves: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec.of(leaf) for name, leaf in leaves.items()}


@implements(Tensor.__setitem__)
def _set_item(x: Tensor, index: Any, value: Any) -> None:
    """Write rows whose memory can be written to: those of quantized weights."""
    if not isinstance(x, CompressedTensor):
        x[index] = to_dense(value)
        return
    target = x[index]
    if not isinstance(target, CompressedTensor):
        raise UnsupportedOperationError(
            f"items of a {type(x).__name__} cannot be set; call dequantize() for a dense tensor"
        )
    target.copy_(value)


@implements(Tensor.fill_diagonal_)
def _fill_diagonal(x: CompressedTensor, value: float, wrap: bool = False) -> None:
    """Refuse it; torch would write to a view."""
    raise UnsupportedOperationError(
        f"fill_diagonal_ is not supported by {type(x).__name__}, which cannot be changed in place;"
        " call dequantize() for a dense tensor"
    )


@implements(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(x: CompressedTensor, value: Tensor) -> None:
    """Replace the parts; torch itself would replace dtype and shape only."""
    if not isinstance(value, CompressedTensor):
        raise UnsupportedOperationError(
            f"the data of {_describe(x)} cannot be replaced by {_describe(value)};"
            " replace the parameter: module.weight = nn.Parameter(…)"
        )
    other: Tensor = value.alias()
    if isinstance(x, nn.Parameter):
        other = nn.Parameter(other, requires_grad=False)
    torch.utils.swap_tensors(x, other)  # type: ignore[no-untyped-call]


@implements(_aten.equal.default)
def _equal(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, CompressedTensor) and isinstance(b, CompressedTensor) and a.form() == b.form():
        pairs = zip(a.leaves(), b.leaves(), strict=True)
        if all(Spec.of(x) == Spec.of(y) and bitwise_equal(x, y) for (_, x), (_, y) in pairs):
            return True
    return torch.equal(to_dense(a), to_dense(b))


@implements(torch.allclose, Tensor.allclose)
def _allclose(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
    return torch.allclose(to_dense(input), to_dense(other), *args, **kwargs)


@implements(_aten.dequantize.self)
def _dequantize(x: CompressedTensor) -> Tensor:
    return x.dequantize()


@implements(_aten._has_compatible_shallow_copy_type.default)
def _is_same_class(x: Tensor, y: Tensor) -> bool:
    return type(x) is type(y)


@implements(Tensor.requires_grad_)
def _keep_gradients_off(x: Tensor, requires_grad: bool = True) -> Tensor:
    """Ignore it: `load_state_dict(assign=True)` copies `requires_grad`; codes have none."""
    return x


@implements(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _ignore_requires_grad(x: Tensor, requires_grad: bool) -> None:
    pass


@implements(Tensor.share_memory_)
def _move_to_shared_memory(x: CompressedTensor) -> CompressedTensor:
    for _, leaf in x.leaves():
        leaf.share_memory_()  # type: ignore[no-untyped-call]
    return x


@implements(Tensor.is_shared)
def _is_shared(x: CompressedTensor) -> bool:
    return all(leaf.is_shared() for _, leaf in x.leaves())  # type: ignore[no-untyped-call]


@implements(_aten.is_pinned.default)
def _is_pinned(x: CompressedTensor, device: torch.device | None = None) -> bool:
    return all(leaf.is_pinned() for _, leaf in x.leaves())


@implements(_aten._pin_memory.default)
def _pin_memory(x: CompressedTensor, device: torch.device | None = None) -> Tensor:
    return x.map_leaves(torch.Tensor.pin_memory)


def _make_like(operator: Any, x: CompressedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a dense tensor: nothing is known about its values."""
    device = kwargs.get("device") or x.device
    out: Tensor = operator(_make_meta(x), *args, **{**kwargs, "device": device})
    return out


@implements(_aten.empty_like.default)
def _empty_like(x: CompressedTensor, **kwargs: Any) -> Tensor:
    """Return a dense tensor, but a compressed one for `Module.to_empty` of a meta model."""
    device = torch.device(kwargs.get("device") or x.device)
    if x.is_meta and device.type != "meta" and kwargs.get("dtype") in (None, x.dtype):
        return x.map_leaves(lambda leaf: torch.zeros_like(leaf, device=device))
    return _make_like(_aten.empty_like.default, x, **kwargs)


for _operator in (
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.rand_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    _aten.randn_like.default,
    _aten.zeros_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_full.default,
    _aten.new_ones.default,
):
    implements(_operator)(partial(_make_like, _operator))


@implements(_aten.new_zeros.default)
def _new_zeros(x: CompressedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Return compressed rows, which FSDP2 needs, or a dense tensor of another shape."""
    is_plain = not any(kwargs.values())
    if x.dim() > 1 and len(size) == x.dim() and tuple(size[1:]) == x.shape[1:] and is_plain:
        return x.make_zero_rows(size[0])
    return _make_like(_aten.new_zeros.default, x, size, **kwargs)
