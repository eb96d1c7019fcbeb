"""Hessians of layers, and column-by-column error compensation based on them.

An error `e` in one row of a weight adds `e H eᵀ` to the squared error of the outputs, where
`H = XᵀX / n` for the inputs `X [n, columns]`. Up to a constant factor, `H` is the Hessian of that
error with respect to the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, SingularError
from slimtensors.tensor import ceil_div

NoteCallback = Callable[[str], object]
"""Called with one sentence for each deviation from the request, such as raised damping."""


_BLOCK = 128
"""Columns of a Hessian that are computed by one product."""


class Hessian:
    """Mean of `xᵀx` over all inputs added so far."""

    def __init__(self, columns: int, *, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(columns, columns, device=device)
        self.largest = torch.zeros(columns, device=device)
        """Largest absolute value of each input column."""
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Add the inputs `[..., columns]` of one call."""
        x = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        if not len(x):
            return
        largest = torch.maximum(x.amax(0), x.amin(0).neg_())
        if not torch.isfinite(largest).all():
            raise ConfigError(
                "NaN or infinity in the inputs; check the calibration data, "
                "or run the model in bfloat16 or float32"
            )
        if x.device.type == "cpu":  # the matrix is symmetric: the upper part suffices
            for i in range(0, x.shape[1], _BLOCK):
                self._sum[i : i + _BLOCK, i:].addmm_(x[:, i : i + _BLOCK].T, x[:, i:])
        else:
            self._sum.addmm_(x.T, x)
        self.largest = torch.maximum(self.largest, largest)
        self.tokens += len(x)

    def mean(self) -> Tensor:
        """Return the matrix `[columns, columns]` in float32."""
        upper = self._sum.triu() / max(self.tokens, 1)
        return upper + upper.triu(1).T


MatrixKey = tuple[str, int]
"""Name of a layer, and index of a matrix within it."""

HessianMap = dict[MatrixKey, Hessian]


def output_error(error: Tensor, hessian: Tensor) -> float:
    """Return the mean squared output error, summed over all rows, caused by a weight error."""
    error = error.float()
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64))


def factor_hessian(hessian: Tensor, *, damping: float, tell: NoteCallback) -> Tensor:
    """Return the upper triangular `R [columns, columns]` with `H = R Rᵀ`.

    Then `e H eᵀ = |e R|²`, and the j-th term depends only on the errors of columns up to j.
    `damping`, in units of the mean of the diagonal, is added to the diagonal. It is doubled, and
    reported to `tell`, until the matrix is positive definite. Columns whose inputs were all zero
    get the mean of the diagonal.
    """
    # Equivalent to GPTQ's Cholesky factor of the inverse, at a third of the cost. The flips turn
    # the lower factor that LAPACK returns into an upper one.
    flipped = hessian.flip(0, 1)
    diagonal = flipped.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.sum()) / max(int((~dead).sum()), 1)
    if not mean > 0:
        raise SingularError("all inputs were zero")
    if dead.any():
        tell(f"{int(dead.sum())} of {len(dead)} inputs were always zero")
        diagonal[dead] = mean
    added = 0.0
    while True:
        diagonal += (damping - added) * mean
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed and torch.isfinite(lower).all():
            break
        if damping >= 1:
            raise SingularError(
                f"the Hessian is not positive definite, even with damping {damping:g}"
            )
        added, damping = damping, max(2 * damping, 1e-4)
        tell(f"the Hessian is singular: damping raised to {damping:g}")
    upper: Tensor = lower.flip(0, 1)
    return upper


@dataclass(frozen=True)
class Sweep:
    """A weight that is processed column by column, each column compensating earlier errors.

    Tensors are transposed, so that each column of the weight is contiguous in memory.
    """

    columns: Tensor
    """Columns with the compensation for all errors so far; final values once processed."""
    errors: Tensor
    """Original minus final value of each processed column; the original value before that."""
    compensation: Tensor
    """`C [columns, columns]`: column j gets `Σ e[k] C[k, j]` for the errors `e[k]` before it."""
    width: int
    """Columns per group: when the first of a group is due, all are fully compensated."""

    @classmethod
    def start(cls, columns: Tensor, upper: Tensor, *, width: int) -> "Sweep":
        """Prepare a weight `[columns, rows]`, modified in place, and its Hessian's factor."""
        return cls(columns, columns.clone(), upper / upper.diagonal(), width)

    def run(self, finish: Callable[[int], Tensor]) -> Tensor:
        """Process all columns and return them; `finish` returns the final values of a column."""
        self._run(0, len(self.columns), finish)
        return self.columns

    def _run(self, begin: int, end: int, finish: Callable[[int], Tensor]) -> None:
        """Process columns that already compensate the errors of all columns before `begin`.

        Bisection turns nearly all of the work into products of large matrices.
        """
        if end - begin == 1:
            final = finish(begin)
            self.columns[begin] = final
            self.errors[begin] -= final
            return
        middle = self._middle(begin, end)
        self._run(begin, middle, finish)
        factors = self.compensation[begin:middle, middle:end]
        self.columns[middle:end].addmm_(factors.T, self.errors[begin:middle])
        self._run(middle, end, finish)

    def _middle(self, begin: int, end: int) -> int:
        size = end - begin
        if size <= self.width:
            return begin + size // 2
        groups = ceil_div(size, self.width)
        return begin + groups // 2 * self.width
