"""Train a small byte-level Llama on the sources of Python's standard library, with checkpoints."""

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
from slimtensors.report import CheckpointReport, collect_checkpoints
from slimtensors.storage import SINGLE, write_json
from slimtensors.tensor import Json, bitwise_equal

LENGTH = 128
"""Sequence length in tokens."""

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_EVALUATION_EVERY = 12
"""One file of this many is for evaluation only."""
_EXCERPT_PIECES, _PIECE_BYTES = 128, 1024


def training_text() -> bytes:
    """Return the text to train on."""
    excluded = set(_evaluation_files())
    return _read_all(path for path in _library_files() if path not in excluded)


def evaluation_text() -> bytes:
    """Return the text to evaluate on."""
    return _read_all(_evaluation_files())


def excerpt(text: bytes) -> str:
    """Return equally spaced pieces of a text, enough for calibration."""
    step = max(len(text) // _EXCERPT_PIECES, 1)
    pieces = (text[i : i + _PIECE_BYTES] for i in range(0, len(text), step))
    return b"".join(pieces).decode(errors="ignore")


def text_rows(text: bytes, count: int, *, seed: int) -> Tensor:
    """Return `count` random pieces of a text as rows of byte values."""
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(numbers) - LENGTH, (count, 1), generator=random)
    return numbers[starts + torch.arange(LENGTH)].long()


def _library_files() -> list[Path]:
    return sorted(LIBRARY.glob("*.py"))


def _evaluation_files() -> list[Path]:
    return _library_files()[::_EVALUATION_EVERY]


def _read_all(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that a byte-level tokenizer maps to the same code point; others are mapped above 255."""


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token ids are byte values: `tokenizer.json` and its config."""
    level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "vocab": _vocabulary(), "merges": []}
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


def _vocabulary() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    printable = {chr(byte): byte for byte in _PRINTABLE}
    return printable | {chr(256 + i): byte for i, byte in enumerate(others)}


_BATCH_SIZE = 12
_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and its learning rate schedule."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    def step(self, tokens: Tensor) -> float:
        """Take one optimizer step on a batch, and return the loss."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss.detach())


def new_training(steps: int, *, layers: int = 4, seed: int = 0) -> Training:
    """Return an untrained Llama with optimizer and schedule for `steps` steps."""
    torch.manual_seed(seed)
    model = _new_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    return Training(model, optimizer, schedule)


def training_batch(text: bytes, step: int) -> Tensor:
    """Return the batch of a step."""
    return text_rows(text, _BATCH_SIZE, seed=1000 + step)


def write_llama(model: Any, folder: Path) -> None:
    """Write a model folder in bfloat16: weights, config and byte-level tokenizer."""
    folder.mkdir(parents=True)
    weights = {name: x.bfloat16() for name, x in model.state_dict().items()}
    save(weights, folder / SINGLE, preset="dense")
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
"""Checkpoint profile -> folder. Both profiles keep the weights exact."""

OnStep = Callable[[int, int, float], object]
"""Called after each step with its number, the number of steps, and the loss."""


@dataclass(frozen=True)
class CheckpointRun:
    """The checkpoints of a training run, and their costs."""

    profile: str
    checkpoints: list[CheckpointReport]
    save_seconds: float
    """Per checkpoint."""
    load_seconds: float
    """For the newest checkpoint."""
    is_exact: bool
    """Whether the newest weights are bitwise equal to those of the model."""
    moment_error: float
    """Mean relative RMS error of the newest optimizer moments."""

    @property
    def bytes(self) -> int:
        """Total size of the checkpoints."""
        return sum(checkpoint.bytes for checkpoint in self.checkpoints)

    @property
    def dense_bytes(self) -> int:
        """Total size of the states in memory."""
        return sum(checkpoint.dense_bytes for checkpoint in self.checkpoints)


def train(
    training: Training,
    folder: Path,
    batch_of: Callable[[int], Tensor],
    steps: int,
    on_step: OnStep,
) -> list[CheckpointRun]:
    """Train while saving eight checkpoints with each profile, and check them."""
    every = max(steps // _SAVES, 1)
    parts = (training.model, training.optimizer, training.schedule)
    save_seconds = dict.fromkeys(RUNS, 0.0)
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
            loss = training.step(batch_of(step))
            for profile, ckpt in loops.items():
                start = time.perf_counter()
                ckpt.step(loss=loss)
                save_seconds[profile] += time.perf_counter() - start
            on_step(step + 1, steps, loss)
        if steps % every:
            for ckpt in loops.values():
                ckpt.save(loss=loss)
    return [_check_run(folder, profile, training.model, save_seconds[profile]) for profile in RUNS]


def _check_run(
    folder: Path, profile: str, model: nn.Module, total_save_seconds: float
) -> CheckpointRun:
    run = folder / RUNS[profile]
    newest = points(run)[-1]
    start = time.perf_counter()
    state = load_checkpoint(newest.path)
    load_seconds = time.perf_counter() - start
    checkpoints, errors = collect_checkpoints(run), newest.manifest.errors.values()
    return CheckpointRun(
        profile,
        checkpoints,
        total_save_seconds / len(checkpoints),
        load_seconds,
        _has_weights(model, state["model"]),
        fmean(errors) if errors else 0.0,
    )


def _has_weights(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == expected.keys() and all(
        bitwise_equal(x, expected[name]) for name, x in state.items()
    )
