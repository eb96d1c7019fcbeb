"""Divergence of the outputs of a model from those of its teacher."""

import math

import pytest
import torch

from slimtensors.errors import MismatchError
from slimtensors.recipe.training import answers_divergence, divergence


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_matches_its_definition(temperature):
    a, b = logits(5, 7), logits(5, 7, seed=1)
    p, q = (b / temperature).softmax(-1), (a / temperature).softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean().item() * temperature**2
    found = divergence(a, b, temperature=temperature)
    assert math.isclose(found.item(), expected, rel_tol=1e-5)
    assert divergence(a, a, temperature=temperature).item() == 0


def test_padding_is_excluded():
    a, b = logits(2, 3, 7), logits(2, 3, 7, seed=1)
    attention = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = answers_divergence({"logits": a}, {"logits": b}, temperature=1, attention=attention)
    rows = divergence(a[attention.bool()], b[attention.bool()], temperature=1)
    assert torch.equal(found, rows)


def test_divergences_of_all_logits_are_summed():
    a = {"start_logits": logits(2, 9), "end_logits": logits(2, 9, seed=1), "loss": torch.ones(())}
    b = {"start_logits": logits(2, 9, seed=2), "end_logits": logits(2, 9, seed=3)}
    attention = torch.ones(2, 9)
    parts = [divergence(a[name], b[name], temperature=2) for name in b]
    found = answers_divergence(a, b, temperature=2, attention=attention)
    torch.testing.assert_close(found, parts[0] + parts[1])


def test_a_teacher_with_other_outputs_raises():
    with pytest.raises(MismatchError, match=r"\[2, 9\] and \[2, 8\]"):
        divergence(logits(2, 9), logits(2, 8), temperature=1)
    with pytest.raises(MismatchError, match="no common logits: the model returns loss"):
        answers_divergence({"loss": logits(1)}, {"logits": logits(2, 8)}, temperature=1)
    with pytest.raises(MismatchError, match="return_dict"):
        answers_divergence((logits(2, 8),), {"logits": logits(2, 8)}, temperature=1)
