"""Write the golden files of deltas, states, checkpoints and distributed checkpoints, version 1.

    python tests/golden/slim/make_states.py tests/golden/slim/1

The files here were made once and are never rewritten. Every file or folder has `expected` values
beside it. A new version gets new files, from a program of its own.
"""

import json
import shutil
import sys
from collections import Counter, OrderedDict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expected import write_expected
from make import half_zero, noise
from slimtensors.distributed import StorageReader, StorageWriter
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import slimtensors
from slimtensors.checkpoint import (
    Profile,
    build_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from slimtensors.folder import diff_folder

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return about normal numbers."""
    count = int(np.prod(shape))
    sums = noise(seed, 12 * count, torch.uint8).view(12, count).float().sum(0)
    return ((sums - 1536) / 256 * scale).view(shape)


def changed(x: torch.Tensor, seed: int, scale: float = 0.01) -> torch.Tensor:
    """Return floats with small changes, larger for large numbers."""
    y = x.float() * (1 + normal(seed, *x.shape, scale=scale)) + normal(seed + 1, *x.shape) * 1e-6
    return y.to(x.dtype)


def make_models() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a base and a model for a delta with every kind of entry."""
    base = {str(d)[6:]: normal(i, 24, 40, scale=0.1).to(d) for i, d in enumerate(FLOATS)}
    new = {name: changed(x, 50 + i) for i, (name, x) in enumerate(base.items())}
    wild = noise(60, 96, torch.float32)
    base |= {
        "integers": noise(61, 400, torch.int16) // 64,
        "unsigned": noise(62, 300, torch.uint8),
        "wide": noise(63, 90, torch.int64),
        "fnuz": normal(64, 20, 30, scale=0.1).to(torch.float8_e4m3fnuz),
        "bits": wild,
        "kept": normal(65, 8, 8).bfloat16(),
        "other shape": normal(66, 4, 8),
        "only base": normal(67, 4),
    }
    words = wild.view(torch.int32).clone()
    words[::7] += 3
    words[:4] = torch.tensor([-(2**31), 0, 0x7FC12345, -1], dtype=torch.int32)
    new |= {
        "integers": base["integers"] + (noise(70, 400, torch.uint8) % 3).short() - 1,
        "unsigned": base["unsigned"] + noise(71, 300, torch.uint8) % 2,
        "wide": base["wide"] + 1,
        "fnuz": changed(base["fnuz"], 72, 0.02),
        "bits": words.view(torch.float32),
        "kept": base["kept"],
        "other shape": normal(73, 8, 4),
        "only new": half_zero(74, 10, 20, torch.float32),
        "scalar": torch.tensor(-0.0),
        "none": torch.empty(0, 3),
    }
    new["tied"] = new["float32"]
    return base, new


def write_deltas(folder: Path) -> None:
    """Write a delta between files and one between folders of shards, with their bases."""
    base, new = make_models()
    folder.mkdir(parents=True)
    slimtensors.save(base, folder / "base.safetensors", preset="lossless")
    slimtensors.save(new, folder / "new.safetensors", preset="dense")
    slimtensors.diff(folder / "new.safetensors", folder / "base.safetensors", folder / "file")
    (folder / "file").rename(folder / "file.safetensors")
    (folder / "new.safetensors").unlink()
    write_expected(new, folder / "expected-file.json")
    shards = {k: new[k] for k in ("bfloat16", "float16", "kept", "only new", "scalar")}
    slimtensors.save(shards, folder / "new", preset="dense", max_shard_size=2500)
    (folder / "new" / "config.json").write_text('{"model_type": "golden"}\n')
    diff_folder(folder / "new", folder / "base.safetensors", folder / "folder")
    shutil.rmtree(folder / "new")
    write_expected(shards, folder / "expected-folder.json")
    delta = read_manifest(folder / "folder" / "delta.safetensors")["delta"]
    assert delta["files"]
    tables = (read_manifest(folder / "file.safetensors")["delta"]["tensors"], delta["tensors"])
    kinds = {entry[0] for table in tables for entry in table.values()}
    assert kinds == {"whole", "same", "difference", "by-exponent"}, kinds


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a file."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return json.loads(header["__metadata__"]["slimtensors"])


def make_state() -> dict[str, Any]:
    """Return a state with every type of value that the outline knows."""
    ordered: Any = OrderedDict([("weight", normal(80, 3, 5)), ("bias", normal(81, 5).half())])
    ordered._metadata = OrderedDict([("", {"version": 2})])
    shared = normal(82, 6, 6).bfloat16()
    return {
        "model": ordered,
        "plain": OrderedDict([("b", 1), ("a", [])]),
        "tensors": {"one": shared, "same": shared, "none": torch.empty(2, 0), 0: torch.tensor(7)},
        "a": {"b": torch.tensor([1.5])},
        "a.b": torch.tensor([2.5]),
        "arrays": [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1 + 2j]), np.zeros(0)],
        "scalars": (np.float32(0.1), np.int64(-5), np.bool_(True), np.complex64(1 - 1j)),
        "numbers": [0, -1, 2**80, 0.1, -0.0, 1e300, 5e-324, True, False, None],
        "floats": {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")},
        "complex": [1.5 - 2j, complex("nan"), complex(0, -float("inf"))],
        "bytes": [b"", b"\x00\xffslim"],
        "text": {"": "", "ü 🙂": 'a "b" \\ \n\t\x00'},
        "keys": {1: "int", 2.5: "float", None: "none", (1, "x"): "tuple", False: "bool"},
        "tuple": ((), ((1,), [2, (3,)])),
        "counter": Counter({3: 2, "x": 1}),
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.complex128],
        "devices": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
        "size": torch.Size([2, 0, 3]),
        "no size": torch.Size([]),
    }


def write_states(folder: Path) -> None:
    """Write a state with everything, one in the other dialect, and one without tensors."""
    folder.mkdir(parents=True)
    sparse = {"step": 3, "weights": {"w": half_zero(83, 16, 16, torch.float32)}}
    for name, state, dialect in (
        ("everything", make_state(), "slim"),
        ("compressed-tensors", sparse, "compressed-tensors"),
        ("small", {"step": 3}, "slim"),
    ):
        preset = "lossless" if dialect == "slim" else "sparse"
        slimtensors.save(state, folder / f"{name}.safetensors", dialect=dialect, preset=preset)
        write_expected(state, folder / f"expected-{name}.json")


class Net(nn.Module):
    """A model with an embedding, a tied weight, norms, buffers, and weights of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 16)
        self.up = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.down = nn.Linear(16, 16, bias=False).bfloat16()
        self.half = nn.Linear(16, 16, bias=False).half()
        self.out = nn.Linear(16, 16, bias=False)
        self.out.weight = self.words.weight


class Run:
    """A run whose gradients are noise: the states do not depend on the machine's kernels."""

    def __init__(self) -> None:
        self.model = Net()
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                p.copy_(normal(100 + i, *p.shape, scale=0.2))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, eps=1e-4, weight_decay=9.0
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 3, 5])
        self.steps = 0

    def train(self, steps: int) -> None:
        """Update the weights."""
        for _ in range(steps):
            self.steps += 1
            for i, p in enumerate(self.model.parameters()):
                seed = 1000 * self.steps + i
                rows = (
                    normal(500 + i, *p.shape[:1], scale=1.0).exp2().view(-1, *[1] * (p.dim() - 1))
                )
                p.grad = (normal(seed, *p.shape, scale=0.01) * rows).to(p.dtype)
            self.optimizer.step()
            self.scheduler.step()
            self.model.norm.num_batches_tracked += 1

    def state(self, *, rng_state: bool = False, **options: Any) -> dict[str, Any]:
        """Return the state."""
        return build_checkpoint(
            self.model,
            self.optimizer,
            self.scheduler,
            step=self.steps,
            epoch=self.steps // 4,
            metrics={"loss": 1 / self.steps},
            rng_state=rng_state,
            **options,
        )


def make_moments(step: int) -> dict[str, Any]:
    """Return moments that are smaller if the first ones are sorted by the second ones."""
    weight = normal(302, 24, 40, scale=0.1)
    model = {"one": weight, "two": weight.bfloat16()}
    if step > 1:
        model = {name: changed(x * 0.98, 303) for name, x in model.items()}
    states: dict[int, Any] = {}
    for i, dtype in enumerate((torch.float32, torch.bfloat16)):
        mask = noise(300 + step, 64 * 64, torch.uint8).view(64, 64) > 32
        scale = (normal(304, 64, 64, scale=2).round() * 2).exp2() * mask
        first, second = (scale / 256).to(dtype), (scale.square() / 65536).to(dtype)
        states[i] = {"exp_avg": first, "exp_avg_sq": second}
    return {"model": model, "optimizer": {"state": states}, "step": step}


def write_checkpoints(folder: Path) -> None:
    """Write full and delta checkpoints of all profiles, and deltas of deltas."""
    run = Run()
    run.train(4)
    folder.mkdir(parents=True)

    def save(name: str, state: dict[str, Any], **options: Any) -> None:
        save_checkpoint(state, folder / name, **options)
        loaded = load_checkpoint(folder / name)
        write_expected(loaded, folder / f"expected-{name}.json")

    save("full", run.state(rng_state=True, extra={"sizes": torch.Size([1, 2]), "note": "ü"}))
    save("base", run.state())
    save("model", build_checkpoint(run.model, rng_state=False))
    save("full-optimizer-bf16", run.state(), profile="optimizer-bf16")
    save("full-history", run.state(), profile="history")
    save("int8", run.state(), quantize_i8=True)
    save("moments", make_moments(1), profile="optimizer-bf16")
    save("delta-moments", make_moments(2), base=folder / "moments")
    run.train(2)
    base = folder / "base"
    for profile in ("exact", "optimizer-bf16", "optimizer", "all"):
        save(f"delta-{profile}", run.state(), base=base, profile=profile)
    save("delta-history", run.state(), base=folder / "full-history", profile="history")
    own = Profile("own", first_bits=9, second_bits=12, weight_bits=4)
    save("delta-own", run.state(), base=base, profile=own)
    run.train(1)
    with torch.no_grad():
        run.model.up.weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save("chain", run.state(), base=folder / "delta-all", profile="all")

    kinds: set[str] = set()
    keys: set[str] = set()
    for path in folder.glob("*/state.safetensors"):
        for entry in read_manifest(path).get("delta", {}).get("checkpoint", {}).values():
            kinds.add(entry["as"])
            keys |= entry.keys()
    assert kinds == {
        *("whole", "same", "difference", "by-exponent", "grouped", "steps", "roots")
    }, kinds
    assert keys == {*("as", "dtype", "shape", "bits", "seed", "base", "times", "by", "step")}, keys


def make_sharded(step: int) -> dict[str, Any]:
    """Return the state of a distributed run."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def split(x: torch.Tensor, *how: Any) -> torch.Tensor:
        return distribute_tensor(x, mesh, how)

    weight = normal(200, 41, 24, scale=0.1)
    first, second = normal(201, 41, 24, scale=1e-3), normal(202, 41, 24, scale=1e-4).square()
    bias = normal(203, 7).bfloat16()
    if step > 10:
        weight, first, second = changed(weight, 204), changed(first, 206, 0.3), second * 0.96
        weight[20:] = normal(200, 41, 24, scale=0.1)[20:]
    return {
        "model": {
            "rows": split(weight, Shard(0)),
            "columns": split(weight.bfloat16(), Shard(1)),
            "copies": split(bias, Replicate()),
            "one": split(torch.ones(1), Shard(0)),
            "scale": torch.tensor(2.5),
            "none": torch.empty(0, 3),
        },
        "optim": {
            "state": {
                "rows": {
                    "step": torch.tensor(float(step)),
                    "exp_avg": split(first, Shard(0)),
                    "exp_avg_sq": split(second, Shard(0)),
                }
            },
            "param_groups": [{"params": ["rows"], "lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "step": step,
        "rng": (3, (1, 2), None, b"\x00\x01"),
        "dtype": torch.bfloat16,
    }


def run_rank(rank: int, world: int, folder: Path) -> None:
    """Save the distributed checkpoints of one rank."""
    store = dist.FileStore(str(folder / f".store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def save(name: str, step: int, **options: Any) -> None:
        writer = StorageWriter(folder / name, piece_bytes=1900, **options)
        dcp.save(make_sharded(step), storage_writer=writer)
        loaded = make_sharded(99)
        dcp.load(loaded, storage_reader=StorageReader(folder / name))
        whole = {k: x.full_tensor() for k, x in iterate(loaded) if hasattr(x, "full_tensor")}
        if rank == 0:
            write_expected(gather(loaded, whole), folder / f"expected-{name}.json")

    save(f"ranks-{world}", 10)
    if world == 2:
        save("ranks-2-delta", 15, base=folder / "ranks-1")
        save("ranks-2-all", 15, base=folder / "ranks-2", profile="all")
    else:
        save("ranks-1-optimizer", 10, profile="optimizer")
    dist.destroy_process_group()


def iterate(value: Any, path: str = "") -> Any:
    """Yield the tensors of a state with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from iterate(part, f"{path}.{key}")


def gather(value: Any, whole: dict[str, torch.Tensor], path: str = "") -> Any:
    """Return the state with whole tensors."""
    if isinstance(value, dict):
        return {key: gather(part, whole, f"{path}.{key}") for key, part in value.items()}
    return whole.get(path, value)


def write_distributed(folder: Path) -> None:
    """Write checkpoints of one and of two ranks, and deltas."""
    folder.mkdir(parents=True)
    for world in (1, 2):
        ranks = [
            get_context("spawn").Process(target=run_rank, args=(rank, world, folder))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        (folder / f".store-{world}").unlink()


def main(folder: Path) -> None:
    """Write all files."""
    write_deltas(folder / "deltas")
    write_states(folder / "states")
    write_checkpoints(folder / "checkpoints")
    write_distributed(folder / "distributed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
