"""Where a run that was interrupted goes on: at a checkpoint of one of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slimtensors.archive import load, save
from slimtensors.checkpoint import Point, points
from slimtensors.container import StrPath, local
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.recipe import Recipe

FOLDER = "checkpoints"
"""Of the output folder; in it, one per stage."""
_RECIPE, _MASKS = "recipe.yaml", "masks.safetensors"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from."""

    stage: str
    point: Point

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.point.manifest.step or 0


def folder_of(home: Path, stage: str) -> Path:
    """Return the folder of a stage's checkpoints."""
    return home / FOLDER / stage


def begin(folder: Path, recipe: Recipe, held: Mapping[str, Tensor]) -> None:
    """Note what a stage begins with, for a run that has to go on in it."""
    if old := _points(folder):
        raise ConfigError(f"{folder}: holds {old[-1].name}; resume, or choose another output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    recipe.save(folder)
    if held:
        save(dict(held), folder / _MASKS)


def held_in(folder: Path) -> dict[str, Tensor]:
    """Return the masks that held when a stage began."""
    path = folder / _MASKS
    return dict(load(path)) if path.exists() else {}


def find(home: Path, recipe: Recipe, given: StrPath | bool) -> Resumed:
    """Return the checkpoint that is meant: with True the newest; raise if another recipe's."""
    names = [stage.name for stage in recipe.stages]
    if given is True:
        begun = [name for name in names if _points(folder_of(home, name))]
        if not begun:
            _check_recipe(home, recipe)
            raise ConfigError(f"{home / FOLDER}: there is no checkpoint to resume from")
        found = Resumed(begun[-1], _points(folder_of(home, begun[-1]))[-1])
    else:
        path = local(given) if not isinstance(given, bool) else home
        each = {name: _points(folder_of(home, name)) for name in names}
        at = [Resumed(n, p) for n, some in each.items() for p in some if _is_same(p.path, path)]
        if not at:
            _check_recipe(home, recipe)
            raise ConfigError(f"{path}: is no checkpoint of a stage in {home / FOLDER}")
        found = at[0]
    _check_recipe(home, recipe)
    return found


def _check_recipe(home: Path, recipe: Recipe) -> None:
    for path in sorted((home / FOLDER).glob(f"*/{_RECIPE}")):
        if Recipe.load(path) != recipe:
            raise MismatchError(
                f"{path.parent}: was trained by another recipe, which {path.name} tells; resume"
                " with that one, or choose another output_dir"
            )


def _points(folder: Path) -> list[Point]:
    return list(points(folder)) if folder.is_dir() else []


def _is_same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
