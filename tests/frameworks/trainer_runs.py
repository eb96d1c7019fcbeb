"""A small language model trained by the Trainer of transformers, native or ours."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from slimtensors.transformers import SlimTrainer


class Lines(Dataset):
    """A few lines of random tokens."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 64, (16,), generator=g)
        return {"input_ids": ids, "labels": ids}


class Recorder(TrainerCallback):
    """Record the loss of each step and the names of the checkpoints that were saved."""

    def __init__(self):
        self.losses, self.saved = {}, []

    def on_log(self, args, state, control, logs=None, **parts):
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_save(self, args, state, control, **parts):
        self.saved.append(state.global_step)


class StopAt(TrainerCallback):
    """Stop training after a step, as a killed job would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **parts):
        if state.global_step >= self.step:
            raise KeyboardInterrupt


class Plain(nn.Module):
    """A model that is not one of transformers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        x = self.norm(self.embed(input_ids).flatten(0, 1))
        logits = self.head(torch.nn.functional.dropout(x, 0.1, self.training))
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten()), "logits": logits}


def make_llama(**options):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.2,
        **options,
    )
    return LlamaForCausalLM(config)


def build(cls, folder, *callbacks, make_model=make_llama, settings=None, **options):
    """Return a Trainer of this class and its recorder."""
    torch.manual_seed(0)
    recorder = Recorder()
    args = TrainingArguments(
        folder,
        **{
            "save_strategy": "steps",
            "save_steps": 3,
            "per_device_train_batch_size": 4,
            "max_steps": 14,
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "seed": 1,
            **options,
        },
    )
    more = {"checkpoints": settings} if cls is not Trainer and settings is not None else {}
    trainer = cls(
        make_model(),
        args,
        train_dataset=Lines(),
        eval_dataset=Lines(),
        callbacks=[recorder, *callbacks],
        **more,
    )
    return trainer, recorder


def interrupt(cls, folder, step, **options):
    """Train until a step, and stop as if by Ctrl-C."""
    trainer, _ = build(cls, folder, StopAt(step), **options)
    try:
        trainer.train()
    except KeyboardInterrupt:
        return trainer
    raise AssertionError("not interrupted")


def train(cls, folder, *callbacks, resume=None, **options):
    """Train to the end; return the Trainer and its recorder."""
    trainer, recorder = build(cls, folder, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


__all__ = ["SlimTrainer", "Trainer", "build", "interrupt", "make_llama", "names", "train"]
