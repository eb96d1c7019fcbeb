"""The Trainer's arguments, as we use them: it trains, and our checkpoints are saved beside it."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from slimtensors.errors import ConfigError, nearest


def arguments(given: Any, folder: Path) -> TrainingArguments:
    """Return arguments, from a mapping or from the Trainer's own, for a run in a folder."""
    if given is None:
        given = {}
    if isinstance(given, Mapping):
        known = {each.name for each in fields(TrainingArguments) if each.init}
        for name in given.keys() - known:
            raise ConfigError(f"training_args: there is no {name!r}; {nearest(str(name), known)}")
        is_cpu = not torch.accelerator.is_available()  # then torch warns, and bf16 is refused
        here = {"dataloader_pin_memory": not is_cpu, "use_cpu": is_cpu}
        given = TrainingArguments(**{**here, **given, "output_dir": str(folder)})
    if not isinstance(given, TrainingArguments):
        raise ConfigError(f"training_args: are a TrainingArguments or a mapping, not {given!r}")
    if given.save_strategy == SaveStrategy.BEST:
        raise ConfigError("save_strategy: is no, steps or epoch here")
    if given.load_best_model_at_end:
        raise ConfigError("load_best_model_at_end: the best model may not have its final masks yet")
    mine = copy(given)
    mine.output_dir = str(folder)
    return mine


def saving(args: TrainingArguments, steps: int, steps_per_epoch: int) -> dict[str, Any] | None:
    """Return what `SlimCheckpoints` is to do about what the arguments ask for; none if nothing."""
    if args.save_strategy == SaveStrategy.NO:
        return None
    every = float(steps_per_epoch)
    if args.save_strategy == SaveStrategy.STEPS:
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * steps
    return {"every": max(1, round(every)), "keep_last": args.save_total_limit}


def without_saving(args: TrainingArguments) -> TrainingArguments:
    """Return arguments with which the Trainer itself saves nothing."""
    mine = copy(args)
    mine.save_strategy = SaveStrategy.NO
    return mine
