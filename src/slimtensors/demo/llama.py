"""A small Llama on bytes, and how it is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import save
from slimtensors.container import SINGLE, write_json
from slimtensors.demo.text import LENGTH, rows
from slimtensors.demo.tokenizer import write_byte_tokenizer
from slimtensors.errors import MissingDependencyError

_ROWS = 12
"""Pieces of text per step."""
_RATE = 3e-3


@dataclass(frozen=True)
class Training:
    """A model under training, and what moves it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    def step(self, tokens: Tensor) -> float:
        """Learn from some rows, and return the loss."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss.detach())


def new_training(steps: int, *, layers: int = 4, seed: int = 0) -> Training:
    """Return a Llama that knows nothing yet, to be trained in so many steps."""
    torch.manual_seed(seed)
    model = _new_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    return Training(model, optimizer, schedule)


def lesson(text: bytes, step: int) -> Tensor:
    """Return what is learnt from in a step."""
    return rows(text, _ROWS, seed=1000 + step)


def write_llama(model: Any, folder: Path) -> None:
    """Write a model folder in bfloat16: weights, config, and the tokenizer of bytes."""
    folder.mkdir(parents=True)
    half = {name: x.bfloat16() for name, x in model.state_dict().items()}
    save(half, folder / SINGLE, preset="dense")
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    write_byte_tokenizer(folder)


def _new_llama(layers: int) -> nn.Module:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise MissingDependencyError("transformers", "transformers") from None
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model
