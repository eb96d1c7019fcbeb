"""What training did to a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor, nn

from slimtensors.sparsity import combined, sparsity_of
from slimtensors.spec import Json, on_cpu

FILE = "report.json"
"""What it is called beside the model."""


@dataclass(frozen=True)
class LayerSparsity:
    """How sparse a weight has become."""

    name: str
    items: int
    kept: int
    structure: str

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.kept / self.items if self.items else 0.0


@dataclass(frozen=True)
class TrainedStage:
    """How a stage was trained."""

    name: str
    modifiers: tuple[str, ...]
    steps: int
    seconds: float
    loss: float | None
    """The mean of all steps; none if nothing was left to train."""
    resumed_from: int = 0
    """Steps that were done before."""
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.name}: {self.steps} steps in {self.seconds:.1f} s, loss {loss}"


@dataclass(frozen=True)
class TrainingReport:
    """What was done in each stage, and how sparse the weights are that were pruned."""

    stages: tuple[TrainedStage, ...]
    layers: tuple[LayerSparsity, ...]

    @property
    def sparsity(self) -> float:
        """The share of zeros of all weights that were pruned."""
        items = sum(layer.items for layer in self.layers)
        return 1 - sum(layer.kept for layer in self.layers) / items if items else 0.0

    def to_json(self) -> Json:
        """Return the JSON form."""
        layers = [asdict(layer) | {"sparsity": round(layer.sparsity, 6)} for layer in self.layers]
        stages = [asdict(stage) | {"modifiers": list(stage.modifiers)} for stage in self.stages]
        return {"stages": stages, "sparsity": round(self.sparsity, 6), "layers": layers}

    def __str__(self) -> str:
        wide = max((len(layer.name) for layer in self.layers), default=0)
        lines = [str(stage) for stage in self.stages]
        lines += [
            f"{layer.name:{wide}}  {layer.sparsity:7.2%}  {layer.structure}"
            for layer in self.layers
        ]
        return "\n".join([*lines, f"{'all that was pruned':{wide}}  {self.sparsity:7.2%}"])


def layers_of(model: nn.Module, masks: Mapping[str, Tensor]) -> tuple[LayerSparsity, ...]:
    """Measure the weights that have masks."""
    found = []
    for name in masks:
        weight = on_cpu(model.get_parameter(name).detach())
        measured = combined([sparsity_of(weight)])
        kept = int(weight.count_nonzero())
        found.append(LayerSparsity(name, weight.numel(), kept, measured.structure))
    return tuple(found)
