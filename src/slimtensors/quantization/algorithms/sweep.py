"""Settle the columns of a weight one after the other, each making up for those before it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Settle = Callable[[int], Tensor]
"""Returns what a column becomes, once all before it are settled."""


@dataclass(frozen=True)
class Sweep:
    """A weight on its way, transposed: its columns lie in memory one by one."""

    aims: Tensor
    """What each column had better be, given the errors so far; once settled, what it is."""
    errors: Tensor
    """What each column was less what it became, once settled; until then, what it was."""
    pulls: Tensor
    """By how much errors of columns pull on those after them."""
    width: int
    """When the first of so many columns is settled, no later error is missing in their aims."""

    @classmethod
    def of(cls, columns: Tensor, pulls: Tensor, *, width: int) -> "Sweep":
        """Begin with a weight `[columns, rows]`, which is used up."""
        return cls(columns, columns.clone(), pulls, width)

    def run(self, settle: Settle) -> Tensor:
        """Settle all columns and return them."""
        self._run(0, len(self.aims), settle)
        return self.aims

    def _run(self, begin: int, end: int, settle: Settle) -> None:
        """Settle these columns; errors of those before are already in their aims.

        Halving makes nearly all of the work products of large matrices.
        """
        if end - begin == 1:
            settled = settle(begin)
            self.aims[begin] = settled
            self.errors[begin] -= settled
            return
        middle = self._middle(begin, end)
        self._run(begin, middle, settle)
        pull = self.pulls[begin:middle, middle:end]
        self.aims[middle:end].addmm_(pull.T, self.errors[begin:middle])
        self._run(middle, end, settle)

    def _middle(self, begin: int, end: int) -> int:
        size = end - begin
        if size <= self.width:
            return begin + size // 2
        groups = -(-size // self.width)
        return begin + groups // 2 * self.width
