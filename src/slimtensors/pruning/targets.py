"""Which layers of a model are meant to be pruned."""

from collections.abc import Mapping, Sequence

from torch import nn

from slimtensors.errors import ConfigError
from slimtensors.pruning.structure import Structure
from slimtensors.quantization.algorithms.layers import Layer, layers_of
from slimtensors.quantization.layers import classes_of, weights_of
from slimtensors.quantization.targets import is_target

_LINEAR = {"Linear", "Conv1D"}


def find_layers(
    model: nn.Module,
    targets: Sequence[str],
    ignore: Sequence[str],
    *,
    structure: Structure | None = None,
) -> dict[str, Layer]:
    """Return the layers that targets fit and that are not ignored, by name, to be pruned.

    A layer that shares its weight with another raises, as does one that cannot have the structure.
    """
    chosen = fitting_layers(model, targets, ignore)
    _check_tied(model, chosen)
    if structure is not None:
        for layer in chosen.values():
            _check_structure(layer, structure)
    return chosen


def fitting_layers(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str]
) -> dict[str, Layer]:
    """Return the layers that targets fit and that are not ignored, by name.

    A target may also be the name of a weight, or fit a module: then it means all linear layers in
    it. A target that fits nothing raises.
    """
    layers = layers_of(model)
    meant: set[str] = set()
    for target in targets:
        found = _meant(model, layers, target)
        if not found:
            raise ConfigError(
                f"target {target!r} fits no layer of the model that can be pruned;"
                f" their names are like {next(iter(layers), 'none')}"
            )
        meant |= found
    ignored = set().union(*(_meant(model, layers, target) for target in ignore))
    chosen = {name: layer for name, layer in layers.items() if name in meant - ignored}
    if not chosen:
        raise ConfigError(f"all layers that fit {', '.join(targets)} are ignored")
    return chosen


def unknown(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return those of some targets that fit nothing: they may be typing errors."""
    layers = layers_of(model)
    return [target for target in targets if not _meant(model, layers, target)]


def _meant(model: nn.Module, layers: Mapping[str, Layer], target: str) -> set[str]:
    own: dict[int, set[str]] = {}
    for key, layer in layers.items():
        own.setdefault(id(layer.module), set()).add(key)
    found: set[str] = set()
    for name, module in model.named_modules():
        names = {name, *(f"{name}.{weight.parameter}" for weight in weights_of(module))}
        if any(is_target([target], each, classes_of(module)) for each in names):
            found |= own.get(id(module)) or _linear_layers(layers, within=name)
    return found


def _linear_layers(layers: Mapping[str, Layer], *, within: str) -> set[str]:
    return {
        key
        for key, layer in layers.items()
        if within and key.startswith(f"{within}.") and {*classes_of(layer.module)} & _LINEAR
    }


def _check_structure(layer: Layer, structure: Structure) -> None:
    try:
        structure.check(*layer.matrix.shape[-2:])
    except ConfigError as error:
        raise ConfigError(f"{layer.name}: {error}") from error


def _check_tied(model: nn.Module, layers: Mapping[str, Layer]) -> None:
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    for layer in layers.values():
        if len(shared := names[id(layer.parameter)]) > 1:
            raise ConfigError(f"{layer.name}: shares its weight: {', '.join(shared)}; ignore it")
