"""Divergence of the predictions of a changed model from those of the original."""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import Batch
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.tensor import Json

_LEAST = -1e4
"""Log-probability of what is impossible."""
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Divergence:
    """Comparison of predictions, as means over all of them."""

    predictions: int
    cosine: float
    """Cosine similarity of the outputs."""
    kl: float | None = None
    """KL divergence from the original predictions in nats; None for outputs that are not logits."""
    top1: float | None = None
    """Share of predictions with the same most probable label."""
    acceptance: float | None = None
    """Probability that the original model accepts a prediction in speculative decoding."""
    perplexity: tuple[float, float] | None = None
    """Perplexity before and after; None unless the model is a causal LM."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        before, after = self.perplexity or (None, None)
        return {
            "predictions": self.predictions,
            "kl": self.kl,
            "top1_agreement": self.top1,
            "acceptance_rate": self.acceptance,
            "cosine": self.cosine,
            "perplexity_before": before,
            "perplexity": after,
        }

    def is_worse_than(self, other: "Divergence") -> bool:
        """Return True if the predictions are farther from the original than others."""
        if self.kl is None or other.kl is None:
            return self.cosine < other.cosine
        return self.kl > other.kl

    def describe_loss(self) -> str:
        """Return the divergence in a word and a number."""
        return f"cosine {self.cosine:.5f}" if self.kl is None else f"KL {self.kl:.4f}"

    def __str__(self) -> str:
        if self.kl is None:
            return f"cosine of outputs {self.cosine:.5f} on {self.predictions:,} held-out outputs"
        parts = [f"KL {self.kl:.4f} on {self.predictions:,} held-out predictions"]
        if self.perplexity is not None:
            parts.append(f"perplexity {self.perplexity[0]:.2f} -> {self.perplexity[1]:.2f}")
        parts.append(f"top-1 agreement {self.top1:.1%}")
        parts.append(f"acceptance rate {self.acceptance:.1%}")
        return ", ".join(parts)


class Reference(AbstractContextManager["Reference"]):
    """The outputs of the original model on some data, in temporary files.

    Leaving the context removes the files.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Run the model."""
        self._batches = batches
        self._folder = tempfile.TemporaryDirectory(prefix="slimtensors-reference-")
        self.are_logits = False
        with evaluation_mode(model):
            for i, batch in enumerate(batches):
                outputs, self.are_logits = extract_outputs(call_model(model, batch))
                torch.save(self._shrink(outputs), self._path(i))

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def __len__(self) -> int:
        return len(self._batches)

    def loss(self, model: nn.Module, i: int) -> Tensor:
        """Return the divergence of a changed model on one batch, for training."""
        before = torch.load(self._path(i), weights_only=True).float()
        after = extract_outputs(call_model(model, self._batches[i]))[0].float()
        if not self.are_logits:
            cosines = [
                functional.cosine_similarity(new, old).mean()
                for old, new in _list_pairs(before, after)
            ]
            return 1 - torch.stack(cosines).mean()
        after = _log_softmax(after).flatten(0, -2)
        return functional.kl_div(
            after, before.flatten(0, -2), reduction="batchmean", log_target=True
        )

    def compare(self, model: nn.Module) -> Divergence:
        """Return the divergence of a changed model."""
        is_causal = type(model).__name__.endswith(_CAUSAL_SUFFIXES)
        sums = torch.zeros(6, dtype=torch.float64)
        count = labels = 0
        with evaluation_mode(model):
            for i, batch in enumerate(self._batches):
                before = torch.load(self._path(i), weights_only=True).float()
                after = extract_outputs(call_model(model, batch))[0].float()
                ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
                for row, (old, new) in enumerate(_list_pairs(before, after)):
                    count += len(old)
                    if self.are_logits:  # as the original ones were stored
                        old, new = _log_softmax(old), _log_softmax(new)
                    sums[0] += functional.cosine_similarity(old, new).sum()
                    if not self.are_logits:
                        continue
                    p, q = old.exp(), new.exp()
                    sums[1] += (p * (old - new)).sum()
                    sums[2] += (old.argmax(-1) == new.argmax(-1)).sum()
                    sums[3] += torch.minimum(p, q).sum()
                    if is_causal and isinstance(ids, Tensor):
                        following = ids[row, 1:, None]
                        sums[4] -= old[:-1].gather(-1, following).sum()
                        sums[5] -= new[:-1].gather(-1, following).sum()
                        labels += len(following)
        if not bool(sums.isfinite().all()):
            raise ConfigError("outputs of the model are not finite: no divergence can be measured")
        cosine, kl, top1, acceptance = (float(x) / count for x in sums[:4])
        if not self.are_logits:
            return Divergence(count, cosine)
        perplexity = None
        if labels:
            before_, after_ = (math.exp(min(float(x) / labels, 700.0)) for x in sums[4:])
            perplexity = before_, after_
        return Divergence(count, cosine, kl, top1, acceptance, perplexity)

    def _shrink(self, outputs: Tensor) -> Tensor:
        """Return outputs in 16 bits; log-probabilities near zero keep most of their precision."""
        return _log_softmax(outputs.float()).half() if self.are_logits else outputs

    def _path(self, i: int) -> Path:
        return Path(self._folder.name) / f"{i}.pt"


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities; those of masked labels are finite, also in 16 bits."""
    return logits.log_softmax(-1).clamp(min=_LEAST)


def _list_pairs(before: Tensor, after: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of each sample `[predictions, features]`, before and after.

    Outputs with one feature are compared as one vector.
    """
    if before.shape[-1] == 1:
        return [(before.reshape(1, -1), after.reshape(1, -1))]
    return [
        (old.reshape(-1, old.shape[-1]), new.reshape(-1, new.shape[-1]))
        for old, new in zip(before, after, strict=True)
    ]


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Return the result of a model for a batch: keyword arguments, arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


def extract_outputs(result: Any) -> tuple[Tensor, bool]:
    """Return the logits if there are any, else the first output; and whether they are logits."""
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        if logits.dim() == 4:  # labels of pixels
            logits = logits.movedim(1, -1)
        return logits, logits.shape[-1] > 1
    if isinstance(result, Tensor):
        return result, False
    outputs = result.values() if isinstance(result, Mapping) else result
    for x in outputs if isinstance(outputs, Iterable) else ():
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
            return x, False
    raise ConfigError(f"the outputs of the model contain no tensor: {type(result).__name__}")
