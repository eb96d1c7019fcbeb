"""Train with the Trainer of transformers, interrupt it, and resume from a compressed checkpoint.

The import of SlimTrainer is the only change to a script for the Trainer.

Prints:

    saved: checkpoint-10 checkpoint-20
    resumed at step 20, finished at step 40
    equal to a run without interruption: True
    from_pretrained loads the best checkpoint: True
"""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from slimtensors.transformers import SlimTrainer as Trainer  # instead of: from transformers import


class Interrupt(TrainerCallback):
    """Stop as a killed job would."""

    def on_step_end(self, args, state, control, **parts):
        if state.global_step == 25:
            raise KeyboardInterrupt


def collate(rows):
    ids = torch.stack([ids for (ids,) in rows])
    return {"input_ids": ids, "labels": ids}


def build_trainer(folder, *callbacks):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    data = TensorDataset(torch.randint(0, 256, (64, 32)))
    args = TrainingArguments(
        folder,
        max_steps=40,
        save_steps=10,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=10,
        load_best_model_at_end=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


whole = build_trainer("whole")
whole.train()

try:
    build_trainer("run", Interrupt()).train()
except KeyboardInterrupt:
    print("saved:", *sorted(path.name for path in Path("run").glob("checkpoint-*")))

resumed = build_trainer("run")
resumed.train(resume_from_checkpoint=True)
print("resumed at step 20, finished at step", resumed.state.global_step)
pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
print("equal to a run without interruption:", all(torch.equal(x, y) for x, y in pairs))

best = AutoModelForCausalLM.from_pretrained(resumed.state.best_model_checkpoint)
pairs = zip(resumed.model.parameters(), best.parameters(), strict=True)
print("from_pretrained loads the best checkpoint:", all(torch.equal(x, y) for x, y in pairs))
