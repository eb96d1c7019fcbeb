"""Tensors of the torch quantized dtypes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import QUANTIZED_DTYPES, Parts, Spec

_PER_TENSOR = torch.per_tensor_affine
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


@register
@dataclass(frozen=True)
class TorchQuantized:
    """Store the integers, scales and zero points of a qint8, quint8 or qint32 tensor. Lossless."""

    name: ClassVar[str] = "torch-quantized"
    part_names: ClassVar[tuple[str, ...]] = ("q", "scale", "zero_point", "axis")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `q`, `scale`, `zero_point`, and `axis` if there is a scale per channel."""
        scheme = x.qscheme()
        if scheme == _PER_TENSOR:
            scale = torch.tensor(x.q_scale(), dtype=torch.float64)
            return {"q": x.int_repr(), "scale": scale, "zero_point": torch.tensor(x.q_zero_point())}
        if scheme not in _PER_CHANNEL:
            raise UnsupportedTensorError(f"tensors quantized as {scheme} cannot be stored")
        return {
            "q": x.int_repr(),
            "scale": x.q_per_channel_scales(),
            "zero_point": x.q_per_channel_zero_points(),
            "axis": torch.tensor(x.q_per_channel_axis()),
        }

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Build the quantized tensor from integers, scales and zero points."""
        q, scale, zero_point = parts["q"], parts["scale"], parts["zero_point"]
        if Spec.of(q) != Spec(QUANTIZED_DTYPES[like.dtype], like.shape):
            raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
        q = q.clone()  # it may be a view of the file
        if not scale.is_floating_point() or zero_point.is_complex():
            raise CorruptFileError(
                f"invalid dtypes: {scale.dtype} scales, {zero_point.dtype} zero points"
            )
        if "axis" not in parts:
            if scale.numel() != 1 or zero_point.numel() != 1:
                raise CorruptFileError("axis is missing, but there are several scales")
            return torch._make_per_tensor_quantized_tensor(q, scale.item(), int(zero_point))
        if Spec.of(parts["axis"]) != Spec(torch.int64, ()):
            raise CorruptFileError(f"expected one int64 as axis, got {Spec.of(parts['axis'])}")
        axis = int(parts["axis"])
        if not 0 <= axis < q.dim() or not scale.shape == zero_point.shape == (q.shape[axis],):
            raise CorruptFileError(f"{scale.numel()} scales do not fit axis {axis} of {like.shape}")
        return torch._make_per_channel_quantized_tensor(q, scale.clone(), zero_point.clone(), axis)
