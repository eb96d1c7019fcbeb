"""A recipe: what to do to a model, stage by stage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimtensors.container import StrPath
from slimtensors.errors import ConfigError
from slimtensors.recipe import yaml_text
from slimtensors.recipe.modifiers import Modifier, make, name_of, written
from slimtensors.spec import Json

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
            name_of(modifier)
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
        return cls.from_dict(yaml_text.parse(source))

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
        return yaml_text.dump(self.to_dict())

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
            yield make(str(key), values)


def _listed(name: str, group: Any) -> Iterable[Any]:
    if isinstance(group, Mapping):
        return [group]
    if isinstance(group, list):
        return group
    raise ConfigError(f"{name}: is a mapping or a list of modifiers, not {group!r}")


def _written(stage: Stage) -> Json:
    each = [{name_of(modifier): written(modifier)} for modifier in stage.modifiers]
    names = [name for one in each for name in one]
    is_mapping = len(set(names)) == len(names)
    group: Any = {key: x for one in each for key, x in one.items()} if is_mapping else each
    run_type: Json = {"run_type": stage.run_type} if stage.run_type else {}
    return run_type | {f"{stage.name}_{_MODIFIERS}": group}
