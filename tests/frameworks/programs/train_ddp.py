"""Train with the Trainer in every process of torchrun; write the weights and losses of rank 0.

torchrun --nproc-per-node=2 train_ddp.py native|ours FOLDER RESULT [STOP] [RESUME]
"""

import os
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from frameworks.trainer_runs import SlimTrainer, StopAt, Trainer, build


class Dropped(torch.nn.Module):
    """A model whose loss depends on the random state of each process."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        x = torch.nn.functional.dropout(self.embed(input_ids), 0.5, self.training)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}


kind, folder, result, stop, resume = [*sys.argv[1:], *["0"] * 5][:5]
trainer, recorder = build(
    Trainer if kind == "native" else SlimTrainer,
    folder,
    *([StopAt(int(stop))] if int(stop) else []),
    make_model=Dropped,
    ddp_backend="gloo",
    max_steps=9,
    save_total_limit=2,
    load_best_model_at_end=True,
    eval_strategy="steps",
    eval_steps=3,
)
with suppress(KeyboardInterrupt):
    trainer.train(resume_from_checkpoint=True if resume == "resume" else None)
if trainer.is_world_process_zero():
    torch.save({"model": trainer.model.state_dict(), "losses": recorder.losses}, result)
dist.barrier()
os._exit(0)  # threads of gloo may abort while the interpreter ends
