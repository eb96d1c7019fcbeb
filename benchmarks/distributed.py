"""Save and load a training state on two ranks through torch.distributed.checkpoint.

    python benchmarks/distributed.py FOLDER        # trains first, if FOLDER has no states

The state is that of both models of `training.py`, sharded by rows as FSDP2 does. Wall times are
those of the slower rank, CPU times those of both. The simulated slow disk has 200 MB/s for both
ranks together and does not overlap with computation: its times are disk time plus CPU time.
"""

import ctypes
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, Timing, options, peak_memory
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from training import states

from slimtensors.checkpoint.distributed import StorageReader, StorageWriter
from slimtensors.checkpoint.distributed.manifest import (
    DistributedManifest,
    WrittenItem,
    collect_results,
    to_metadata,
)
from slimtensors.storage.location import MappedFile

RANKS = 2
SLOW = 200e6
"""Bytes per second of the slow disk."""
STEPS = {"gpt": (1000, 1020), "minilm": (60, 110)}

State = dict[str, Any]
Case = tuple[Callable[[Path], Any], Callable[[Path], Any]]

CASES: dict[str, Case] = {
    "plain": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "lossless": (
        lambda path: StorageWriter(path, threads=1),
        lambda path: StorageReader(path, threads=1),
    ),
    "lossless-max": (
        lambda path: StorageWriter(path, preset="lossless-max", threads=1),
        lambda path: StorageReader(path, threads=1),
    ),
    "difference": (
        lambda path: StorageWriter(
            path, preset="lossless-max", base=path.parent / "base", threads=1
        ),
        lambda path: StorageReader(path, threads=1),
    ),
    "difference, optimizer-bf16": (
        lambda path: StorageWriter(
            path,
            preset="lossless-max",
            base=path.parent / "base",
            profile="optimizer-bf16",
            threads=1,
        ),
        lambda path: StorageReader(path, threads=1),
    ),
}
TIMED = ("plain", "lossless")


def state(folder: Path, when: int) -> State:
    """Return the state of both models, not sharded."""
    found: State = {"model": {}, "optim": {"state": {}, "param_groups": []}}
    for model, steps in STEPS.items():
        saved = torch.load(states(model, folder)[steps[when]])
        optimizer = saved["optimizer"]
        found["model"] |= {f"{model}.{name}": x for name, x in saved["model"].items()}
        for index, moments in optimizer["state"].items():
            found["optim"]["state"][f"{model}.{index}"] = moments
        for group in optimizer["param_groups"]:
            names = [f"{model}.{index}" for index in group["params"]]
            kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            found["optim"]["param_groups"].append({**kept, "params": names})
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nested state with a function applied to all tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return [mapped(part, change) for part in value] if type(value) is list else value


def sharded(value: State) -> State:
    """Return a state sharded by rows over the ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def shard(x: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return x.clone()
        part = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        # A copy, so that the whole tensor can be freed.
        return DTensor.from_local(
            part.to_local().clone(), mesh, [Shard(0)], shape=x.shape, stride=x.stride()
        )

    return mapped(value, shard)


def blank(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def held(value: State) -> int:
    total = 0

    def count(x: torch.Tensor) -> None:
        nonlocal total
        total += x.nbytes

    mapped(value, count)
    return total


class Disk:
    """A simulated disk with a limited bandwidth."""

    def __init__(self, rate: float) -> None:
        self._rate, self._owed = rate, 0.0
        self.seconds = 0.0
        """Total seconds of transfers."""

    def passes(self, count: int) -> None:
        self.seconds += count / self._rate
        self._owed += count / self._rate
        if self._owed > 0.02:  # in few sleeps, because each takes longer than requested
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin


def timed(work: Callable[[], object], disk: Disk | None = None) -> tuple[float, float]:
    """Return the seconds of the slower rank, and the CPU seconds of all.

    With a simulated disk, wall time is disk time plus CPU time, as on an idle machine.
    """
    gc.collect()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    before = disk.seconds if disk else 0.0
    work()
    mine = time.perf_counter() - wall, time.process_time() - cpu
    if disk:
        assert disk.seconds > before, "nothing has passed through the slow disk"
        mine = disk.seconds - before + mine[1], mine[1]
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, mine)
    return max(w for w, _ in every), sum(c for _, c in every)


class SlowFile:
    """A file on the simulated slow disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        self._disk.passes(len(memoryview(data).cast("B")))
        return self._file.write(data)

    def read(self, *args: Any) -> bytes:
        data = self._file.read(*args)
        self._disk.passes(len(data))
        return data

    def readinto(self, target: Any) -> int:
        count = self._file.readinto(target)
        self._disk.passes(count)
        return count

    def __enter__(self) -> "SlowFile":
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def slow_disk(disk: Disk) -> Iterator[None]:
    """Slow down all large files opened in this process, and reads of mapped ones."""
    plain_open, plain_fdopen, plain_read = Path.open, os.fdopen, MappedFile.read

    def slow_open(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = plain_open(self, mode, *args, **kwargs)
        return SlowFile(file, disk) if "b" in mode and self.suffix == ".distcp" else file

    def slow_fdopen(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = plain_fdopen(descriptor, mode, *args, **kwargs)
        return SlowFile(file, disk) if mode == "r+b" else file  # as our writer opens its files

    def slow_read(self: MappedFile, begin: int, end: int) -> memoryview:
        disk.passes(end - begin)
        return plain_read(self, begin, end)

    Path.open, os.fdopen, MappedFile.read = slow_open, slow_fdopen, slow_read
    try:
        yield
    finally:
        Path.open, os.fdopen, MappedFile.read = plain_open, plain_fdopen, plain_read


def work(rank: int, folder: str, target: str, quick: bool) -> None:
    """Run the work of one rank and write the results to a file."""
    torch.set_num_threads(1)
    home = Path(target)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home / 'meet'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=5),
    )
    base, now = (sharded(state(Path(folder), when)) for when in (0, 1))
    dcp.save(base, storage_writer=StorageWriter(home / "base", preset="lossless-max"))
    figures: dict[str, Any] = {"bytes": {"held": held(now)}, "peak": {}, "fast": {}, "slow": {}}
    del base
    out = mapped(now, blank)

    def save(name: str) -> None:
        dcp.save(now, storage_writer=CASES[name][0](home / name))

    def load(name: str) -> None:
        dcp.load(out, storage_reader=CASES[name][1](home / name))

    def fresh(name: str) -> None:
        if rank == 0:
            shutil.rmtree(home / name, ignore_errors=True)
        dist.barrier()

    gc.disable()
    for name in CASES:
        fresh(name)
        free_memory()
        with peak_memory() as saving:
            wall, cpu = timed(lambda name=name: save(name))
        free_memory()
        with peak_memory() as loading:
            load_wall, load_cpu = timed(lambda name=name: load(name))
        figures["bytes"][name] = size(home / name)
        figures["peak"][name] = [saving["peak"], loading["peak"]]
        figures["fast"][name] = {"save": [], "load": [], "once": [wall, cpu, load_wall, load_cpu]}
        if name == "difference":
            figures["exact"] = all_same(out, now)
    for _ in range(1 if quick else 3):
        for name in TIMED:
            fresh(name)
            figures["fast"][name]["save"].append(timed(lambda name=name: save(name)))
            figures["fast"][name]["load"].append(timed(lambda name=name: load(name)))
    disk = Disk(SLOW / RANKS)
    with slow_disk(disk):
        for name in TIMED:
            fresh(name)
            wrote = timed(lambda name=name: save(name), disk)
            read = timed(lambda name=name: load(name), disk)
            figures["slow"][name] = {"save": [wrote], "load": [read]}
    if rank == 0:
        (home / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def free_memory() -> None:
    """Return freed memory to the system, so that later peaks are visible."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def all_same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor):
        a, b = a.to_local(), b.to_local()
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(all_same(a[key], b[key]) for key in a)
    return a == b


def planning(report: Report, ranks: int, counts: tuple[int, ...], target: Path) -> None:
    """Time the work of the coordinator for `ranks` ranks: plans and the manifest."""
    costs = {}
    gc.disable()  # as in all timings: its cost grows with the number of objects
    for count in counts:
        shards = ranks * count
        runs = [planned(ranks, count, target / f"plan{count}-{i}") for i in range(3)]
        costs[shards] = [min(run[step] for run in runs) for step in range(4)]
        each = [1e6 * cost / shards for cost in costs[shards]]
        print(
            f"  {shards:7d} shards, us each: plan {each[0]:5.1f} by torch, ours {each[1]:5.1f},"
            f" read back {each[2]:5.1f}, load plan {each[3]:5.1f}"
        )
        report.rows.append({"shards": shards, "seconds": costs[shards]})
    first, *_, last = costs
    growth = (sum(costs[last][1:3]) / last) / (sum(costs[first][1:3]) / first)
    report.at_most("planning: cost per shard, most shards against fewest", growth, 1.5)


def planned(ranks: int, count: int, target: Path) -> list[float]:
    """Return the CPU seconds of torch's plan, of our part, of reading it, of a rank's load plan."""
    plans = [rank_plan(rank, ranks, count) for rank in range(ranks)]
    gc.collect()
    times = [time.process_time()]
    merged, metadata = DefaultSavePlanner().create_global_plan(plans)
    times.append(time.process_time())
    writer = StorageWriter(target)
    ordered = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in merged])
    results = [written(plan) for plan in ordered]
    tensors, objects, files = collect_results(metadata, results)
    text = DistributedManifest("run", "now", ranks, "exact", files, tensors, objects).to_text()
    times.append(time.process_time())
    again = to_metadata(DistributedManifest.from_text(text))
    times.append(time.process_time())
    for name, about in again.state_dict_metadata.items():
        create_read_items_for_chunk_list(name, about, [about.chunks[ranks // 2]])
    times.append(time.process_time())
    return [end - begin for begin, end in pairwise(times)]


def rank_plan(rank: int, ranks: int, count: int) -> SavePlan:
    """Return the plan of one rank for `count` tensors, each sharded by rows over all ranks."""
    items, paths = [], {}
    for i in range(count):
        name = f"model.layers.{i}.weight"
        paths[name] = ("model", f"layers.{i}.weight")
        offsets, sizes = torch.Size([rank * 4, 0]), torch.Size([4, 8])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype=torch.float32),
            torch.Size([4 * ranks, 8]),
        )
        index = MetadataIndex(name, offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data=paths)


def written(plan: SavePlan) -> list[WriteResult]:
    told = WrittenItem(f"rank-{plan.storage_data.rank:05d}.safetensors", 1)
    return [WriteResult(item.index, 1, told) for item in plan.items]


def timing(pairs: list[list[float]]) -> Timing:
    return Timing([wall for wall, _ in pairs], [cpu for _, cpu in pairs])


def tables(report: Report, figures: dict[str, Any]) -> None:
    sizes, whole = figures["bytes"], figures["bytes"]["plain"]
    print(f"\n{sizes['held'] / MB:.1f} MB on {RANKS} ranks; differences exact: {figures['exact']}")
    print(f"  {'':30}{'MB':>9}{'smaller':>9}{'peak MB of a rank: save':>25}{'load':>7}")
    for name in CASES:
        peak = figures["peak"][name]
        ratio = whole / sizes[name]
        print(
            f"  {name:30}{sizes[name] / MB:9.1f}{ratio:8.2f}x"
            f"{peak[0] / MB:25.0f}{peak[1] / MB:7.0f}"
        )
        row = {"case": name, "bytes": sizes[name], "smaller": ratio, "peak": peak}
        report.rows.append({**row, "once": figures["fast"][name]["once"]})
    for disk in ("fast", "slow"):
        for step in ("save", "load"):
            found = {name: timing(figures[disk][name][step]) for name in TIMED}
            title = f"{step}, {'page cache' if disk == 'fast' else '200 MB/s'}"
            report.table(title, found, size=sizes["held"], against="plain")
            ours, plain = found["lossless"], found["plain"]
            if (
                disk == "fast"
            ):  # one thread per rank: CPU time is disturbed least by other processes
                ratio = ours.busy / plain.busy
                report.at_most(f"{title}: CPU, lossless against plain", ratio, 1.3)
            else:
                report.at_most(f"{title}: lossless against plain", ours.best / plain.best, 1)
    rates = figures["fast"]["lossless"]
    for step in ("save", "load"):
        rate = sizes["held"] / timing(rates[step]).busy / MB
        print(f"  one core {step}s {rate:.0f} MB/s of state")
        report.rows.append({"case": f"{step} rate of a core", "MB/s": rate})


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the states; a place to work is made in it")
    parser.add_argument("--work", type=Path, help="where to save; on the disk to be measured")
    chosen = parser.parse_args()
    target = (chosen.work or chosen.folder).resolve() / f"distributed-{os.getpid()}"
    target.mkdir(parents=True)
    report = Report("distributed", quick=chosen.quick)
    for model in STEPS:
        states(model, chosen.folder)
    try:
        arguments = (str(chosen.folder), str(target), chosen.quick)
        multiprocessing.spawn(work, arguments, nprocs=RANKS)
        tables(report, json.loads((target / "figures.json").read_text()))
        print("\n64 ranks, simulated")
        counts = (16, 32) if chosen.quick else (64, 128, 256, 512)
        planning(report, 64, counts, target)
    finally:
        shutil.rmtree(target)
    report.finish()


if __name__ == "__main__":
    main()
