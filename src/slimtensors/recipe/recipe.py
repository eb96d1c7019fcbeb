"""Recipes: stages of modifiers, read from YAML and written back."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slimtensors.errors import (
    ConfigError,
    MissingDependencyError,
    report_malformed,
    suggest,
)
from slimtensors.quantization import QuantizationArgs, QuantizationScheme, is_preset_scheme
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
from slimtensors.storage import StrPath, read_text, write_file_atomically
from slimtensors.tensor import Json

RECIPE_FILE = "recipe.yaml"
"""File name of the recipe in the folder of the model it was applied to."""

MODIFIERS: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
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
"""Modifiers by their names in recipes."""

_STAGE, _MODIFIERS, _SUFFIX = "_stage", "modifiers", "Modifier"
_RUN_TYPES = ("oneshot", "train")

_ALIASES: Mapping[str, tuple[type[Any], ...]] = {
    # In SparseML, magnitude pruning is gradual if the recipe gives a start and an end.
    "MagnitudePruning": (MagnitudePruning, GradualMagnitudePruning),
    "Quantization": (Quantize,),
    "WandaPruning": (Wanda,),
    "GMPruning": (GradualMagnitudePruning,),
    "OutputDistillation": (Distillation,),
    "Distillation": (Distillation,),
}
"""Names in SparseML and llm-compressor, without the suffix `Modifier`."""

_FIELD_ALIASES: Mapping[type[Any], Mapping[str, str]] = {
    MagnitudePruning: {"final_sparsity": "sparsity", "params": "targets"},
    AWQ: {"n_grid": "steps"},
    ConstantPruning: {"params": "targets"},
    Distillation: {"distillation_teacher": "teacher"},
} | {
    cls: {
        "start_epoch": "start",
        "end_epoch": "end",
        "inter_func": "schedule",
        "update_scheduler": "schedule",
        "mask_type": "mask_structure",
        "params": "targets",
    }
    for cls in (GradualMagnitudePruning, MovementPruning)
}
"""Field names in SparseML and llm-compressor."""

_FIXED_FIELDS: Mapping[str, object] = {
    "sequential_update": True,
    "preserve_sparsity_mask": True,
    "leave_enabled": True,
    "start": 0.0,
    "start_epoch": 0.0,
    "end_epoch": -1.0,
    "block_size": 128,
    "offload_hessians": False,
}
"""Fields of other libraries that are accepted with this value only, on modifiers without them."""

_ALL_TARGETS = ("__ALL_PRUNABLE__", "__ALL__")

_FLOAT = re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan)$")
_MAX_ITEMS = 100_000
"""Values in a recipe, to which a few lines with aliases could expand."""
_INT = re.compile(r"^(?:[-+]?\d+)$")


@dataclass(frozen=True)
class Stage:
    """Modifiers that run together: one after the other in `oneshot`, all at once in `train`."""

    modifiers: tuple[Modifier, ...]
    name: str = "default"
    run_type: str | None = None
    """`oneshot` or `train` if the stage is for one of them only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modifiers", tuple(self.modifiers))
        for modifier in self.modifiers:
            modifier_name(modifier)
        if not self.modifiers:
            raise ConfigError(f"{self.name}{_STAGE}: no modifiers")
        if self.run_type is not None and self.run_type not in _RUN_TYPES:
            raise ConfigError(
                f"{self.name}{_STAGE}: run_type must be oneshot or train, got {self.run_type!r}"
            )


@dataclass(frozen=True)
class Recipe:
    """Stages, in the order in which they run.

    Example:
        >>> recipe = Recipe.of([SparseGPT(mask_structure="2:4"), GPTQ("W4A16")])
        >>> Recipe.from_yaml(recipe.to_yaml()) == recipe
        True
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) < len(names):
            raise ConfigError("a recipe needs at least one stage, and unique stage names")

    @classmethod
    def of(cls, source: Any) -> "Recipe":
        """Return a recipe from modifiers, stages, YAML, or the path of a YAML file."""
        match source:
            case Recipe():
                return source
            case Stage():
                return cls((source,))
            case Path():
                return cls.load(source)
            case str():
                is_path = "\n" not in source and source.endswith((".yaml", ".yml"))
                return cls.load(source) if is_path else cls.from_yaml(source)
            case Mapping():
                return cls.from_dict(source)
            case Sequence() if source and all(isinstance(each, Stage) for each in source):
                return cls(tuple(source))
            case Sequence():
                return cls((Stage(tuple(source)),))
        return cls((Stage((source,)),))

    @classmethod
    def load(cls, path: StrPath) -> "Recipe":
        """Read a YAML file."""
        with report_malformed(str(path), ConfigError):
            try:
                return cls._parse(_parse_yaml(read_text(path)))
            except FileNotFoundError:
                raise ConfigError("recipe not found") from None
            except OSError as error:
                raise ConfigError(f"cannot read the recipe: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise ConfigError("invalid YAML: not UTF-8 text") from error

    @classmethod
    def from_yaml(cls, source: str) -> "Recipe":
        """Read YAML: `<name>_stage:` contains `<group>_modifiers:` with modifiers by name."""
        return cls.from_dict(_parse_yaml(source))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """Read the content of a YAML file; without stages, all modifiers form one stage."""
        with report_malformed("recipe", ConfigError):
            return cls._parse(data)

    @classmethod
    def _parse(cls, data: Mapping[str, Any]) -> "Recipe":
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected a mapping of stages, or a .yaml file; got {data!r}")
        stages = {key: x for key, x in data.items() if str(key).endswith(_STAGE)}
        others = {key: x for key, x in data.items() if key not in stages}
        if stages and others:
            raise ConfigError(f"{next(iter(others))}: stage names must end in {_STAGE}")
        if not stages:
            return cls((_parse_stage("default", others),))
        return cls(tuple(_parse_stage(key.removesuffix(_STAGE), x) for key, x in stages.items()))

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """Modifiers of all stages."""
        return tuple(modifier for stage in self.stages for modifier in stage.modifiers)

    def to_dict(self) -> Json:
        """Return the content of a YAML file."""
        return {f"{stage.name}{_STAGE}": _dump_stage(stage) for stage in self.stages}

    def to_yaml(self) -> str:
        """Return YAML from which `from_yaml` reads an equal recipe."""
        text: str = _import_yaml().safe_dump(
            self.to_dict(), sort_keys=False, default_flow_style=None, width=100
        )
        return text

    def save(self, folder: StrPath) -> None:
        """Write `recipe.yaml` to a folder."""
        write_file_atomically(Path(folder, RECIPE_FILE), self.to_yaml().encode())


def modifier_name(modifier: object) -> str:
    """Return the name of a modifier in recipes; raise if it is not a modifier."""
    if type(modifier) not in MODIFIERS.values():
        raise ConfigError(f"{modifier!r} is not a modifier; known: {', '.join(MODIFIERS)}")
    return type(modifier).__name__


def _parse_stage(name: str, data: Any) -> Stage:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}{_STAGE}: expected a mapping of modifiers, got {data!r}")
    modifiers: list[Modifier] = []
    for key, group in data.items():
        if str(key).endswith(_MODIFIERS):
            modifiers += _parse_group(str(key), group)
        elif key != "run_type":
            raise ConfigError(f"{name}{_STAGE}: {key!r} does not end in {_MODIFIERS}")
    return Stage(tuple(modifiers), name, data.get("run_type"))


def _parse_group(name: str, group: Any) -> Iterator[Modifier]:
    if not isinstance(group, Mapping | list):
        raise ConfigError(f"{name}: expected a mapping or a list of modifiers, got {group!r}")
    for item in [group] if isinstance(group, Mapping) else group:
        if not isinstance(item, Mapping):
            raise ConfigError(f"{name}: expected a modifier name with its fields, got {item!r}")
        for key, values in item.items():
            if values is not None and not isinstance(values, Mapping):
                raise ConfigError(f"{name}: {key}: expected a mapping of fields, got {values!r}")
            yield _make_modifier(str(key), values)


def _make_modifier(name: str, data: Mapping[str, Any] | None) -> Any:
    """Return a modifier from its name and fields, which may be those of other libraries."""
    classes = _find_classes(name)
    accepted = set().union(*(_field_names(cls) | {*_field_aliases(cls)} for cls in classes))
    values = dict(data or {})
    for key, fixed in _FIXED_FIELDS.items():
        if key in accepted or key not in values:
            continue
        if values.pop(key) != fixed:
            raise ConfigError(f"{name}: {key} must be {fixed}")
    unknown: list[str] = []
    for cls in classes:
        arguments = _rename_fields(cls, values)
        unknown = unknown or sorted(arguments.keys() - _field_names(cls))
        if not arguments.keys() - _field_names(cls):
            break
    else:
        raise ConfigError(f"{name} has no field {unknown[0]!r}; {suggest(unknown[0], accepted)}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{name}: invalid field value: {error}") from error


def _find_classes(name: str) -> tuple[type[Any], ...]:
    """Return the classes that a name may refer to; raise with the nearest name if there is none."""
    if name in MODIFIERS:
        return (MODIFIERS[name],)
    stem = name.removesuffix(_SUFFIX)
    if stem in _ALIASES:
        return _ALIASES[stem]
    if stem in MODIFIERS and name != stem:
        return (MODIFIERS[stem],)
    known = {*MODIFIERS, *(f"{each}{_SUFFIX}" for each in (*MODIFIERS, *_ALIASES))}
    raise ConfigError(f"unknown modifier {name!r}; {suggest(name, known)}")


def _rename_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by our field names."""
    aliases = _field_aliases(cls)
    renamed = {aliases.get(key, key): value for key, value in values.items()}
    if renamed.get("targets") in _ALL_TARGETS:
        del renamed["targets"]
    return {key: value for key, value in renamed.items() if value is not None}


def _field_aliases(cls: type[Any]) -> Mapping[str, str]:
    return _FIELD_ALIASES.get(cls, {})


def _field_names(cls: type[Any]) -> set[str]:
    return {each.name for each in fields(cls)}


def _dump_stage(stage: Stage) -> Json:
    items = [{modifier_name(modifier): _dump_fields(modifier)} for modifier in stage.modifiers]
    names = [name for item in items for name in item]
    is_unique = len(set(names)) == len(names)
    group: Any = {key: x for item in items for key, x in item.items()} if is_unique else items
    run_type: Json = {"run_type": stage.run_type} if stage.run_type else {}
    return run_type | {f"{stage.name}_{_MODIFIERS}": group}


def _dump_fields(modifier: Any) -> Json:
    """Return the fields that differ from their defaults, as plain values."""

    def default(each: Any) -> object:
        return each.default if each.default_factory is MISSING else each.default_factory()

    return {
        each.name: _to_plain(value)
        for each in fields(modifier)
        if (value := getattr(modifier, each.name)) != default(each)
    }


def _to_plain(value: Any) -> Any:
    match value:
        case QuantizationScheme() | QuantizationArgs():
            return value.to_dict()
        case StrEnum():
            return str(value)
        case Mapping():
            return {key: _to_preset(key, item) or _to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_plain(item) for item in value]
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return _to_plain(asdict(value)) if is_instance else value


def _to_preset(name: str, value: Any) -> list[str] | None:
    """Return the targets of a scheme that is the preset of this name; else None.

    The JSON form of the scheme would fix its group size.
    """
    if not isinstance(value, QuantizationScheme) or not value.fits_columns:
        return None
    if not is_preset_scheme(name) or value != QuantizationScheme.preset(name, value.targets):
        return None
    return list(value.targets)


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError("PyYAML", "transformers") from None
    return yaml


def _parse_yaml(source: str) -> Any:
    """Read YAML without executing anything; duplicate keys raise."""
    yaml = _import_yaml()
    try:
        data = yaml.load(source, Loader=_make_loader(yaml))
        _check_count(_count_items(data, {}))
    except (yaml.YAMLError, RecursionError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"invalid YAML: {str(error) or type(error).__name__}") from error
    except ConfigError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # of PyYAML, for numbers
        raise ConfigError(f"invalid YAML: {str(error)[:200]}") from error
    return data


def _check_count(items: int) -> None:
    if items > _MAX_ITEMS:
        raise ConfigError(f"aliases expand to more than {_MAX_ITEMS} items")


def _count_items(value: Any, counts: dict[int, int]) -> int:
    """Return the number of values; those with several aliases count each time."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        counts[id(value)] = _MAX_ITEMS + 1  # until it is known: an alias of itself has no end
        parts = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count_items(part, counts) for part in parts)
    return counts[id(value)]


def _make_loader(yaml: Any) -> Any:
    """Return a safe loader with the numbers of YAML 1.2: in YAML 1.1, `2:4` is 124."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)  # copies the items of `<<: *alias`
            _check_count(len(node.value))

    loader: Any = Loader
    numbers = {"tag:yaml.org,2002:int": _INT, "tag:yaml.org,2002:float": _FLOAT}
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in numbers]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in numbers.items():
        loader.add_implicit_resolver(tag, pattern, list("-+0123456789."))
    loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
    loader.add_multi_constructor("!", _construct_tagged)
    return loader


def _construct_mapping(loader: Any, node: Any) -> Any:
    """Return a mapping; raise on duplicate keys, which PyYAML would drop silently."""
    seen: set[str] = set()
    for key, _ in node.value:
        if (name := str(key.value)) in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"line {line}: duplicate key {name}; use a list, or another stage")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


def _construct_tagged(loader: Any, name: str, node: Any) -> Any:
    """Return SparseML's `!Name` with its fields as a mapping with one key."""
    if node.id == "mapping":
        return {name: _construct_mapping(loader, node)}
    if node.value == "":
        return {name: None}
    line = node.start_mark.line + 1
    raise ConfigError(f"line {line}: !{name} must be followed by fields as in `name: value`")
