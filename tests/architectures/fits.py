"""Fit tiny models to a budget and check the folders from outside."""

from pathlib import Path

from architectures import catalogue
from architectures.recipes import KINDS, list_types, make_batches
from strategies import same_bits

from slimtensors.errors import SlimError
from slimtensors.transformers import Budget, fit
from slimtensors.transformers.auto import load_pretrained

BITS = 6.0
"""Bits per parameter: tiny models consist largely of small tensors that stay exact."""
REPEATS = 3
"""How often the batches are used, so that most experts get enough of them."""


def find_kind(model_type: str) -> str | None:
    """Return the first kind of models that a type has."""
    return next((kind for kind in KINDS if model_type in list_types(kind)), None)


def check_fit(model_type: str, folder: Path) -> tuple[str, list[str]]:
    """Return `right`, `refused` or `wrong`, and the reasons.

    Raise CannotBuildError if there is no tiny model that runs.
    """
    tiny = catalogue.find(model_type, find_kind(model_type))
    model = tiny.build()
    batches = make_batches(model) * REPEATS
    model.save_pretrained(folder / "dense")
    try:
        found, report = fit(folder / "dense", Budget(bits=BITS), batches, output_dir=folder / "fit")
    except SlimError as error:
        return ("wrong" if (folder / "fit").exists() else "refused"), [str(error)]
    problems = []
    again, info = load_pretrained(type(found), folder / "fit", output_loading_info=True)
    expected, state = found.state_dict(), again.state_dict()
    problems += [f"loading: {name}" for name in info["missing_keys"]]
    problems += [
        f"weights: {name}"
        for name in expected.keys() | state.keys()
        if name not in expected or name not in state or not same_bits(expected[name], state[name])
    ]
    size = sum(path.stat().st_size for path in (folder / "fit").glob("*.safetensors"))
    if size != report.weight_bytes or size > BITS / 8 * report.parameters:
        problems.append(f"size: {size} of {BITS / 8 * report.parameters:.0f} bytes")
    noted = {name for name, *_, note in report.tensors if note}
    silent = [name for name, _, _, loss, _ in report.tensors if loss is None and name not in noted]
    problems += [f"no statistics, not reported: {name}" for name in silent]
    return ("wrong" if problems else "right"), problems
