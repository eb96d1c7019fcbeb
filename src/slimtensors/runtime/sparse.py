"""Weights held without their zeros."""

import warnings
from functools import cache
from typing import Self

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import Bitmask
from slimtensors.codecs.bitmask import mask_shape
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.runtime.compressed import CompressedTensor, NoConfig
from slimtensors.tensor import Spec, as_bytes


class SparseTensor(CompressedTensor):
    """A bit per position, and the values whose bit is set. Lossless, for every dtype."""

    kind = "sparse"
    part_names = ("mask", "kept")
    mask: Tensor
    kept: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Take the zeros out of a dense tensor."""
        found = Bitmask().encode(x.detach().cpu().contiguous())
        parts = {"mask": found["mask"].to(x.device), "kept": found["values"].to(x.device)}
        return cls(parts, NoConfig(), Spec.of(x))

    def dense(self) -> Tensor:
        """Return an ordinary tensor with the same numbers."""
        spec = Spec(self.dtype, tuple(self.shape))
        parts = {"mask": self.mask.cpu(), "values": self.kept.cpu()}
        return Bitmask().decode(parts, spec).to(self.device)

    def check(self) -> None:
        """Raise `CorruptFileError` if the mask does not fit the shape, or not the values."""
        spec = Spec(self.dtype, tuple(self.shape))
        fits = Spec.of(self.mask) == Spec(torch.uint8, mask_shape(spec))
        if fits and not self.is_meta:
            fits = _core.popcount(as_bytes(self.mask.cpu())) == self.kept.numel()
        if not fits or self.kept.dtype is not self.dtype:
            raise CorruptFileError(f"{self.kept.numel()} values and a mask for {spec} do not fit")

    def rows(self, index: slice | Tensor) -> Tensor:
        """Return some rows, compressed if they are a slice."""
        dense = self.dequantize()[index]
        return self.of(dense) if isinstance(index, slice) else dense

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the values in another dtype, and the mask as it is."""
        parts = {"mask": self.mask, "kept": self.kept.to(dtype)}
        return type(self)(parts, self.config, Spec(dtype, tuple(self.shape)))


_OF_ROWS = {torch.int32, torch.float32}


class CsrTensor(CompressedTensor):
    """The values of each row with their columns: kernels skip what is not there.

    Values are held as float32, the only kind that torch's kernel multiplies.
    """

    kind = "csr"
    part_names = ("starts", "columns", "kept")
    starts: Tensor
    columns: Tensor
    kept: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Take the zeros out of a dense matrix."""
        if x.dim() != 2 or not x.is_floating_point() or x.dtype is torch.float64:
            raise ConfigError(f"rows of {x.dtype} {tuple(x.shape)} cannot be held as float32")
        x = x.detach()
        bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
        held = bits.ne(0)  # the bits, because -0.0 equals 0
        starts = torch.zeros(len(x) + 1, dtype=torch.int32, device=x.device)
        starts[1:] = held.sum(1).cumsum(0)
        columns = held.nonzero()[:, 1].to(torch.int32)
        parts = {"starts": starts, "columns": columns, "kept": x[held].float()}
        return cls(parts, NoConfig(), Spec.of(x))

    def dense(self) -> Tensor:
        """Return an ordinary tensor with the same numbers."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        counts = self.starts.diff().long()
        rows = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        out[rows, self.columns.long()] = self.kept.to(self.dtype)
        return out

    def check(self) -> None:
        """Raise `CorruptFileError` if there are values outside of the matrix."""
        starts, columns, (rows, width) = self.starts, self.columns, self.shape
        fits = starts.shape == (rows + 1,) and columns.shape == self.kept.shape
        if fits and not self.is_meta:
            fits = int(starts[0]) == 0 and int(starts[-1]) == columns.numel()
            fits = fits and bool((starts.diff() >= 0).all())
            fits = fits and bool(((columns >= 0) & (columns < width)).all())
        if not fits or {starts.dtype, columns.dtype, self.kept.dtype} != _OF_ROWS:
            raise CorruptFileError(f"values do not lie inside a matrix of shape {(rows, width)}")

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply what is not zero, in float32."""
        flat = x.reshape(-1, x.shape[-1]).float()
        size = (self.shape[0], self.shape[1])
        _hear_of_beta_once()
        weight = torch.sparse_csr_tensor(
            self.starts, self.columns, self.kept, size, check_invariants=False
        )
        out = (weight @ flat.t()).t()
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*x.shape[:-1], size[0])

    def rows(self, index: slice | Tensor) -> Tensor:
        """Return some rows, compressed if they are a slice."""
        dense = self.dequantize()[index]
        return self.of(dense) if isinstance(index, slice) else dense

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the same numbers, rounded to `dtype` if that has fewer bits."""
        if dtype is torch.float64:
            raise ConfigError("rows cannot be held as float64; use dequantize()")
        parts = {**self.parts(), "kept": self.kept.to(dtype).float()}
        return type(self)(parts, self.config, Spec(dtype, tuple(self.shape)))


@cache
def _hear_of_beta_once() -> None:
    """Let torch say that its sparse rows are in beta state, which it does once, to nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()
