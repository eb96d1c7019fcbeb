"""Products with compressed weights: `F.linear`, `matmul` and their operators."""

import torch
from torch import Tensor
from torch.nn import functional

from slimtensors.errors import ConfigError
from slimtensors.runtime.compressed import CompressedTensor, parse_traced_spec, rebuild_traced
from slimtensors.runtime.dispatch import DENSE, implements, report_dense, to_dense
from slimtensors.runtime.views import ViewTensor

_aten = torch.ops.aten


@implements(functional.linear, _aten.linear.default)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Implement `F.linear` for a compressed weight."""
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
        x, weight = x.to(dtype), weight if weight.dtype is dtype else weight.cast(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype is not weight.dtype:
        raise ConfigError(
            f"input is {x.dtype}, but the weight is {weight.dtype}; convert one: weight.to(x.dtype)"
        )
    if weight.is_traced():
        out: Tensor = _linear_op(x, *weight.traced_arguments())
        return out if bias is None else out + bias
    if torch.is_grad_enabled() and x.requires_grad:
        return functional.linear(x, weight.dequantize(), bias)
    return weight.linear(x, bias)


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


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__)
@implements(torch.mm, Tensor.mm, torch.mv, Tensor.mv)
def _matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    product = _multiply(a, b) if out is None else DENSE
    return torch.matmul(a, b, out=out) if product is DENSE else product


@implements(torch.addmm, Tensor.addmm)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = _add_product(bias, a, b, beta=beta, alpha=alpha)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha) if out is DENSE else out


implements(_aten.mm.default, _aten.mv.default)(_multiply)


@implements(_aten.addmm.default)
def _add_product(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if isinstance(bias, CompressedTensor):
        return DENSE  # type: ignore[no-any-return]
    out = _multiply(a, b)
    return out if out is DENSE else beta * bias + alpha * out


@torch.library.custom_op("slimtensors::linear", mutates_args=())
def _linear_op(x: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    """Represent all kernels as one operator for compilers."""
    return rebuild_traced(form, leaves).linear(x, None).contiguous()  # as compilers expect


@_linear_op.register_fake
def _(x: Tensor, form: str, leaves: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], parse_traced_spec(form).shape[0]))
