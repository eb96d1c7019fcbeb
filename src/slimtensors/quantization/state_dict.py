"""State dicts of quantized models: export, decompress, restore.

Stacked experts are stored per expert, as transformers saves them.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from slimtensors.archive.read import open_archive
from slimtensors.errors import ConfigError, MismatchError, SlimError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params
from slimtensors.quantization.apply import apply_quantization_config
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.checkpoint_layout import (
    CheckpointLayout,
    convert_for_saving,
    describe_unstorable,
    find_layout,
    find_unstorable,
)
from slimtensors.quantization.config import LAYOUT, QuantizationConfig, QuantizationStatus
from slimtensors.quantization.layers import Weight, list_class_names, list_weights
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import (
    ACTIVATION_SUFFIXES,
    LayerPlan,
    Quantization,
    Report,
    get_quantization,
    is_stored_dense,
    read_dense_params,
    select_parts,
)
from slimtensors.quantization.targets import (
    KV_CACHE,
    choose_format,
    find_group,
    make_disjoint,
    matches_any,
    show_expert_group,
)
from slimtensors.storage import StrPath
from slimtensors.tensor import Spec

_ROUTER = re.compile(r"Router|Gating|Gate(?![a-z])")
_READY = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)


def export_state(model: nn.Module, config: QuantizationConfig) -> dict[str, Tensor]:
    """Return the tensors of a frozen or compressed model in their stored form.

    Raise `ConfigError` if the dialect compressed-tensors cannot store a weight of the model.
    """
    states = [state for state, _ in _iterate_states(model, config)]
    if unstorable := find_unstorable(model, [state.plan for state in states]):
        raise ConfigError(describe_unstorable(unstorable))
    layout = _find_stacks(model, states)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for state in states:
        plan = state.plan
        for name in (*state.tensors(), *(weight.parameter for weight in plan.weights)):
            tensors.pop(plan.key(name), None)
        if plan.has_stacked_experts:
            tensors |= _export_experts(state, layout)
        else:
            tensors |= {plan.key(name): x for name, x in state.tensors().items()}
    return tensors


def describe_config(model: nn.Module, config: QuantizationConfig) -> QuantizationConfig:
    """Return the config to store with a compressed model: with formats and disjoint groups."""
    config = _adopt_group_sizes(model, config)
    stored: dict[str, str] = {}
    cache = config.kv_cache_scheme
    layers: dict[str, tuple[str, Sequence[str]]] = {}
    patterns: dict[str, str] = {}
    states = list(_iterate_states(model, config))
    layout = _find_stacks(model, [state for state, _ in states])
    for state, group in states:
        plan = state.plan
        if plan.weights:
            stored[group] = plan.format
        cache = plan.activations.get("q", cache)
        if plan.has_stacked_experts:
            expert_patterns = _find_expert_patterns(state, layout)
            patterns |= expert_patterns
            layers |= dict.fromkeys(expert_patterns, (group, ("Linear",)))
        elif group in config.config_groups:
            layers[plan.name] = group, plan.classes
    groups = {
        name: replace(group, format=stored.get(name, "dense"))
        for name, group in config.config_groups.items()
        if not group.is_empty or _is_empty(config)
    }
    expert_groups = {layers[name][0] for name in patterns}
    disjoint = make_disjoint(groups, layers, patterns)
    unlisted = [x for x in _list_routers(model) if not matches_any(config.ignore, x, ("Linear",))]
    unlisted += _list_layers(model, config, config.config_groups.keys() - groups.keys())
    return replace(
        config,
        config_groups=show_expert_group(disjoint, expert_groups, patterns.values()),
        format=formats.merge(stored.values()),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[*config.ignore, *unlisted],
        kv_cache_scheme=cache,
        version=LAYOUT,
    )


def _adopt_group_sizes(model: nn.Module, config: QuantizationConfig) -> QuantizationConfig:
    """Return a config with the group sizes that were chosen when it was applied to a model."""
    if not any(scheme.fits_columns for scheme in config.config_groups.values()):
        return config
    plans = [x.plan for module in model.modules() if (x := get_quantization(module)) is not None]
    applied = {plan.group: plan.scheme for plan in plans if plan.group != KV_CACHE}
    return replace(config, config_groups=config.config_groups | applied)


@dataclass
class ModelSchemes:
    """Schemes of the quantized layers of a model."""

    schemes: list[QuantizationScheme] = field(default_factory=list)
    kv_cache: QuantizationArgs | None = None
    status: QuantizationStatus = QuantizationStatus.INITIALIZED
    unquantized: list[str] = field(default_factory=list)
    """Names of layers whose class is quantized elsewhere in the model."""


def read_schemes(model: nn.Module) -> ModelSchemes:
    """Return the schemes of all quantized layers, in the order of the model."""
    found = ModelSchemes()
    classes: set[str] = set()
    others: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        kind = "Linear" if _is_router(module) else type(module).__name__
        state = get_quantization(module)
        if state is not None:
            found.status = state.status
            found.kv_cache = state.plan.activations.get("k", found.kv_cache)
        if state is None or state.plan.group == KV_CACHE:
            others.append((name, kind))
            continue
        classes.add(kind)
        if state.plan.scheme not in found.schemes:
            found.schemes.append(state.plan.scheme)
    found.unquantized = [name for name, kind in others if kind in classes]
    return found


def decompress_state(
    state: Mapping[str, Tensor], config: QuantizationConfig, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return a state dict with dense weights instead of quantized parts."""
    layers = find_stored_layers(state.keys())
    dense = {name: x for name, x in state.items() if not is_quantization_part(name, layers)}
    modules = dict(model.named_modules()) if model is not None else {}
    for layer, suffixes in layers.items():
        parts = {suffix: state[join_name(layer, suffix)] for suffix in suffixes}
        try:
            scheme = _read_group_size(find_scheme(layer, config, modules), parts)
            dense[join_name(layer, "weight")] = decompress_weight(
                parts, scheme, config, modules.get(layer)
            )
        except SlimError as error:
            raise type(error)(f"{layer}: {error}") from error
    return dense


def _read_group_size(scheme: QuantizationScheme, parts: Mapping[str, Tensor]) -> QuantizationScheme:
    """Return a scheme with the group size of stored parts, unless it was chosen."""
    if not scheme.fits_columns or is_stored_dense(parts):
        return scheme
    assert scheme.weights is not None
    specs = {suffix: Spec.of(x) for suffix, x in parts.items()}
    columns = find_dense_shape(specs, scheme.weights, lambda: parts["weight_shape"])[-1]
    groups = parts["weight_scale"].shape[-1]
    return scheme.with_group_size(columns // groups if groups > 1 else -1)


def restore_model(
    model: nn.Module, state: Mapping[str, Tensor], config: QuantizationConfig
) -> Report:
    """Load the tensors of a compressed model into a dense one, which is frozen afterwards."""
    start = replace(config, quantization_status=QuantizationStatus.INITIALIZED)
    report = apply_quantization_config(model, start)
    rest = dict(state)
    weights = set()
    for module in list(model.modules()):
        if (quantization := get_quantization(module)) is None:
            continue
        plan = quantization.plan
        if plan.has_stacked_experts:
            raise ConfigError(
                f"{plan.name}: only transformers can stack experts; "
                "use from_pretrained(None, config=…, state_dict=compressor.decompress(…))"
            )
        keys = {name: plan.key(name) for name in (*formats.SUFFIXES, *ACTIVATION_SUFFIXES)}
        tensors = {name: rest.pop(key) for name, key in keys.items() if key in rest}
        quantization.load_stored(module, tensors, config.version)
        weights |= {plan.key(weight.parameter) for weight in plan.weights}
    _load_rest(model, rest, weights)
    return report


def load_pretrained_quantization_parameters(
    model: nn.Module, model_name_or_path: StrPath, load_weight_qparams: bool = False
) -> None:
    """Load the static scales of activations from a file or folder into a quantized model.

    With `load_weight_qparams`, also those of weights, which freezing then uses. Raise
    `CorruptFileError` if a scale is missing, `StatusError` if a weight is already frozen.
    """
    names = (*formats.SUFFIXES, *ACTIVATION_SUFFIXES)
    with open_archive(model_name_or_path) as archive:
        for module in model.modules():
            if (state := get_quantization(module)) is None:
                continue
            keys = {name: state.plan.key(name) for name in names}
            tensors = {name: archive.get_tensor(x) for name, x in keys.items() if x in archive}
            state.load_activation_params(tensors)
            if load_weight_qparams:
                _load_weight_params(state, tensors)


def find_stored_layers(names: Collection[str]) -> dict[str, list[str]]:
    """Return the suffixes of the stored parts of each quantized layer, by its name."""
    split = [name.rpartition(".") for name in names]
    required = ("weight_scale", "weight_packed")  # either: a layer may lack one in a broken file
    return {
        layer: [suffix for suffix in formats.SUFFIXES if join_name(layer, suffix) in names]
        for layer in sorted({layer for layer, _, suffix in split if suffix in required})
    }


def join_name(layer: str, suffix: str) -> str:
    """Return the name of a tensor of a layer."""
    return f"{layer}.{suffix}" if layer else suffix


def find_dense_shape(
    specs: Mapping[str, Spec], args: QuantizationArgs, read_shape: Callable[[], Tensor]
) -> tuple[int, ...]:
    """Return the shape of a dense weight from its stored parts, by suffix.

    `read_shape` reads the part `weight_shape`, which only packed integers have.
    """
    if "weight_shape" in specs:
        return tuple(int(size) for size in read_shape().flatten())
    if "weight" in specs:
        return specs["weight"].shape
    *outer, width = specs["weight_packed"].shape
    return *outer, 8 * width // args.num_bits  # 4- or 6-bit floats


def is_quantization_part(name: str, layers: Mapping[str, Collection[str]]) -> bool:
    """Return True if a tensor is a part of a quantized layer, or a scale of activations."""
    layer, _, suffix = name.rpartition(".")
    return suffix in ACTIVATION_SUFFIXES or suffix in layers.get(layer, {})


def find_scheme(
    layer: str, config: QuantizationConfig, modules: Mapping[str, nn.Module]
) -> QuantizationScheme:
    """Return the scheme of a stored layer; one that is not in `modules` counts as `Linear`."""
    groups = config.config_groups
    if modules:
        classes = list_class_names(modules[layer]) if layer in modules else ["Linear"]
        group = find_group(groups, (), layer, classes)
    else:
        group = find_group(groups, (), layer, ()) or _find_only_class_group(config)
    if group is None or groups[group].weights is None:
        raise ConfigError("stored quantized, but no group of the config quantizes it")
    return groups[group]


def decompress_weight(
    parts: Mapping[str, Tensor],
    scheme: QuantizationScheme,
    config: QuantizationConfig,
    module: nn.Module | None,
) -> Tensor:
    """Return the dense weight of a layer from its parts, in the shape of its module."""
    args = scheme.weights
    assert args is not None, "find_scheme returns schemes with weights"
    if is_stored_dense(parts):
        return parts["weight"]
    matrix = formats.find(choose_format(scheme, config), version=config.version).decompress(
        parts, args
    )
    if module is None:
        return matrix
    weight: Tensor = module.get_parameter("weight")
    return list_weights(module)[0].from_matrix(matrix, weight.shape)


def _load_weight_params(state: Quantization, tensors: Mapping[str, Tensor]) -> None:
    args = state.plan.weight_args
    for weight in state.plan.weights:
        assert args is not None, "only layers with weight_args list weights"
        if state.status >= QuantizationStatus.FROZEN:
            raise StatusError(f"{state.plan.name}: load the scales of weights before freezing them")
        parts = select_parts(weight, tensors)
        if is_stored_dense(parts):
            shape = tuple(weight.to_matrix(parts["weight"]).shape)
            state.params[weight.parameter] = read_dense_params(parts, args, shape)
        else:
            _, state.params[weight.parameter] = formats.find(state.plan.format).parse(parts, args)


def _load_rest(model: nn.Module, rest: Mapping[str, Tensor], quantized: set[str]) -> None:
    """Load unquantized tensors; raise `MismatchError` if any are missing or unexpected."""
    missing, unexpected = model.load_state_dict(rest, strict=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in rest if name in parameters}
    absent = [x for x in missing if x not in quantized and id(parameters.get(x)) not in loaded]
    if absent or unexpected:
        raise MismatchError(
            f"the state dict does not fit the model: missing {absent}, unexpected {unexpected}"
        )


def _iterate_states(
    model: nn.Module, config: QuantizationConfig
) -> Iterator[tuple[Quantization, str]]:
    """Yield the states of all quantized layers with the names of their groups in a config.

    Raise if one is not ready to be stored.
    """
    found = False
    config = _adopt_group_sizes(model, config)
    for module in model.modules():
        if (state := get_quantization(module)) is None:
            continue
        found = True
        plan = state.plan
        if state.status not in _READY:
            raise StatusError(
                f"{plan.name}: status is {state.status}, expected frozen; "
                "call model.apply(freeze_module_quantization) first"
            )
        yield state, _find_group_name(plan, config)
    if not found and not _is_empty(config):
        raise StatusError("the model is not quantized; call apply_quantization_config first")


def _find_group_name(plan: LayerPlan, config: QuantizationConfig) -> str:
    """Return the group of a layer: by name, or by scheme if the config has other names."""
    if plan.group in config.config_groups or plan.group == KV_CACHE:
        return plan.group
    for name, scheme in config.config_groups.items():
        if scheme == plan.scheme:
            return name
    raise MismatchError(f"{plan.name}: its group {plan.group!r} is from another config")


def _is_empty(config: QuantizationConfig) -> bool:
    groups = config.config_groups.values()
    return config.kv_cache_scheme is None and all(scheme.is_empty for scheme in groups)


def _find_only_class_group(config: QuantizationConfig) -> str | None:
    """Return the group of all layers that no name or pattern matches."""
    class_targets = {
        name: {t for t in scheme.targets if not t.startswith("re:") and "." not in t}
        for name, scheme in config.config_groups.items()
        if scheme.weights is not None
    }
    by_class = {name: classes for name, classes in class_targets.items() if classes}
    if len(by_class) > 1 or any(classes - {"Linear"} for classes in by_class.values()):
        raise ConfigError(f"its group depends on its class ({sorted(by_class)}); pass the model")
    return next(iter(by_class), None)


def _find_stacks(model: nn.Module, states: Sequence[Quantization]) -> CheckpointLayout:
    """Return where checkpoints store the stacked experts of a model."""
    plans = [state.plan for state in states if state.plan.has_stacked_experts]
    return find_layout(model, {plan.key(w.parameter): w for plan in plans for w in plan.weights})


def _export_experts(state: Quantization, layout: CheckpointLayout) -> dict[str, Tensor]:
    """Return the stored tensors of stacked experts, for each layer of each expert."""
    stored: dict[str, Tensor] = {}
    args = state.plan.weight_args
    for weight in state.plan.weights:
        assert args is not None, "only layers with weight_args list weights"
        format = formats.find(state.plan.format)
        codes, params = format.parse(select_parts(weight, state.tensors()), args)
        for layer, rows in _find_expert_rows(state, weight, layout).items():
            row_params = _select_rows(params, rows, codes.shape[-2], args)
            parts = format.store(codes.flatten(0, 1)[rows], row_params, args)
            stored |= {f"{layer}.{suffix}": x for suffix, x in parts.items()}
    return stored


def _find_expert_patterns(state: Quantization, layout: CheckpointLayout) -> dict[str, str]:
    """Return a pattern for all layers of stacked experts, by the layer name in checkpoints."""
    patterns: dict[str, str] = {}
    for weight in state.plan.weights:
        for layer in _find_expert_rows(state, weight, layout):
            stem = re.sub(r"\.\d+\.[^.]+$", "", layer)
            patterns[layer] = f"re:{re.escape(stem)}\\..*"
    return patterns


def _is_router(module: nn.Module) -> bool:
    return _ROUTER.search(type(module).__name__) is not None


def _list_routers(model: nn.Module) -> list[str]:
    """Return the names in checkpoints of the layers that route tokens to experts.

    transformers does not implement them as `Linear`, but vLLM does: the config must ignore them.
    """
    found = {
        f"{name}.weight": torch.zeros(1, 1)
        for name, module in model.named_modules()
        if _is_router(module) and "weight" in dict(module.named_parameters())
    }
    return [name.removesuffix(".weight") for name in convert_for_saving(model, found)]


def _find_expert_rows(
    state: Quantization, weight: Weight, layout: CheckpointLayout
) -> dict[str, Tensor]:
    """Return the rows of a stack that belong to each layer in a checkpoint, by its name."""
    stored = layout.find(state.plan.key(weight.parameter))
    if any(tensor.rows is None for tensor in stored):  # a model that is not from transformers
        shape, _ = state.plan.dense[weight.parameter]
        experts, rows = weight.to_matrix(torch.empty(shape, device="meta")).shape[:2]
        numbers = torch.arange(experts * rows).view(experts, rows)
        name = state.plan.name
        return {f"{name}.{i}.{weight.parameter}": numbers[i] for i in range(experts)}
    return {x.name.removesuffix(".weight"): x.rows for x in stored if x.rows is not None}


def _list_layers(
    model: nn.Module, config: QuantizationConfig, groups: Collection[str]
) -> list[str]:
    """Return the names of the layers of some groups."""
    return [
        name
        for name, module in model.named_modules()
        if list_weights(module)
        and find_group(config.config_groups, config.ignore, name, list_class_names(module))
        in groups
    ]


def _select_rows(params: Params, rows: Tensor, height: int, args: QuantizationArgs) -> Params:
    """Return the params of some rows of a stack of matrices with `height` rows."""
    first = int(rows[0])
    if args.strategy is QuantizationStrategy.BLOCK:
        step = (args.block_structure or (1, 1))[0]
        if first % height % step or (len(rows) % step and (first + len(rows)) % height):
            raise ConfigError(f"blocks of {step} rows do not divide the rows of a layer")
        first_rows, down = rows[::step], params.scale.shape[-2]
        index = first_rows // height * down + first_rows % height // step
    elif args.strategy is QuantizationStrategy.TENSOR:
        index = rows[:1] // height
    else:
        index = rows

    def select(x: Tensor) -> Tensor:
        selected = x.flatten(0, 1)[index]
        return selected.flatten() if args.strategy is QuantizationStrategy.TENSOR else selected

    global_scale = params.global_scale
    return Params(
        select(params.scale),
        None if params.zero_point is None else select(params.zero_point),
        None if global_scale is None else global_scale.flatten()[first // height].reshape(1),
    )
