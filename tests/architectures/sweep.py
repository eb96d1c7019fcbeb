"""Check every model type of transformers and record the outcomes in `results.json`.

PYTHONPATH=tests python -m architectures.sweep [--checks lossless int8 ...] [--types bert ...]

A check that is recorded for a type is not repeated, unless the type is named.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from architectures import catalogue, results
from architectures.lossless import check_lossless
from architectures.quantized import SCHEMES, check_quantized
from architectures.recipes import RECIPES, check_recipes
from architectures.stock import StockProcess
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

CHECKS = ("lossless", *SCHEMES, *RECIPES)

CASES = tuple(
    (dtype, zeros) for dtype in (torch.float32, torch.bfloat16) for zeros in (False, True)
)
"""Models of a type that are stored losslessly: dtype, and whether half of the weights are 0."""

_SMALL = 4_000_000
"""Parameters up to which each model runs forward; of a larger type, the first one does."""


def find_model(model_type: str) -> catalogue.Tiny:
    """Return a tiny model that transformers can save and load itself."""
    tiny = catalogue.find(model_type)
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny.build().save_pretrained(folder)
            tiny.model_class.from_pretrained(folder, output_loading_info=True)[0].state_dict()
        except Exception as error:
            raise catalogue.CannotBuildError(
                f"{model_type}: not loaded by transformers: {type(error).__name__}: {error}"
            ) from error
    return tiny


def check_type(tiny: catalogue.Tiny, checks: Iterable[str], stock: StockProcess) -> dict[str, Any]:
    """Return the outcome of each check for a tiny model."""
    outcomes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipes = [check for check in checks if check in RECIPES]
        outcomes |= check_recipes(tiny.model_type, Path(folder), recipes)
    for check in (check for check in checks if check not in RECIPES):
        with tempfile.TemporaryDirectory() as folder:
            if check == "lossless":
                outcomes[check] = _check_cases(tiny, Path(folder))
            else:
                model = tiny.build(torch.bfloat16)
                outcome = asdict(check_quantized(model, check, Path(folder), stock))
                outcomes[check] = {key: value for key, value in outcome.items() if value}
    return outcomes


def _check_cases(tiny: catalogue.Tiny, folder: Path) -> dict[str, Any]:
    """Check a lossless folder in each dtype, with and without zeros."""
    reasons, forward = [], 0
    inputs = _find_inputs(tiny)
    for number, (dtype, zeros) in enumerate(CASES):
        model = tiny.build(dtype)
        if zeros:
            _zero_half(model)
        is_small = sum(x.numel() for x in model.parameters()) < _SMALL
        runs = inputs is not None and (is_small or number == 0)
        by_folder = number % 2 == 0
        try:
            problems = check_lossless(
                model,
                _cast(inputs, dtype) if runs else None,
                folder / str(number),
                by_folder=by_folder,
            )
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        label = f"{str(dtype).removeprefix('torch.')}{' with zeros' if zeros else ''}"
        reasons += [f"{label}: {problem}" for problem in problems]
        forward += runs
    outcome = {"result": "wrong" if reasons else "right", "models": len(CASES), "forward": forward}
    return outcome | ({"reasons": reasons} if reasons else {})


def _find_inputs(tiny: catalogue.Tiny) -> dict[str, Any] | None:
    try:
        return catalogue.make_inputs(tiny.build())
    except catalogue.CannotBuildError:
        return None


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the inputs with floats in a dtype."""
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


@torch.no_grad()
def _zero_half(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for x in model.parameters():
        x.masked_fill_(torch.rand(x.shape, generator=generator) < 0.5, 0)


def main() -> None:
    """Run the checks that are not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", nargs="+", default=CHECKS, choices=CHECKS)
    parser.add_argument("--types", nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("slimtensors").propagate = False
    set_verbosity_error()
    disable_progress_bar()
    recorded = results.read_types()
    with StockProcess() as stock:
        for model_type in options.types or catalogue.list_model_types():
            start, entry = time.monotonic(), recorded.get(model_type, {})
            checks = [x for x in options.checks if options.types or x not in entry]
            if not checks or (not options.types and "reason" in entry):
                continue
            try:
                tiny = find_model(model_type)
            except catalogue.CannotBuildError as error:
                entry = {"reason": str(error)}
            else:
                entry = {"class": tiny.model_class.__name__, "kind": tiny.kind}
                entry |= check_type(tiny, checks, stock)
            results.record(model_type, **entry)
            print(f"{time.monotonic() - start:.0f} s", model_type, entry, flush=True)


if __name__ == "__main__":
    main()
