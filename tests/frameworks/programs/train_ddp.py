"""Train in every process of torchrun: natively, with SlimTrainer until a step, and resumed.

torchrun --nproc-per-node=2 train_ddp.py FOLDER
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from frameworks.trainer_runs import SlimTrainer, StopAt, Trainer, build, names


class Dropped(torch.nn.Module):
    """A model whose loss depends on the random state of each process."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        torch.rand(dist.get_rank())  # all processes start with the same random state
        x = torch.nn.functional.dropout(self.embed(input_ids), 0.5, self.training)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}


def run(cls, folder, *callbacks, resume=None):
    """Train, until a callback interrupts it; return what rank 0 needs for comparisons."""
    trainer, recorder = build(
        cls,
        folder,
        *callbacks,
        make_model=Dropped,
        ddp_backend="gloo",
        max_steps=9,
        save_total_limit=2,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=3,
    )
    with suppress(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    state = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    return {"model": state, "losses": recorder.losses, "names": names(folder)}


root = Path(sys.argv[1])
results = {
    "whole": run(Trainer, root / "whole"),
    "interrupted": run(SlimTrainer, root / "run", StopAt(7)),
    "resumed": run(SlimTrainer, root / "run", resume=True),
}
if dist.get_rank() == 0:
    torch.save(results, root / "results.pt")
dist.barrier()
os._exit(0)  # threads of gloo may abort while the interpreter ends
