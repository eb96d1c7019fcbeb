"""Run a modifier that prunes."""

from collections.abc import Mapping

from torch import nn

from slimtensors import pruning
from slimtensors.pruning.targets import unknown
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.recipe.modifiers import Pruning, SparseGPT, Wanda, name_of
from slimtensors.recipe.modifiers.fields import OUTPUT
from slimtensors.recipe.oneshot.how import How
from slimtensors.recipe.report import Step


def prune(model: nn.Module, modifier: Pruning, how: How) -> Step:
    """Prune a model in place."""
    layers = pruning.find_layers(
        model, modifier.targets, modifier.ignore, structure=modifier.structure
    )
    reports = pruning.prune_model(
        model,
        _shares(model, layers, modifier, how),
        method=_method(modifier, how),
        structure=modifier.structure,
        calibration=how.batches,
        folder=how.folder,
        progress=how.progress,
    )
    missing = [name for name in unknown(model, modifier.ignore) if name != OUTPUT]
    notes = tuple(f"ignore: {name!r} fits nothing in this model" for name in missing)
    return Step(name_of(modifier), reports, notes, modifier.structure.name)


def _method(modifier: Pruning, how: How) -> pruning.Method:
    if isinstance(modifier, SparseGPT):
        return pruning.SparseGPT(modifier.block_size, modifier.dampening_frac)
    return pruning.Wanda() if isinstance(modifier, Wanda) else pruning.Magnitude(bool(how.batches))


def _shares(
    model: nn.Module, layers: Mapping[str, Layer], modifier: Pruning, how: How
) -> dict[str, float]:
    sparsity = modifier.sparsity
    if isinstance(sparsity, Mapping):
        return pruning.per_target(layers, sparsity)
    if isinstance(sparsity, tuple):
        return pruning.per_block(model, layers, sparsity)
    if isinstance(modifier, Wanda | SparseGPT) and modifier.sparsity_profile is not None:
        return pruning.by_outliers(
            model,
            layers,
            sparsity,
            batches=how.batches,
            times=modifier.owl_m,
            limit=modifier.owl_lmbda,
        )
    return dict.fromkeys(layers, sparsity)
