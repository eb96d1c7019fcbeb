"""Which tensors of a checkpoint are weights of linear layers, told without the model's classes."""

import re

from slimtensors.spec import Spec

_EMBEDDING = re.compile(r"embed|embd|^(wte|wpe|shared|relative_attention_bias)$")
_ROUTER = re.compile(r"^(gate|router)$")
"""Layers that choose experts: small, sensitive, and often not of class `Linear`."""

ON_THEIR_SIDE = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
"""Kinds of models (`model_type`) whose layers are `Conv1D`: inputs by outputs."""

OUTPUT = (
    r"re:(.*\.)?(lm_head|decoder|proj_out|generator_lm_head|vocab_projector|output_projection"
    r"|embed_out|lm_loss|pred_layer\.proj)$"
)
"""Linear layers that files lack where they share the weight of an embedding."""

_STACK = re.compile(r"experts|moe")


def layer_of(name: str, spec: Spec) -> str | None:
    """Return the layer whose weight this is, if it is a matrix; none otherwise."""
    layer, _, last = name.rpartition(".")
    is_matrix = len(spec.shape) == 2 and spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return layer if last == "weight" and layer and is_matrix and spec.numel else None


def is_linear(layer: str) -> bool:
    """Tell by its name whether a layer with a matrix is linear: no embedding, and no router."""
    parts = layer.split(".")
    return not any(map(_EMBEDDING.search, parts)) and not _ROUTER.match(parts[-1])


def is_stack(name: str, spec: Spec) -> bool:
    """Tell whether a tensor may be weights of many experts in one, each a linear layer."""
    if not _STACK.search(name) or not spec.dtype.is_floating_point or "bias" in name:
        return False
    return len(spec.shape) == 3 or (len(spec.shape) == 2 and not name.endswith("weight"))
