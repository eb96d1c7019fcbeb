"""Write the golden files of version 2.

    python tests/golden/slim/make_2.py tests/golden/slim/2

The files here were made once and are never rewritten. Every file or folder has `expected` values
beside it. A new version gets new files, from a program of its own.
"""

import hashlib
import json
import shutil
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expected import write_expected
from make import half_zero, noise
from make_states import normal, read_manifest
from torch import nn

import slimtensors
from slimtensors.checkpoint import build_checkpoint, load_checkpoint, save_checkpoint
from slimtensors.folder import compress_folder, diff_folder


def make_state() -> dict[str, Any]:
    """Return a state with every type of value that version 2 adds."""
    images = normal(400, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    model = OrderedDict([("weight", images.half())])
    model._metadata = OrderedDict()  # type: ignore[attr-defined]
    return {
        "model": model,
        "orders": [images, normal(401, 6, 4).T, normal(402, 2, 3, 4).permute(1, 2, 0)],
        "tied": [images, images],
        "leaf": normal(403, 3).requires_grad_(),
        "parameter": nn.Parameter(normal(404, 4, 3).T),
        "frozen": nn.Parameter(normal(405, 2), requires_grad=False),
        "no dimensions": [np.array(1.5), np.array(2, np.int8)],
        "big-endian": [np.arange(3, dtype=">f4"), np.array([1 + 2j], ">c8"), np.int16(5)],
        "dates": [np.array(["2020-01-01", "NaT"], "M8[D]"), np.timedelta64(3, "ms")],
        "text": [np.str_("ü 🙂"), np.bytes_(b"\x00\xff")],
        "tables": [defaultdict(list, a=[1]), defaultdict(None, {2: 3}), defaultdict(int)],
        "queues": [deque([1, 2.5], maxlen=5), deque(["a"]), deque(maxlen=0)],
        "sets": [{3, 1, "x"}, frozenset({(1, 2), None}), set()],
        "integers": [2**1999, 2**2000, -(7**5000)],
    }


def write_states(folder: Path) -> None:
    """Write a state with all types."""
    folder.mkdir(parents=True)
    slimtensors.save(make_state(), folder / "everything.safetensors")
    write_expected(make_state(), folder / "expected-everything.json")


def hash_files(folder: Path) -> dict[str, str]:
    """Return SHA-256 sums of the files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of a model."""
    return {
        "a.weight": half_zero(410, 24, 30, torch.bfloat16),
        "a.bias": normal(411, 24),
        "b.weight": (normal(412, 30, 40) * 0.1).bfloat16(),
        "counter": torch.tensor(3),
        "flags": noise(413, 30, torch.uint8) > 99,
        "none": torch.empty(0, 4),
    }


def write_plain(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a plain file whose header is formatted unlike ours."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    header: dict[str, Any] = {}
    data = b""
    for name, x in reversed(tensors.items()):
        raw = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"data_offsets": span, "dtype": names[x.dtype], "shape": list(x.shape)}
        data += raw
    text = json.dumps({**header, "__metadata__": metadata}, indent=1).encode() + b" " * 13
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_model(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a plain model folder of two files."""
    folder.mkdir(parents=True)
    files = {"model-1.safetensors": list(tensors)[:2], "model-2.safetensors": list(tensors)[2:]}
    for file, names in files.items():
        write_plain({n: tensors[n] for n in names}, folder / file, {"format": "pt", "n": file})
    weight_map = {name: file for file, names in files.items() for name in reversed(names)}
    index = {"weight_map": weight_map, "metadata": {"total_size": 1, "note": "ü"}}
    text = json.dumps(index, ensure_ascii=False, indent=3)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text('{"model_type":"golden",  "b": 1, "a": 2}')


def write_originals(folder: Path) -> None:
    """Write compressed models that contain the headers of their originals, and a delta."""
    folder.mkdir(parents=True)
    tensors = make_tensors()
    source = folder / "plain.safetensors"
    write_plain(tensors, source, {"zeta": "ü", "alpha": '{"a": 1}'})
    with slimtensors.open(source) as archive:
        slimtensors.save(archive, folder / "file.safetensors", preset="lossless")
    write_model(tensors, folder / "model")
    compress_folder(folder / "model", folder / "folder", preset="lossless")
    changed = {k: x + 1e-3 if x.dtype is torch.bfloat16 else x for k, x in tensors.items()}
    write_model(changed, folder / "changed")
    diff_folder(folder / "changed", folder / "file.safetensors", folder / "delta")
    sums = {
        "file": {"plain.safetensors": hashlib.sha256(source.read_bytes()).hexdigest()},
        "folder": hash_files(folder / "model"),
        "delta": hash_files(folder / "changed"),
    }
    (folder / "expected-sums.json").write_text(json.dumps(sums, indent=1) + "\n")
    source.unlink()
    for name in ("model", "changed"):
        shutil.rmtree(folder / name)


def write_shards(folder: Path) -> None:
    """Write shards that share a generation."""
    slimtensors.save(make_tensors(), folder / "model", max_shard_size=1500)
    assert all(
        "generation" in read_manifest(path) for path in (folder / "model").glob("*.safetensors")
    )
    write_expected(slimtensors.load(folder / "model"), folder / "expected-model.json")


class Net(nn.Module):
    """A model with weights in two memory orders."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.out = nn.Linear(40, 32, bias=False).bfloat16()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(normal(seed + i, *p.shape, scale=0.2))


def make_doubles(steps: int) -> dict[str, Any]:
    """Return a state in float64 whose second moments decay."""
    second = normal(450, 24, 40).square().double() * 0.99**steps
    second += second * normal(451 + steps, 24, 40).double() * 1e-12
    return {
        "model": {"w": normal(452, 24, 40).double() + steps * 1e-9},
        "optimizer": {
            "state": {
                0: {
                    "step": torch.tensor(10.0 + steps),
                    "exp_avg": normal(453 + steps, 6, 8).double(),
                    "exp_avg_sq": second,
                }
            },
            "param_groups": [{"params": [0], "betas": (0.9, 0.99)}],
        },
        "step": 10 + steps,
    }


def write_doubles(folder: Path) -> None:
    """Write checkpoints in float64."""
    for name, steps, base in (("double", 0, None), ("delta-double", 2, folder / "double")):
        save_checkpoint(make_doubles(steps), folder / name, base=base)
        write_expected(make_doubles(steps), folder / f"expected-{name}.json")
    delta = read_manifest(folder / "delta-double" / "state.safetensors")["delta"]
    assert "times" in delta["checkpoint"]["optimizer.state.0.exp_avg_sq"]


def write_checkpoints(folder: Path) -> None:
    """Write sealed checkpoints of two models, of equal tensors, and deltas."""
    models = {"student": Net(420), "teacher": Net(420)}
    optimizers = {name: torch.optim.AdamW(net.parameters()) for name, net in models.items()}

    def train(seed: int) -> None:
        for name, net in models.items():
            for i, p in enumerate(net.parameters()):
                grad = normal(seed + i + 50 * len(name), *p.shape, scale=0.01).to(p.dtype)
                p.grad = grad.to(memory_format=torch.preserve_format)
            optimizers[name].step()

    def save(name: str, **options: Any) -> None:
        state = build_checkpoint(
            models=models,
            optimizers=optimizers,
            step=3,
            rng_state=False,
            metrics={"loss": 0.5, "worst": float("nan"), "best": -float("inf")},
            extra={"window": deque([1.0, 2.0], maxlen=3), "copy": models["student"].out.weight + 0},
        )
        save_checkpoint(state, folder / name, **options)
        write_expected(load_checkpoint(folder / name), folder / f"expected-{name}.json")
        manifest = read_manifest(folder / name / "state.safetensors")
        is_exact = "profile" not in options  # rounded tensors have no copies
        assert ("copies" in manifest.get("delta", manifest)) == is_exact

    save("start")
    assert read_manifest(folder / "start" / "state.safetensors")["copies"]
    train(430)
    save("full")
    train(440)
    save("delta-exact", base=folder / "full")
    assert read_manifest(folder / "delta-exact" / "state.safetensors")["delta"]["copies"]
    save("delta-all", base=folder / "full", profile="all")


def main(folder: Path) -> None:
    """Write all files."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_doubles(folder / "checkpoints")
    write_states(folder / "states")
    write_originals(folder / "originals")
    write_shards(folder / "shards")
    write_checkpoints(folder / "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
