"""Live sync: stall of `publish`, bytes per version against TRL's layout, latency over S3.

    python benchmarks/sync.py [--quick]

Needs `pip install 'slimtensors[remote]' moto[server]`. bf16 weights follow fp32 ones that change by
normal noise, as in RL: most keep their bits, small ones change more often. TRL's layout is an int32
index and a bf16 value per change, in safetensors. The S3 server is moto on loopback, in another
process.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import MB, Report, interleaved, options
from safetensors.torch import save_file
from torch import Tensor

from slimtensors.sync import following, publishing

RATES = {1: 3.2e-7, 2: 6.6e-7, 5: 1.75e-6}
"""Percent of changed weights -> standard deviation of the noise."""


class Weights:
    """bf16 weights of an fp32 model that changes by noise."""

    def __init__(self, size: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        rows = 2048
        count = max(size // (rows * rows * 2), 1)
        self.exact = [
            0.02 * torch.randn(rows, rows, generator=self.generator) for _ in range(count)
        ]
        self.state = {f"layers.{i}.weight": x.bfloat16() for i, x in enumerate(self.exact)}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.state.values())

    def step(self, deviation: float) -> None:
        for x, rounded in zip(self.exact, self.state.values(), strict=True):
            x += deviation * torch.randn(x.shape, generator=self.generator)
            rounded.copy_(x)


def write_trl(new: dict[str, Tensor], old: dict[str, Tensor], path: Path) -> int:
    """Write the changes as indices and values; return the size of the file."""
    parts = {}
    for name, x in new.items():
        words = (x.view(torch.int16) != old[name].view(torch.int16)).view(-1)
        indices = words.nonzero().view(-1)
        parts[f"{name}.indices"] = indices.int()
        parts[f"{name}.values"] = x.view(-1)[indices]
    save_file(parts, path)
    return path.stat().st_size


def measure_bytes(report: Report, size: int) -> None:
    """Compare bytes per version."""
    for percent, deviation in RATES.items():
        weights = Weights(size)
        with tempfile.TemporaryDirectory() as folder:
            with publishing(Path(folder) / "run", weights.state) as out:
                out.publish(0)
                out.wait()
                old = {name: x.clone() for name, x in weights.state.items()}
                weights.step(deviation)
                out.publish(1)
                published = out.wait()
            theirs = write_trl(weights.state, old, Path(folder) / "trl.safetensors")
        version = published.version
        row = {
            "changed": version.changed / version.items,
            "bits_per_change": version.bits_per_change,
            "dense_over_ours": weights.nbytes / version.delta_bytes,
            "trl_over_ours": theirs / version.delta_bytes,
        }
        report.rows.append(row)
        print(
            f"{row['changed']:7.2%} changed: {row['bits_per_change']:5.2f} bits per change,"
            f" {row['dense_over_ours']:6.1f}x smaller than dense,"
            f" {row['trl_over_ours']:5.2f}x smaller than TRL's layout",
            flush=True,
        )
        report.at_least(f"smaller than TRL's layout at {percent} %", row["trl_over_ours"], 4)


def measure_stall(report: Report, size: int) -> None:
    """Compare `publish` with a copy of the state into memory that exists."""
    weights = Weights(size)
    copy = {name: x.clone() for name, x in weights.state.items()}
    with (
        tempfile.TemporaryDirectory() as folder,
        publishing(Path(folder) / "run", weights.state) as out,
    ):
        for step in range(3):  # allocates all buffers
            out.publish(step)
            out.wait()

        def copy_state() -> None:
            torch._foreach_copy_([*copy.values()], [*weights.state.values()])

        times = interleaved(
            {"copy": copy_state, "publish": lambda: out.publish(9)}, 3, before=out.wait
        )
    ratio = times["publish"].best / times["copy"].best
    print(f"stall of publish: {ratio:.2f} copies of the state", flush=True)
    report.at_most("stall of publish, in copies of the state", ratio, 1.2, "")


@contextmanager
def s3_server():
    """Yield storage options of a local S3 server with the bucket `runs`, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "5722"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = "http://127.0.0.1:5722"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(endpoint, timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        place = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        import boto3

        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        boto3.client("s3", **place, **keys).create_bucket(Bucket="runs")
        yield {"key": "x", "secret": "x", "client_kwargs": place}
    finally:
        process.kill()
        process.wait()


def measure_latency(report: Report, size: int) -> None:
    """Measure the time from `publish` until a follower has the new weights."""
    weights = Weights(size)
    served = {name: torch.zeros_like(x) for name, x in weights.state.items()}
    url = f"s3://runs/{uuid.uuid4().hex}"
    with s3_server() as storage:
        follower = following(url, storage_options=storage)
        with publishing(url, weights.state, storage_options=storage) as out:
            out.publish(0)
            out.wait()
            follower.update(served)
            wall, busy = [], []
            for step in range(1, 5):
                weights.step(RATES[1])
                begin, cpu = time.perf_counter(), time.process_time()
                out.publish(step)
                published = out.wait()
                middle = time.perf_counter()
                update = follower.update(served)
                wall.append(time.perf_counter() - begin)
                busy.append(time.process_time() - cpu)
                print(
                    f"publish {middle - begin:.2f} s, update {wall[-1] - middle + begin:.2f} s,"
                    f" CPU {busy[-1]:.2f} s; {published.version.delta_bytes / MB:.1f} MB,"
                    f" {published.requests} + {update.requests} requests",
                    flush=True,
                )
                assert all(torch.equal(x, served[name]) for name, x in weights.state.items())
    report.rows.append({"latency": wall, "cpu": busy, "load": os.getloadavg()[0]})
    report.at_most(f"latency of {size / 1e9:.2g} GB at 1 % changed over S3", min(wall), 2, "s")


def main() -> int:
    given = options(__doc__.splitlines()[0]).parse_args()
    report = Report("sync", quick=given.quick)
    measure_bytes(report, 16 << 20 if given.quick else 64 << 20)
    measure_stall(report, 64 << 20 if given.quick else 256 << 20)
    measure_latency(report, 64 << 20 if given.quick else 1 << 30)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
