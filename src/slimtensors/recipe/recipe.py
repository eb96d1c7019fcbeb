"""Recipes: stages of modifiers, read from YAML and written back."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimtensors.errors import ConfigError, MissingDependencyError, nearest
from slimtensors.quantization import QuantizationArgs, QuantizationScheme
from slimtensors.recipe.modifiers import (
    AWQ,
    GPTQ,
    ConstantPruning,
    Distillation,
    GradualMagnitudePruning,
    MagnitudePruning,
    Modifier,
    MovementPruning,
    Quantize,
    SmoothQuant,
    SparseGPT,
    Wanda,
)
from slimtensors.storage import StrPath
from slimtensors.tensor import Json

_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan")
_INT = re.compile(r"[-+]?\d+")


def parse_yaml(source: str) -> Any:
    """Read YAML; nothing in it is ever run. What is said twice in one place raises."""
    yaml = _yaml()
    try:
        return yaml.load(source, Loader=_loader(yaml))
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}") from error


def dump_yaml(data: Json) -> str:
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


MODIFIERS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        MagnitudePruning,
        Wanda,
        SparseGPT,
        ConstantPruning,
        Quantize,
        GPTQ,
        AWQ,
        SmoothQuant,
        GradualMagnitudePruning,
        MovementPruning,
        Distillation,
    )
}

_SUFFIX = "Modifier"
_OTHERS: Mapping[str, tuple[type[Any], ...]] = {
    # There, pruning by magnitude is gradual if it is said when it begins and ends.
    "MagnitudePruning": (MagnitudePruning, GradualMagnitudePruning),
    "Quantization": (Quantize,),
    "WandaPruning": (Wanda,),
    "GMPruning": (GradualMagnitudePruning,),
    "OutputDistillation": (Distillation,),
    "Distillation": (Distillation,),
}
"""What SparseML and llm-compressor call them, without the suffix."""

_FIELDS: Mapping[type[Any], Mapping[str, str]] = {
    MagnitudePruning: {"final_sparsity": "sparsity", "params": "targets"},
    AWQ: {"n_grid": "steps"},
    ConstantPruning: {"params": "targets"},
    Distillation: {"distillation_teacher": "teacher"},
} | {
    kind: {
        "start_epoch": "start",
        "end_epoch": "end",
        "inter_func": "schedule",
        "update_scheduler": "schedule",
        "mask_type": "mask_structure",
        "params": "targets",
    }
    for kind in (GradualMagnitudePruning, MovementPruning)
}
"""What they call the fields."""

_ALWAYS: Mapping[str, object] = {
    "sequential_update": True,
    "preserve_sparsity_mask": True,
    "leave_enabled": True,
    "start": 0.0,
    "start_epoch": 0.0,
    "end_epoch": -1.0,
    "block_size": 128,
    "offload_hessians": False,
}
"""Fields of theirs that ask for what happens anyway, where a modifier has none of that name."""

_EVERYTHING = ("__ALL_PRUNABLE__", "__ALL__")


def make_modifier(name: str, given: Mapping[str, Any] | None) -> Any:
    """Return the modifier that a recipe describes; raise with the nearest name if there is none."""
    kinds = _kinds(name)
    values = dict(given or {})
    for key, always in _ALWAYS.items():
        is_field = any(key in _known(kind) | _FIELDS.get(kind, {}).keys() for kind in kinds)
        if is_field or key not in values:
            continue
        if values.pop(key) != always:
            raise ConfigError(f"{name}: {key} is always {always} here")
    named = [_named(kind, values) for kind in kinds]
    fitting = [i for i, known in enumerate(named) if not known.keys() - _known(kinds[i])]
    if not fitting:
        unknown = next(iter(named[0].keys() - _known(kinds[0])))
        said = set().union(*(_known(kind) | _FIELDS.get(kind, {}).keys() for kind in kinds))
        raise ConfigError(f"{name} has no field {unknown!r}; {nearest(unknown, said)}")
    best = fitting[0]
    try:
        return kinds[best](**named[best])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{name}: a field has a value that it cannot have: {error}") from error


def modifier_name(modifier: object) -> str:
    """Return what a recipe calls a modifier; raise if it is none."""
    if type(modifier) not in MODIFIERS.values():
        raise ConfigError(f"{modifier!r} is no modifier; known: {', '.join(MODIFIERS)}")
    return type(modifier).__name__


def modifier_fields(modifier: Any) -> Json:
    """Return the fields that are not as by default, as YAML and JSON have them."""
    return {
        each.name: _plain(value)
        for each in fields(modifier)
        if (value := getattr(modifier, each.name)) != _default(each)
    }


def _kinds(name: str) -> tuple[type[Any], ...]:
    if name in MODIFIERS:
        return (MODIFIERS[name],)
    stem = name.removesuffix(_SUFFIX)
    if stem in _OTHERS:
        return _OTHERS[stem]
    if stem in MODIFIERS and name != stem:
        return (MODIFIERS[stem],)
    known = {*MODIFIERS, *(f"{each}{_SUFFIX}" for each in (*MODIFIERS, *_OTHERS))}
    raise ConfigError(f"there is no modifier {name!r}; {nearest(name, known)}")


def _named(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the names of our fields."""
    others = _FIELDS.get(kind, {})
    named = {others.get(key, key): value for key, value in values.items()}
    if named.get("targets") in _EVERYTHING:
        del named["targets"]
    return {key: value for key, value in named.items() if value is not None}


def _known(kind: type[Any]) -> set[str]:
    return {each.name for each in fields(kind)}


def _default(each: Any) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _plain(value: Any) -> Any:
    match value:
        case QuantizationScheme() | QuantizationArgs():
            return value.to_dict()
        case StrEnum():
            return str(value)
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return _plain(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value


FILE = "recipe.yaml"
"""What it is called beside the model that it made."""

_STAGE, _MODIFIERS = "_stage", "modifiers"
_RUNS = ("oneshot", "train")


@dataclass(frozen=True)
class Stage:
    """Modifiers that run together: one after the other in `oneshot`, at once in `train`."""

    modifiers: tuple[Modifier, ...]
    name: str = "default"
    run_type: str | None = None
    """`oneshot` or `train`, if it is for one of them alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modifiers", tuple(self.modifiers))
        for modifier in self.modifiers:
            modifier_name(modifier)
        if not self.modifiers:
            raise ConfigError(f"{self.name}{_STAGE}: has no modifiers")
        if self.run_type is not None and self.run_type not in _RUNS:
            raise ConfigError(f"{self.name}{_STAGE}: run_type is oneshot or train")


@dataclass(frozen=True)
class Recipe:
    """Stages, in the order in which they run. Equal recipes do the same."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) < len(names):
            raise ConfigError("a recipe has stages, each with a name of its own")

    @classmethod
    def of(cls, given: Any) -> "Recipe":
        """Make a recipe of modifiers, stages, YAML, or the path of a YAML file."""
        match given:
            case Recipe():
                return given
            case Stage():
                return cls((given,))
            case Path():
                return cls.load(given)
            case str():
                is_path = "\n" not in given and given.endswith((".yaml", ".yml"))
                return cls.load(given) if is_path else cls.from_yaml(given)
            case Mapping():
                return cls.from_dict(given)
            case Sequence() if given and all(isinstance(each, Stage) for each in given):
                return cls(tuple(given))
            case Sequence():
                return cls((Stage(tuple(given)),))
        return cls((Stage((given,)),))

    @classmethod
    def load(cls, path: StrPath) -> "Recipe":
        """Read a YAML file."""
        try:
            return cls.from_yaml(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such recipe") from None
        except OSError as error:
            raise ConfigError(f"{path}: the recipe cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is no YAML, but bytes that are no text") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_yaml(cls, source: str) -> "Recipe":
        """Read YAML: `<name>_stage:`, in it `<group>_modifiers:`, in it modifiers by name."""
        return cls.from_dict(parse_yaml(source))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """Read what YAML says; without a stage, all modifiers are in one."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"a recipe is a mapping of stages, or a .yaml file; not {data!r}")
        stages = {key: x for key, x in data.items() if str(key).endswith(_STAGE)}
        others = {key: x for key, x in data.items() if key not in stages}
        if stages and others:
            raise ConfigError(f"{next(iter(others))}: is no stage; those end in {_STAGE}")
        if not stages:
            return cls((_stage("default", others),))
        return cls(tuple(_stage(key.removesuffix(_STAGE), x) for key, x in stages.items()))

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """Those of all stages."""
        return tuple(modifier for stage in self.stages for modifier in stage.modifiers)

    def to_dict(self) -> Json:
        """Return what YAML says."""
        return {f"{stage.name}{_STAGE}": _written(stage) for stage in self.stages}

    def to_yaml(self) -> str:
        """Return YAML that `from_yaml` makes an equal recipe of."""
        return dump_yaml(self.to_dict())

    def save(self, folder: StrPath) -> None:
        """Write `recipe.yaml` into a folder."""
        Path(folder, FILE).write_text(self.to_yaml(), encoding="utf-8")


def _stage(name: str, data: Any) -> Stage:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}{_STAGE}: is a mapping of modifiers, not {data!r}")
    modifiers: list[Modifier] = []
    for key, group in data.items():
        if str(key).endswith(_MODIFIERS):
            modifiers += _group(str(key), group)
        elif key != "run_type":
            raise ConfigError(f"{name}{_STAGE}: {key!r} does not end in {_MODIFIERS}")
    return Stage(tuple(modifiers), name, data.get("run_type"))


def _group(name: str, group: Any) -> Iterator[Modifier]:
    for one in _listed(name, group):
        if not isinstance(one, Mapping):
            raise ConfigError(f"{name}: a modifier is a name and its fields, not {one!r}")
        for key, values in one.items():
            if values is not None and not isinstance(values, Mapping):
                raise ConfigError(f"{name}: {key}: fields are a mapping, not {values!r}")
            yield make_modifier(str(key), values)


def _listed(name: str, group: Any) -> Iterable[Any]:
    if isinstance(group, Mapping):
        return [group]
    if isinstance(group, list):
        return group
    raise ConfigError(f"{name}: is a mapping or a list of modifiers, not {group!r}")


def _written(stage: Stage) -> Json:
    each = [{modifier_name(modifier): modifier_fields(modifier)} for modifier in stage.modifiers]
    names = [name for one in each for name in one]
    is_mapping = len(set(names)) == len(names)
    group: Any = {key: x for one in each for key, x in one.items()} if is_mapping else each
    run_type: Json = {"run_type": stage.run_type} if stage.run_type else {}
    return run_type | {f"{stage.name}_{_MODIFIERS}": group}
