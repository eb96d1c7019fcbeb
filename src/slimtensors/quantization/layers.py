"""Weights that can be quantized, in a model or by the names of a checkpoint's tensors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimtensors.tensor import Spec

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


_PLAIN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Weight:
    """A parameter that holds a weight, or the stacked weights of experts."""

    parameter: str
    transposed: bool = False
    """Whether it lies as inputs by outputs."""

    def matrix(self, x: Tensor) -> Tensor:
        """Return it as outputs by inputs, or as a stack of such."""
        if self.transposed:
            return x.transpose(-1, -2).contiguous()
        return x.flatten(1) if self.parameter == "weight" else x

    def shaped(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a matrix as the layer has it."""
        return (matrix.transpose(-1, -2) if self.transposed else matrix).reshape(tuple(shape))


def weights_of(module: nn.Module) -> tuple[Weight, ...]:
    """List the weights of a layer; none if it is of a kind that cannot be quantized."""
    if isinstance(module, _PLAIN):
        return (Weight("weight"),)
    if _is_gpt2_linear(module):
        return (Weight("weight", transposed=True),)
    if not are_experts(module):
        return ()
    transposed = bool(getattr(module, "is_transposed", False))
    stacks = {name: x for name, x in module.named_parameters(recurse=False) if x.dim() == 3}
    return tuple(Weight(name, transposed) for name in stacks)


def are_experts(module: nn.Module) -> bool:
    """Tell whether a module holds many experts in stacked parameters, as in transformers 5."""
    if not type(module).__name__.endswith("Experts"):
        return False
    own = list(module.parameters(recurse=False))
    return any(x.dim() == 3 and x.is_floating_point() for x in own)


def classes_of(module: nn.Module) -> list[str]:
    """List the names by which targets may call the layer's class: its own and its parents'.

    Stacked experts are also called `Linear`: in checkpoints, each of them is one.
    """
    names = [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    return [*names, "Linear"] if are_experts(module) else names


def takes_numbers(module: nn.Module) -> bool:
    """Tell whether what flows into the layer is numbers, not the ids of tokens."""
    return not isinstance(module, nn.Embedding)


def is_cached_attention(module: nn.Module) -> bool:
    """Tell whether a module is an attention that may put keys and values into a cache."""
    named = "attention" in type(module).__name__.lower()
    if not named or not any(hasattr(module, p) for p in ("k_proj", "qkv_proj", "kv_b_proj")):
        return False
    code = getattr(type(module).forward, "__wrapped__", type(module).forward).__code__
    return bool({"past_key_value", "past_key_values"} & set(code.co_varnames))


def _is_gpt2_linear(module: nn.Module) -> bool:
    """Tell a `Conv1D` of transformers, which is a Linear on its side, without importing it."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), torch.Tensor)
