"""Tasks for the processes of a group: train, save, load, fail. Each writes a JSON report."""

import gc
import json
import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from slimtensors.checkpoint.distributed import StorageReader, StorageWriter, writer
from slimtensors.checkpoint.distributed.manifest import (
    read_distributed_manifest,
    write_distributed_manifest,
)
from slimtensors.storage.reader import DISTRIBUTED as MANIFEST

WIDE = "model.up.weight"
"""A tensor with many pieces in every layout."""
PIECE = 64 << 10


class Net(nn.Module):
    """A model whose number of rows is not divisible by the number of ranks."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(51, 64)
        self.up = nn.Linear(64, 9001)
        self.down = nn.Linear(9001, 64)
        self.norm = nn.LayerNorm(64)
        self.gain = nn.Parameter(torch.ones(1))  # all ranks but one have an empty shard

    def forward(self, x):
        h = self.words(x)
        h = self.gain * self.norm(h + self.down(torch.tanh(self.up(h))))
        return h @ self.words.weight.T


class Training:
    """A model and its optimizer, sharded over all ranks."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = Net()
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for part in (self.model.up, self.model.down, self.model):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.steps = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            g = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
            x = torch.randint(0, 51, (8,), generator=g)
            loss = nn.functional.cross_entropy(self.model(x), x.roll(1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            losses.append(loss.item())
        return losses

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "steps": self.steps}

    def load(self, path):
        """Load a checkpoint and return the number of decoded bytes."""
        state, reader = self.state(), StorageReader(path)
        dcp.load(state, storage_reader=reader)
        model, optimizer = state["model"], state["optim"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.steps = state["steps"]
        return reader.decoded_bytes


def iter_tensors(value, path=""):
    """Yield names and whole tensors of a state."""
    if isinstance(value, DTensor):
        yield path, value.full_tensor()
    elif isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from iter_tensors(part, f"{path}.{key}" if path else str(key))


def count_shard_bytes(state):
    """Return the bytes of the local shards of a state."""
    if isinstance(state, DTensor):
        return state.to_local().nbytes
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(count_shard_bytes, state.values())) if isinstance(state, dict) else 0


def count_differences(state, folder, name):
    """Return the number of tensors that differ from the reference."""
    want = torch.load(folder / f"{name}.pt")
    found = dict(iter_tensors(state))
    assert found.keys() == want.keys()
    return sum(not torch.equal(x, want[key]) for key, x in found.items())


def keep_reference(state, folder, name):
    whole = dict(iter_tensors(state))
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{name}.pt")


def catch_error(action):
    """Call `action`, and return its error and duration."""
    begin = time.monotonic()
    try:
        action()
    except BaseException as error:
        return {"kind": type(error).__name__, "text": str(error), "time": time.monotonic() - begin}
    return None


def save(state, path, **options):
    dcp.save(state, storage_writer=StorageWriter(path, piece_bytes=PIECE, **options))


def one(folder):
    """Train on one rank, without sharding."""
    run = Training(seed=3)
    run.train(2)
    keep_reference(run.state(), folder, "one")
    save(run.state(), folder / "one")


def two(folder):
    """Train on two ranks and save with all options."""
    rank, report = dist.get_rank(), {}
    run = Training(seed=0)
    run.train(2)
    keep_reference(run.state(), folder, "base")
    save(run.state(), folder / "base")
    run.train(2)
    keep_reference(run.state(), folder, "delta")
    save(run.state(), folder / "delta", base=folder / "base")
    save(run.state(), folder / "small", base=folder / "base", profile="optimizer-bf16")
    report["on"] = run.train(3)

    again = Training(seed=5)
    again.train(1)
    report["decoded"] = again.load(folder / "delta")
    report["shard_bytes"] = count_shard_bytes(again.state())
    report["wrong"] = count_differences(again.state(), folder, "delta")
    report["again"] = again.train(3)

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(300_000.0).view(300, 1000)
    layouts = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    sharded = {name: distribute_tensor(whole, mesh, how) for name, how in layouts.items()}
    save(sharded, folder / "layouts")
    report["layouts"] = {}
    for name, how in layouts.items():
        out = {key: distribute_tensor(torch.zeros_like(whole), mesh, how) for key in layouts}
        dcp.load(out, storage_reader=StorageReader(folder / "layouts"))
        report["layouts"][name] = sum(not torch.equal(x.full_tensor(), whole) for x in out.values())

    again.load(folder / "one")
    report["one"] = count_differences(again.state(), folder, "one")

    snapshot = run.state()
    keep_reference(snapshot, folder, "async")
    saving = dcp.async_save(snapshot, storage_writer=StorageWriter(folder / "async"))
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    getattr(saving, "upload_completion", saving).result()
    again.load(folder / "async")
    report["async"] = count_differences(again.state(), folder, "async")

    report["errors"] = collect_errors(folder, run, rank)
    report["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return report


class FailingPlanner(DefaultSavePlanner):
    """A planner that fails on rank 1."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise OSError("the disk is on fire")
        return super().resolve_data(write_item)


def collect_errors(folder, run, rank):
    """Return the errors of this rank in saves and loads that fail on one rank."""
    state = run.state()
    found = {"exists": catch_error(lambda: save(state, folder / "base", overwrite=False))}

    def burn():
        burnt = StorageWriter(folder / "burnt")
        dcp.save(state, storage_writer=burnt, planner=FailingPlanner())

    found["burnt"] = catch_error(burn)
    gc.collect()
    dist.barrier()
    found["left"] = [p.name for p in folder.iterdir() if "burnt" in p.name]

    version, writer.VERSION = writer.VERSION, writer.VERSION + rank
    found["versions"] = catch_error(lambda: save(state, folder / "versions"))
    writer.VERSION = version
    preset = "lossless" if rank else "lossless-max"
    found["presets"] = catch_error(lambda: save(state, folder / "presets", preset=preset))
    found["targets"] = catch_error(lambda: save(state, folder / f"target{rank}"))

    save(state, folder / "broken")
    for name in ("missing", "mixed", "flipped"):
        if rank == 0:
            damage(folder, name)
        dist.barrier()
        found[name] = catch_error(lambda name=name: run.load(folder / name))
    return found


def damage(folder, name):
    """Write a damaged copy of a checkpoint."""
    target = shutil.copytree(folder / "broken", folder / name)
    file = target / "rank-00001.safetensors"
    if name == "missing":
        file.unlink()
    elif name == "mixed":
        shutil.copy(folder / "async" / file.name, file)
        manifest = read_distributed_manifest(target)
        (target / MANIFEST).unlink()
        files = {**manifest.files, file.name: file.stat().st_size}
        write_distributed_manifest(target, replace(manifest, files=files))
    else:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 16
        file.write_bytes(raw)


def three(folder):
    """Load on three ranks the checkpoints of two."""
    report = {}
    run = Training(seed=9)
    run.train(1)
    for name in ("base", "delta"):
        decoded = run.load(folder / name)
        report[name] = {"decoded": decoded, "shard_bytes": count_shard_bytes(run.state())}
        report[name]["wrong"] = count_differences(run.state(), folder, name)
    mesh = init_device_mesh("cpu", (3,))
    want = torch.load(folder / "delta.pt")[WIDE]
    for name, how in {"columns": [Shard(1)], "copies": [Replicate()]}.items():
        out = {"model": {"up.weight": distribute_tensor(torch.zeros_like(want), mesh, how)}}
        reader = StorageReader(folder / "delta")
        dcp.load(out, storage_reader=reader)
        report[name] = int(not torch.equal(out["model"]["up.weight"].full_tensor(), want))
    report["losses"] = run.train(1)
    save(run.state(), folder / "third", base=folder / "base")
    keep_reference(run.state(), folder, "third")
    run.load(folder / "third")
    report["third"] = count_differences(run.state(), folder, "third")
    report["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return report


class KillingPlanner(DefaultSavePlanner):
    """A planner that kills rank 1 while it writes."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class HangingPlanner(DefaultSavePlanner):
    """A planner that hangs on rank 1."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            time.sleep(120)
        return super().resolve_data(write_item)


def killed(folder, planner=KillingPlanner):
    """Lose a rank while an older checkpoint is being overwritten."""
    state = {"x": torch.arange(6.0), "rows": distribute(torch.arange(40.0))}
    save(state, folder / "kept")
    state = {"x": torch.zeros(6), "rows": distribute(torch.zeros(40))}
    over = StorageWriter(folder / "kept", overwrite=True)
    return catch_error(lambda: dcp.save(state, storage_writer=over, planner=planner()))


def stuck(folder):
    """Wait for a rank that hangs."""
    return killed(folder, HangingPlanner)


def remote(folder):
    """Save a checkpoint and its delta to the URL in `remote.json`, and load the delta."""
    url, options = json.loads((folder / "remote.json").read_text())
    first = {"rows": distribute(torch.arange(4000.0)), "copy": torch.ones(3), "step": 1}
    later = {"rows": distribute(torch.arange(4000.0) + 0.5), "copy": torch.ones(3), "step": 2}
    dcp.save(first, storage_writer=StorageWriter(f"{url}/a", storage_options=options))
    over = StorageWriter(f"{url}/b", base=f"{url}/a", storage_options=options)
    dcp.save(later, storage_writer=over)
    loaded = {"rows": distribute(torch.zeros(4000)), "copy": torch.zeros(3), "step": 0}
    dcp.load(loaded, storage_reader=StorageReader(f"{url}/b", storage_options=options))
    is_equal = loaded["rows"].to_local().equal(later["rows"].to_local())
    return is_equal and loaded["step"] == 2


def distribute(x):
    return distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])


def _run_task(task, rank, world, folder, timeout):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / task}.init",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    report = globals()[task](folder)
    (folder / f"{task}-{rank}.json").write_text(json.dumps(report))
    if task not in ("killed", "stuck"):
        dist.destroy_process_group()
    os._exit(0)  # do not wait for lost ranks


def start(task, world, folder, *, timeout=60):
    """Start a group of processes."""
    context = get_context("spawn")
    processes = [
        context.Process(target=_run_task, args=(task, rank, world, Path(folder), timeout))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def read_report(task, rank, folder):
    """Return the report of a rank, or None if it did not finish."""
    path = folder / f"{task}-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None
