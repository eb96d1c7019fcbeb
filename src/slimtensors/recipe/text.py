"""YAML as people write recipes: `2:4` is text, `1e-4` is a number."""

import re
from typing import Any

from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.spec import Json

_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan")
_INT = re.compile(r"[-+]?\d+")


def parse(source: str) -> Any:
    """Read YAML; nothing in it is ever run."""
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
    return kind


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError("PyYAML", "transformers") from None
    return yaml
