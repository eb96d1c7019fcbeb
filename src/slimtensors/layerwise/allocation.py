"""Which layers are pruned, and how much each loses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.layerwise.engine import Batch, find_blocks, prepare_batch, record_calls
from slimtensors.layerwise.inputs import Layer, layers_of, watch_block, without_padding
from slimtensors.layerwise.structure import Structure
from slimtensors.quantization.layers import classes_of, weights_of
from slimtensors.quantization.plans import is_target, target_rank

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


Shares = dict[str, float]
"""Of zeros, by the name of a layer."""

_MOST = 0.99


def per_block(model: nn.Module, layers: Mapping[str, Layer], shares: Sequence[float]) -> Shares:
    """Give all layers of a block the share that a list has for it."""
    blocks = list(find_blocks(model))
    if len(shares) != len(blocks):
        raise ConfigError(f"a list of {len(shares)} sparsities for {len(blocks)} blocks")
    of = dict(zip(blocks, shares, strict=True))
    found = {name: of[block] for name in layers if (block := _block(name, blocks)) is not None}
    if missing := layers.keys() - found.keys():
        raise ConfigError(f"{min(missing)}: lies in no block; ignore it, or give no list")
    return found


def per_target(layers: Mapping[str, Layer], shares: Mapping[str, float]) -> Shares:
    """Give each layer the share of the target that fits it best."""
    found: Shares = {}
    used: set[str] = set()
    for name, layer in layers.items():
        classes = classes_of(layer.module)
        ranks = {t: r for t in shares if (r := target_rank(t, name, classes)) is not None}
        if not ranks:
            raise ConfigError(f"{name}: no sparsity is given for it; name it, or ignore it")
        best = [target for target, r in ranks.items() if r == min(ranks.values())]
        if len({shares[target] for target in best}) > 1:
            raise ConfigError(f"{name}: {' and '.join(best)} both give it a sparsity")
        used |= ranks.keys()
        found[name] = shares[best[0]]
    for target in shares.keys() - used:
        raise ConfigError(f"sparsity of {target!r}: fits no layer that is to be pruned")
    return found


def by_outliers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    share: float,
    *,
    batches: Sequence[Batch],
    times: float,
    limit: float,
) -> Shares:
    """Let blocks keep more in which more weights stand out, as OWL does (Yin et al., 2023).

    A weight stands out if it, times the size of its input, is `times` the mean of its layer. The
    shares lie within twice `limit`, around `share`, which is that of all blocks together.
    """
    blocks = find_blocks(model)
    counts = dict.fromkeys(blocks, 0)
    with prepare_batch(model):
        stack = record_calls(model, blocks, without_padding(model, batches))
        for block in blocks:
            own = {name: each for name, each in layers.items() if name.startswith(f"{block}.")}
            for inputs in watch_block(stack, block, own.values(), {}):
                sizes = inputs.hessian.mean().diagonal().sqrt()
                for name, i in inputs.readers:
                    counts[block] += _outstanding(own[name].matrices[i], sizes, times)
            stack.advance(block)
    weights = {
        block: sum(x.parameter.numel() for n, x in layers.items() if n.startswith(f"{block}."))
        for block in blocks
    }
    spread = _spread({b: counts[b] / n for b, n in weights.items() if n}, weights, limit)
    found = {name: _block(name, list(blocks)) for name in layers}
    return {
        name: min(max(share - spread[block], 0.0), _MOST) if block in spread else share
        for name, block in found.items()
    }


def _outstanding(weight: Tensor, sizes: Tensor, times: float) -> int:
    scores = weight.float().abs() * sizes
    return int((scores > times * scores.mean()).sum())


def _spread(ratios: Mapping[str, float], weights: Mapping[str, int], limit: float) -> Shares:
    """Return how much more than others each block keeps; over all weights, that is nothing."""
    low, high = min(ratios.values()), max(ratios.values())
    if high == low:
        return dict.fromkeys(ratios, 0.0)
    x = torch.tensor([*ratios.values()], dtype=torch.float64)
    n = torch.tensor([weights[block] for block in ratios], dtype=torch.float64)
    x = (x - low) / (high - low) * 2 * limit
    x -= (x * n).sum() / n.sum()
    return dict(zip(ratios, x.tolist(), strict=True))


def _block(name: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if name.startswith(f"{block}.")), None)
