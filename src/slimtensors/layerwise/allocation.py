"""Select the layers to prune, and allocate a share of zeros to each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, describe_problems
from slimtensors.layerwise.inputs import Batch, Layer, collect_layers, remove_padding
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.layerwise.structure import Structure
from slimtensors.layerwise.walk import Walk, find_blocks, group_by_block
from slimtensors.quantization.layers import list_class_names, list_weights
from slimtensors.quantization.targets import matches_any, rank_target

Shares = dict[str, float]
"""Share of zeros by layer name."""

_LINEAR_CLASSES = {"Linear", "Conv1D"}
_MAX_SHARE = 0.99


def find_layers(
    model: nn.Module,
    targets: Sequence[str],
    ignore: Sequence[str],
    *,
    structure: Structure | None = None,
) -> dict[str, Layer]:
    """Return the layers to prune, by name: those that match a target and are not ignored.

    Raise if a layer is empty, shares its weight with another, or does not fit the structure.
    """
    layers = fitting_layers(model, targets, ignore)
    problems = list(_find_ties(model, layers))
    for layer in layers.values():
        if not layer.parameter.numel():
            problems.append((layer.name, "cannot prune an empty weight; add the layer to ignore"))
        try:
            if structure is not None:
                structure.check(*layer.matrix.shape[-2:])
        except ConfigError as error:
            problems.append((layer.name, str(error)))
    if problems:
        raise ConfigError(describe_problems(problems))
    return layers


def fitting_layers(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str]
) -> dict[str, Layer]:
    """Return the layers that match a target and are not ignored, by name.

    A target is a name, a class, or a pattern, of a layer or of its weight. If it matches a module
    that contains layers, it selects all linear layers in it. Raise if a target matches nothing.
    """
    layers = collect_layers(model)
    matches = {target: _match_target(model, layers, target) for target in targets}
    if unmatched := [target for target, names in matches.items() if not names]:
        hint = f"layer names look like {next(iter(layers), 'none')}"
        raise ConfigError(
            "\n".join(
                f"target {target!r} matches no prunable layer of the model; {hint}"
                for target in unmatched
            )
        )
    selected = set().union(*matches.values())
    ignored = set().union(*(_match_target(model, layers, target) for target in ignore))
    found = {name: layer for name, layer in layers.items() if name in selected - ignored}
    if not found:
        raise ConfigError(f"all layers that match {', '.join(targets)} are ignored")
    return found


def find_unmatched_targets(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return the targets that match no layer."""
    layers = collect_layers(model)
    return [target for target in targets if not _match_target(model, layers, target)]


def _match_target(model: nn.Module, layers: Mapping[str, Layer], target: str) -> set[str]:
    """Return the names of all layers that a target selects."""
    names_by_module: dict[int, set[str]] = {}
    for key, layer in layers.items():
        names_by_module.setdefault(id(layer.module), set()).add(key)
    matches: set[str] = set()
    for name, module in model.named_modules():
        names = {name, *(f"{name}.{weight.parameter}" for weight in list_weights(module))}
        if any(matches_any([target], each, list_class_names(module)) for each in names):
            matches |= names_by_module.get(id(module)) or _linear_layers(layers, within=name)
    return matches


def _linear_layers(layers: Mapping[str, Layer], *, within: str) -> set[str]:
    return {
        key
        for key, layer in layers.items()
        if within
        and key.startswith(f"{within}.")
        and {*list_class_names(layer.module)} & _LINEAR_CLASSES
    }


def _find_ties(model: nn.Module, layers: Mapping[str, Layer]) -> Iterator[tuple[str, str]]:
    """Yield layers that share their weight with another, and the problem."""
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    for layer in layers.values():
        if len(tied := names[id(layer.parameter)]) > 1:
            yield (
                layer.name,
                f"tied weights cannot be pruned: {', '.join(tied)}; add the layer to ignore",
            )


def per_block(model: nn.Module, layers: Mapping[str, Layer], shares: Sequence[float]) -> Shares:
    """Allocate the i-th share to all layers of the i-th block."""
    blocks = list(find_blocks(model))
    if len(shares) != len(blocks):
        raise ConfigError(f"expected one sparsity per block ({len(blocks)}), got {len(shares)}")
    by_block = dict(zip(blocks, shares, strict=True))
    result = {
        layer.name: by_block[block]
        for block, group in group_by_block(layers, blocks).items()
        for layer in group
    }
    if missing := layers.keys() - result.keys():
        raise ConfigError(
            f"{min(missing)}: outside of the repeated blocks covered by a list of sparsities;"
            " add the layer to ignore"
        )
    return {name: result[name] for name in layers}


def per_target(layers: Mapping[str, Layer], shares: Mapping[str, float]) -> Shares:
    """Allocate to each layer the share of its closest target."""
    result: Shares = {}
    used: set[str] = set()
    for name, layer in layers.items():
        classes = list_class_names(layer.module)
        ranks = {t: r for t in shares if (r := rank_target(t, name, classes)) is not None}
        if not ranks:
            raise ConfigError(f"{name}: no sparsity matches this layer; add a target or ignore it")
        best = [target for target, rank in ranks.items() if rank == min(ranks.values())]
        if len({shares[target] for target in best}) > 1:
            raise ConfigError(f"{name}: conflicting sparsities for targets {' and '.join(best)}")
        used |= ranks.keys()
        result[name] = shares[best[0]]
    for target in shares.keys() - used:
        raise ConfigError(f"sparsity: target {target!r} matches no layer to prune")
    return result


def by_outliers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    share: float,
    *,
    batches: Sequence[Batch],
    times: float,
    limit: float,
) -> Shares:
    """Prune blocks less that contain more outliers, like OWL (Yin et al., 2023).

    An outlier is a weight whose product with its input's norm exceeds `times` the mean of its
    layer. Shares differ by at most twice `limit`; their mean over all weights is `share`.
    """
    counts: dict[str, int] = {}
    groups: dict[str, list[Layer]] = {}
    with evaluation_mode(model):
        walk = Walk.plan(model, layers, remove_padding(model, batches))
        with closing(walk.iterate_units()) as units:
            for unit in units:
                groups[unit.name] = [layer for group in unit.groups for layer in group]
                counts[unit.name] = 0
                for inputs in unit.record_inputs(groups[unit.name]):
                    norms = inputs.hessian.mean().diagonal().sqrt()
                    for name, i in inputs.readers:
                        outliers = _count_outliers(layers[name].matrices[i], norms, times)
                        counts[unit.name] += outliers
    sizes = {
        block: sum(layer.parameter.numel() for layer in group) for block, group in groups.items()
    }
    ratios = {block: counts[block] / size for block, size in sizes.items() if size}
    offsets = _share_offsets(ratios, sizes, limit)
    result = dict.fromkeys(layers, share)
    for block, offset in offsets.items():
        for layer in groups[block]:
            result[layer.name] = min(max(share - offset, 0.0), _MAX_SHARE)
    return result


def _count_outliers(weight: Tensor, norms: Tensor, times: float) -> int:
    scores = weight.float().abs() * norms
    return int((scores > times * scores.mean()).sum())


def _share_offsets(ratios: Mapping[str, float], sizes: Mapping[str, int], limit: float) -> Shares:
    """Return how much less each block is pruned; the mean over all weights is zero."""
    low, high = min(ratios.values()), max(ratios.values())
    if high == low:
        return dict.fromkeys(ratios, 0.0)
    x = torch.tensor([*ratios.values()], dtype=torch.float64)
    n = torch.tensor([sizes[block] for block in ratios], dtype=torch.float64)
    x = (x - low) / (high - low) * 2 * limit
    x -= (x * n).sum() / n.sum()
    return dict(zip(ratios, x.tolist(), strict=True))
