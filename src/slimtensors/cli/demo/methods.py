"""The storage methods that the demo compares, and the evaluation of their results."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.cli.demo.training import LENGTH, excerpt
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import read_config, read_quantization_section
from slimtensors.folder.quantize import quantize_folder
from slimtensors.layerwise.allocation import find_layers
from slimtensors.layerwise.prune import SparseGPT, prune_model
from slimtensors.layerwise.structure import Groups, Structure, Unstructured
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe.calibration import Calibration, Data, batches_for

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_PROMPT = "    def __init__(self, "
_SENTENCE_TOKENS = 90
_IGNORE = ["lm_head"]
_CALIBRATION = Calibration(samples=64, length=LENGTH)
_CALIBRATION_DTYPE = torch.float32
"""Some CPUs report bfloat16 matrix products that they cannot run."""


@dataclass(frozen=True)
class StorageMethod:
    """One way to store a model."""

    name: str
    folder: str
    about: str
    write: Callable[[Path, Path, str], object]
    """Writes the target folder from the source folder; the text is calibration data."""


def _compress(preset: str) -> Callable[[Path, Path, str], object]:
    return lambda source, target, text: compress_folder(source, target, preset=preset)


def _prune(structure: Structure) -> Callable[[Path, Path, str], object]:
    def write(source: Path, target: Path, text: str) -> None:
        from slimtensors.transformers.auto import load_model, load_tokenizer
        from slimtensors.transformers.saving import enable

        model, tokenizer = load_model(source), load_tokenizer(source)
        assert tokenizer is not None, "checked by Evaluator.for_folder"
        dtype = model.dtype
        sparsities = dict.fromkeys(find_layers(model, ["Linear"], _IGNORE), 0.5)
        batches, _ = batches_for(model, [text], _CALIBRATION, tokenizer=tokenizer)
        prune_model(
            model.to(_CALIBRATION_DTYPE),
            sparsities,
            method=SparseGPT(),
            structure=structure,
            calibration=batches,
        )
        enable(model.to(dtype), preset="lossless").save_pretrained(target)
        tokenizer.save_pretrained(target)

    return write


def _quantize(scheme: str) -> Callable[[Path, Path, str], object]:
    return lambda source, target, text: quantize_folder(source, target, _config(scheme, source))


def _calibrate(scheme: str) -> Callable[[Path, Path, str], object]:
    def write(source: Path, target: Path, text: str) -> object:
        from slimtensors.transformers.calibrate import calibrate_folder

        return calibrate_folder(
            source,
            target,
            _config(scheme, source),
            [text],
            calibration=_CALIBRATION,
            dtype=_CALIBRATION_DTYPE,
        )

    return write


def _config(scheme: str, source: Path) -> QuantizationConfig:
    """Return the config of a preset scheme that ignores the output layer, if the model has one."""
    is_tied = bool(read_config(source).get("tie_word_embeddings"))
    with Archive(source) as archive:
        ignore = [layer for layer in _IGNORE if is_tied or f"{layer}.weight" in archive]
    return QuantizationConfig.preset(scheme, ignore=ignore)


DENSE = StorageMethod("dense", "dense", "Plain safetensors.", lambda *_: None)
"""The original model, which the other methods read."""

METHODS = (
    StorageMethod("lossless", "lossless", "Lossless compression.", _compress("lossless")),
    StorageMethod(
        "sparse 50 %",
        "sparse-50",
        "50 % of the weights are zero (SparseGPT).",
        _prune(Unstructured()),
    ),
    StorageMethod(
        "sparse 2:4",
        "sparse-24",
        "Two of every four weights are zero (SparseGPT).",
        _prune(Groups(2, 4)),
    ),
    StorageMethod("int8", "int8", "8-bit integers, a scale per 128 weights.", _quantize("W8A16")),
    StorageMethod(
        "W4A16 RTN", "w4a16-rtn", "4-bit integers, rounding to nearest.", _quantize("W4A16")
    ),
    StorageMethod(
        "W4A16 GPTQ",
        "w4a16-gptq",
        "4-bit integers, GPTQ error compensation.",
        _calibrate("W4A16"),
    ),
    StorageMethod("extreme", "extreme", "8-bit integers, entropy-coded.", _compress("extreme")),
)


@dataclass(frozen=True)
class Evaluator:
    """Loads a model from each folder and measures it on text it was not trained on."""

    model_class: Any
    """The transformers class that loads the model."""
    tokenizer: Any
    tokens: Tensor
    """Rows of tokens for the perplexity."""
    is_causal: bool

    @classmethod
    def for_folder(cls, folder: Path, text: bytes, *, samples: int) -> "Evaluator":
        """Return the evaluator of a model folder; raise if transformers cannot load it."""
        from slimtensors.transformers.auto import find_class

        transformers = import_transformers()
        config = read_config(folder)
        model_class = find_class(config.get("architectures") or [])
        if model_class is None:
            raise ConfigError(f"{folder}: config.json names no transformers class (architectures)")
        section = read_quantization_section(config)
        if section.get("quant_method", "slimtensors") != "slimtensors":
            raise ConfigError(f"{folder} is already quantized; the demo requires dense weights")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigError(f"{folder}: no tokenizer found that transformers can load") from None
        amount = Calibration(samples, LENGTH)
        batches, _ = Data.of([excerpt(text)]).batches(amount, tokenizer=tokenizer)
        tokens = torch.cat([batch["input_ids"] for batch in batches])
        return cls(model_class, tokenizer, tokens, model_class.__name__.endswith(_CAUSAL))

    def load(self, folder: Path) -> nn.Module:
        """Load the model from a folder, in float32."""
        from slimtensors.transformers.auto import load_pretrained

        model: nn.Module = load_pretrained(self.model_class, folder, dtype=torch.float32)
        return model.eval()

    def time_load(self, folder: Path) -> tuple[nn.Module, float]:
        """Load the model, and return it and the best time of three, or of one if that is slow."""
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            model = self.load(folder)
            seconds = time.perf_counter() - start
            best = min(best, seconds)
            if seconds > 2:
                break
        return model, best

    @torch.no_grad()
    def perplexity(self, model: nn.Module) -> float | None:
        """Return the perplexity per token, or None if the model is not causal."""
        if not self.is_causal:
            return None
        losses = [model(input_ids=x, labels=x).loss for x in torch.split(self.tokens, 16)]
        return math.exp(min(float(torch.stack(losses).mean()), 50.0))

    @torch.no_grad()
    def generate(self, model: Any) -> str:
        """Return a prompt and its continuation, sampled with a fixed seed."""
        tokens = self.tokenizer(_PROMPT, return_tensors="pt")["input_ids"]
        torch.manual_seed(1)
        for _ in range(min(_SENTENCE_TOKENS, LENGTH - tokens.shape[1])):
            logits = model(input_ids=tokens).logits[0, -1]
            top = logits.topk(5)
            probabilities = torch.softmax(top.values / 0.7, 0)
            tokens = torch.cat([tokens, top.indices[probabilities.multinomial(1)][None]], 1)
        return " ".join(self.tokenizer.decode(tokens[0]).split())


def import_transformers() -> Any:
    """Return the transformers package, or raise with the command that installs it."""
    try:
        import transformers

        import slimtensors.transformers.auto  # noqa: F401  registers our folders
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise MissingDependencyError("transformers", "transformers") from None
    return transformers
