"""How the outputs of a layer change with its weight, on the inputs that were seen."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

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
        rows = slice(None, None, -(-len(before) // _ROWS) or 1)
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
