"""What a layer's inputs say about its weights: which errors of theirs are seen in its outputs.

The error of the outputs, caused by an error `e` in one row of the weight, is `e H eᵀ` with
`H = XᵀX / n` for the inputs `X [n, columns]`: the Hessian, up to a factor.
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, SingularError
from slimtensors.tensor import ceil_div

Tell = Callable[[str], object]
"""Gets a sentence about something that did not go as asked."""


class Hessian:
    """The mean of `xᵀx` over all inputs seen so far."""

    def __init__(self, columns: int, *, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(columns, columns, device=device)
        self.largest = torch.zeros(columns, device=device)
        """The largest absolute value of each input."""
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Take in the inputs `[..., columns]` of one call."""
        x = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        if not len(x):
            return
        largest = torch.maximum(x.amax(0), x.amin(0).neg_())
        if not torch.isfinite(largest).all():  # NaN and infinity are the largest of all
            raise ConfigError(
                "NaN or infinity among its inputs; check the calibration data, "
                "or run the model in bfloat16 or float32"
            )
        self._sum.addmm_(x.T, x)
        self.largest = torch.maximum(self.largest, largest)
        self.tokens += len(x)

    def divide(self, scale: Tensor) -> None:
        """Pretend that all inputs had been divided by `scale [columns]`."""
        self._sum /= scale
        self._sum /= scale[:, None]
        self.largest = self.largest / scale

    def mean(self) -> Tensor:
        """Return the matrix `[columns, columns]` in float32."""
        return self._sum / max(self.tokens, 1)


def output_error(error: Tensor, hessian: Tensor) -> float:
    """Return the mean square, summed over all rows, that an error of a weight adds to outputs."""
    error = error.float()
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64))


def factor(hessian: Tensor, *, damping: float, tell: Tell) -> Tensor:
    """Return `R [columns, columns]`, upper triangular, with `H = R Rᵀ`.

    It makes `e H eᵀ = |e R|²`, of which the j-th term only knows errors up to column j. `damping`,
    in units of the mean of the diagonal, is added to it; doubled, and told, for as long as the
    matrix is singular all the same. Columns that saw only zeros count as the mean.
    """
    # This is what GPTQ finds through the inverse of H, at a third of the cost. Libraries give
    # lower factors, hence the flips.
    flipped = hessian.flip(0, 1)
    diagonal = flipped.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.sum()) / max(int((~dead).sum()), 1)
    if not mean > 0:
        raise SingularError("its inputs were all zero: nothing to learn from them")
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
            raise SingularError(f"the Hessian is not positive, even with damping {damping:g}")
        added, damping = damping, max(2 * damping, 1e-4)
        tell(f"the Hessian is singular: damping raised to {damping:g}")
    upper: Tensor = lower.flip(0, 1)
    return upper


def pulls(upper: Tensor) -> Tensor:
    """Return `P [columns, columns]`, by which errors of columns pull on those that come after.

    Adding `Σ e[k] P[k, j]` to column j makes up best for the errors `e` of those before it.
    """
    return upper / upper.diagonal()


_ROWS = 128
"""How many rows of a weight are enough to tell."""


@dataclass(frozen=True)
class Change:
    """Sums over outputs, of means over inputs."""

    outputs: int = 0
    was: float = 0.0
    """Square of what they were."""
    now: float = 0.0
    both: float = 0.0
    """Product of what they were and what they are."""
    off: float = 0.0
    """Square of the difference."""

    @classmethod
    def between(cls, before: Tensor, after: Tensor, hessian: Tensor) -> "Change":
        """Compare two weights `[outputs, inputs]`, by some of their rows."""
        rows = slice(None, None, ceil_div(len(before), _ROWS) or 1)
        old, new = before[rows].float(), after[rows].float()
        seen, seen_new = old @ hessian, new @ hessian

        def product(x: Tensor, y: Tensor) -> float:
            return float((x * y).sum(dtype=torch.float64))

        off = product(seen - seen_new, old - new)
        return cls(len(old), product(seen, old), product(seen_new, new), product(seen, new), off)

    @classmethod
    def of_all(cls, changes: Iterable["Change"]) -> "Change":
        """Return that of several weights together."""
        table = [astuple(each) for each in changes]
        return cls(*(sum(column) for column in zip(*table, strict=True))) if table else cls()

    @property
    def mse(self) -> float | None:
        """Mean square of the difference, of one output for one input."""
        return self.off / self.outputs if self.outputs else None

    @property
    def relative(self) -> float | None:
        """The same as a share of what the outputs were."""
        return self.off / self.was if self.was else None

    @property
    def cosine(self) -> float | None:
        """The angle between outputs before and after: 1 if only their size changes."""
        return self.both / (self.was * self.now) ** 0.5 if self.was > 0 and self.now > 0 else None
