"""Weights that stay in memory without their zeros."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Self

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors._moved import Renamed
from slimtensors.codecs import Bitmask
from slimtensors.codecs.bitmask import mask_shape
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.runtime.compressed import CompressedTensor, NoConfig
from slimtensors.tensor import Spec, as_bytes


class _Recompressed(CompressedTensor):
    """A tensor whose slices are compressed again, except in a compiler, which knows no values."""

    @classmethod
    def from_dense(cls, x: Tensor) -> Self:
        """Compress a dense tensor."""
        raise NotImplementedError

    def slice_rows(self, rows: slice) -> Self | None:
        """Return compressed rows."""
        return None if self.has_no_values() else self.from_dense(self.dequantize()[rows])

    def slice_columns(self, columns: slice) -> Self | None:
        """Return compressed columns."""
        return None if self.has_no_values() else self.from_dense(self.dequantize()[:, columns])

    @classmethod
    def concatenate(cls, tensors: Sequence[Self], dim: int) -> Self | None:
        """Return matrices as one."""
        if any(x.has_no_values() for x in tensors):
            return None
        return cls.from_dense(torch.cat([x.dequantize() for x in tensors], dim))


class SparseTensor(_Recompressed):
    """One bit per position and the nonzero values. Lossless, for every dtype."""

    kind = "sparse"
    part_names = ("mask", "kept")
    mask: Tensor
    kept: Tensor

    of = Renamed("from_dense")

    @classmethod
    def from_dense(cls, x: Tensor) -> Self:
        """Compress a dense tensor."""
        encoded = Bitmask().encode(x.detach().cpu().contiguous())
        parts = {"mask": encoded["mask"].to(x.device), "kept": encoded["values"].to(x.device)}
        return cls(parts, NoConfig(), Spec.of(x))

    def decompress(self) -> Tensor:
        """Return the dense tensor."""
        spec = Spec(self.dtype, tuple(self.shape))
        parts = {"mask": self.mask.cpu(), "values": self.kept.cpu()}
        return Bitmask().decode(parts, spec).to(self.device)

    def check(self) -> None:
        """Raise `CorruptFileError` if the mask does not fit the shape or the values."""
        super().check()
        spec = Spec(self.dtype, tuple(self.shape))
        fits = Spec.of(self.mask) == Spec(torch.uint8, mask_shape(spec))
        if fits and not self.is_meta:
            fits = _core.popcount(as_bytes(self.mask.cpu())) == self.kept.numel()
        if not fits or self.kept.dtype is not self.dtype or self.kept.dim() != 1:
            raise CorruptFileError(f"mask and {self.kept.numel()} values do not fit {spec}")

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the tensor with its values cast to `dtype`."""
        parts = {"mask": self.mask, "kept": self.kept.to(dtype)}
        return type(self)(parts, self.config, Spec(dtype, tuple(self.shape)))


_CSR_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CsrTensor(_Recompressed):
    """Nonzero values by row with their columns (CSR); kernels skip zeros.

    Values are stored as float32, the only dtype that torch's kernel supports.
    """

    kind = "csr"
    part_names = ("starts", "columns", "kept")
    index_parts = frozenset({"starts", "columns"})
    starts: Tensor
    columns: Tensor
    kept: Tensor

    of = Renamed("from_dense")

    @classmethod
    def from_dense(cls, x: Tensor) -> Self:
        """Compress a dense matrix."""
        if x.dim() != 2 or not x.is_floating_point() or x.dtype is torch.float64:
            raise ConfigError(
                f"CSR supports matrices of up to 32-bit floats, got {x.dtype} {tuple(x.shape)}"
            )
        x = x.detach()
        bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
        nonzero = bits.ne(0)  # bits, because -0.0 == 0
        starts = torch.zeros(len(x) + 1, dtype=torch.int32, device=x.device)
        starts[1:] = nonzero.sum(1).cumsum(0)
        columns = nonzero.nonzero()[:, 1].to(torch.int32)
        parts = {"starts": starts, "columns": columns, "kept": x[nonzero].float()}
        return cls(parts, NoConfig(), Spec.of(x))

    def decompress(self) -> Tensor:
        """Return the dense tensor."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        counts = self.starts.diff().long()
        rows = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        out[rows, self.columns.long()] = self.kept.to(self.dtype)
        return out

    def check(self) -> None:
        """Raise `CorruptFileError` if values are outside of the matrix."""
        super().check()
        if self.dim() != 2 or self.dtype not in _CSR_DTYPES:
            raise CorruptFileError(f"CSR does not support {Spec.of(self)}")
        starts, columns, (rows, width) = self.starts, self.columns, self.shape
        count = columns.numel()
        fits = (
            Spec.of(starts) == Spec(torch.int32, (rows + 1,))
            and Spec.of(columns) == Spec(torch.int32, (count,))
            and Spec.of(self.kept) == Spec(torch.float32, (count,))
        )
        if fits and not self.is_meta:
            fits = int(starts[0]) == 0 and int(starts[-1]) == count
            fits = fits and bool((starts[1:] >= starts[:-1]).all())  # differences may overflow
            fits = fits and bool(((columns >= 0) & (columns < width)).all())
        if not fits:
            raise CorruptFileError(f"values do not fit a matrix of shape {(rows, width)}")

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the nonzero values, in float32."""
        flat = x.reshape(-1, x.shape[-1]).float()
        size = (self.shape[0], self.shape[1])
        _suppress_beta_warning()
        weight = torch.sparse_csr_tensor(
            self.starts, self.columns, self.kept, size, check_invariants=False
        )
        out = (weight @ flat.t()).t()
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*x.shape[:-1], size[0])

    def cast(self, dtype: torch.dtype) -> CompressedTensor:
        """Return the tensor as `dtype`, with values rounded to it; float64 as a `SparseTensor`."""
        if dtype is torch.float64:
            return SparseTensor.from_dense(self.dequantize().double())
        parts = {**self.parts(), "kept": self.kept.to(dtype).float()}
        return type(self)(parts, self.config, Spec(dtype, tuple(self.shape)))


@cache
def _suppress_beta_warning() -> None:
    """Trigger and ignore torch's warning that CSR is in beta, which it emits once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()
