"""Which weights are kept, of one layer or of all: those with the highest scores."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.pruning import Structure, Unstructured
from slimtensors.quantization.layers import Weight

Ranking = Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]]
"""Makes masks from scores and the share of zeros."""


def by_layer(structure: Structure, views: Mapping[str, Weight]) -> Ranking:
    """Return a ranking that gives every layer the same share of zeros, in some structure.

    `views` tell how each weight is seen as a matrix.
    """

    def kept(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        return {name: ~_zeros(structure, views[name], x, share) for name, x in scores.items()}

    return kept


def of_all_layers(structure: Structure) -> Ranking:
    """Return a ranking that compares the weights of all layers with each other."""
    if not isinstance(structure, Unstructured):
        raise ConfigError(f"mask_structure {structure.name} cannot be applied globally")

    def kept(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        every = torch.cat([x.flatten() for x in scores.values()])
        mask = ~structure.zeros(every[None], share)[0]
        parts = torch.split(mask, [x.numel() for x in scores.values()])
        return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}

    return kept


def _zeros(structure: Structure, view: Weight, scores: Tensor, share: float) -> Tensor:
    matrix = view.matrix(scores)
    experts = matrix if matrix.dim() == 3 else matrix[None]
    zeros = torch.stack([_zeros_of_matrix(structure, x, share) for x in experts])
    return view.shaped(zeros.view_as(matrix), scores.shape)


def _zeros_of_matrix(structure: Structure, scores: Tensor, share: float) -> Tensor:
    zeros = structure.zeros(scores, share)
    if structure.share is not None and share < structure.share:
        # On the way to 2:4 only the lowest of those go that have to go in the end.
        zeros = Unstructured().zeros(scores.masked_fill(~zeros, torch.inf), share)
    return zeros
