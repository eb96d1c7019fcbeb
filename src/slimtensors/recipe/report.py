"""Reports of applied recipes, and the quality of a model before and after."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors.archive.summary import Summary, count_noun, format_bytes, format_table
from slimtensors.codecs.statistics import sparsity_of
from slimtensors.errors import group_names
from slimtensors.layerwise.divergence import call_model, extract_outputs
from slimtensors.layerwise.inputs import Layer, collect_layers, remove_padding
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization.state import get_quantization, select_parts
from slimtensors.recipe.calibration import Batch
from slimtensors.tensor import Json, ceil_div, to_cpu

REPORT_FILE = "report.json"
"""File name of the report in the folder of the model."""

_UNSTRUCTURED = "unstructured"
_SPARSE = 0.05
"""Share of zeros from which on the size is estimated with a mask."""

_MAX_LINES = 10
"""Lines of the text of a report."""

_IGNORED_LABEL = -100
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_MAX_VALUES = 1 << 26
"""Maximum number of output values that `measure` keeps for comparison."""


@dataclass(frozen=True)
class Step:
    """Result of one modifier."""

    modifier: str
    layers: tuple[LayerReport, ...] = ()
    notes: tuple[str, ...] = ()
    structure: str | None = None
    """Structure of the zeros that it created."""
    seconds: float = 0.0


@dataclass(frozen=True)
class LayerState:
    """Final state of one layer."""

    name: str
    weights: int
    sparsity: float
    structure: str
    bits: float
    """Bits per weight."""
    is_stored: bool = False
    """Whether `bits` is measured on disk; otherwise it is estimated."""
    group_size: int | None = None
    """Weights that share a scale; None if they are not quantized in groups."""


@dataclass(frozen=True)
class UnchangedLayer:
    """A linear layer that no modifier changed."""

    name: str
    weights: int
    reason: str
    """`ignored`, `not targeted`, `output layer`, `tied to` another weight, or its class."""


@dataclass(frozen=True)
class Quality:
    """Comparison of a model before and after, on evaluation data."""

    cosine: float
    """Cosine similarity of the outputs before and after."""
    kl: float | None = None
    """Mean KL divergence of the predictions in nats; None without logits."""
    perplexity: tuple[float, float] | None = None
    """Perplexity per token, before and after; None unless the model is a causal LM."""


@dataclass(frozen=True)
class Report:
    """Steps that were applied to a model, and its final state."""

    steps: tuple[Step, ...]
    layers: tuple[LayerState, ...]
    """Layers that a modifier changed."""
    notes: tuple[str, ...] = ()
    quality: Quality | None = None
    format: str | None = None
    """Storage format: a preset, or a format of compressed-tensors."""
    stored_bytes: int | None = None
    unchanged: tuple[UnchangedLayer, ...] = ()
    """Linear layers that no modifier changed."""

    @classmethod
    def of(cls, model: nn.Module, steps: Sequence[Step], notes: Sequence[str] = ()) -> "Report":
        """Return the report of a model to which these steps were applied."""
        changed = dict.fromkeys(layer.name for step in steps for layer in step.layers)
        structures: dict[str, str] = {}
        for step in steps:
            for layer in step.layers if step.structure else ():
                if structures.get(layer.name, _UNSTRUCTURED) == _UNSTRUCTURED:
                    structures[layer.name] = str(step.structure)  # zeros are never removed
        layers = collect_layers(model)
        states = [_measure_layer(layers[name], structures.get(name)) for name in changed]
        return cls(tuple(steps), tuple(states), tuple(notes))

    @property
    def sparsity(self) -> float:
        """Share of zeros in all changed layers."""
        items = sum(layer.weights for layer in self.layers)
        return sum(each.weights * each.sparsity for each in self.layers) / items if items else 0.0

    def stored_as(self, format: str, summary: Summary) -> Self:
        """Return the report of a stored model, with the sizes on disk."""
        sizes: dict[str, int] = {}
        for tensor in summary.tensors:
            sizes[tensor.name] = tensor.stored_bytes
        states = [_with_stored_size(each, sizes) for each in self.layers]
        return replace(self, layers=tuple(states), format=format, stored_bytes=summary.stored_bytes)

    def to_json(self) -> Json:
        """Return the JSON form, which `docs/recipes.md` describes."""
        return asdict(self) | {"sparsity": round(self.sparsity, 6)}

    def format_layers(self) -> str:
        """Return a table of all changed layers, with the cosine of outputs for each modifier."""
        rows = [self._format_row(layer) for layer in self.layers]
        steps = [step.modifier for step in self.steps if step.layers]
        return format_table(
            ["layer", "structure", "zeros", "bits", *steps, "seconds"], rows, left=2
        )

    def __str__(self) -> str:
        """Return a summary of at most ten lines; `format_layers` lists the layers."""
        lines = [_describe_step(step) for step in self.steps if step.layers]
        if self.layers:
            lines.append(self._describe_layers())
        if self.quality is not None:
            lines.append(_describe_quality(self.quality))
        if self.stored_bytes is not None:
            lines.append(f"stored as {self.format}: {format_bytes(self.stored_bytes)}")
        if self.unchanged:
            lines.append(self._describe_unchanged())
        notes = [*self.notes, *(note for step in self.steps for note in step.notes)]
        notes += [
            f"{x.name}: {note}" for step in self.steps for x in step.layers for note in x.notes
        ]
        lines += [f"note: {note}" for note in notes]
        if (more := len(lines) - _MAX_LINES) > 0:
            lines[_MAX_LINES - 1 :] = [f"{more + 1} more lines are in {REPORT_FILE}"]
        return "\n".join(lines)

    def _describe_layers(self) -> str:
        weights = sum(layer.weights for layer in self.layers)
        bits = sum(layer.weights * layer.bits for layer in self.layers) / max(weights, 1)
        mark = "" if all(layer.is_stored for layer in self.layers) else "~"
        count = count_noun(len(self.layers), "changed layer")
        return f"{count}: {mark}{bits:.2f} bits per weight, {self.sparsity:.1%} zeros"

    def _describe_unchanged(self) -> str:
        groups = group_names((layer.name, layer.reason) for layer in self.unchanged)
        reasons = [f"{names} ({reason})" for reason, names in groups.items()]
        weights = sum(layer.weights for layer in self.unchanged)
        share = weights / (weights + sum(layer.weights for layer in self.layers))
        count = f"{len(self.unchanged)}, {share:.1%} of the weights"
        return f"unchanged linear layers ({count}): {'; '.join(reasons)}"

    def _format_row(self, layer: LayerState) -> list[str]:
        results = [
            next((each for each in step.layers if each.name == layer.name), None)
            for step in self.steps
            if step.layers
        ]
        cosines = [f"{x.cosine:.5f}" if x and x.cosine is not None else "" for x in results]
        seconds = sum(each.seconds for each in results if each)
        share, bits = f"{layer.sparsity:.1%}", f"{'' if layer.is_stored else '~'}{layer.bits:.2f}"
        return [layer.name, layer.structure, share, bits, *cosines, f"{seconds:.2f}"]


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a model on evaluation data."""

    outputs: Tensor
    are_logits: bool
    perplexity: float | None

    def compare(self, before: "ModelOutputs") -> Quality:
        """Return the quality relative to earlier outputs."""
        cosine = functional.cosine_similarity(before.outputs, self.outputs).mean()
        perplexities = None
        if before.perplexity is not None and self.perplexity is not None:
            perplexities = before.perplexity, self.perplexity
        kl = None
        if self.are_logits:
            old, new = before.outputs.log_softmax(-1), self.outputs.log_softmax(-1)
            kl = float((old.exp() * (old - new)).sum(-1).mean())
        return Quality(float(cosine), kl, perplexities)


def measure(model: nn.Module, batches: Sequence[Batch]) -> ModelOutputs:
    """Run a model on data and return an evenly spaced sample of its outputs, without padding."""
    samples: list[Tensor] = []
    loss, tokens, are_logits = 0.0, 0, False
    is_causal = type(model).__name__.endswith(_CAUSAL_SUFFIXES)
    parts = remove_padding(model, batches)
    with evaluation_mode(model):
        for batch in parts:
            outputs, are_logits = extract_outputs(call_model(model, batch))
            if is_causal and isinstance(batch, Mapping) and "input_ids" in batch:
                labels = batch.get("labels", batch["input_ids"])
                for row_labels, logits in zip(labels[:, 1:], outputs, strict=True):
                    predictions = logits[:-1].float()
                    row_loss = functional.cross_entropy(predictions, row_labels, reduction="sum")
                    loss += float(row_loss)
                    tokens += int(row_labels.ne(_IGNORED_LABEL).sum())
            rows = outputs.flatten(0, -2)
            step = ceil_div(rows.numel() * len(parts), _MAX_VALUES)
            samples.append(rows[:: max(step, 1)].float())
    return ModelOutputs(torch.cat(samples), are_logits, math.exp(loss / tokens) if tokens else None)


def _measure_layer(layer: Layer, structure: str | None) -> LayerState:
    found = sparsity_of(to_cpu(layer.matrix))
    weight = layer.parameter
    state = get_quantization(layer.module)
    args = None if state is None else state.plan.weight_args
    group_size = None if args is None else args.group_size
    dense_bits = 8.0 * weight.element_size()
    if state is not None and (parts := select_parts(layer.weight, state.tensors())):
        bits = 8 * sum(x.nbytes for x in parts.values()) / weight.numel()
    else:
        bits = 1 + dense_bits * (1 - found.share) if found.share >= _SPARSE else dense_bits
    structure = structure or found.structure
    return LayerState(
        layer.name, weight.numel(), found.share, structure, bits, group_size=group_size
    )


def _with_stored_size(layer: LayerState, sizes: Mapping[str, int]) -> LayerState:
    """Return a layer with its bits on disk, unless its tensors have other names there."""
    found = [size for name, size in sizes.items() if name.startswith(f"{layer.name}.weight")]
    if not found and layer.name in sizes:
        found = [sizes[layer.name]]
    if not found:
        return layer
    return replace(layer, bits=8 * sum(found) / layer.weights, is_stored=True)


def _describe_step(step: Step) -> str:
    """Return a line about a modifier: its layers, and how it changes their outputs."""
    text = f"{step.modifier}: {count_noun(len(step.layers), 'layer')} in {step.seconds:.1f} s"
    cosines = sorted((x.cosine, x.name) for x in step.layers if x.cosine is not None)
    if not cosines:
        return text
    middle, (lowest, name) = cosines[len(cosines) // 2][0], cosines[0]
    return f"{text}; cosine of outputs {middle:.5f} (median), {lowest:.5f} (least, {name})"


def _describe_quality(quality: Quality) -> str:
    parts: list[str] = []
    if quality.perplexity is not None:
        before, after = quality.perplexity
        parts.append(f"perplexity {before:.4f} -> {after:.4f}")
    if quality.kl is not None:
        parts.append(f"KL divergence {quality.kl:.5f}")
    return ", ".join([*parts, f"cosine of outputs {quality.cosine:.5f}"])
