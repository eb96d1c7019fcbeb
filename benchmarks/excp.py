"""The published recipe of ExCP (Li et al. 2024) with its defaults, to compare with.

Weight differences below a threshold that depends on the second moment are pruned; moments are set
to zero where the first is small or the difference was pruned; the rest is clustered to 15 values.
"""

from typing import Any

import torch
from torch import Tensor

ALPHA, BETA, CLUSTERS = 5e-5, 2.0, 15


def excp(base: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the state after compression and decompression."""
    names = list(dict(base["model"]))
    model = dict(state["model"])
    moments = {i: dict(values) for i, values in state["optimizer"]["state"].items()}
    shapes = {i: values["exp_avg"].shape for i, values in moments.items()}
    taken: set[int] = set()
    for name in names:
        x = model[name]
        same = (i for i, shape in shapes.items() if shape == x.shape and i not in taken)
        index = next(same, None)
        if index is None or not x.is_floating_point():
            continue
        taken.add(index)
        first, second = moments[index]["exp_avg"], moments[index]["exp_avg_sq"]
        moved = x - base["model"][name]
        limit = moved.abs().median() * min(2.5, ALPHA / float(second.mean().sqrt().clamp(1e-30)))
        keep = moved.abs() > limit
        model[name] = base["model"][name] + clustered(moved, keep)
        alive = keep & (first.abs() > BETA * first.abs().mean())
        moments[index]["exp_avg"] = clustered(first, alive)
        moments[index]["exp_avg_sq"] = clustered(second, alive)
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}


def clustered(x: Tensor, keep: Tensor) -> Tensor:
    """Return `x` with kept values replaced by the nearest cluster centre, others by zero."""
    out, values = torch.zeros_like(x), x[keep]
    if values.numel() <= CLUSTERS:
        return out
    sample = values[:: max(1, values.numel() // 50_000)].contiguous()
    centres = sample.quantile((torch.arange(CLUSTERS) + 0.5) / CLUSTERS).unique()
    for _ in range(12):
        nearest = torch.bucketize(sample, (centres[1:] + centres[:-1]) / 2)
        counts = nearest.bincount(minlength=len(centres))
        sums = nearest.bincount(sample.double(), minlength=len(centres))
        means = (sums / counts.clamp(min=1)).to(x.dtype)
        centres = torch.where(counts > 0, means, centres).sort().values
    out[keep] = centres[torch.bucketize(values, (centres[1:] + centres[:-1]) / 2)]
    return out
