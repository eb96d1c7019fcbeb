"""How far a model's answers are from those of its teacher."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from slimtensors.errors import MismatchError


def divergence(
    student: Tensor, teacher: Tensor, *, temperature: float, where: Tensor | None = None
) -> Tensor:
    """Return the mean KL divergence of two sets of logits, whose last dimension is the classes.

    Both are divided by the temperature, and the result is multiplied by its square, so that
    gradients stay as large as at 1 (Hinton et al., 2015). `where` tells which rows count.
    """
    if student.shape != teacher.shape:
        shapes = f"{list(student.shape)}, the teacher's {list(teacher.shape)}"
        raise MismatchError(f"the model's logits are {shapes}; choose a teacher of the same kind")
    mine = functional.log_softmax(student.float() / temperature, -1)
    wanted = functional.log_softmax(teacher.float() / temperature, -1)
    rows = functional.kl_div(mine, wanted, reduction="none", log_target=True).sum(-1)
    if where is not None:
        rows = rows[where]
    return rows.mean() * temperature**2


def answers_divergence(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    *,
    temperature: float,
    attention: Tensor | None = None,
) -> Tensor:
    """Return the divergence of all logits that two models answered with, added up.

    `attention` is one where a token is not padding; it counts for logits of tokens.
    """
    if not isinstance(student, Mapping) or not isinstance(teacher, Mapping):
        raise MismatchError(
            "answers have no names, by which logits are found; use return_dict=True"
        )
    names = [name for name in student if name.endswith("logits")]
    if not names or not set(names) <= set(teacher):
        have = f"the model answers with {', '.join(student)}, the teacher with {', '.join(teacher)}"
        raise MismatchError(f"there are no logits to learn from: {have}")
    parts = []
    for name in names:
        logits = student[name]
        is_of_tokens = attention is not None and logits.shape[:-1] == attention.shape
        where = attention.bool() if is_of_tokens and attention is not None else None
        parts.append(divergence(logits, teacher[name], temperature=temperature, where=where))
    return torch.stack(parts).sum()
