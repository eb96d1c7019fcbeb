"""Compressed tensors in another shape: transposed, flat, or with split dimensions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors.errors import CorruptFileError
from slimtensors.runtime.compressed import CompressedTensor, Config
from slimtensors.runtime.dispatch import report_dense
from slimtensors.tensor import Json, Spec


@dataclass(frozen=True)
class ViewConfig:
    """Relation of a view to its base."""

    transposed: bool = False
    """Whether the view is the transposed matrix, not the base in another shape."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"transposed": self.transposed}


class ViewTensor(CompressedTensor):
    """A view of a compressed tensor. Nothing is decompressed before the view is used.

    Products with a transposed matrix (`x @ weight.t()`) run on the compressed base.
    """

    kind = "view"
    part_names = ("base",)
    nested_parts = frozenset({"base"})
    config: ViewConfig
    base: CompressedTensor

    @classmethod
    def parse_config(cls, data: Json) -> ViewConfig:
        """Parse the JSON form."""
        return ViewConfig(data["transposed"] is True)

    @classmethod
    def find_strides(cls, shape: tuple[int, ...], config: Config) -> tuple[int, ...] | None:
        """Return the strides of a transposed matrix."""
        assert isinstance(config, ViewConfig)
        return (1, shape[0]) if config.transposed and len(shape) == 2 else None

    @classmethod
    def transpose_matrix(cls, x: CompressedTensor) -> CompressedTensor | None:
        """Return the transposed matrix; None for other views, which have no matrix as base."""
        if isinstance(x, ViewTensor):
            return x.base.alias() if x.config.transposed else None
        if x.dim() != 2:
            return None
        spec = Spec(x.dtype, (x.shape[1], x.shape[0]))
        base = x.alias() if x.is_traced() else x  # which has found its kernels already
        return cls({"base": base}, ViewConfig(transposed=True), spec)

    @classmethod
    def reshape_tensor(cls, x: CompressedTensor, shape: tuple[int, ...]) -> CompressedTensor | None:
        """Return a tensor with the same items in another shape; None for a transposed one."""
        if tuple(x.shape) == shape:
            return x.alias()
        if isinstance(x, ViewTensor):
            return None if x.config.transposed else cls.reshape_tensor(x.base, shape)
        return cls({"base": x.alias()}, ViewConfig(), Spec(x.dtype, shape))

    def check(self) -> None:
        """Raise `CorruptFileError` if the base is not a compressed tensor with the same items."""
        super().check()
        base = self.base
        if not isinstance(base, CompressedTensor) or isinstance(base, ViewTensor):
            raise CorruptFileError("the base of a view must be a compressed tensor")
        base.check()
        if self.config.transposed:
            fits = base.dim() == 2 and base.shape[::-1] == self.shape
        else:
            fits = base.numel() == self.numel()
        if not fits or base.dtype is not self.dtype:
            raise CorruptFileError(f"a view of {Spec.of(self)} does not fit {Spec.of(base)}")

    def decompress(self) -> Tensor:
        """Return the dense tensor."""
        dense = self.base.dequantize()
        return dense.t().contiguous() if self.config.transposed else dense.reshape(self.shape)

    def invalidate(self) -> None:
        """Drop everything cached about the parts of the base."""
        self.base.invalidate()

    def cast(self, dtype: torch.dtype) -> CompressedTensor:
        """Return the view of the base as `dtype`."""
        spec = Spec(dtype, tuple(self.shape))
        return type(self)({"base": self.base.cast(dtype)}, self.config, spec)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the dense tensor: kernels support only the base."""
        report_dense("F.linear", type(self))
        return super().linear(x, bias)

    def slice_rows(self, rows: slice) -> CompressedTensor | None:
        """Return rows of a transposed matrix: columns of the base."""
        sliced = self.base.slice_columns(rows) if self.config.transposed else None
        return None if sliced is None else self.transpose_matrix(sliced)

    def slice_columns(self, columns: slice) -> CompressedTensor | None:
        """Return columns of a transposed matrix: rows of the base."""
        sliced = self.base.slice_rows(columns) if self.config.transposed else None
        return None if sliced is None else self.transpose_matrix(sliced)

    def describe(self) -> str:
        """Return a short description of the encoding."""
        return f"{'transposed' if self.config.transposed else 'reshaped'} {self.base.describe()}"
