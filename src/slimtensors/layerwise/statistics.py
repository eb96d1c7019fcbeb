"""What is known about the matrices of a model, in a work folder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors.errors import SingularError
from slimtensors.layerwise.hessian import MatrixKey, factor_hessian
from slimtensors.layerwise.resume import WorkFolder

DAMPING = 0.01
"""Added to the diagonal of `A`, in units of its mean."""

GROUP_PREFIX = "inputs-"
"""Start of the keys of groups of matrices with the same inputs."""
_GRADIENTS = "gradients"
"""Name in the work folder."""


@dataclass(frozen=True)
class InputFactor:
    """The inputs of one or more matrices, as needed for rounding."""

    factor: Tensor
    """Upper Cholesky factor of the inverse of `A`, columns in `order`."""
    order: Tensor
    """Columns by falling activity: the order in which they are rounded."""
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> Tensor:
        """Error of each column with the same effect, given the compensation by later columns."""
        found = torch.empty_like(self.factor[0])
        found[self.order] = self.factor.diagonal()
        return found


@dataclass(frozen=True)
class MatrixStatistics:
    """What is known about one matrix."""

    inputs: str
    """Key of its `InputFactor`."""
    gradients: Tensor | None
    """Mean squared gradient of each output; None if it was not observed."""
    tokens: int


class Statistics:
    """Statistics of the matrices of a model, in a work folder."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._gradients = work.load(_GRADIENTS) if work.has(_GRADIENTS) else {}
        self._groups: dict[str, str] = {}
        for name in work.list_finished():
            if name.startswith(GROUP_PREFIX):
                self._groups |= dict.fromkeys(work.load_report(name)["readers"], name)
        self._last: tuple[str, InputFactor] | None = None

    def find(self, key: MatrixKey) -> MatrixStatistics | None:
        """Return the statistics of a matrix, or None if it was not observed."""
        group = self._groups.get(_join(key))
        if group is None:
            return None
        tokens = int(self._work.load_report(group)["tokens"])
        return MatrixStatistics(group, self._gradients.get(_join(key)), tokens)

    def load_factor(self, group: str) -> InputFactor:
        """Return an `InputFactor` by its key; the last one is kept in memory."""
        if self._last is None or self._last[0] != group:
            tensors, info = self._work.load(group), self._work.load_report(group)
            found = InputFactor(
                tensors["factor"], tensors["order"], info["tokens"], tuple(info["notes"])
            )
            self._last = group, found
        return self._last[1]

    def has_inputs(self, group: str) -> bool:
        """Return True if the inputs of a group are complete."""
        return self._work.has(group)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are complete."""
        return self._work.has(_GRADIENTS)

    @property
    def notes(self) -> list[str]:
        """Deviations from the request, by the first matrix that they concern."""
        owners = {group: name for name, group in reversed(self._groups.items())}
        return [
            f"{owner.partition('#')[0]}: {note}"
            for group, owner in owners.items()
            for note in self._work.load_report(group)["notes"]
        ]

    def store_inputs(self, group: str, readers: Iterable[MatrixKey], factor: InputFactor) -> None:
        """Store the inputs of a group of matrices."""
        names = [_join(key) for key in readers]
        info = {"tokens": factor.tokens, "notes": list(factor.notes), "readers": names}
        self._work.store(group, {"factor": factor.factor, "order": factor.order}, info)
        self._groups |= dict.fromkeys(names, group)

    def store_gradients(self, gradients: Mapping[MatrixKey, Tensor]) -> None:
        """Store the gradients of all matrices."""
        self._gradients = {_join(key): x.contiguous() for key, x in gradients.items()}
        self._work.store(_GRADIENTS, self._gradients)


def _join(key: MatrixKey) -> str:
    return f"{key[0]}#{key[1]}"


def factor_inputs(mean: Tensor, tokens: int) -> InputFactor:
    """Return the factor of a matrix `A`; columns without inputs get the mean activity."""
    notes: list[str] = []
    order = torch.argsort(mean.diagonal(), descending=True, stable=True)
    try:
        upper = factor_hessian(mean.double()[order][:, order], damping=DAMPING, tell=notes.append)
    except SingularError as error:
        notes.append(f"{error}; columns are rounded without regard to their inputs")
        eye = torch.eye(len(mean))
        return InputFactor(eye, torch.arange(len(mean), dtype=torch.int32), tokens, tuple(notes))
    eye = torch.eye(len(upper), dtype=upper.dtype)
    inverse = torch.linalg.solve_triangular(upper, eye, upper=True)
    return InputFactor(inverse.float(), order.to(torch.int32), tokens, tuple(notes))


__all__ = [
    "DAMPING",
    "GROUP_PREFIX",
    "InputFactor",
    "MatrixStatistics",
    "Statistics",
    "factor_inputs",
]
