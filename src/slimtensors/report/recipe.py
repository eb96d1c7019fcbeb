"""What a recipe did to a model: the file that `oneshot` and `train` leave beside it."""

import json
from pathlib import Path

from slimtensors.container import StrPath
from slimtensors.errors import CorruptFileError
from slimtensors.quantization.algorithms import LayerReport
from slimtensors.recipe.report import FILE, LayerState
from slimtensors.spec import Json


def read_recipe(source: StrPath) -> Json | None:
    """Return what the file says, or the one in this folder; none if there is no such file."""
    if "://" in str(source):
        return None
    path = Path(source) / FILE if Path(source).is_dir() else Path(source)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        # Measured on a broken model, figures may be NaN, which no page can hold.
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError:
        return None
    if not isinstance(data, dict) or not data.keys() >= {"steps", "layers", "quality"}:
        return None  # of somebody else, who also likes the name
    try:
        _check(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path}: is no whole report of a recipe: {error}") from error
    return data


def _check(data: Json) -> None:
    """Raise if something is missing that the page shows."""
    for state in data["layers"]:
        LayerState(**state)
    for step in data["steps"]:
        step["modifier"], step["notes"], step["seconds"]
        for layer in step["layers"]:
            LayerReport.from_json(layer)
    data["notes"], data["format"], data["stored_bytes"], data["sparsity"]
