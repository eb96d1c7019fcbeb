"""How many weights each layer loses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.quantization.algorithms.blocks import Batch, find_blocks, ready
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.quantization.algorithms.padding import without_padding
from slimtensors.quantization.algorithms.recording import record
from slimtensors.quantization.algorithms.watch import watch_block
from slimtensors.quantization.layers import classes_of
from slimtensors.quantization.targets import rank

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
        ranks = {t: r for t in shares if (r := rank(t, name, classes)) is not None}
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
    with ready(model):
        stack = record(model, blocks, without_padding(model, batches))
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
