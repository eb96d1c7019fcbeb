"""SparseGPT: set weights to zero column by column; those still to come make up for it.

After Frantar and Alistarh, 2023, as a sweep like that of GPTQ.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import Tell, factor, pulls
from slimtensors.layerwise.structure import Structure, Unstructured
from slimtensors.layerwise.sweep import Sweep


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
    tell: Tell = lambda text: None,
) -> Tensor:
    """Return a weight `[rows, columns]` with a share of zeros, whose outputs change least.

    Zeros are chosen among `block_size` columns at a time, or as many as the structure needs. Where
    `held` is true they stay. `round_column` puts what is left of a column on a grid, for a weight
    that is quantized already. `tell` gets what was done beyond that: more damping, inputs that were
    always zero.
    """
    structure = structure or Unstructured()
    rows, columns = weight.shape
    structure.check(rows, columns)
    if hessian.shape != (columns, columns) or not torch.isfinite(hessian).all():
        raise ConfigError(f"a Hessian of {tuple(hessian.shape)} numbers for {columns} columns")
    upper = factor(hessian.float(), damping=damping, tell=tell)
    width = structure.at_once(columns, about=block_size)
    sweep = Sweep.of(weight.T.float().contiguous(), pulls(upper), width=width)
    zeros = torch.zeros(columns, rows, dtype=torch.bool, device=weight.device)
    holes = None if held is None else held.T.contiguous()

    def settle(column: int) -> Tensor:
        if column % width == 0:
            here = slice(column, column + width)
            scores = _cost(sweep, upper, here)
            if holes is not None:
                scores.masked_fill_(holes[here], 0.0)
            zeros[here] = structure.zeros(scores.T, share).T
            if holes is not None:
                zeros[here] |= holes[here]
        aims = sweep.aims[column]
        settled = aims if round_column is None else round_column(aims, column)
        return settled.masked_fill(zeros[column], 0.0)

    return sweep.run(settle).T.contiguous().to(weight.dtype)


def _cost(sweep: Sweep, upper: Tensor, here: slice) -> Tensor:
    """Return what zeroing each weight of some columns costs, if all after it make up for it.

    That is a question to the weights as they would be if none of these columns lost any; an aim
    only knows of columns that are settled.
    """
    diagonal = upper.diagonal()[here, None]
    missed = (sweep.aims[here] - sweep.errors[here]).mul_(diagonal)
    moved: Tensor = torch.linalg.solve_triangular(upper[here, here].T, missed, upper=False)
    return moved.add_(sweep.errors[here]).mul_(diagonal).square_()
