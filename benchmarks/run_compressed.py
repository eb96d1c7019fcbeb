"""A Llama that stays compressed while it runs, against dense bf16 and against torchao.

Claims, by time per token at batch 1, all cases in turns in one process: int8 >= 1.8x the speed of
dense at <= 0.65x its memory, int4 (groups of 128) >= 1.6x at <= 0.45x; entropy-coded bf16 <= 0.70x
memory at <= 1.5x the time at batch 32. On one thread it is CPU time, except for entropy-coded
weights, which are decoded ahead on another thread; the table has the CPU time of both. Memory is
that of a fresh process after its first forward, file pages included, minus that of a process
without weights. Saving adds <= 16 MB; loading 579 tensors takes <= 0.1x the time of torchao's way
through transformers. A model fitted to a size (codec trellis) that runs coded takes <= 0.4x the
memory of the same weights loaded dense, after generating a few tokens in a fresh process, at >=
0.05x its tokens per second.

`--size half` is a model of 0.54 G parameters (needs 6 GB); the default is a small one.
`--fitted FOLDER` measures only that, with a folder of `slimtensors compress --target-size`.
`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` is for virtual machines that announce AMX and cannot run it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, interleaved, memory, options, peak_memory, with_threads
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import slimtensors
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Plan
from slimtensors.folder import compress_folder
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import (
    QuantizationConfig,
    coded_weight,
    decode_ahead,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
)
from slimtensors.runtime import is_linear_or_embedding
from slimtensors.transformers.auto import SparseAutoModelForCausalLM

SIZES = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6},
    "half": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8},
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
OURS = {
    "int8": int8_weight_only(),
    "int4 g128": int4_weight_only(),
    "int8, dynamic inputs": int8_dynamic_activation_int8_weight(),
    "entropy-coded": coded_weight(),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--fitted", type=Path, metavar="FOLDER", help="a model fitted to a size")
    parser.add_argument("--memory-of", nargs=2, metavar=("FILE", "KIND"), help="for the script")
    parser.add_argument("--generate-with", nargs=2, metavar=("KIND", "THREADS"), help="the same")
    args = parser.parse_args()
    if args.generate_with:
        kind, threads = args.generate_with
        print(json.dumps(generate_with(args.fitted, kind, int(threads))))
        return
    if args.fitted:
        report = Report("run_compressed-fitted", quick=args.quick)
        compare_fitted(report, args.fitted, args.threads)
        report.finish()
        return
    if args.memory_of:
        print(json.dumps(memory_of(args.size, *args.memory_of)))
        return
    report = Report(f"run_compressed-{args.size}", quick=args.quick)
    dense = empty_model(args.size, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        files = save_all(dense, Path(folder))
        models = {"dense": dense, "dense, again": dense}
        models |= {name: loaded(args.size, file, name) for name, file in files.items()}
        models |= of_torchao(dense)
        for threads in args.threads:
            for batch in (1, 32):
                time_tokens(report, models, threads, batch, 2 if args.quick else 7)
        del models
        compare_memory(report, args.size, files)
        compare_saving(report, args.size, files["int8"], Path(folder))
        compare_loading(report, Path(folder), 2 if args.quick else 64)
        compare_fitted(report, save_fitted(args.size, Path(folder)), args.threads)
    report.finish()


def empty_model(size: str, device: str) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32000, num_attention_heads=16, num_key_value_heads=16, **SIZES[size]
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).bfloat16().eval()


def save_all(dense: nn.Module, folder: Path) -> dict[str, Path]:
    files = {"dense": folder / "dense"}
    slimtensors.save(dense.state_dict(), files["dense"], preset="dense")
    for name, config in OURS.items():
        files[name] = folder / name.replace(" ", "-")
        state = {key: config(x) if is_linear(key) else x for key, x in dense.state_dict().items()}
        slimtensors.save(state, files[name], preset="dense")
    del files["dense"]
    return files


def is_linear(key: str) -> bool:
    return "proj" in key or key == "lm_head.weight"


def loaded(size: str, file: Path, name: str) -> nn.Module:
    """Return a model whose weights are mapped from the file, or encoded again if not mapped."""
    model = empty_model(size, "meta")
    model.load_state_dict(slimtensors.load(file, run_compressed=True), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if name == "entropy-coded":
        quantize_(model, OURS[name], is_linear_or_embedding)
        decode_ahead([*model.model.layers, model.lm_head])
    return model


def of_torchao(dense: nn.Module) -> dict[str, nn.Module]:
    try:
        from torchao.quantization import Int8WeightOnlyConfig
        from torchao.quantization import quantize_ as theirs
    except ImportError:
        return {}
    model = type(dense)(dense.config).bfloat16().eval()
    model.load_state_dict(dense.state_dict())
    theirs(model, Int8WeightOnlyConfig())
    return {"torchao int8": model}


def token(model: nn.Module, batch: int) -> Callable[[], object]:
    given = torch.zeros(batch, 1, dtype=torch.long)

    def run() -> object:
        with torch.inference_mode():
            return model(given, use_cache=False).logits

    return run


def time_tokens(
    report: Report, models: dict[str, nn.Module], threads: int, batch: int, repeats: int
) -> None:
    cases = {name: with_threads(threads, token(m, batch)) for name, m in models.items()}
    times = interleaved(cases, repeats)
    report.table(f"a token, batch {batch}, {threads} threads", times, against="dense")
    spent = {name: each.busy if threads == 1 else each.best for name, each in times.items()}
    speed = {name: spent["dense"] / each for name, each in spent.items()}
    if batch == 1:
        report.at_least(f"int8, {threads} threads", speed["int8"], 1.8)
        report.at_least(f"int4, {threads} threads", speed["int4 g128"], 1.6)
    else:
        report.at_least(f"int8, batch 32, {threads} threads", speed["int8"], 1)
        report.at_least(f"int4, batch 32, {threads} threads", speed["int4 g128"], 1)
        slower = times["entropy-coded"].best / times["dense"].best
        report.at_most(f"entropy-coded, batch 32, {threads} threads, time", slower, 1.5)


def compare_memory(report: Report, size: str, files: dict[str, Path]) -> None:
    def of(name: str) -> float:
        command = [sys.executable, __file__, "--size", size, "--memory-of"]
        file = files.get(name, Path(name))
        done = subprocess.run([*command, str(file), name], check=True, capture_output=True)
        return float(json.loads(done.stdout)["rss"])

    dense, limits = of("dense"), {"int8": 0.65, "int4 g128": 0.45, "entropy-coded": 0.70}
    for name, limit in limits.items():
        report.at_most(f"{name}, memory after a forward", of(name) / dense, limit)


def memory_of(size: str, file: str, name: str) -> dict[str, int]:
    """Return the memory that weights add to a process after one forward."""
    token(LlamaForCausalLM(LlamaConfig(**SIZES["small"] | {"num_hidden_layers": 1})), 1)()
    before = memory()["rss"]
    model = empty_model(size, "cpu") if name == "dense" else loaded(size, Path(file), name)
    token(model, 1)()
    return {"rss": memory()["rss"] - before}


def compare_saving(report: Report, size: str, file: Path, folder: Path) -> None:
    state = slimtensors.load(file, run_compressed=True)
    copied = {name: x.clone() for name, x in state.items()}
    with peak_memory() as risen:
        slimtensors.save(copied, folder / "again", preset="dense")
    report.at_most("int8, memory that saving adds", risen["peak"] / MB, 16, "MB")


def compare_loading(report: Report, folder: Path, layers: int) -> None:
    """Load a Llama of small matrices, 579 tensors in 64 layers, through transformers."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=layers, **sizes)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "dense-folder")
    preset = QuantizationConfig.preset("W8A16", ignore=["lm_head"])
    quantize_folder(folder / "dense-folder", folder / "ours", preset)
    times = {
        "ours": time_of_loading(SparseAutoModelForCausalLM, folder / "ours", run_compressed=True)
    }
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError:
        report.at_most(f"load of {len(model.state_dict())} int8 tensors", times["ours"], 4.56, "s")
        return
    asked = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder / "dense-folder", quantization_config=asked, dtype=torch.bfloat16
    )
    theirs.save_pretrained(folder / "theirs")
    times["torchao"] = time_of_loading(AutoModelForCausalLM, folder / "theirs")
    print(f"  {times}")
    what = f"load of {len(model.state_dict())} int8 tensors against torchao"
    report.at_most(what, times["ours"] / times["torchao"], 0.1)


def save_fitted(size: str, folder: Path) -> Path:
    """Return a folder with trellis weights at about 3 bits, as a model fitted to a size has."""
    empty_model(size, "cpu").save_pretrained(folder / "to-fit")

    def choose(name: str, x: torch.Tensor) -> Plan | None:
        return Plan(Trellis(step=0.25)) if x.dim() == 2 else None

    compress_folder(folder / "to-fit", folder / "fitted", preset=choose)
    return folder / "fitted"


def compare_fitted(report: Report, folder: Path, threads: list[int]) -> None:
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"\nfitted to a size: {stored / MB:.1f} MB of weight files")
    for count in threads:
        found = {}
        for kind in ("dense", "coded"):
            command = [sys.executable, __file__, "--fitted", str(folder), "--generate-with"]
            done = subprocess.run([*command, kind, str(count)], check=True, capture_output=True)
            found[kind] = json.loads(done.stdout)
            rss, speed = found[kind]["rss"] / MB, found[kind]["tokens_per_second"]
            print(f"  {kind}, {count} threads: {rss:.1f} MB, {speed:.2f} tokens/s")
            report.rows.append({"group": "fitted", "case": f"{kind}, {count}", **found[kind]})
        ratio = {key: found["coded"][key] / found["dense"][key] for key in found["dense"]}
        report.at_most(f"fitted, memory, {count} threads", ratio["rss"], 0.4)
        report.at_least(f"fitted, tokens/s, {count} threads", ratio["tokens_per_second"], 0.05)


def generate_with(folder: Path, kind: str, threads: int) -> dict[str, float]:
    """Return the memory that a model adds to a process that generates, and its speed."""
    torch.set_num_threads(threads)
    tokens, count = torch.arange(1, 17)[None], 16
    length = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    tiny = LlamaConfig(vocab_size=256, num_attention_heads=2, **SIZES["small"] | TINY)
    LlamaForCausalLM(tiny).bfloat16().generate(tokens, pad_token_id=0, **length)
    before = memory()["rss"]
    options = {"run_compressed": True} if kind == "coded" else {}
    model = SparseAutoModelForCausalLM.from_pretrained(folder, **options)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        model.generate(tokens, pad_token_id=0, **length)
        times.append(time.perf_counter() - start)
    return {"rss": memory()["rss"] - before, "tokens_per_second": count / min(times)}


def time_of_loading(auto: Any, folder: Path, **options: object) -> float:
    """Return the CPU seconds of loading."""
    start = time.process_time()
    auto.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return time.process_time() - start


if __name__ == "__main__":
    main()
