"""What training did to a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slimtensors.recipe.report import Report


@dataclass(frozen=True)
class TrainedStage:
    """How a stage was trained."""

    name: str
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
class TrainingReport(Report):
    """What was done to a model, in one shot and by training, and what has become of it."""

    stages: tuple[TrainedStage, ...] = ()
    """Those that were trained."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stages), super().__str__()])
