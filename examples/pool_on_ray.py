"""Add a hundred fine-tunes to a pool with Ray, one worker being killed half-way.

    pip install ray
    python examples/pool_on_ray.py [FOLDER]

A pool needs no lock and no coordinator: every worker calls `Pool.add`. A task whose worker died is
run again by Ray, and finds what the first attempt had stored.
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import ray
import torch
from safetensors.torch import save_file

from slimtensors.sync import Pool

MODELS, WORKERS = 100, 2


def write_family(folder: Path) -> list[Path]:
    """Write a base model and fine-tunes of it."""
    random = torch.Generator().manual_seed(0)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(256, 256, generator=random)

    base = {f"layers.{i}.weight": normal(0.02) for i in range(4)}
    paths = []
    for i in range(MODELS):
        tuned = {name: x + normal(1e-5) * (i > 0) for name, x in base.items()}
        path = folder / f"model-{i:03}"
        path.mkdir()
        save_file({n: x.bfloat16() for n, x in tuned.items()}, path / "model.safetensors")
        paths.append(path)
    return paths


@ray.remote(max_retries=4)
def add(pool: Path, model: Path, victim: Path | None) -> int:
    """Add a model. The first worker that removes the file `victim` dies in the middle of it."""
    is_victim = False
    if victim is not None:
        with suppress(FileNotFoundError):
            victim.unlink()
            is_victim = True
    processed = 0

    def report(nbytes: int) -> None:
        nonlocal processed
        processed += nbytes
        if is_victim and processed > 1.5 * (model / "model.safetensors").stat().st_size:
            os.kill(os.getpid(), signal.SIGKILL)

    return Pool(pool).add(model, threads=1, progress=report).stored_bytes


def main(folder: Path) -> None:
    """Add all models, then verify the pool."""
    models = write_family(folder)
    pool, victim = folder / "pool", folder / "kill-one-worker"
    victim.touch()
    Pool(pool).add(models[0])
    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="ERROR")
    start = time.perf_counter()
    half = len(models) // 2
    tasks = [
        add.remote(pool, model, victim if i == half else None)
        for i, model in enumerate(models[1:], 1)
    ]
    stored = sum(ray.get(tasks))
    seconds = time.perf_counter() - start
    ray.shutdown()
    found = Pool(pool).verify()
    assert found.members == MODELS, found
    assert not found.damaged, found
    assert not victim.exists(), "no worker was killed"
    dense = sum(path.stat().st_size for path in folder.glob("model-*/*"))
    print(f"{found.members} models in {seconds:.0f} s, one worker killed; all intact")
    print(
        f"{dense / 1e6:.1f} MB -> {Pool(pool).stored_bytes() / 1e6:.1f} MB ({stored} bytes added)"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
