"""SlimCheckpoints in the Trainer of transformers."""

import pytest
import torch
from strategies import same_bits
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from slimtensors.checkpoint import points, verify_run
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.transformers.trainer import SlimCheckpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Lines(Dataset):
    """A few lines of random tokens."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 64, (16,), generator=g)
        return {"input_ids": ids, "labels": ids}


class Losses(TrainerCallback):
    """Record the loss of each step."""

    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **parts):
        if logs and "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


class Stop(TrainerCallback):
    """Stop training after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **parts):
        control.should_training_stop = state.global_step >= self.step


def trained(folder, *callbacks, resume=None, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    losses = Losses()
    args = TrainingArguments(
        folder,
        **{"save_strategy": "no", **options},
        per_device_train_batch_size=4,
        max_steps=16,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        LlamaForCausalLM(config), args, train_dataset=Lines(), callbacks=[losses, *callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return losses.seen, dict(trainer.model.state_dict())


@pytest.mark.parametrize("stop", [9, 12])  # in the middle of an epoch, and at its end
def test_a_resumed_run_is_bitwise_equal(tmp_path, stop):
    losses, model = trained(tmp_path / "whole")
    run = tmp_path / "run"
    trained(run, SlimCheckpoints(every=3, keep_last=2), Stop(stop))
    assert points(run)[-1].name == f"checkpoint-{stop}"
    again, resumed = trained(run, SlimCheckpoints(every=3, keep_last=2), resume=True)
    assert again == {step: loss for step, loss in losses.items() if step > stop}
    assert all(same_bits(x, resumed[name]) for name, x in model.items())
    assert verify_run(run)
    assert points(run)[-1].name == "checkpoint-15"
    assert points(run)[-1].manifest.metrics["loss"] == losses[14]  # the last that was logged


def test_other_save_strategies_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="save_strategy='no'"):
        trained(tmp_path, SlimCheckpoints(), save_strategy="steps")


def test_an_old_run_is_not_overwritten(tmp_path):
    trained(tmp_path, SlimCheckpoints(every=3), Stop(3))
    with pytest.raises(
        ConfigError, match="contains checkpoint-3, but training resumes from step 0"
    ):
        trained(tmp_path, SlimCheckpoints(every=3), Stop(3))


def test_training_continues_past_a_damaged_checkpoint(tmp_path):
    trained(tmp_path, SlimCheckpoints(every=3, keep_last=2), Stop(6))
    state = tmp_path / "checkpoint-6" / "state.safetensors"
    raw = bytearray(state.read_bytes())
    raw[-9] ^= 1
    state.write_bytes(raw)
    older = str(tmp_path / "checkpoint-3")
    with pytest.raises(CorruptFileError, match=f"pass resume_from_checkpoint='{older}'"):
        trained(tmp_path, SlimCheckpoints(every=3), resume=True)
    trained(tmp_path, SlimCheckpoints(every=3, keep_last=2), Stop(6), resume=older)
    assert (tmp_path / "damaged-checkpoint-6").is_dir()
    trained(tmp_path, SlimCheckpoints(every=3, keep_last=1), Stop(9), resume=True)
    assert points(tmp_path)[-1].name == "checkpoint-9"
    assert list(verify_run(tmp_path).damaged) == ["damaged-checkpoint-6"]
