"""How well a model still does what it did: perplexity, and how far its outputs have moved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors.calibration import Batch
from slimtensors.quantization.algorithms.blocks import ready
from slimtensors.quantization.algorithms.padding import without_padding

_IGNORED = -100
"""The label of a token that no model is asked about."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MOST = 1 << 26
"""How many numbers of the model's first outputs are kept to compare with."""


@dataclass(frozen=True)
class Quality:
    """A model before and after, on data of its own."""

    cosine: float
    """Between outputs before and after."""
    kl: float | None = None
    """By how many nats what it predicts has moved, on average; none without logits."""
    perplexity: tuple[float, float] | None = None
    """Before and after, per token; none unless it predicts the next one."""


@dataclass(frozen=True)
class Measured:
    """What a model says about data."""

    outputs: Tensor
    are_logits: bool
    perplexity: float | None

    def compared_with(self, before: "Measured") -> Quality:
        """Return how that differs from what it said before."""
        cosine = functional.cosine_similarity(before.outputs, self.outputs).mean()
        pair = None
        if before.perplexity is not None and self.perplexity is not None:
            pair = before.perplexity, self.perplexity
        kl = None
        if self.are_logits:
            was, now = before.outputs.log_softmax(-1), self.outputs.log_softmax(-1)
            kl = float((was.exp() * (was - now)).sum(-1).mean())
        return Quality(float(cosine), kl, pair)


def measure(model: nn.Module, batches: Sequence[Batch]) -> Measured:
    """Run a model on data; of its outputs, evenly chosen ones are kept, and none of padding."""
    kept: list[Tensor] = []
    loss, tokens, are_logits = 0.0, 0, False
    is_causal = type(model).__name__.endswith(_CAUSAL)
    parts = without_padding(model, batches)
    with ready(model):
        for batch in parts:
            outputs, are_logits = _outputs(_called(model, batch))
            if is_causal and isinstance(batch, Mapping) and "input_ids" in batch:
                labels = batch.get("labels", batch["input_ids"])
                for wanted, logits in zip(labels[:, 1:], outputs, strict=True):
                    said = logits[:-1].float()
                    loss += float(functional.cross_entropy(said, wanted, reduction="sum"))
                    tokens += int(wanted.ne(_IGNORED).sum())
            rows = outputs.flatten(0, -2)
            step = -(-rows.numel() * len(parts) // _MOST)
            kept.append(rows[:: max(step, 1)].float())
    return Measured(torch.cat(kept), are_logits, math.exp(loss / tokens) if tokens else None)


def _called(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


def _outputs(result: Any) -> tuple[Tensor, bool]:
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    return result if isinstance(result, Tensor) else result[0], False
