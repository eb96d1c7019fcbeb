"""The model that the demo is about, as it runs: what it predicts, and what it writes."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.beside import read_config
from slimtensors.calibration import Calibration, Data
from slimtensors.demo.text import LENGTH, excerpt
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.quantized_folder.calibrate import find_class

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
        from slimtensors.integrations.transformers.auto import sparse

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

        import slimtensors.integrations.transformers.auto  # noqa: F401  registers our folders
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise MissingDependencyError("transformers", "transformers") from None
    return transformers
