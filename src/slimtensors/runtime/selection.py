"""Selection of the weights that `quantize_` compresses: by a function, or by their names."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from slimtensors.errors import ConfigError, suggest
from slimtensors.runtime.configs import CONFIGS, Compression

Filter = Callable[[nn.Module, str], bool]
"""Function that selects modules, given a module and its name in the model."""


def is_linear(module: nn.Module, name: str) -> bool:
    """Select linear layers, except the output projection of `nn.MultiheadAttention`."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_linear_or_embedding(module: nn.Module, name: str) -> bool:
    """Select linear layers and embeddings."""
    return is_linear(module, name) or isinstance(module, nn.Embedding)


@dataclass(frozen=True)
class FqnToConfig:
    """Map names of modules to configurations, or to None to leave a module as it is.

    A name may be that of the module, of a parameter (`"layers.0.weight"`), a regular expression for
    either (`"re:layers[.].*"`), or `"_default"` for all other linear layers.
    """

    fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    version: int = 1

    def __post_init__(self) -> None:
        configs, others = self.fqn_to_config, self.module_fqn_to_config
        if configs and others and configs != others:
            raise ConfigError("fqn_to_config and module_fqn_to_config differ; pass one of them")
        parsed = {
            key: None if config is None else parse_config(config)
            for key, config in (configs or others).items()
        }
        for key, config in parsed.items():
            if isinstance(config, FqnToConfig):
                raise ConfigError(f"{key}: FqnToConfig cannot contain another one")
        object.__setattr__(self, "fqn_to_config", parsed)
        object.__setattr__(self, "module_fqn_to_config", parsed)

    def find(self, module: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the configurations of parameters of a module; empty if no name selects them."""
        configs = self.fqn_to_config
        paths = {name: f"{module}.{name}".lstrip(".") for name in parameters}
        found = {name: configs[path] for name, path in paths.items() if path in configs}
        if not found and module in configs:
            return {"weight": configs[module]}
        for name, path in paths.items():
            key = self._find_pattern(path) if parameters[name].dim() > 1 else None  # not biases
            if key is not None:
                found.setdefault(name, configs[key])
        key = None if found else self._find_pattern(module)
        return found if key is None else {"weight": configs[key]}

    def _find_pattern(self, path: str) -> str | None:
        return next((key for key in self.fqn_to_config if _matches_pattern(key, path)), None)

    def list_unused(self, paths: Collection[str]) -> list[str]:
        """Return the names that select none of the modules and parameters of a model."""
        return [
            key
            for key in self.fqn_to_config
            if key != "_default" and not any(key == p or _matches_pattern(key, p) for p in paths)
        ]


ModuleFqnToConfig = FqnToConfig


def _matches_pattern(key: str, path: str) -> bool:
    return key.startswith("re:") and re.fullmatch(key[3:], path) is not None


def parse_config(config: Any) -> Compression | FqnToConfig:
    """Return a configuration; for one of torchao, the one with the same name and options here."""
    parsed: Any = config
    if not isinstance(config, type) and type(config).__module__.partition(".")[0] == "torchao":
        name = type(config).__name__
        known = {**CONFIGS, FqnToConfig.__name__: FqnToConfig}
        if name not in known:
            raise ConfigError(f"{name} of torchao is not supported; {suggest(name, known)}")
        parsed = known[name](**vars(config))
    elif isinstance(config, type) or not (callable(config) or isinstance(config, FqnToConfig)):
        raise ConfigError(f"expected a configuration such as int8_weight_only(), got {config!r}")
    return parsed  # type: ignore[no-any-return]


def select_weights(
    model: nn.Module, config: Compression | FqnToConfig, filter_fn: Filter | None
) -> Iterator[tuple[str, nn.Module, str, Compression]]:
    """Yield the name of each selected module, the module, its parameter, and how to compress it."""
    if isinstance(config, FqnToConfig) and filter_fn is not None:
        raise ConfigError("FqnToConfig selects modules by name; pass no filter_fn")
    for name, module in model.named_modules():
        if isinstance(config, FqnToConfig):
            found = config.find(name, dict(module.named_parameters(recurse=False)))
            if not found and is_linear(module, name):
                found = {"weight": config.fqn_to_config.get("_default")}
        else:
            found = {"weight": config} if (filter_fn or is_linear)(module, name) else {}
        for parameter, compress in found.items():
            if compress is not None:
                yield name, module, parameter, compress
