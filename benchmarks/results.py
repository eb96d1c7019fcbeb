"""Make RESULTS.md, and the table in the README, of the JSON files that the benchmarks have written.

    python benchmarks/results.py [FOLDER]

Left out are trial runs (`--quick`). What RESULTS.md says of a benchmark that was not run again
stays, with its date. A figure of the short table whose benchmark was not run is left out; one that
its benchmark does not state any more is an error.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Result = Mapping[str, Any]

_SPARSE, _MANY = "bfloat16 4096 x 4096, density", "2000 fp32 tensors of 64 x 64"
_CT14, _CT20 = "compressed-tensors 0.14.0.1", "compressed-tensors 0.20"
_DENSE = "safetensors, dense"
_W4, _GPTQ = "W4A16 g128 (pack-quantized)", "W4 g128, 4096 x 4096, activation order None"
_FASTER, _SMALLER = "{:.1f}x as fast", "{:.2f}x smaller"
_TIME = "{:.2f}x the time"

SHORT: Mapping[str, Sequence[tuple[str, str, str, str]]] = {
    "bitmask_kernels": [
        (
            f"{_SPARSE} 50%, caches warm: encode against {_CT14}",
            "encode half zeros",
            _CT14,
            _FASTER,
        ),
        (
            f"{_SPARSE} 50%, caches warm: decode against {_CT14}",
            "decode half zeros",
            _CT14,
            _FASTER,
        ),
        (
            f"{_SPARSE} 6%, caches cold: decode against {_CT14}",
            "decode 94 % zeros, cold",
            _CT14,
            _FASTER,
        ),
    ],
    "masks": [
        ("MiniLM 6 %: HDF5 / max, bytes", "94 % zeros, int8", "HDF5, CSR, gzip", _SMALLER),
        ("BERT Gaussian 6 %: HDF5 / max, bytes", "the same, BERT", "HDF5, CSR, gzip", _SMALLER),
    ],
    "lossless": [
        ("MiniLM bfloat16: points over zipnn", "bf16, `lossless`: size", "zipnn", "{:+.2f} points"),
        ("MiniLM bfloat16: encode / zipnn", "encode", "zipnn", _FASTER),
        ("MiniLM bfloat16: decode warm / zipnn", "decode", "zipnn", _FASTER),
        ("MiniLM bfloat16: decode fresh / zipnn", "decode, fresh memory", "zipnn", _FASTER),
        (
            "MiniLM bfloat16 max: size / pcodec 12",
            "bf16, `lossless-max`: size",
            "pcodec 12",
            "{:.3f}x the size",
        ),
        ("MiniLM bfloat16 max: encode / pcodec 12", "encode", "pcodec 12", _FASTER),
        ("MiniLM bfloat16 max: decode warm / pcodec 12", "decode", "pcodec 12", _FASTER),
    ],
    "quantize_kernels": [
        (f"{_W4}: compress, scales found against {_CT20}", "quantize to W4A16", _CT20, _FASTER),
    ],
    "gptq": [(f"{_GPTQ}: as fast as llm-compressor", "GPTQ, one layer", "llm-compressor", _FASTER)],
    "recipes": [
        ("50 % SparseGPT: CPU time", "SparseGPT, a whole model", "llm-compressor", _TIME),
    ],
    "checkpoints": [
        ("gpt: exact, smaller", "exact delta of a checkpoint, GPT", "torch.save", _SMALLER),
        ("minilm: exact, smaller", "the same, MiniLM fine-tuned", "torch.save", _SMALLER),
        ("gpt: optimizer-bf16, smaller", "moments in bf16, GPT", "torch.save", _SMALLER),
    ],
    "checkpoint_run": [
        (
            "the run, smaller than torch.save files",
            "50 saves, two of them whole",
            "torch.save",
            _SMALLER,
        ),
    ],
    "run_compressed-half": [
        ("int8, 1 threads", "a token, int8", "dense bf16", _FASTER),
        ("int4, 1 threads", "a token, int4", "dense bf16", _FASTER),
        ("load of 579 int8 tensors against torchao", "load 579 int8 tensors", "torchao", _TIME),
    ],
    "load_file": [
        (
            "load to dense against copying into fresh pages",
            "load 512 MiB, half zeros",
            "a copy of the dense bytes",
            _TIME,
        )
    ],
    "many_tensors": [
        (f"{_MANY}, plain: open + load", "load 2,000 small tensors", _DENSE, _TIME),
        (f"{_MANY}, sparse, density 10%: open + load", "the same, sparse", _DENSE, _TIME),
    ],
    "cold_load": [("cold: time of the dense load", "load 2 GB, cold cache", _DENSE, _TIME)],
    "transformers_load": [
        ("load: time of the cold dense load", "`from_pretrained`, cold cache", _DENSE, _TIME),
        ("load: time of the warm dense load", "`from_pretrained`, warm cache", _DENSE, _TIME),
    ],
    "import_time": [("of import torch", "`import slimtensors`", "`import torch`", _TIME)],
}
"""By benchmark: the claim, what it is about, who it is compared with, how to say it."""


def main() -> int:
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"
    results = read(folder)
    if not results:
        print(f"{folder}: no results; run the benchmarks first: make bench", file=sys.stderr)
        return 2
    RESULTS.write_text(page(results, RESULTS.read_text() if RESULTS.exists() else ""))
    README.write_text(filled(README.read_text(), short(results)))
    print(f"{RESULTS.name}: {len(results)} benchmarks")
    return 0


def read(folder: Path) -> dict[str, Result]:
    """Return the results that state claims, by the name of the benchmark."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if "claims" in result and not path.stem.endswith("-quick"):
            written = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
            found[path.stem] = {"date": written, **result}
    return found


def page(results: Mapping[str, Result], before: str) -> str:
    """Return RESULTS.md: the short table, the machine, and every claim of every benchmark."""
    older = dict(part.split("\n", 1) for part in before.split("\n## ")[1:])
    newer = {name: f"\n{_about(it)}\n\n{_table(it['claims'])}\n" for name, it in results.items()}
    machines = sorted({_machine(result) for result in results.values()})
    parts = [
        "# Results",
        "Made by `benchmarks/results.py` of what `make bench` measured; "
        "[what is measured and how to read it](README.md).",
        short(results),
        "\n".join(f"- {machine}" for machine in machines),
    ]
    parts += [f"## {name}\n{text.rstrip()}" for name, text in sorted((older | newer).items())]
    return "\n\n".join(parts) + "\n"


def short(results: Mapping[str, Result]) -> str:
    """Return the short table between its marks."""
    rows = [
        f"| {what} | {peer} | {how.format(_value(results[name], claim))} |"
        for name, figures in SHORT.items()
        if name in results
        for claim, what, peer, how in figures
    ]
    return "\n".join([BEGIN, "| | against | |", "|---|---|---|", *rows, END])


def block(text: str) -> str:
    """Return the table between the marks of a page."""
    found = re.search(f"{BEGIN}.*?{END}", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"no {BEGIN} … {END} on the page")
    return found.group()


def filled(text: str, table: str) -> str:
    """Return the page with another table between its marks."""
    return text.replace(block(text), table)


def _value(result: Result, claim: str) -> float:
    for stated in result["claims"]:
        if stated["claim"] == claim:
            return float(stated["value"])
    raise SystemExit(f"{result['benchmark']} states no {claim!r}; mend SHORT in results.py")


def _machine(result: Result) -> str:
    at = result["machine"]
    memory = at["memory_bytes"] / 2**30
    pages = re.search(r"\[(\w+)\]", at["huge_pages"])
    huge = f", huge pages: {pages[1]}" if pages else ""
    system = f"Linux {at['kernel']}, Python {at['python']}"
    return f"{at['cpu']}, {at['cores']} cores, {memory:.0f} GiB, {system}{huge}"


def _about(result: Result) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in result["machine"]["versions"].items())
    busy = result["cores_used_by_others"]
    disturbed = f" **Disturbed**: others used {busy:.1f} cores." if result["disturbed"] else ""
    return f"{result['date']}, commit {result['machine']['commit']}; {versions}.{disturbed}"


def _table(claims: Sequence[Result]) -> str:
    return "\n".join(["| | measured | asked | |", "|---|--:|--:|---|", *_rows(claims)])


def _rows(claims: Sequence[Result]) -> Iterator[str]:
    for claim in claims:
        sign, target = claim["target"].split()
        measured = f"{claim['value']:.4g} {claim.get('unit', 'x')}"
        met = "" if claim["met"] else "missed"
        yield f"| {claim['claim']} | {measured} | {sign} {float(target):g} | {met} |"


if __name__ == "__main__":
    sys.exit(main())
