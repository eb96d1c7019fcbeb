"""Reports of what a recipe did, with the quality measured before and after."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors.archive.summary import Summary, format_bytes, table
from slimtensors.codecs.statistics import sparsity_of
from slimtensors.layerwise.engine import evaluation_mode
from slimtensors.layerwise.inputs import Layer, collect_layers, remove_padding
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization.state import parts_of, quantization_of
from slimtensors.recipe.calibration import Batch
from slimtensors.tensor import Json, ceil_div, to_cpu

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
    parts = remove_padding(model, batches)
    with evaluation_mode(model):
        for batch in parts:
            outputs, are_logits = _outputs(_called(model, batch))
            if is_causal and isinstance(batch, Mapping) and "input_ids" in batch:
                labels = batch.get("labels", batch["input_ids"])
                for wanted, logits in zip(labels[:, 1:], outputs, strict=True):
                    said = logits[:-1].float()
                    loss += float(functional.cross_entropy(said, wanted, reduction="sum"))
                    tokens += int(wanted.ne(_IGNORED).sum())
            rows = outputs.flatten(0, -2)
            step = ceil_div(rows.numel() * len(parts), _MOST)
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


FILE = "report.json"
"""What it is called beside the model that it is of."""

_UNSTRUCTURED, _SPARSE = "unstructured", 0.05


@dataclass(frozen=True)
class Step:
    """What one modifier did."""

    modifier: str
    layers: tuple[LayerReport, ...] = ()
    notes: tuple[str, ...] = ()
    structure: str | None = None
    """Of the zeros that it made."""
    seconds: float = 0.0


@dataclass(frozen=True)
class LayerState:
    """What has become of one layer."""

    name: str
    weights: int
    sparsity: float
    structure: str
    bits: float
    """Per weight."""
    is_stored: bool = False
    """Whether that is so on disk; else it is estimated, by codes, or by a mask and what is left."""


@dataclass(frozen=True)
class Report:
    """What was done to a model, step by step, and what has become of it."""

    steps: tuple[Step, ...]
    layers: tuple[LayerState, ...]
    """Those that a modifier changed."""
    notes: tuple[str, ...] = ()
    quality: Quality | None = None
    format: str | None = None
    """How the model was stored: a preset, or a format of compressed-tensors."""
    stored_bytes: int | None = None

    @classmethod
    def of(cls, model: nn.Module, steps: Sequence[Step], notes: Sequence[str] = ()) -> "Report":
        """Measure a model to which these steps were done."""
        changed = dict.fromkeys(layer.name for step in steps for layer in step.layers)
        structures: dict[str, str] = {}
        for step in steps:
            for layer in step.layers if step.structure else ():
                if structures.get(layer.name, _UNSTRUCTURED) == _UNSTRUCTURED:
                    structures[layer.name] = str(step.structure)  # zeros stay, and so does it
        layers = collect_layers(model)
        states = [_state(layers[name], structures.get(name)) for name in changed]
        return cls(tuple(steps), tuple(states), tuple(notes))

    @property
    def sparsity(self) -> float:
        """The share of zeros in all layers that were changed."""
        items = sum(layer.weights for layer in self.layers)
        return sum(each.weights * each.sparsity for each in self.layers) / items if items else 0.0

    def stored_as(self, format: str, summary: Summary) -> Self:
        """Return the report of a model that was stored, with the bits that really takes."""
        sizes: dict[str, int] = {}
        for tensor in summary.tensors:
            sizes[tensor.name] = tensor.stored_bytes
        states = [_stored(each, sizes) for each in self.layers]
        return replace(self, layers=tuple(states), format=format, stored_bytes=summary.stored_bytes)

    def to_json(self) -> Json:
        """Return everything; `docs/recipes.md` describes it."""
        return asdict(self) | {"sparsity": round(self.sparsity, 6)}

    def __str__(self) -> str:
        rows = [self._row(layer) for layer in self.layers]
        steps = [step.modifier for step in self.steps if step.layers]
        head = ["layer", "structure", "zeros", "bits", *steps, "seconds"]
        lines = [table(head, rows, left=2)] if rows else []
        lines += ["cosine of outputs, before and after each modifier"] if rows else []
        if self.quality is not None:
            lines.append(_line(self.quality))
        if self.stored_bytes is not None:
            lines.append(f"stored as {self.format}: {format_bytes(self.stored_bytes)}")
        notes = [*self.notes, *(note for step in self.steps for note in step.notes)]
        notes += [
            f"{x.name}: {note}" for step in self.steps for x in step.layers for note in x.notes
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in notes)])

    def _row(self, layer: LayerState) -> list[str]:
        done = [
            next((each for each in step.layers if each.name == layer.name), None)
            for step in self.steps
            if step.layers
        ]
        cosines = [f"{x.cosine:.5f}" if x and x.cosine is not None else "" for x in done]
        seconds = sum(each.seconds for each in done if each)
        share, bits = f"{layer.sparsity:.1%}", f"{'' if layer.is_stored else '~'}{layer.bits:.2f}"
        return [layer.name, layer.structure, share, bits, *cosines, f"{seconds:.2f}"]


def _state(layer: Layer, structure: str | None) -> LayerState:
    found = sparsity_of(to_cpu(layer.matrix))
    weight = layer.parameter
    state = quantization_of(layer.module)
    size = 8.0 * weight.element_size()
    if state is not None and (parts := parts_of(layer.weight, state.kept())):
        bits = 8 * sum(x.nbytes for x in parts.values()) / weight.numel()
    else:
        bits = 1 + size * (1 - found.share) if found.share >= _SPARSE else size
    return LayerState(layer.name, weight.numel(), found.share, structure or found.structure, bits)


def _stored(layer: LayerState, sizes: Mapping[str, int]) -> LayerState:
    """Return a layer with its bits on disk; there, stacked experts may be called by other names."""
    own = [size for name, size in sizes.items() if name.startswith(f"{layer.name}.weight")]
    if not own and layer.name in sizes:
        own = [sizes[layer.name]]
    return replace(layer, bits=8 * sum(own) / layer.weights, is_stored=True) if own else layer


def _line(quality: Quality) -> str:
    parts: list[Any] = []
    if quality.perplexity is not None:
        before, after = quality.perplexity
        parts.append(f"perplexity {before:.4f} -> {after:.4f}")
    if quality.kl is not None:
        parts.append(f"KL divergence {quality.kl:.5f}")
    return ", ".join([*parts, f"cosine of outputs {quality.cosine:.5f}"])
