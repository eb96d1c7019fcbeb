"""The ways to store a model that the demo shows, and how each is evaluated."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary
from slimtensors.cli.demo.training import LENGTH, excerpt
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import read_config
from slimtensors.folder.quantize import quantize_folder
from slimtensors.layerwise.allocation import find_layers
from slimtensors.layerwise.prune import SparseGPT, prune_model
from slimtensors.layerwise.structure import Groups, Structure, Unstructured
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe.calibration import Calibration, Data, batches_for

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_PROMPT = "    def __init__(self, "
_WRITTEN = 90
"""Tokens of a sentence."""


@dataclass(frozen=True)
class Subject:
    """A kind of model, its tokenizer, and text that it has not seen."""

    kind: Any
    """The class of transformers that loads it."""
    tokenizer: Any
    tokens: Tensor
    """Rows to predict."""
    is_causal: bool

    @classmethod
    def of(cls, folder: Path, text: bytes, *, samples: int) -> "Subject":
        """Find out what a folder holds; raise if that is no model that can be shown."""
        from slimtensors.transformers.calibrate import find_class

        transformers = needed()
        config = read_config(folder)
        kind = find_class(config.get("architectures") or [])
        if kind is None:
            raise ConfigError(f"{folder}: is no model: config.json names no class of transformers")
        section = config.get("quantization_config") or {}
        if section.get("quant_method", "slimtensors") != "slimtensors":
            raise ConfigError(f"{folder}: is quantized already; the demo begins with dense weights")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigError(f"{folder}: has no tokenizer that transformers can load") from None
        how = Calibration(samples, LENGTH)
        words, _ = Data.of([excerpt(text)]).batches(how, tokenizer=tokenizer)
        tokens = torch.cat([batch["input_ids"] for batch in words])
        return cls(kind, tokenizer, tokens, kind.__name__.endswith(_CAUSAL))

    def load(self, folder: Path) -> nn.Module:
        """Load the model from a folder, however it is stored there, to run in float32."""
        from slimtensors.transformers.auto import sparse

        model: nn.Module = sparse(self.kind).from_pretrained(folder, dtype=torch.float32)
        return model.eval()

    def timed(self, folder: Path) -> tuple[nn.Module, float]:
        """Load the model three times, unless that takes long, and tell the shortest time."""
        best = math.inf
        for _ in range(3):
            begin = time.perf_counter()
            model = self.load(folder)
            took = time.perf_counter() - begin
            best = min(best, took)
            if took > 2:
                break
        return model, best

    @torch.no_grad()
    def perplexity(self, model: nn.Module) -> float | None:
        """Return how many tokens the model hesitates between; none if it does not predict any."""
        if not self.is_causal:
            return None
        losses = [model(input_ids=x, labels=x).loss for x in torch.split(self.tokens, 16)]
        return math.exp(min(float(torch.stack(losses).mean()), 50.0))

    @torch.no_grad()
    def sentence(self, model: Any) -> str:
        """Let the model go on with some text; the random numbers are always the same."""
        tokens = self.tokenizer(_PROMPT, return_tensors="pt")["input_ids"]
        torch.manual_seed(1)
        for _ in range(min(_WRITTEN, LENGTH - tokens.shape[1])):
            logits = model(input_ids=tokens).logits[0, -1]
            likely = logits.topk(5)
            chance = torch.softmax(likely.values / 0.7, 0)
            tokens = torch.cat([tokens, likely.indices[chance.multinomial(1)][None]], 1)
        return " ".join(self.tokenizer.decode(tokens[0]).split())


def needed() -> Any:
    """Return transformers, or raise with the line that installs it."""
    try:
        import transformers

        import slimtensors.transformers.auto  # noqa: F401  registers our folders
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise MissingDependencyError("transformers", "transformers") from None
    return transformers


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
        from slimtensors.transformers.auto import load_model, load_tokenizer
        from slimtensors.transformers.saving import enable

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
        from slimtensors.transformers.calibrate import calibrate_folder

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
