"""Modifiers that need training: zeros that come little by little, and a teacher."""

from dataclasses import dataclass

from slimtensors.errors import ConfigError
from slimtensors.pruning import Structure
from slimtensors.recipe.modifiers import fields
from slimtensors.recipe.modifiers.fields import LINEAR, OUTPUT

SCHEDULES = ("cubic", "linear")


@dataclass(frozen=True)
class _Gradual:
    """What all say that prune little by little; times are in epochs."""

    final_sparsity: float = 0.5
    init_sparsity: float = 0.0
    start: float = 0.0
    end: float | None = None
    """When the final sparsity is reached; by default, when training ends."""
    update_frequency: float | None = None
    """Time from one choice of zeros to the next; by default, every step of the optimizer."""
    schedule: str = "cubic"
    """How sparsity grows: `cubic`, fast at first, or `linear`."""
    mask_structure: str = "unstructured"
    """`unstructured`, `2:4` and the like (kept of how many), `rows`, or blocks like `16x16`."""
    apply_globally: bool = False
    """Whether weights are compared with those of all layers, not only of their own."""
    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = (OUTPUT,)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "targets", fields.names(self.targets))
        put(self, "ignore", fields.names(self.ignore))
        put(self, "final_sparsity", fields.share(self.final_sparsity, "final_sparsity"))
        put(self, "init_sparsity", fields.share(self.init_sparsity, "init_sparsity"))
        fields.choice(self.schedule, "schedule", SCHEDULES)
        if self.init_sparsity > self.final_sparsity:
            raise ConfigError("init_sparsity is above final_sparsity; weights do not come back")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ConfigError(f"end {self.end} does not come after start {self.start}")
        if self.update_frequency is not None:
            fields.positive(self.update_frequency, "update_frequency")
        if self.structure.name == "unstructured":
            put(self, "mask_structure", "unstructured")

    @property
    def structure(self) -> Structure:
        """Where zeros may be."""
        return fields.structure(self.mask_structure, self.final_sparsity, "final_sparsity")


@dataclass(frozen=True)
class GradualMagnitudePruning(_Gradual):
    """Remove the smallest weights, a few more at a time (Zhu and Gupta, 2017)."""


@dataclass(frozen=True)
class MovementPruning(_Gradual):
    """Remove weights that training moves towards zero (Sanh et al., 2020)."""

    score_learning_rate: float = 1e-2
    """How fast the scores are learned that decide which weights go."""
    score_init: str = "zeros"
    """What scores begin with: `zeros`, as PruneBERT's, or `magnitude`, in units of the layer's
    standard deviation: better where training is too short to learn them all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.positive(self.score_learning_rate, "score_learning_rate")
        fields.choice(self.score_init, "score_init", ("zeros", "magnitude"))


@dataclass(frozen=True)
class Distillation:
    """Learn also from what a teacher says, by default the model itself before training."""

    teacher: str | None = None
    """A folder or a name; by default, the model as it comes in."""
    hardness: float = 0.5
    """How much of the loss is the teacher's, from 0 to 1."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        fields.positive(self.temperature, "temperature")
        if not 0 < self.hardness <= 1:
            raise ConfigError(f"hardness is a share above 0 and up to 1, not {self.hardness!r}")
