"""State dicts of quantized models, stacked experts included."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, MismatchError, SlimError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params
from slimtensors.quantization.apply import apply_quantization_config
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.config import LAYOUT, QuantizationConfig, QuantizationStatus
from slimtensors.quantization.layers import classes_of, weights_of
from slimtensors.quantization.plans import (
    KV_CACHE,
    format_of,
    is_target,
    make_disjoint,
    resolve_target,
)
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import Quantization, Report, parts_of, quantization_of


def expert_parts(model: nn.Module, state: Quantization) -> dict[str, Tensor]:
    """Return what is stored of stacked experts: for each of them, the parts of its layers."""
    stored: dict[str, Tensor] = {}
    args = state.plan.weight_args
    for weight in state.plan.weights:
        assert args is not None, "a layer without quantized weights lists none"
        how = formats.find(state.plan.format)
        codes, params = how.parse(parts_of(weight, state.kept()), args)
        for layer, rows in _rows(model, state, weight.parameter, codes.shape).items():
            own = _params_of_rows(params, rows, codes.shape[-2], args)
            parts = how.store(codes.flatten(0, 1)[rows], own, args)
            stored |= {f"{layer}.{suffix}": x for suffix, x in parts.items()}
    return stored


def expert_targets(model: nn.Module, state: Quantization) -> dict[str, str]:
    """Return what checkpoints call the layers of stacked experts, each with a pattern for all."""
    names: dict[str, str] = {}
    for weight in state.plan.weights:
        shape, _ = state.plan.dense[weight.parameter]
        for layer in _rows(model, state, weight.parameter, shape):
            stem = re.sub(r"\.\d+\.[^.]+$", "", layer)
            names[layer] = f"re:{re.escape(stem)}\\..*"
    return names


def routers(model: nn.Module) -> list[str]:
    """List the layers that choose experts, as checkpoints call them.

    They are no `Linear` in transformers, but are in vLLM, which must be told to leave them alone.
    """
    found = {
        f"{name}.weight": torch.zeros(1, 1)
        for name, module in model.named_modules()
        if _ROUTER.search(type(module).__name__) and "weight" in dict(module.named_parameters())
    }
    return [name.removesuffix(".weight") for name in _as_saved(model, found)]


_ROUTER = re.compile(r"Router|Gating|Gate(?![a-z])")


def _rows(
    model: nn.Module, state: Quantization, parameter: str, shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return which rows of all experts make up each layer of the checkpoint, by its name.

    transformers knows how it cuts a stack when it saves; numbers of rows, sent through the same
    cut, tell which of them ends up where.
    """
    experts, rows = shape[:2]
    places = torch.arange(experts * rows).view(experts, rows, 1)
    name = f"{state.plan.name}.{parameter}"
    cut = _as_saved(model, {name: places.repeat(1, 1, 2)})
    if name in cut:  # as it is: checkpoints of this model have stacks as well
        return {f"{state.plan.name}.{i}.{parameter}": places[i, :, 0] for i in range(experts)}
    for piece in cut.values():
        if piece.dim() != 2 or piece.shape[1] != 2:
            raise ConfigError(f"{name}: is turned around in checkpoints; leave it unquantized")
    return {layer.removesuffix(".weight"): piece[:, 0] for layer, piece in cut.items()}


def _as_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    cut: dict[str, Tensor] = revert_weight_conversion(model, state)
    return cut


def _params_of_rows(params: Params, rows: Tensor, height: int, args: QuantizationArgs) -> Params:
    """Return the params of some rows of a stack whose matrices have `height` of them."""
    first = int(rows[0])
    if args.strategy is QuantizationStrategy.BLOCK:
        step = (args.block_structure or (1, 1))[0]
        if first % height % step or (len(rows) % step and (first + len(rows)) % height):
            raise ConfigError(f"blocks of {step} rows reach over the end of a layer's rows")
        at, down = rows[::step], params.scale.shape[-2]
        chosen = at // height * down + at % height // step
    elif args.strategy is QuantizationStrategy.TENSOR:
        chosen = rows[:1] // height
    else:
        chosen = rows

    def pick(x: Tensor) -> Tensor:
        found = x.flatten(0, 1)[chosen]
        return found.flatten() if args.strategy is QuantizationStrategy.TENSOR else found

    whole = params.global_scale
    return Params(
        pick(params.scale),
        None if params.zero_point is None else pick(params.zero_point),
        None if whole is None else whole.flatten()[first // height].reshape(1),
    )


_READY = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)
_OF_WEIGHTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
)
_OF_ACTIVATIONS = tuple(
    f"{which}_{what}"
    for which in ("input", "output", "q", "k", "v")
    for what in ("scale", "zero_point", "global_scale")
)


def quantized_state(model: nn.Module, config: QuantizationConfig) -> dict[str, Tensor]:
    """Return the tensors of a frozen or compressed model, as they go to disk."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for own in _quantized(model, config):
        for name in (*own.kept(), *(weight.parameter for weight in own.plan.weights)):
            state.pop(own.plan.key(name), None)
        if own.plan.are_experts:
            state |= expert_parts(model, own)
        else:
            state |= {own.plan.key(name): x for name, x in own.kept().items()}
    return state


def described(model: nn.Module, config: QuantizationConfig) -> QuantizationConfig:
    """Return the config of a compressed model: with formats, and groups that do not overlap."""
    stored: dict[str, str] = {}
    layers: dict[str, tuple[str, Sequence[str]]] = {}
    patterns: dict[str, str] = {}
    for own in _quantized(model, config):
        plan = own.plan
        if plan.weights:
            stored[plan.group] = plan.format
        if plan.are_experts:
            own_patterns = expert_targets(model, own)
            patterns |= own_patterns
            layers |= dict.fromkeys(own_patterns, (plan.group, ("Linear",)))
        elif plan.group in config.config_groups:
            layers[plan.name] = plan.group, plan.classes
    groups = {
        name: replace(group, format=stored.get(name, group.format))
        for name, group in config.config_groups.items()
    }
    unlisted = [x for x in routers(model) if not is_target(config.ignore, x, ("Linear",))]
    return replace(
        config,
        config_groups=make_disjoint(groups, layers, patterns),
        format=formats.of_all(stored.values()),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[*config.ignore, *unlisted],
        version=LAYOUT,
    )


def dense_state(
    state: Mapping[str, Tensor], config: QuantizationConfig, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return dense weights in place of the parts that stand for them."""
    layers = stored_layers(state.keys())
    dense = {name: x for name, x in state.items() if not is_number(name, layers)}
    modules = dict(model.named_modules()) if model is not None else {}
    for layer, suffixes in layers.items():
        parts = {suffix: state[key_of(layer, suffix)] for suffix in suffixes}
        try:
            scheme = scheme_of(layer, config, modules)
            dense[key_of(layer, "weight")] = dense_weight(parts, scheme, config, modules.get(layer))
        except SlimError as error:
            raise type(error)(f"{layer}: {error}") from error
    return dense


def restored(model: nn.Module, state: Mapping[str, Tensor], config: QuantizationConfig) -> Report:
    """Load the tensors of a compressed model into a dense one, and leave it frozen."""
    start = replace(config, quantization_status=QuantizationStatus.INITIALIZED)
    report = apply_quantization_config(model, start)
    rest = dict(state)
    weights = set()
    for module in list(model.modules()):
        if (own := quantization_of(module)) is None:
            continue
        if own.plan.are_experts:
            raise ConfigError(
                f"{own.plan.name}: only transformers can stack experts; "
                "from_pretrained(None, config=…, state_dict=compressor.decompress(…))"
            )
        keys = {name: own.plan.key(name) for name in (*_OF_WEIGHTS, *_OF_ACTIVATIONS)}
        own.keep({name: rest.pop(key) for name, key in keys.items() if key in rest})
        own.adopt(module, config.version)
        weights |= {own.plan.key(weight.parameter) for weight in own.plan.weights}
    _load(model, rest, weights)
    return report


def _quantized(model: nn.Module, config: QuantizationConfig) -> Iterator[Quantization]:
    """Yield the states of quantized layers, if they are ready and of this config."""
    found = False
    for module in model.modules():
        if (own := quantization_of(module)) is None:
            continue
        found = True
        if own.status not in _READY:
            raise StatusError(
                f"{own.plan.name}: is {own.status}, not frozen; "
                "model.apply(freeze_module_quantization) comes before compressing"
            )
        if own.plan.group not in config.config_groups and own.plan.group != KV_CACHE:
            raise MismatchError(
                f"{own.plan.name}: its group {own.plan.group!r} is of another config"
            )
        yield own
    if not found:
        raise StatusError("the model is not quantized: apply_quantization_config comes first")


def stored_layers(names: Collection[str]) -> dict[str, list[str]]:
    """Return the suffixes of the parts of every layer that is stored quantized, by its name."""
    split = [name.rpartition(".") for name in names]
    telling = ("weight_scale", "weight_packed")  # a layer that lost one of them is found, too
    return {
        layer: [suffix for suffix in _OF_WEIGHTS if key_of(layer, suffix) in names]
        for layer in sorted({layer for layer, _, suffix in split if suffix in telling})
    }


def key_of(layer: str, suffix: str) -> str:
    """Return what a part of a layer is called."""
    return f"{layer}.{suffix}" if layer else suffix


def is_number(name: str, layers: Mapping[str, Collection[str]]) -> bool:
    """Tell whether a tensor only says what others mean."""
    layer, _, suffix = name.rpartition(".")
    return suffix in _OF_ACTIVATIONS or suffix in layers.get(layer, {})


def scheme_of(
    layer: str, config: QuantizationConfig, modules: Mapping[str, nn.Module]
) -> QuantizationScheme:
    """Return the scheme by which a layer is stored; of layers in no module, that of `Linear`."""
    groups = config.config_groups
    if modules:
        classes = classes_of(modules[layer]) if layer in modules else ["Linear"]
        found = resolve_target(groups, (), layer, classes)
    else:
        found = resolve_target(groups, (), layer, ()) or _only_class(config)
    if found is None or groups[found].weights is None:
        raise ConfigError("is stored quantized, but no group of the config quantizes it")
    return groups[found]


def _only_class(config: QuantizationConfig) -> str | None:
    """Return the group that all layers are in which no name and no pattern claims."""
    plain = {
        name: {t for t in scheme.targets if not t.startswith("re:") and "." not in t}
        for name, scheme in config.config_groups.items()
    }
    named = {name: classes for name, classes in plain.items() if classes}
    if len(named) > 1 or any(classes - {"Linear"} for classes in named.values()):
        raise ConfigError(f"which of {sorted(named)} it is in depends on its class; pass the model")
    return next(iter(named), None)


def is_stored_dense(parts: Mapping[str, Tensor]) -> bool:
    """Tell whether the weight of a layer is there dense, with the scales beside it."""
    weight = parts.get("weight")
    return weight is not None and weight.is_floating_point() and weight.element_size() > 1


def dense_weight(
    parts: Mapping[str, Tensor],
    scheme: QuantizationScheme,
    config: QuantizationConfig,
    module: nn.Module | None,
) -> Tensor:
    """Return the weight of a layer from its parts, in the shape that its module wants."""
    args = scheme.weights
    assert args is not None, "a scheme was found because it has some"
    if is_stored_dense(parts):
        return parts["weight"]
    matrix = formats.find(format_of(scheme, config), version=config.version).decompress(parts, args)
    if module is None:
        return matrix
    return weights_of(module)[0].shaped(matrix, _shape(module))


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight: Tensor = module.get_parameter("weight")
    return tuple(weight.shape)


def _load(model: nn.Module, rest: Mapping[str, Tensor], quantized: set[str]) -> None:
    """Load what is not quantized, and raise if anything is missing or left over."""
    missing, unexpected = model.load_state_dict(rest, strict=False)
    own = dict(model.named_parameters(remove_duplicate=False))
    there = {id(own[name]) for name in rest if name in own}
    absent = [x for x in missing if x not in quantized and id(own.get(x)) not in there]
    if absent or unexpected:
        raise MismatchError(f"the tensors do not fit: missing {absent}, unexpected {unexpected}")
