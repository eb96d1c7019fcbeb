"""Layers that vLLM fuses into one, and the global scale that they have to share.

vLLM applies one global scale to all rows of a fused layer, so scales of its parts that differ would
make it compute with wrong weights.
"""

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from slimtensors.quantization.affine import compute_global_scale

_LOG = logging.getLogger(__name__)

_FUSED = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj"),
    ("gate_proj", "up_proj", "dense_h_to_4h"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("c_fc_0", "c_fc_1"),
    ("fc1", "fc3"),
)
"""Names of layers in the same module that vLLM may fuse."""


def group_fused(layers: Iterable[str]) -> list[list[str]]:
    """Return the groups of two or more layers that vLLM may fuse, of all these layers."""
    sets = {leaf: number for number, names in enumerate(_FUSED) for leaf in names}
    groups: dict[tuple[str, int], list[str]] = {}
    for layer in layers:
        parent, _, leaf = layer.rpartition(".")
        if leaf in sets:
            groups.setdefault((parent, sets[leaf]), []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


def warn_unshared(state: Mapping[str, Tensor], source: str) -> None:
    """Log a warning if global scales of stored layers differ although vLLM may fuse the layers."""
    suffix = ".weight_global_scale"
    scales = {x.removesuffix(suffix): state[x] for x in state if x.endswith(suffix)}
    unshared = [
        layer
        for group in group_fused(scales)
        if any(not torch.equal(scales[layer], scales[group[0]]) for layer in group)
        for layer in group
    ]
    if unshared:
        _LOG.warning(
            "%s: global scales of %d layers that vLLM fuses differ (%s, ...): it would compute with"
            " wrong weights; quantize with quantize_folder or quantize_model, which share them",
            source,
            len(unshared),
            unshared[0],
        )


def share_global_scale(weights: Iterable[Tensor]) -> Tensor:
    """Return the global scale of several matrices, which the largest of their values determines."""
    ranges = [torch.stack(torch.aminmax(weight)) for weight in weights]
    low, high = torch.aminmax(torch.stack(ranges))
    return compute_global_scale(low, high)
