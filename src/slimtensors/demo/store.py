"""The ways to store a model that the demo shows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from slimtensors.archive import Archive
from slimtensors.beside import read_config
from slimtensors.calibration import Calibration, batches_for
from slimtensors.demo.text import LENGTH
from slimtensors.folder import compress_folder
from slimtensors.pruning import (
    Groups,
    SparseGPT,
    Structure,
    Unstructured,
    find_layers,
    prune_model,
)
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantized_folder import calibrate_folder, quantize_folder
from slimtensors.summary import Summary

_LEFT_OUT = ["lm_head"]
_SAMPLES = Calibration(samples=64, length=LENGTH)
_RUN_IN = torch.float32
"""Where a method runs the model: some machines announce products of bf16 that they cannot do."""


@dataclass(frozen=True)
class Way:
    """One way to store a model."""

    name: str
    folder: str
    about: str
    make: Callable[[Path, Path, str], object]
    """Writes one folder from another; the text is for methods that run the model."""


def _compressed(preset: str) -> Callable[[Path, Path, str], Summary]:
    return lambda source, target, text: compress_folder(source, target, preset=preset)


def _pruned(structure: Structure) -> Callable[[Path, Path, str], None]:
    def make(source: Path, target: Path, text: str) -> None:
        from slimtensors.integrations.transformers.models import load_model, load_tokenizer
        from slimtensors.integrations.transformers.saving import enable

        model, tokenizer = load_model(source), load_tokenizer(source)
        assert tokenizer is not None, "models without one are refused"
        own = model.dtype
        shares = dict.fromkeys(find_layers(model, ["Linear"], _LEFT_OUT), 0.5)
        samples, _ = batches_for(model, [text], _SAMPLES, tokenizer=tokenizer)
        prune_model(
            model.to(_RUN_IN),
            shares,
            method=SparseGPT(),
            structure=structure,
            calibration=samples,
        )
        enable(model.to(own), preset="lossless").save_pretrained(target)
        tokenizer.save_pretrained(target)

    return make


def _rounded(scheme: str) -> Callable[[Path, Path, str], Summary]:
    def make(source: Path, target: Path, text: str) -> Summary:
        return quantize_folder(source, target, _config(scheme, source))

    return make


def _calibrated(scheme: str) -> Callable[[Path, Path, str], Summary]:
    def make(source: Path, target: Path, text: str) -> Summary:
        config = _config(scheme, source)
        return calibrate_folder(source, target, config, [text], calibration=_SAMPLES, dtype=_RUN_IN)

    return make


def _config(scheme: str, source: Path) -> QuantizationConfig:
    """Return the config of a preset that leaves out the output layer, if the model has one."""
    is_tied = bool(read_config(source).get("tie_word_embeddings"))
    with Archive(source) as archive:
        ignore = [layer for layer in _LEFT_OUT if is_tied or f"{layer}.weight" in archive]
    return QuantizationConfig.preset(scheme, ignore=ignore)


WAYS = (
    Way("lossless", "lossless", "Every bit, in fewer.", _compressed("lossless")),
    Way(
        "sparse 50 %",
        "sparse-50",
        "Half of the weights are zero, and the others make up for them.",
        _pruned(Unstructured()),
    ),
    Way(
        "sparse 2:4",
        "sparse-24",
        "Two of every four weights are zero, and the others make up for them.",
        _pruned(Groups(2, 4)),
    ),
    Way("int8", "int8", "8-bit integers, a scale per 128 weights.", _rounded("W8A16")),
    Way("W4A16 RTN", "w4a16-rtn", "4-bit integers, each the nearest one.", _rounded("W4A16")),
    Way(
        "W4A16 GPTQ",
        "w4a16-gptq",
        "4-bit integers that make up for each other.",
        _calibrated("W4A16"),
    ),
    Way("extreme", "extreme", "8-bit integers, entropy-coded.", _compressed("extreme")),
)
