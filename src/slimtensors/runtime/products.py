"""Products with compressed weights: `F.linear`, `matmul` and their operators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slimtensors.errors import ConfigError
from slimtensors.runtime.compressed import (
    CompressedTensor,
    dequantize_op,
    parse_traced_spec,
    rebuild_traced,
)
from slimtensors.runtime.dispatch import DENSE, implements, report_dense, to_dense
from slimtensors.runtime.views import ViewTensor

_aten = torch.ops.aten


@implements(functional.linear, _aten.linear.default)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Implement `F.linear` for a compressed weight."""
    x = input
    if isinstance(x, CompressedTensor) or isinstance(bias, CompressedTensor):
        kind = type(x if isinstance(x, CompressedTensor) else bias)
        report_dense("F.linear", kind)
        x, bias = to_dense(x), None if bias is None else to_dense(bias)
    if not isinstance(weight, CompressedTensor):
        return functional.linear(x, weight, bias)
    if x.shape[-1:] != weight.shape[1:]:
        raise ConfigError(
            f"input of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}"
        )
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        cast = weight if weight.dtype is dtype else weight.cast(dtype)
        with torch.autocast(device, enabled=False):  # kernels choose their own dtypes
            return linear(x.to(dtype), cast, None if bias is None else bias.to(dtype))
    if x.dtype is not weight.dtype:
        raise ConfigError(
            f"input is {x.dtype}, but the weight is {weight.dtype}; convert one: weight.to(x.dtype)"
        )
    if weight.is_traced():
        out: Tensor = _linear_op(x, *weight.traced_arguments())
        return out if bias is None else out + bias
    if weight.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):  # as in vmap
        return functional.linear(x, weight.dequantize(), bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """A product whose gradient needs the compressed weight, not a dense copy in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: CompressedTensor, bias: Tensor | None) -> Tensor:
        """Return the product."""
        ctx.weight = weight
        return weight.linear(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Return the gradients of inputs and bias."""
        (grad,) = grads
        to_x, _, to_bias = ctx.needs_input_grad
        return (
            grad @ ctx.weight.dequantize() if to_x else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None,
        )


def _find_transposed_base(x: Tensor) -> CompressedTensor | None:
    """Return the matrix of which `x` is the transposed one, or None."""
    return x.base if isinstance(x, ViewTensor) and x.config.transposed else None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply on codes if one factor is a weight as `F.linear` uses it: `w @ x`, `x @ w.t()`."""
    base = _find_transposed_base(b)
    if base is not None and not isinstance(a, CompressedTensor) and a.dim():
        return linear(a, base)
    is_weight = isinstance(a, CompressedTensor) and not isinstance(a, ViewTensor) and a.dim() == 2
    if is_weight and not isinstance(b, CompressedTensor) and b.dim() in (1, 2):
        return linear(b, a) if b.dim() == 1 else linear(b.t(), a).t()
    return DENSE  # type: ignore[no-any-return]


def _multiply_matrices(a: Tensor, b: Tensor, *, dims: tuple[int, int] = (2, 2)) -> Tensor:
    if (a.dim(), b.dim()) != dims:
        return DENSE  # type: ignore[no-any-return]
    return _multiply(a, b)


def _multiply_vector(a: Tensor, b: Tensor) -> Tensor:
    return _multiply_matrices(a, b, dims=(2, 1))


def _add_product(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if isinstance(bias, CompressedTensor) or bias.dtype is not a.dtype:
        return DENSE  # type: ignore[no-any-return]
    out = _multiply_matrices(a, b)
    if out is DENSE:
        return DENSE
    out = out if alpha == 1 else alpha * out
    return beta * bias.expand(out.shape) + out if beta else out  # zero ignores NaN


def _run_product(
    function: Callable[..., Tensor], multiply: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Multiply before autograd decomposes the product, unless the arguments are unusual."""
    if kwargs.keys() <= {"beta", "alpha"}:
        out = multiply(*args, **kwargs)
        if out is not DENSE:
            return out
    return function(*args, **kwargs)


for _multiplies, _operators, _functions in (
    (_multiply, (), (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (_multiply_matrices, (_aten.mm.default,), (torch.mm, Tensor.mm)),
    (_multiply_vector, (_aten.mv.default,), (torch.mv, Tensor.mv)),
    (_add_product, (_aten.addmm.default,), (torch.addmm, Tensor.addmm)),
):
    implements(*_operators)(_multiplies)
    for _function in _functions:
        implements(_function)(partial(_run_product, _function, _multiplies))


@torch.library.custom_op("slimtensors::linear", mutates_args=())
def _linear_op(x: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    """Represent all kernels as one operator for compilers."""
    return rebuild_traced(form, leaves).linear(x, None).contiguous()  # as compilers expect


@_linear_op.register_fake
def _(x: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], parse_traced_spec(form).shape[0]))


def _save_weight(ctx: Any, inputs: tuple[Tensor, str, list[Tensor]], output: Tensor) -> None:
    _, ctx.form, leaves = inputs
    ctx.save_for_backward(*leaves)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[None]]:
    leaves = list(ctx.saved_tensors)
    return grad @ dequantize_op(ctx.form, leaves), None, [None] * len(leaves)


_linear_op.register_autograd(_differentiate, setup_context=_save_weight)
