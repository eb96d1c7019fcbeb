"""Models in memory: their quantization config, targets of a config, and loading of weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from slimtensors.errors import MismatchError
from slimtensors.folder.config_json import SparsityConfig
from slimtensors.quantization import formats
from slimtensors.quantization.apply import decompress_quantized_weights
from slimtensors.quantization.config import QuantizationConfig
from slimtensors.quantization.layers import list_class_names
from slimtensors.quantization.state import LayerPlan, get_quantization
from slimtensors.quantization.state_dict import read_schemes
from slimtensors.quantization.targets import KV_CACHE, matches_any


def describe_quantization(model: nn.Module) -> QuantizationConfig | None:
    """Return the config of a quantized model, with its groups; None if no layer is quantized."""
    plans = {
        state.plan.group: state.plan
        for module in model.modules()
        if (state := get_quantization(module)) is not None
    }
    if not plans:
        return None
    found = read_schemes(model)
    groups = {name: plan for name, plan in plans.items() if name != KV_CACHE}
    return QuantizationConfig(
        {name: plan.scheme for name, plan in groups.items()},
        formats.merge(plan.format for plan in groups.values()),
        found.status,
        found.unquantized,
        found.kv_cache,
    )


def decompress_layers(model: nn.Module) -> None:
    """Make the quantized weights of a model dense again; on `meta`, they have no values."""
    for module in model.modules():
        state = get_quantization(module)
        is_meta = state is not None and any(x.is_meta for x in state.tensors().values())
        if state is not None and is_meta:
            state.set_tensors(_make_values(state.plan, state.tensors()))
        decompress_quantized_weights(module)
        if is_meta:
            module.to("meta")


def _make_values(plan: LayerPlan, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for stored tensors on `meta`; shapes, which decompression reads, are real."""
    values = {name: torch.zeros_like(x, device="cpu") for name, x in stored.items()}
    for weight in plan.weights:
        shape, _ = plan.dense[weight.parameter]
        matrix = weight.to_matrix(torch.empty(shape, device="meta"))
        if (name := f"{weight.parameter}_shape") in values:
            sizes = matrix.shape[-values[name].numel() :]
            values[name] = torch.tensor(sizes, dtype=values[name].dtype)
    return values


def match_targets(model: nn.Module, config: SparsityConfig) -> Callable[[str], bool]:
    """Return a function that selects tensors by name: all, or those of the config's layers.

    A layer that is not a module of the model counts as `Linear`: checkpoints store experts so.
    """
    modules = dict(model.named_modules())

    def is_target(name: str) -> bool:
        layer = name.rpartition(".")[0]
        classes = list_class_names(modules[layer]) if layer in modules else ["Linear"]
        is_listed = not config.targets or matches_any(config.targets, layer, classes)
        return is_listed and not matches_any(config.ignore or (), layer, classes)

    return is_target


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace parameters and buffers, which may be on `meta`, by the tensors of a state dict.

    Tensors keep their dtype and move to the device of what they replace. Tied weights stay tied.
    Raise `MismatchError` if the names or shapes differ from those of the model.
    """
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    found = {id(names[name]) for name in state if name in names}
    missing = [x for x in model.state_dict() if x in names and id(names[x]) not in found]
    unexpected = [name for name in state if name not in names]
    if missing or unexpected:
        raise MismatchError(
            f"the weights do not fit the model: missing {missing[:9]}, unexpected"
            f" {unexpected[:9]}; load folders of transformers with SparseAutoModel"
        )
    new: dict[int, Tensor] = {}
    for name, x in state.items():
        old = names[name]
        if x.shape != old.shape:
            raise MismatchError(f"{name}: shape {tuple(x.shape)}, expected {tuple(old.shape)}")
        x = x if old.is_meta else x.to(old.device)
        is_parameter = isinstance(old, nn.Parameter)
        grad = x.is_floating_point() and x.element_size() > 1
        new[id(old)] = nn.Parameter(x, requires_grad=grad) if is_parameter else x
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for key, old in [*parameters, *module.named_buffers(recurse=False)]:
            if id(old) in new:
                setattr(module, key, new[id(old)])
