"""Save a model that a recipe was done to, in the format that suits what was done."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from slimtensors.archive import inspect
from slimtensors.compressor import ModelCompressor
from slimtensors.container import write_json
from slimtensors.errors import ConfigError
from slimtensors.folder import read_config
from slimtensors.integrations.transformers.saving import enable
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantized_folder import Rewrite, convert_folder
from slimtensors.recipe import Recipe
from slimtensors.recipe.modifiers import Quantizing
from slimtensors.recipe.oneshot.quantize import config_for
from slimtensors.recipe.report import FILE, Report

Told = TypeVar("Told", bound=Report)

_SPARSE = 0.4
"""The share of zeros from which on codes are smaller with a mask than packed."""


def check_model(model: nn.Module) -> None:
    """Raise if a model cannot be saved as a folder of transformers."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ConfigError(f"{kind} is no model of transformers; slimtensors.save can store it")


def save_model(
    model: Any, folder: Path, recipe: Recipe, report: Told, *, save_compressed: bool
) -> Told:
    """Save a model with its recipe and its report, and return the report with what it took.

    What is quantized is stored as compressed-tensors has it, for stock loaders; what is also sparse
    as codes and masks, which takes less, unless activations are quantized too; what is only sparse
    in the preset `sparse`.
    """
    enable(model)
    quantizing = [each for each in recipe.modifiers if isinstance(each, Quantizing)]
    if quantizing and save_compressed:
        config = config_for(model, quantizing[0])
        if report.sparsity < _SPARSE or config.has_activations:
            format = _save_quantized(model, config, folder)
        else:
            format = _save_sparse_codes(model, config, folder)
    else:
        model.save_pretrained(folder, save_compressed=save_compressed)
        format = read_config(folder).get("quantization_config", {}).get("preset", "dense")
    report = report.stored_as(format, inspect(folder))
    recipe.save(folder)
    write_json(folder / FILE, report.to_json())
    return report


def _save_quantized(model: Any, config: QuantizationConfig, folder: Path) -> str:
    state = ModelCompressor(config).compress(model)
    try:
        type(model).save_pretrained(model, folder, state_dict=state)
        return str(model.config.quantization_config["format"])
    finally:
        del model.config.quantization_config  # of the folder: the model itself has dense weights


def _save_sparse_codes(model: Any, config: QuantizationConfig, folder: Path) -> str:
    with TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
        first = Path(beside, "quantized")
        _save_quantized(model, config, first)
        convert_folder(first, folder, to="slim", how=Rewrite(replace=True))
    return "slim"
