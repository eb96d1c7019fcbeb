"""What a recipe does before, while and after a model is trained, stage by stage."""

from dataclasses import dataclass

from slimtensors.errors import ConfigError
from slimtensors.recipe import ConstantPruning, Modifier, Recipe, SmoothQuant, Stage
from slimtensors.recipe.modifiers import Pruning, Quantizing, Training, name_of


@dataclass(frozen=True)
class Planned:
    """A stage, and whether it is trained."""

    stage: Stage
    is_trained: bool

    @property
    def pruning(self) -> tuple[Modifier, ...]:
        """Those that prune in one shot, before the stage is trained if it is."""
        kinds = Pruning if self.is_trained else Pruning | ConstantPruning
        return tuple(m for m in self.stage.modifiers if isinstance(m, kinds))

    @property
    def quantizing(self) -> tuple[Modifier, ...]:
        """Those that quantize, after everything else."""
        return tuple(m for m in self.stage.modifiers if isinstance(m, Quantizing | SmoothQuant))


def planned(recipe: Recipe) -> list[Planned]:
    """Return the stages and which of them train; if none says so, the first does.

    Raise if a model would be trained after it was quantized.
    """
    trained = [stage.name for stage in recipe.stages if _says_train(stage)]
    if not trained:
        trained = [stage.name for stage in recipe.stages if stage.run_type is None][:1]
    if not trained:
        raise ConfigError("no stage of the recipe is to be trained; use oneshot")
    plan = [Planned(stage, stage.name in trained) for stage in recipe.stages]
    quantized = ""
    for each in plan:
        if quantized and (each.is_trained or each.pruning):
            raise ConfigError(
                f"the stage {each.stage.name} comes after {quantized}, which quantizes: weights"
                " would leave their grid; quantize last"
            )
        quantized = each.stage.name if each.quantizing else quantized
    return plan


def _says_train(stage: Stage) -> bool:
    needing = [name_of(m) for m in stage.modifiers if isinstance(m, Training)]
    if stage.run_type == "oneshot":
        if needing:
            raise ConfigError(f"{needing[0]} needs training, but {stage.name} is to be oneshot")
        return False
    holds = any(isinstance(m, ConstantPruning) for m in stage.modifiers)
    return bool(needing) or holds or stage.run_type == "train"
