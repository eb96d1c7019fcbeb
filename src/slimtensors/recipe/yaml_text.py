"""YAML as people write recipes: `2:4` is text, `1e-4` is a number."""

import re
from typing import Any

from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.spec import Json

_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan")
_INT = re.compile(r"[-+]?\d+")


def parse(source: str) -> Any:
    """Read YAML; nothing in it is ever run. What is said twice in one place raises."""
    yaml = _yaml()
    try:
        return yaml.load(source, Loader=_loader(yaml))
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}") from error


def dump(data: Json) -> str:
    """Write YAML in the order of the data."""
    text: str = _yaml().safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    return text


def _loader(yaml: Any) -> Any:
    """Return a safe loader with numbers as YAML 1.2 has them: in 1.1, `2:4` is 124."""
    kind: Any = type("Loader", (yaml.SafeLoader,), {})
    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in numbers]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    starts = list("-+0123456789.")
    kind.add_implicit_resolver(numbers[0], re.compile(f"^(?:{_INT.pattern})$"), starts)
    kind.add_implicit_resolver(numbers[1], re.compile(f"^(?:{_FLOAT.pattern})$"), starts)
    kind.add_constructor("tag:yaml.org,2002:map", _mapping)
    kind.add_multi_constructor("!", _tagged)
    return kind


def _mapping(loader: Any, node: Any) -> Any:
    """Return a mapping; of two equal keys, the library would drop the first without a word."""
    seen: set[str] = set()
    for key, _ in node.value:
        if (name := str(key.value)) in seen:
            where = f"line {key.start_mark.line + 1}"
            raise ConfigError(f"{where}: {name} is there twice; write a list, or another stage")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


def _tagged(loader: Any, name: str, node: Any) -> Any:
    """Return `!Name` and its fields, as SparseML wrote modifiers, as a mapping of one."""
    if node.id == "mapping":
        return {name: _mapping(loader, node)}
    if node.value == "":
        return {name: None}
    where = f"line {node.start_mark.line + 1}"
    raise ConfigError(f"{where}: !{name} takes fields, as in `name: value`, and nothing else")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError("PyYAML", "transformers") from None
    return yaml
