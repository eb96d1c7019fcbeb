"""The model that transformers builds from `config.json`, on the meta device and without weights.

It shows what a tensor of the folder becomes on load: under which name, in which kind of layer, and
whether it is split, merged or rearranged on the way. Only classes of transformers itself are built:
remote code is never run.
"""

import contextlib
import copy
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slimtensors.errors import ConfigError, MissingDependencyError, describe_error
from slimtensors.quantization.layers import is_conv1d
from slimtensors.tensor import Json, Spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_MAX_LAYERS = 10_000
_LAYER_COUNT = re.compile(r"n_layers?|\w*num_(\w+_)?(layers|blocks)|(en|de)coder_layers|depth")
"""Entries of configs that are numbers of layers."""

_PATCHING = threading.RLock()
"""Held while transformers replaces functions of its own and of torch, or warnings are filtered.

If two threads did so at once, the second would restore the replacements of the first for good.
"""


class Kind(StrEnum):
    """What a tensor of a file is in the model."""

    LINEAR = "weight of a linear layer"
    EMBEDDING = "weight of an embedding"
    CONV1D = "weight of a transposed linear layer (Conv1D)"
    EXPERTS = "stacked experts, or a part of them"
    CONVERTED = "split, merged or rearranged on load"
    OTHER = "another parameter or buffer"
    UNKNOWN = "not a part of the model"


@dataclass(frozen=True)
class Placement:
    """Where a tensor of a file is stored in the model."""

    kind: Kind
    parameter: str
    """Name after loading; the first one of a tensor that is split. As in the file if `UNKNOWN`."""
    others: tuple[str, ...] = ()
    """The other parameters of a tensor that is split."""
    operations: tuple[str, ...] = ()
    """Conversions on load, such as `Chunk` or `MergeModulelist`; empty if only renamed."""
    dequantizes: bool = False
    """Whether transformers runs these conversions on dequantized weights."""
    splits_rows: bool = False
    """Whether the conversions only split the tensor, and by its rows."""

    @property
    def module(self) -> str:
        """Name of the module that has the parameter."""
        return self.parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Architecture:
    """A model on the meta device, and the conversions of its checkpoints."""

    model: "PreTrainedModel"
    conversions: tuple[Any, ...] = field(repr=False)
    """Weight conversions of transformers, in the order in which they are applied."""

    @classmethod
    def build(cls, config: Json) -> "Architecture":
        """Build the model of a `config.json`; raise `ConfigError` with the reason if impossible."""
        try:
            from transformers import PreTrainedModel
            from transformers.conversion_mapping import get_model_conversion_mapping
        except ImportError as error:
            raise MissingDependencyError("transformers", "transformers") from error
        native = _clean_config(config)
        with _silence():
            parsed = _parse_config(native)
            model_class = _find_class(native, parsed)
            try:
                with contextlib.ExitStack() as stack:
                    for context in model_class.get_init_context(torch.float32, False, False, None):
                        stack.enter_context(context)
                    model = model_class(copy.deepcopy(parsed))
                assert isinstance(model, PreTrainedModel)
                conversions = get_model_conversion_mapping(model)
            except Exception as error:  # any bug of a model class, or a broken config
                name, reason = model_class.__name__, " ".join(describe_error(error).split())
                raise ConfigError(f"{name} cannot be built: {reason}") from error
        return cls(model, tuple(conversions))

    @cached_property
    def parameters(self) -> dict[str, Spec]:
        """Parameters and persistent buffers, by name; shared ones under each of their names."""
        return {name: Spec.of(x) for name, x in self.model.state_dict().items()}

    @cached_property
    def linear_layers(self) -> dict[str, nn.Linear]:
        """Every `nn.Linear`, by name: what the target `Linear` of a quantization config matches."""
        return {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}

    @cached_property
    def output_layers(self) -> frozenset[str]:
        """Names of the layers that predict tokens, of the model and of models inside of it."""
        from transformers import PreTrainedModel

        heads: set[int] = set()
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel):
                with contextlib.suppress(Exception):  # not implemented, or a missing attribute
                    heads.add(id(module.get_output_embeddings()))
        return frozenset(n for n, m in self.model.named_modules() if id(m) in heads)

    @cached_property
    def ties(self) -> dict[str, str]:
        """Parameters that share the memory of another one -> that one."""
        return dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    def list_replaced_modules(self) -> dict[str, nn.Module]:
        """Return the modules that transformers replaces in a quantized model, by name."""
        from transformers.quantizers import base
        from transformers.utils.quantization_config import QuantizationMethod

        patches = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
        found = {}
        for name, module in self.model.named_modules():
            patch = patches.get(type(module).__name__)
            if patch and QuantizationMethod.COMPRESSED_TENSORS in patch["quantization_methods"]:
                with torch.device("meta"), _silence():
                    found[name] = patch["module_name"](self.model.config.get_text_config())
        return found

    def with_modules(self, modules: Mapping[str, nn.Module]) -> "Architecture":
        """Return the architecture with some modules replaced."""
        model = copy.deepcopy(self.model)
        for name, module in modules.items():
            model.set_submodule(name, module)
        return Architecture(model, self.conversions)

    def place(self, names: Iterable[str]) -> dict[str, Placement]:
        """Return what the tensors of a checkpoint with these names become on load."""
        renamed = self.rename(names, self.parameters)
        return {name: self._describe(*target) for name, target in renamed.items()}

    def rename(
        self, names: Iterable[str], expected: Mapping[str, object]
    ) -> dict[str, tuple[str, Any]]:
        """Return the name after loading, and the converter if any, of each tensor of a checkpoint.

        `expected` contains the names that the model has when the checkpoint is loaded.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        # Some conversions remember what they saw, so every call starts with fresh ones, and names
        # are sorted as on load.
        conversions = copy.deepcopy(self.conversions)
        converters = [x for x in conversions if isinstance(x, WeightConverter)]
        renamings = [x for x in conversions if not isinstance(x, WeightConverter)]
        by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
        prefix = self.model.base_model_prefix
        found = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], prefix, expected)
            found[name] = (target, by_pattern.get(pattern))
        return found

    def find_unloadable(self, parts: Mapping[str, Mapping[str, Spec]]) -> dict[str, str]:
        """Return the linear layers that transformers fails to load quantized, with the error.

        `parts` maps layers to the tensors that take the place of their weight. On load,
        transformers calls the initialization of every module, and in some models that needs the
        dense weight.
        """
        model = copy.deepcopy(self.model)
        for x in (*model.parameters(), *model.buffers()):
            x._is_hf_initialized = True
        found: dict[str, str] = {}
        with _silence(), _guard_initialization():
            # Modules that fail on the meta device anyway show nothing.
            working = {m for m, owner in _list_owners(model) if _initialize(m, owner) is None}
            quantized = {model.get_submodule(name): name for name in parts}
            weights = {module: module.weight for module in quantized}
            for module, name in quantized.items():
                _replace_weight(module, parts[name])
            for module, owner in _list_owners(model):
                while module in working and (error := _initialize(module, owner)) is not None:
                    needed = getattr(error, "obj", None)  # of an AttributeError
                    inside = [x for x in module.modules() if x in quantized]
                    layers = [needed] if needed in inside else inside
                    if not layers:
                        break
                    for layer in layers:
                        layer.weight = weights[layer]
                        found[quantized.pop(layer)] = describe_error(error)
        return found

    def find_failing_splits(self, layers: Iterable[str]) -> dict[str, str]:
        """Return the conversions that stop transformers, given the quantized linear layers.

        It splits a weight and its scales if the layer of the first part is quantized, and fails to
        dequantize it otherwise, even if the files contain no such weight.
        """
        scales = "\n".join(f"{name}.weight_scale" for name in layers)
        found: dict[str, str] = {}
        for conversion in self.conversions:
            sources = conversion._original_source_patterns
            first, *others = conversion._original_target_patterns
            operations = getattr(conversion, "operations", ())
            if (
                operations
                and others
                and all(source.endswith(".weight") for source in sources)
                and not any(operation.supports_many_to_many for operation in operations)
                and not re.search(f"{first}_scale$", scales, re.MULTILINE)
            ):
                found[first] = "is split on load, which works for quantized layers only"
        return found

    def describe_failure(self, reason: str) -> str:
        """Return a warning that transformers cannot load the model from a quantized folder."""
        return (
            f"transformers cannot load {type(self.model).__name__} with this quantization"
            f" ({reason}); the SparseAutoModel classes of slimtensors.transformers can"
        )

    def _describe(self, target: str, converter: Any) -> Placement:
        details: dict[str, Any] = {}
        if converter is not None:
            first, *others = converter.target_patterns
            details = {
                "others": tuple(target.replace(first, other) for other in others),
                "operations": tuple(type(x).__name__ for x in converter.operations),
                "dequantizes": all(
                    x.endswith(".weight") for x in converter._original_source_patterns
                ),
                "splits_rows": bool(others)
                and all(
                    type(x).__name__ in ("Chunk", "Split") and x.dim == 0
                    for x in converter.operations
                ),
            }
        return Placement(self._find_kind(target, is_converted=bool(details)), target, **details)

    def _find_kind(self, target: str, *, is_converted: bool) -> Kind:
        if target not in self.parameters:
            return Kind.CONVERTED if is_converted else Kind.UNKNOWN
        owner, _, last = target.rpartition(".")
        module = self.model.get_submodule(owner)
        if _is_expert_module(module) and len(self.parameters[target].shape) == 3:
            return Kind.EXPERTS
        if is_converted:
            return Kind.CONVERTED
        if last == "weight" and isinstance(module, nn.Linear):
            return Kind.LINEAR
        if last == "weight" and isinstance(module, nn.Embedding):
            return Kind.EMBEDDING
        return Kind.CONV1D if last == "weight" and is_conv1d(module) else Kind.OTHER


def _list_owners(model: "PreTrainedModel") -> list[tuple[nn.Module, "PreTrainedModel"]]:
    """Return each module and the model, or model inside of it, that initializes it."""
    from transformers import PreTrainedModel

    owners = {"": model}
    for name, module in model.named_modules():
        is_model = isinstance(module, PreTrainedModel)
        owners[name] = module if is_model else owners[name.rpartition(".")[0]]
    return [(module, owners[name]) for name, module in model.named_modules()]


def _initialize(module: nn.Module, owner: "PreTrainedModel") -> Exception | None:
    try:
        with torch.no_grad():
            owner._init_weights(module)
    except Exception as error:  # any: this is the code of hundreds of models
        return error
    return None


def _replace_weight(module: nn.Module, parts: Mapping[str, Spec]) -> None:
    del module.weight
    for suffix, spec in parts.items():
        x = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        parameter = nn.Parameter(x, requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        module.register_parameter(suffix, parameter)


def _is_expert_module(module: nn.Module) -> bool:
    names = [kind.__name__ for kind in type(module).__mro__]
    return any("Expert" in name for name in names) or hasattr(module, "num_experts")


def _clean_config(config: Json) -> Json:
    """Return the config without references to code outside of transformers, at any depth.

    Numbers that JSON lacks, which transformers writes as objects, become floats.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            if (number := value.get("__float__")) in ("Infinity", "-Infinity", "NaN"):
                return float(number)
            removed = ("auto_map", "trust_remote_code", "quantization_config")
            return {k: clean(v) for k, v in value.items() if k not in removed}
        return [clean(x) for x in value] if isinstance(value, list) else value

    cleaned: Json = clean(config)
    return cleaned


def _check_layers(config: Json) -> None:
    """Raise if the model has too many layers to be built."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layers(value)
        elif isinstance(value, int) and value > _MAX_LAYERS and _LAYER_COUNT.fullmatch(str(name)):
            raise ConfigError(f"{name} is {value}; at most {_MAX_LAYERS} layers are supported")


def _parse_config(config: Json) -> "PretrainedConfig":
    from transformers import CONFIG_MAPPING

    _check_layers(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(f"transformers has no model type {model_type!r}")
    try:
        parsed: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(config)
    except Exception as error:  # configs validate themselves in many ways
        reason = " ".join(describe_error(error).split())
        raise ConfigError(f"transformers rejects the config of {model_type}: {reason}") from error
    parsed._attn_implementation = "eager"  # others need packages that may not be installed
    return parsed


def _find_class(config: Json, parsed: "PretrainedConfig") -> "type[PreTrainedModel]":
    """Return the class of transformers that the config names, or the base class of its type."""
    import transformers

    listed = config.get("architectures")
    names = listed if isinstance(listed, list) else []
    known = [name for name in names if isinstance(name, str) and name in dir(transformers)]
    if not names:
        if type(parsed) not in transformers.MODEL_MAPPING:
            raise ConfigError("config.json names no architecture")
        base = transformers.MODEL_MAPPING[type(parsed)]
        base_class: type[PreTrainedModel] = base[0] if isinstance(base, list | tuple) else base
        return base_class
    if not known:
        raise ConfigError(f"transformers has no model class {names[0]!r}")
    name = known[0]
    found = getattr(transformers, name)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigError(f"{name} is not a model class of transformers")
    config_class = getattr(found, "config_class", None)
    if config_class is None or isinstance(parsed, config_class) or _is_mapped(name, parsed):
        return found
    raise ConfigError(f"{name} is not a model of type {parsed.model_type}")


def _is_mapped(name: str, config: "PretrainedConfig") -> bool:
    """Return True if an auto class of transformers builds the named class for a config."""
    from transformers.models.auto import modeling_auto

    for key, mapping in vars(modeling_auto).items():
        if key.endswith("_MAPPING_NAMES"):
            classes = mapping.get(config.model_type, ())
            if name in ((classes,) if isinstance(classes, str) else classes):
                return True
    return False


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress warnings about a model that is never run."""
    from transformers.utils import logging as transformers_logging

    with _PATCHING, warnings.catch_warnings():
        level = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers_logging.set_verbosity(level)


def _guard_initialization() -> contextlib.AbstractContextManager[None]:
    """Return the context in which transformers initializes what a checkpoint does not contain."""
    from transformers import initialization

    guard: contextlib.AbstractContextManager[None] = initialization.guard_torch_init_functions()
    return guard
