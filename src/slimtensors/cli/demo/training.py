"""A small Llama on bytes, trained here on the text of Python's standard library."""

import sysconfig
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import save
from slimtensors.checkpoint import checkpointing, load_checkpoint, points
from slimtensors.errors import MissingDependencyError
from slimtensors.report import Link, links
from slimtensors.storage import SINGLE, write_json
from slimtensors.tensor import Json, bitwise_equal

LENGTH = 128
"""Bytes, or tokens, that a model sees at once."""

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_EVERY = 12
"""One file of so many is kept apart, to measure on."""
_PIECES, _PIECE = 128, 1024


def training_text() -> bytes:
    """Return the text to train on."""
    apart = set(_apart())
    return _joined(path for path in _sources() if path not in apart)


def evaluation_text() -> bytes:
    """Return the text to measure on."""
    return _joined(_apart())


def excerpt(text: bytes) -> str:
    """Return pieces from all over a text, as much as it takes to see what a model does."""
    step = max(len(text) // _PIECES, 1)
    pieces = (text[i : i + _PIECE] for i in range(0, len(text), step))
    return b"".join(pieces).decode(errors="ignore")


def text_rows(text: bytes, count: int, *, seed: int) -> Tensor:
    """Return random pieces of a text, one number per byte."""
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(numbers) - LENGTH, (count, 1), generator=random)
    return numbers[starts + torch.arange(LENGTH)].long()


def _sources() -> list[Path]:
    return sorted(LIBRARY.glob("*.py"))


def _apart() -> list[Path]:
    return _sources()[::_EVERY]


def _joined(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that tokenizers on bytes write as the character of that number; others get one above."""


def write_byte_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and its config: the number of a token is that of its byte."""
    level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "vocab": _characters(), "merges": []}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        },
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)


def _characters() -> dict[str, int]:
    hidden = [byte for byte in range(256) if byte not in _SHOWN]
    shown = {chr(byte): byte for byte in _SHOWN}
    return shown | {chr(256 + i): byte for i, byte in enumerate(hidden)}


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
    return text_rows(text, _ROWS, seed=1000 + step)


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


_SAVES = 8

RUNS = {"exact": "checkpoints", "optimizer": "checkpoints-optimizer"}
"""Profiles by which the state is kept, weights always exactly, and the folders."""

OnStep = Callable[[int, int, float], object]
"""Called after each step with its number, how many there are, and the loss."""


@dataclass(frozen=True)
class Chain:
    """A run that was kept, and what that took."""

    profile: str
    links: list[Link]
    save_seconds: float
    """Of one checkpoint."""
    load_seconds: float
    """Of the newest."""
    is_exact: bool
    """Whether the weights of the newest are what the training ended with, bit for bit."""
    moment_error: float
    """Of the moments of the newest, on average; relative, RMS."""

    @property
    def bytes(self) -> int:
        """Of all checkpoints."""
        return sum(link.bytes for link in self.links)

    @property
    def dense_bytes(self) -> int:
        """Of all states in memory."""
        return sum(link.dense_bytes for link in self.links)


def train(
    training: Training, folder: Path, lesson: Callable[[int], Tensor], steps: int, on_step: OnStep
) -> list[Chain]:
    """Train, saving eight times on the way by each profile, and look at what was saved."""
    every = max(steps // _SAVES, 1)
    parts = (training.model, training.optimizer, training.schedule)
    saving = dict.fromkeys(RUNS, 0.0)
    with ExitStack() as stack:
        loops = {
            profile: stack.enter_context(
                checkpointing(
                    folder / run,
                    *parts,
                    every=every,
                    keyframe_every=_SAVES,
                    profile=profile,
                    async_=False,
                )
            )
            for profile, run in RUNS.items()
        }
        for step in range(steps):
            loss = training.step(lesson(step))
            for profile, ckpt in loops.items():
                begin = time.perf_counter()
                ckpt.step(loss=loss)
                saving[profile] += time.perf_counter() - begin
            on_step(step + 1, steps, loss)
        if steps % every:
            for ckpt in loops.values():
                ckpt.save(loss=loss)
    return [_looked_at(folder, profile, training.model, saving[profile]) for profile in RUNS]


def _looked_at(folder: Path, profile: str, model: nn.Module, saving: float) -> Chain:
    run = folder / RUNS[profile]
    newest = points(run)[-1]
    begin = time.perf_counter()
    state = load_checkpoint(newest.path)
    loading = time.perf_counter() - begin
    found, errors = links(run), newest.manifest.errors.values()
    return Chain(
        profile,
        found,
        saving / len(found),
        loading,
        _same(model, state["model"]),
        fmean(errors) if errors else 0.0,
    )


def _same(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == stored.keys() and all(
        bitwise_equal(x, stored[name]) for name, x in state.items()
    )
