"""Find weights that can be quantized: in a model, or by the names of a checkpoint's tensors."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimtensors.tensor import Spec

_EMBEDDING = re.compile(r"embed|embd|^(wte|wpe|shared|relative_attention_bias)$")
_ROUTER = re.compile(r"^(gate|router)$")
"""Layers that route tokens to experts: small, sensitive, and often not of class `Linear`."""

TRANSPOSED_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
"""Model types (`model_type`) whose layers are `Conv1D`: `[inputs, outputs]`."""

OUTPUT_LAYERS = (
    r"re:(.*\.)?(lm_head|decoder|proj_out|generator_lm_head|vocab_projector|output_projection"
    r"|embed_out|lm_loss|pred_layer\.proj)$"
)
"""Output layers, which checkpoints omit if they are tied to an embedding."""

_EXPERTS = re.compile(r"experts|moe")


def find_layer_name(name: str, spec: Spec) -> str | None:
    """Return the layer name of a weight matrix, or None for any other tensor."""
    layer, _, last = name.rpartition(".")
    is_matrix = len(spec.shape) == 2 and spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return layer if last == "weight" and layer and is_matrix and spec.numel else None


def is_linear_name(layer: str) -> bool:
    """Return True if the name of a layer is not one of an embedding or a router."""
    parts = layer.split(".")
    return not any(map(_EMBEDDING.search, parts)) and not is_router_name(layer)


def is_router_name(layer: str) -> bool:
    """Return True if the name of a layer, or of a module around it, is that of a router."""
    return any(map(_ROUTER.match, layer.split(".")))


def is_expert_stack(name: str, spec: Spec) -> bool:
    """Return True if a tensor may contain the stacked weights of several experts."""
    if not _EXPERTS.search(name) or not spec.dtype.is_floating_point or "bias" in name:
        return False
    return len(spec.shape) == 3 or (len(spec.shape) == 2 and not name.endswith("weight"))


_LAYER_CLASSES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Weight:
    """A parameter that is a weight, or the stacked weights of experts."""

    parameter: str
    transposed: bool = False
    """Whether its shape is `[inputs, outputs]`."""
    stacked: bool = False
    """Whether its first dimension is that of experts."""

    def to_matrix(self, x: Tensor) -> Tensor:
        """Return the parameter as a matrix `[outputs, inputs]`, or a stack of matrices."""
        if self.transposed:
            return x.transpose(-1, -2).contiguous()
        return x if self.stacked else x.flatten(1)

    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a matrix `[outputs, inputs]` in the layout and shape of the parameter."""
        return (matrix.transpose(-1, -2) if self.transposed else matrix).reshape(tuple(shape))


def list_weights(module: nn.Module) -> tuple[Weight, ...]:
    """Return the weights of a layer; empty if its class cannot be quantized."""
    if isinstance(module, _LAYER_CLASSES):
        return () if _is_computed(module) else (Weight("weight"),)
    if is_conv1d(module):
        return (Weight("weight", transposed=True),)
    if not has_stacked_experts(module):
        return ()
    stacks = {name: x for name, x in module.named_parameters(recurse=False) if x.dim() == 3}
    transposed = _are_transposed(module, list(stacks.values()))
    return tuple(Weight(name, transposed, stacked=True) for name in stacks)


def _is_computed(module: nn.Module) -> bool:
    """Return True if the weight of a layer is computed from other parameters, as by weight norm."""
    return "weight" not in module._parameters and hasattr(module, "weight")


def has_stacked_experts(module: nn.Module) -> bool:
    """Return True if parameters of a module stack several experts, as in transformers 5."""
    if not type(module).__name__.endswith("Experts"):
        return False
    parameters = module.parameters(recurse=False)
    return any(x.dim() == 3 and x.is_floating_point() for x in parameters)


def list_class_names(module: nn.Module) -> list[str]:
    """Return the class names that targets may use for a layer: its class and all base classes.

    Stacked experts and `Conv1D` also match `Linear`: they are linear layers in another layout.
    """
    names = [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    is_linear = has_stacked_experts(module) or is_conv1d(module)
    return [*names, "Linear"] if is_linear else names


def find_output_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers that are usually left as they are, with the reason, by name.

    These are the output layers that a model names itself, and layers with a tied weight: that of an
    embedding, or one that the model lists as tied.
    """
    heads: set[int] = set()
    for module in model.modules():
        if callable(find_head := getattr(module, "get_output_embeddings", None)):
            with suppress(Exception):  # not implemented, or an attribute that the model lacks
                heads.add(id(find_head()))
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    ties |= {source: name for name, source in ties.items() if source not in ties}
    embeddings = {
        id(module.weight): f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if not has_float_input(module):
            continue
        for weight in list_weights(module):
            key = f"{name}.{weight.parameter}"
            tied = embeddings.get(id(getattr(module, weight.parameter)), ties.get(key))
            if tied is not None:
                found[name] = f"tied to {tied}"
            if id(module) in heads:
                found[name] = "output layer" + ("" if tied is None else f", {found[name]}")
    return found


def find_empty_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers whose weights have no elements, such as `Linear(64, 0)`."""
    return [
        name
        for name, module in model.named_modules()
        if (weights := list_weights(module))
        and not any(getattr(module, weight.parameter).numel() for weight in weights)
    ]


def has_float_input(module: nn.Module) -> bool:
    """Return True if the input of a layer is floats and not token ids."""
    return not isinstance(module, nn.Embedding)


def is_cached_attention_module(module: nn.Module) -> bool:
    """Return True if a module is an attention layer that may use a key/value cache."""
    is_attention = "attention" in type(module).__name__.lower()
    if not is_attention or not any(hasattr(module, p) for p in ("k_proj", "qkv_proj", "kv_b_proj")):
        return False
    code = getattr(type(module).forward, "__wrapped__", type(module).forward).__code__
    return bool({"past_key_value", "past_key_values"} & set(code.co_varnames))


def is_conv1d(module: nn.Module) -> bool:
    """Return True for `Conv1D` of transformers, a transposed Linear, without importing it."""
    return type(module).__name__ == "Conv1D" and isinstance(
        getattr(module, "weight", None), torch.Tensor
    )


def _are_transposed(module: nn.Module, stacks: Sequence[Tensor]) -> bool:
    """Return True if stacks of experts are `[experts, inputs, outputs]`.

    Most modules of transformers have an attribute that says so. For the others, the inputs of the
    first stack, which reads the hidden states, must be the outputs of the last, which writes them.
    """
    if isinstance(declared := getattr(module, "is_transposed", None), bool):
        return declared
    first, last = stacks[0].shape[1:], stacks[-1].shape[1:]
    return first[1] != last[0] and first[0] == last[1]
