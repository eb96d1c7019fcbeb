"""Cost of fitting a model to a budget, by the size of the model: CPU time and memory.

Claims: rounding takes <= 1.5 CPU minutes per 100 M weights, statistics apart; a model of 7 G
parameters fits into 32 GB of memory. Each size runs in a process of its own, on one thread, with
random weights and few tokens; costs per token and per weight are extrapolated to 7 G parameters.
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
from measure import Report, memory, options
from transformers import LlamaConfig, LlamaForCausalLM

from slimtensors.folder.weights import FolderOptions
from slimtensors.layerwise import fisher
from slimtensors.layerwise.fit import Fitter
from slimtensors.transformers import Budget, Calibration, fit

SIZES = {
    "135 M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    "270 M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 18},
    "540 M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 17},
}
SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
VOCABULARY = 32_000
SAMPLES, LENGTH, TOKENS = 4, 256, 32_768
"""Data of a run, and the tokens of a usual one."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=SIZES, help="for the script")
    args = parser.parse_args()
    if args.size:
        print(json.dumps(run(SIZES[args.size])))
        return
    report = Report("fit_scale", quick=args.quick)
    names = ("statistics", "rounding", "passes", "rest", "peak", "predicted")
    print(f"\n  {'parameters':12}" + "".join(f"{name:>11}" for name in names))
    for size in list(SIZES)[:1] if args.quick else SIZES:
        command = [sys.executable, __file__, "--size", size]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        x = json.loads(out.splitlines()[-1])
        report.rows.append({"group": "size", "case": size, **x})
        minutes, rounding, rest = count_minutes(x)
        times = f"{minutes:7.1f} min{rounding:7.2f} min{x['passes']:11}{rest:7.1f} min"
        sizes = f"{x['peak'] / 1e9:8.2f} GB{predict_peak(x) / 1e9:8.2f} GB"
        print(f"  {size:12}{times}{sizes}", flush=True)
        report.at_most(f"{size}: CPU minutes per 100 M weights", rounding, 1.5, "minutes")
    seven = describe(SEVEN)
    scale = seven["parameters"] / x["parameters"]
    print(
        f"  7 G parameters: statistics about {minutes * scale:.0f} CPU minutes,"
        f" rounding {rounding * seven['parameters'] / 1e8:.0f}"
    )
    report.at_most("memory for 7 G parameters, predicted", predict_peak(seven) / 1e9, 32, "GB")
    report.finish()


def count_minutes(x: dict[str, Any]) -> tuple[float, float, float]:
    """Return CPU minutes for statistics of `TOKENS`, rounding 100 M weights, and the rest."""
    statistics = x["statistics"] / (SAMPLES * LENGTH) * TOKENS / 60
    return statistics, x["rounding"] / x["parameters"] * 1e8 / 60, x["rest"] / 60


def describe(sizes: dict[str, int]) -> dict[str, Any]:
    """Return what the memory of a Llama depends on."""
    hidden, inner, layers = sizes.values()
    parameters = layers * (4 * hidden * hidden + 3 * hidden * inner) + VOCABULARY * hidden
    # Inputs of q, k, v; of o; of gate and up; of down: float32.
    moments = 4 * layers * (3 * hidden**2 + inner**2)
    return {
        "parameters": parameters,
        "model": 2 * parameters,
        "moments": moments,
        "matrix": max(hidden * inner, VOCABULARY * hidden),
        "outputs": 2 * LENGTH * VOCABULARY,
    }


def predict_peak(x: dict[str, Any]) -> float:
    """Return the memory model: weights, then statistics or rounded tensors.

    Statistics share 40 % of the free memory, in several passes over the data if they need more.
    """
    statistics = min(x["moments"], 0.4 * max(32e9 - x["model"], 0)) + 12 * x["outputs"]
    rounding = 3 / 8 * x["parameters"] * 2 + 16 * x["matrix"]
    return float(x["model"] + max(statistics, rounding))


def run(sizes: dict[str, int]) -> dict[str, Any]:
    """Fit a model of random weights to 3 bits; return CPU seconds and memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": sizes["hidden_size"] // 64}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **heads)
    batches = [{"input_ids": torch.randint(0, VOCABULARY, (1, LENGTH))} for _ in range(SAMPLES + 1)]
    seconds = {"rounding": 0.0, "statistics": 0.0, "passes": 0}

    def timed(function: Callable[..., Any], key: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **options)
            finally:
                seconds[key] += time.process_time() - start

        return call

    round_all = Fitter.round_all

    def counted(self: Fitter, step: float) -> Any:
        seconds["passes"] += 1
        return round_all(self, step)

    Fitter.solve = timed(Fitter.solve, "rounding")  # type: ignore[method-assign]
    Fitter.round_all = counted  # type: ignore[method-assign]
    fisher._run = timed(fisher._run, "statistics")
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).bfloat16().save_pretrained(Path(folder) / "dense")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before, start = memory()["rss"], time.process_time()
        settings = Calibration(samples=SAMPLES, evaluate=batches[-1:])
        fit(
            Path(folder) / "dense",
            Budget(bits=3.0),
            batches[:-1],
            calibration=settings,
            how=FolderOptions(threads=1),
        )
        total, peak = time.process_time() - start, memory()["peak"] - before
    rest = total - seconds["rounding"] - seconds["statistics"]
    return describe(sizes) | seconds | {"rest": rest, "peak": peak}


if __name__ == "__main__":
    main()
