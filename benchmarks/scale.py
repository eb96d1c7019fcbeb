"""What compressing and loading a huge model costs each of many processes.

`--tables` prints the tables of docs/scale.md, which follow from the rates and speeds stated below.
Without it, rates are measured on this machine, and each formula is compared with a real run of one
and of two processes on a small model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
MIB = 1 << 20


@dataclass(frozen=True)
class Rates:
    """What one core does in a second, with files in the page cache."""

    make: float
    """Dense bytes made into finished files by `lossless`: read, coded, written, checked."""
    join: float
    """Stored bytes of parts made into a finished file: read, checked, copied, written, checked."""
    load: float
    """Dense bytes loaded: read, checked, decoded."""
    ratio: float
    """Stored bytes per dense byte."""
    base: float
    """Bytes of a process that has imported everything and done nothing."""
    start: float
    """Seconds of one core before the first byte and after the last."""


STATED = Rates(
    make=0.25 * GB,
    join=0.3 * GB,
    load=0.9 * GB,
    ratio=0.663,
    base=0.3 * GB,
    start=0.2,
)
"""On the low side of what docs/scale.md says was seen; `join` is what a whole run leaves for it."""


@dataclass(frozen=True)
class Cluster:
    """The machines."""

    cores: int = 8
    """Of each rank."""
    ranks: int = 8
    """On each machine."""
    network: float = 10 * GB
    """Bytes a second between a machine and the storage, each way: 100 Gbit/s, 80 % of it."""
    storage: float = 200 * GB
    """Bytes a second of the whole storage, each way."""
    start: float = 10.0
    """Seconds until all processes have imported torch and found each other."""

    def speed(self, busy: int, count: int) -> float:
        """Return the bytes a second of one of `busy` ranks, spread evenly over `count`."""
        machines = -(-count // self.ranks)
        return min(self.network / -(-busy // machines), self.storage / busy)


@dataclass(frozen=True)
class Model:
    """A model in bf16."""

    name: str
    parameters: float
    largest: float
    """Bytes of its largest tensor."""
    file: float = 5 * GB
    """Bytes of its files."""

    @property
    def nbytes(self) -> float:
        return 2 * self.parameters

    @property
    def files(self) -> int:
        return max(round(self.nbytes / self.file), 1)


MODELS = [
    Model("8 B", 8e9, 128_256 * 4096 * 2),
    Model("70 B", 70e9, 128_256 * 8192 * 2),
    Model("405 B", 405e9, 128_256 * 16_384 * 2),
    Model("1 T", 1e12, 163_840 * 7168 * 2),
]
COUNTS = [1, 8, 64, 512, 1024]

IN_FLIGHT = 64 * MIB
"""Bytes of tensors that a process has under way at once."""
LEAST = 16 * MIB
"""Bytes of the smallest part of a file."""


@dataclass(frozen=True)
class Cost:
    """What one rank has to do."""

    read: float
    written: float
    core_seconds: float
    memory: float
    joined: float = 0.0
    """Of what is read and written, the bytes that a rank of those that join files moves."""
    joiners: int = 0

    def seconds(self, cluster: Cluster, count: int) -> float:
        """Add up reading, computing and writing, as if none of them happened at the same time."""
        moved = (self.read + self.written - 2 * self.joined) / cluster.speed(count, count)
        if self.joined:
            moved += 2 * self.joined / cluster.speed(self.joiners, count)
        return cluster.start + moved + self.core_seconds / cluster.cores


def is_cut(model: Model, count: int) -> bool:
    """Tell whether files are larger than fair shares, so that they are made in parts."""
    return count > 1 and model.nbytes / model.files > 1.25 * model.nbytes / count


def compress(model: Model, count: int, rates: Rates) -> Cost:
    """Return what the busiest of `count` ranks does to compress a model.

    Files that are made in parts are written twice: a rank of those that join reads and checks the
    parts of a whole file, copies them together, and writes them again.
    """
    cut = is_cut(model, count)
    share = max(model.nbytes / count, 0 if cut else model.nbytes / model.files)
    stored = rates.ratio * share
    joined = rates.ratio * model.nbytes / model.files if cut else 0.0
    part = max(share / 2, LEAST)
    tensor = min(model.largest, part) if cut else model.largest
    busy = (1 + rates.ratio) * max(tensor, IN_FLIGHT)
    return Cost(
        read=share + joined,
        written=stored + joined,
        core_seconds=rates.start + share / rates.make + joined / rates.join,
        memory=rates.base + max(busy, 2 * rates.ratio * model.largest if cut else 0),
        joined=joined,
        joiners=model.files,
    )


def load(model: Model, count: int, rates: Rates) -> Cost:
    """Return what one of `count` ranks does that load equal shares; the result is not counted."""
    share = model.nbytes / count
    stored = rates.ratio * share
    tensor = min(model.largest, share)
    busy = rates.start + share / rates.load
    return Cost(stored, 0.0, busy, rates.base + rates.ratio * tensor)


def tables(rates: Rates = STATED, cluster: Cluster | None = None) -> str:
    """Return the tables of docs/scale.md."""
    cluster = cluster or Cluster()
    return "\n\n".join(
        [
            _table("compress", compress, rates, cluster),
            _table("load", load, rates, cluster),
        ]
    )


def _table(
    title: str, cost: Callable[[Model, int, Rates], Cost], rates: Rates, cluster: Cluster
) -> str:
    lines = [
        f"| {title} | ranks | reads GB | writes GB | seconds | memory GB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for model in MODELS:
        for count in COUNTS:
            found = cost(model, count, rates)
            cells = [
                model.name,
                str(count),
                _number(found.read / GB),
                _number(found.written / GB),
                _number(found.seconds(cluster, count)),
                f"{found.memory / GB:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.1f}"


def write_model(folder: Path, *, files: int) -> Model:
    """Write a model: a file with one large tensor, and one with many small ones, or none."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * 0.02).bfloat16()

    parts = [
        {"embed.weight": weight(49_152, 2048)},
        {f"layers.{i}.weight": weight(2048, 2048) for i in range(24)},
    ][:files]
    homes = {}
    folder.mkdir()
    for i, tensors in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file(tensors, folder / file)
        homes |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    items = sum(x.numel() for tensors in parts for x in tensors.values())
    largest = parts[0]["embed.weight"].nbytes
    return Model(f"{files} files", items, largest, file=2 * items / files)


def measured_rates(folder: Path, model: Model) -> Rates:
    """Measure what one thread does with a model of one file."""
    import slimtensors

    (made,) = run(1, folder, model.name)
    stored = folder / f"{model.name} by 1"
    size = slimtensors.inspect(stored).stored_bytes
    start = start_seconds(folder)
    return Rates(
        make=model.nbytes / (made["cpu"] - start),
        join=size / best(lambda: join(stored)),
        load=model.nbytes / best(lambda: slimtensors.load(stored, threads=1)),
        ratio=size / model.nbytes,
        base=base_memory(),
        start=start,
    )


def join(stored: Path) -> None:
    """Do with a finished file what is done with a part: check it, copy it, make a file of it."""
    from slimtensors.archive import Archive
    from slimtensors.archive.write import ArchiveSource, TensorSource, write_out
    from slimtensors.folder.site import LocalSite
    from slimtensors.folder.weights import Record

    site = LocalSite(stored.with_name("joined"), [], replace=True)
    site.begin({})

    def again(folder: Path) -> Record:
        with Archive(stored) as archive:
            items = [
                TensorSource(
                    name, archive.spec(name), lambda each, name=name: archive.encoded(name, each)
                )
                for name in archive
            ]
            written = write_out(ArchiveSource(items), folder / "x", preset="dense", dialect="slim")
        return Record.of(written, {}).relative_to(folder)

    site.put("files", "x", again)
    site.find("files", "x")
    site.drop()
    site.close()


def best(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least CPU seconds that some work takes."""
    found = []
    for _ in range(repeats):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return min(found)


RANK = """
import json, os, sys, time
from pathlib import Path
from slimtensors.folder import compress_folder
from slimtensors.folder.processes import (
    SingleProcess, is_multi_process, process_group_from_env)
source, target, report = sys.argv[1:]
own = process_group_from_env() if is_multi_process() else SingleProcess()
Path("/proc/self/clear_refs").write_text("5")
done = 0
def progress(count):
    global done
    done += count
before, began = time.process_time(), time.perf_counter()
compress_folder(source, target, threads=1, ranks=own, progress=progress)
status = Path("/proc/self/status").read_text()
peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
Path(f"{report}.{own.rank}").write_text(json.dumps({
    "cpu": time.process_time() - before, "bytes": done, "peak": 1024 * peak}))
"""


def base_memory() -> float:
    """Return what a process has that has imported everything."""
    code = "import slimtensors.folder; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("VmRSS"))
    return 1024.0 * int(line.split()[1])


def start_seconds(folder: Path) -> float:
    """Return the CPU seconds that a model of next to nothing takes."""
    import torch

    import slimtensors

    (folder / "nothing").mkdir()
    slimtensors.save({"x": torch.ones(9)}, folder / "nothing", preset="dense")
    (rank,) = run(1, folder, "nothing")
    return rank["cpu"]


def run(count: int, folder: Path, model: str) -> list[dict[str, float]]:
    """Compress a model with so many processes; return what each says of itself."""
    script, target = folder / "rank.py", folder / f"{model} by {count}"
    script.write_text(RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *(launcher if count > 1 else []), script]
    command += [folder / model, target, f"{target} report"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return [json.loads(Path(f"{target} report.{rank}").read_text()) for rank in range(count)]


def check(folder: Path) -> list[tuple[str, float, float]]:
    """Return for each formula what it predicts here, and what was measured."""
    import slimtensors

    one, two = (write_model(folder / f"{n} files", files=n) for n in (1, 2))
    rates = measured_rates(folder, one)
    print(f"measured on one core here: {_words(rates)}\n")
    found = []
    for model, count in ((two, 1), (two, 2), (one, 2)):
        ranks = run(count, folder, model.name)
        cost = compress(model, count, rates)
        stored = slimtensors.inspect(folder / f"{model.name} by {count}").stored_bytes
        case = f"{model.files} files, {count} ranks"
        most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        found += [
            (f"{case}: MB given to one", model.nbytes / count / 1e6, most["bytes"] / 1e6),
            (f"{case}: MB stored", rates.ratio * model.nbytes / 1e6, stored / 1e6),
            (f"{case}: CPU s of one", cost.core_seconds, most["cpu"]),
            (f"{case}: MB of memory", cost.memory / 1e6, most["peak"] / 1e6),
        ]
    seconds = best(lambda: slimtensors.load(folder / "2 files by 1", threads=1))
    predicted = load(two, 1, rates).core_seconds - rates.start
    return [*found, ("load, 1 rank: CPU s", predicted, seconds)]


def _words(rates: Rates) -> str:
    speeds = {"make": rates.make, "join": rates.join, "load": rates.load}
    told = ", ".join(f"{name} {speed / GB:.2f} GB/s" for name, speed in speeds.items())
    rest = f"a process {rates.base / 1e6:.0f} MB and {rates.start:.2f} s"
    return f"{told}, stored {rates.ratio:.3f} of the bytes, {rest}"


def main() -> None:
    """Print the tables, or how good they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print those of docs/scale.md")
    if parser.parse_args().tables:
        print(tables())
        return
    with tempfile.TemporaryDirectory() as folder:
        found = check(Path(folder))
    print(f"{'':34}{'predicted':>10}{'measured':>10}{'ratio':>7}")
    for what, predicted, measured in found:
        print(f"{what:34}{predicted:10.2f}{measured:10.2f}{measured / predicted:7.2f}")


if __name__ == "__main__":
    main()
