"""SparseGPT: prune column by column; later columns compensate the error.

After Frantar and Alistarh, 2023, as a sweep like that of GPTQ.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import NoteCallback, Sweep, factor_hessian
from slimtensors.layerwise.structure import Structure, Unstructured


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    share: float,
    *,
    structure: Structure | None = None,
    held: Tensor | None = None,
    block_size: int = 128,
    damping: float = 0.01,
    round_column: Callable[[Tensor, int], Tensor] | None = None,
    tell: NoteCallback = lambda text: None,
) -> Tensor:
    """Return a weight `[rows, columns]` with a share of zeros, whose outputs change least.

    Zeros are chosen for `block_size` columns at a time, or as many as the structure requires.
    Where `held` is True the result is zero as well. `round_column` maps the values of a column to
    the grid of a weight that is already quantized. `tell` is called with a note for each deviation:
    raised damping, dead inputs.
    """
    structure = structure or Unstructured()
    rows, columns = weight.shape
    structure.check(rows, columns)
    if hessian.shape != (columns, columns) or not torch.isfinite(hessian).all():
        raise ConfigError(
            f"expected a finite Hessian of shape {(columns, columns)}, got {tuple(hessian.shape)}"
        )
    upper = factor_hessian(hessian.float(), damping=damping, tell=tell)
    width = structure.at_once(columns, about=block_size)
    sweep = Sweep.start(weight.T.float().contiguous(), upper, width=width)
    zeros = torch.zeros(columns, rows, dtype=torch.bool, device=weight.device)
    fixed_zeros = None if held is None else held.T.contiguous()

    def finish(column: int) -> Tensor:
        if column % width == 0:
            group = slice(column, column + width)
            scores = _pruning_cost(sweep, upper, group)
            if fixed_zeros is not None:
                scores.masked_fill_(fixed_zeros[group], 0.0)
            zeros[group] = structure.zeros(scores.T, share).T
            if fixed_zeros is not None:
                zeros[group] |= fixed_zeros[group]
        values = sweep.columns[column]
        if round_column is not None:
            values = round_column(values, column)
        return values.masked_fill(zeros[column], 0.0)

    return sweep.run(finish).T.contiguous().to(weight.dtype)


def _pruning_cost(sweep: Sweep, upper: Tensor, group: slice) -> Tensor:
    """Return the cost of zeroing each weight of a group, if all later columns compensate it.

    The cost depends on the weights as they would be if nothing in the group were pruned, whereas
    `sweep.columns` contains the compensation for columns before the group only.
    """
    diagonal = upper.diagonal()[group, None]
    missing = (sweep.columns[group] - sweep.errors[group]).mul_(diagonal)
    moved: Tensor = torch.linalg.solve_triangular(upper[group, group].T, missing, upper=False)
    return moved.add_(sweep.errors[group]).mul_(diagonal).square_()
