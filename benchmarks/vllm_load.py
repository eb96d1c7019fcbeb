"""Load folders with the real vLLM: compressed against the stock folder, one process for each case.

    make .venv-vllm/installed && .venv-vllm/bin/python benchmarks/vllm_load.py [--model FOLDER]

A random Llama of 1 GB in bf16, and a model of your own: dense, W8A8, FP8 and W4A16, each as vLLM
reads it alone and entropy-coded. Claims, coded against stock: at most 1.15x the CPU time from a
warm cache, at most 0.8x the wall time from storage of 500 MB/s, at most 0.7x the memory above the
level before loading, and W4A16 at least 22 % smaller.

vLLM is imported once, and each case runs in a fork of that process. A load is that of vLLM's
`load_model`: it creates the layers, reads all weights, and rearranges them for its kernels. torch
has one thread: several would wait for each other actively, which counts as CPU time.
Storage is throttled by the cgroup controller blkio (version 1, as root); without it, these cases
are left out and listed. Two ranks (`--ranks`) are measured by the sum of their CPU times.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}

from measure import MB, Report, memory, options, peak_memory

RATE = 500e6
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
SCHEMES = ("dense", "W8A8", "FP8_DYNAMIC", "W4A16")
GROUP = Path("/sys/fs/cgroup/blkio/slimtensors-benchmark")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the models (default: TMPDIR)")
    parser.add_argument("--model", type=Path, help="a bf16 model folder, measured too")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each case")
    parser.add_argument("--only", nargs="+", default=SCHEMES, help="schemes to measure")
    parser.add_argument("--ranks", action="store_true", help="also measure two ranks")
    args = parser.parse_args()
    report = Report("vllm_load", quick=args.quick)
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        work = Path(work)
        in_fork(make_large, work / "large", args.quick)
        models = {"large": work / "large"}
        if args.model:
            models[args.model.name] = args.model
        folders = {name: in_fork(make, model, work, args.only) for name, model in models.items()}
        import_vllm()
        for name, found in folders.items():
            run(report, name, found, args.repeats, ranks=args.ranks)
    if GROUP.exists():
        GROUP.rmdir()
    report.finish()


def make_large(folder: Path, quick: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = LARGE | ({"num_hidden_layers": 2} if quick else {})
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, tie_word_embeddings=False), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)


def make(model: Path, work: Path, schemes: list[str]) -> dict[str, dict[str, str]]:
    """Write the folders of each scheme; return their paths by scheme and form."""
    from slimtensors.folder import compress_folder, quantize_folder
    from slimtensors.quantization import QuantizationConfig

    width = json.loads((model / "config.json").read_text())["hidden_size"]
    size = next(size for size in (128, 64, 32) if width % size == 0)
    folders = {}
    for scheme in schemes:
        stock, coded = model, work / f"{model.name}-{scheme}-coded"
        if scheme == "dense":
            compress_folder(model, coded)
        else:
            stock = work / f"{model.name}-{scheme}"
            config = QuantizationConfig.preset(
                scheme, ignore=["lm_head"], group_size=size if scheme == "W4A16" else None
            )
            quantize_folder(model, stock, config)
            quantize_folder(model, coded, config, coded=True)
        folders[scheme] = {"stock": str(stock), "coded": str(coded)}
    return folders


def run(
    report: Report, name: str, folders: dict[str, dict[str, str]], repeats: int, *, ranks: bool
) -> None:
    cases = ["warm", *(["500 MB/s"] if can_throttle() else []), *(["two ranks"] if ranks else [])]
    if not can_throttle():
        print("storage cannot be throttled here: no wall times at 500 MB/s")
    print(f"\n{name}: best of {repeats}")
    print(f"  {'':34}{'s':>8}{'CPU s':>8}{'peak MB':>9}{'total MB':>10}{'files MB':>10}")
    for scheme, forms in folders.items():
        best = {}
        for _ in range(repeats):
            for case in cases:
                for form, folder in forms.items():
                    found = in_fork(load, Path(folder), case)
                    kept = best.setdefault(f"{case} {form}", found)
                    best[f"{case} {form}"] = {k: min(x, found[k]) for k, x in kept.items()}
        for case, one in best.items():
            print(
                f"  {scheme + ' ' + case:34}{one['seconds']:8.2f}{one['cpu']:8.2f}"
                f"{one['peak'] / MB:9.0f}{one['total'] / MB:10.0f}{one['files'] / MB:10.0f}",
                flush=True,
            )
            report.rows.append({"model": name, "scheme": scheme, "case": case, **one})
        claim(report, f"{name} {scheme}", best)


def claim(report: Report, name: str, best: dict[str, dict[str, float]]) -> None:
    def ratio(case: str, key: str) -> float:
        return best[f"{case} coded"][key] / best[f"{case} stock"][key]

    report.at_most(f"{name}: CPU time, warm", ratio("warm", "cpu"), 1.15)
    report.at_most(f"{name}: memory while loading", ratio("warm", "peak"), 0.7)
    if "500 MB/s coded" in best:
        report.at_most(f"{name}: wall time at 500 MB/s", ratio("500 MB/s", "seconds"), 0.8)
    if "W4A16" in name:
        report.at_most(f"{name}: size of the files", ratio("warm", "files"), 0.78)
    if "two ranks coded" in best:
        report.at_most(f"{name}: CPU time of two ranks", ratio("two ranks", "cpu"), 1.15)


def import_vllm() -> None:
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


def in_fork(function, *arguments):
    """Return the result of a function in a forked process, which prints nothing."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result", Path(folder) / "log"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                result.write_text(json.dumps(function(*arguments)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)
        if not result.exists():
            raise RuntimeError(f"{function.__name__} failed:\n{log.read_text()[-3000:]}")
        return json.loads(result.read_text())


class LoadedError(Exception):
    """Stops the engine after loading."""


def load(folder: Path, case: str) -> dict[str, float]:
    """Load a model and return the time and memory that it took."""
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    files = [*folder.glob("*.safetensors")]
    for path in files:
        drop_from_cache(path) if case == "500 MB/s" else path.read_bytes()
    found: dict[str, float] = {"files": sum(path.stat().st_size for path in files)}
    load_model = BaseModelLoader.load_model

    with tempfile.TemporaryDirectory() as records:

        def measured(self, *arguments, **keywords):
            if case == "500 MB/s":
                throttle(files[0])
            with peak_memory() as risen:
                wall, cpu = time.perf_counter(), time.process_time()
                model = load_model(self, *arguments, **keywords)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            one = {"seconds": wall, "cpu": cpu, "peak": risen["peak"], "total": memory()["peak"]}
            if case != "two ranks":
                found.update(one)
                raise LoadedError
            (Path(records) / str(os.getpid())).write_text(json.dumps(one))
            return model

        BaseModelLoader.load_model = measured
        try:
            LLM(
                model=str(folder),
                enforce_eager=True,
                max_model_len=128,
                max_num_seqs=4,
                skip_tokenizer_init=True,
                num_gpu_blocks_override=64,
                tensor_parallel_size=2 if case == "two ranks" else 1,
            )
        except LoadedError:
            return found
        ranks = [json.loads(path.read_text()) for path in Path(records).iterdir()]
        assert len(ranks) == 2, ranks
        found |= {key: sum(rank[key] for rank in ranks) for key in ("cpu", "peak", "total")}
        return found | {"seconds": max(rank["seconds"] for rank in ranks)}


def can_throttle() -> bool:
    return os.access(GROUP.parent / "blkio.throttle.read_bps_device", os.W_OK)


def throttle(path: Path) -> None:
    """Limit the rate at which this process reads from the disk of a file."""
    device = path.stat().st_dev
    GROUP.mkdir(exist_ok=True)
    limit = f"{os.major(device)}:{os.minor(device)} {int(RATE)}"
    (GROUP / "blkio.throttle.read_bps_device").write_text(limit)
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
