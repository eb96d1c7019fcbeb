"""Write RESULTS.md and the README's table from the results of the benchmarks.

    python benchmarks/results.py [FOLDER]

Read the JSON files in FOLDER (default: benchmarks/results) and replace their sections in
RESULTS.md. Trial runs (`--quick`) are skipped. Sections of benchmarks that were not run again stay
as they are, and so does everything below the first `###` of a section: tables copied by hand from
the output of a script. Without new results, only the README's table is written again, from the
figures in RESULTS.md.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Result = Mapping[str, Any]
Claims = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Ratio:
    """A measured claim as a factor; `inverse` turns "takes 2x the time" into "0.5x as fast"."""

    benchmark: str
    claim: str
    inverse: bool = False

    def of(self, claims: Claims) -> float:
        try:
            value = claims[self.benchmark][self.claim]
        except KeyError:
            raise SystemExit(f"{self.benchmark}: no claim {self.claim!r} in RESULTS.md") from None
        return 1 / value if self.inverse else value


@dataclass(frozen=True)
class Row:
    """A row of the README's table: three factors, each may be missing."""

    title: str
    peer: str
    smaller: Ratio | None = None
    saves: Ratio | None = None
    loads: Ratio | None = None


_W4, _CT20 = "W4A16 g128 (pack-quantized)", "compressed-tensors 0.20"
_GPTQ = "W4 g128, 4096 x 4096, activation order None: as fast as llm-compressor"
_SMALL = "2000 fp32 tensors of 64 x 64, sparse, density 10%: open + load"

AHEAD = [
    Row(
        "bf16 weights, `lossless` (same size)",
        "zipnn",
        saves=Ratio("lossless", "MiniLM bfloat16: encode / zipnn"),
        loads=Ratio("lossless", "MiniLM bfloat16: decode warm / zipnn"),
    ),
    Row(
        "bf16 weights, `lossless-max`",
        "pcodec 12",
        smaller=Ratio("lossless", "MiniLM bfloat16 max: size / pcodec 12", inverse=True),
        saves=Ratio("lossless", "MiniLM bfloat16 max: encode / pcodec 12"),
        loads=Ratio("lossless", "MiniLM bfloat16 max: decode warm / pcodec 12"),
    ),
    Row(
        "W4A16 weights (same bytes)",
        _CT20,
        saves=Ratio("quantize_kernels", f"{_W4}: compress, scales found against {_CT20}"),
        loads=Ratio(
            "quantize_kernels", f"{_W4}: decompress into memory that is there against {_CT20}"
        ),
    ),
    Row("GPTQ, one layer", "llm-compressor", saves=Ratio("gptq", _GPTQ)),
    Row(
        "fine-tuning checkpoint, exact delta",
        "torch.save",
        smaller=Ratio("checkpoints", "minilm: exact, smaller"),
    ),
    Row(
        "pruned encoder, 6 % left, 8 bits",
        "DeepCABAC",
        smaller=Ratio("masks", "MiniLM 6 %: DeepCABAC / max, bytes"),
        saves=Ratio("masks", "MiniLM 6 %: max saves faster than DeepCABAC"),
        loads=Ratio("masks", "MiniLM 6 %: max loads faster than DeepCABAC"),
    ),
    Row(
        "int4 model on a CPU, one token",
        "dense bf16",
        loads=Ratio("run_compressed-half", "int4, 1 threads"),
    ),
]
BEHIND = [
    Row(
        "`from_pretrained`, cold cache, fast disk",
        "safetensors, dense",
        loads=Ratio("transformers_load", "load: time of the cold dense load", inverse=True),
    ),
    Row(
        "`from_pretrained`, warm cache",
        "safetensors, dense",
        loads=Ratio("transformers_load", "load: time of the warm dense load", inverse=True),
    ),
    Row(
        "2,000 small sparse tensors",
        "safetensors, dense",
        loads=Ratio("many_tensors", _SMALL, inverse=True),
    ),
]


def main() -> int:
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"
    results = read(folder)
    if results:
        RESULTS.write_text(page(results, RESULTS.read_text()))
    README.write_text(fill(README.read_text(), short(read_claims(RESULTS.read_text()))))
    print(f"{RESULTS.name}: {len(results)} benchmarks updated; {README.name}: table written")
    return 0


def read(folder: Path) -> dict[str, Result]:
    """Return the results that state claims, by benchmark."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if "claims" in result and not path.stem.endswith("-quick"):
            written = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
            found[path.stem] = {"date": written, **result}
    return found


def read_claims(text: str) -> dict[str, dict[str, float]]:
    """Return the claims of every section of RESULTS.md: benchmark, then claim, to the value."""
    row = re.compile(r"^\| (.+?) \| (-?[\d.e+-]+) [^|]*\| [<>]= ", re.MULTILINE)
    return {
        name: {found[1]: float(found[2]) for found in row.finditer(body)}
        for name, body in _sections(text).items()
    }


def page(results: Mapping[str, Result], before: str) -> str:
    """Return RESULTS.md with the sections of `results` replaced."""
    sections = _sections(before)
    for name, result in results.items():
        _, mark, kept = sections.get(name, "").partition("\n### ")
        sections[name] = f"\n{_about(result)}\n\n{_table(result['claims'])}\n{mark}{kept}"
    machines = sorted({_machine(result) for result in results.values()})
    parts = [
        "# Results",
        "Written by `benchmarks/results.py`; [how to read them](README.md). "
        "Tables under a third-level heading are copied from the output of the script.",
        "\n".join(f"- {machine}" for machine in machines),
    ]
    parts += [f"## {name}\n{text.rstrip()}" for name, text in sorted(sections.items())]
    return "\n\n".join(parts) + "\n"


def _sections(text: str) -> dict[str, str]:
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {name: body for name, _, body in parts}


def short(claims: Claims) -> str:
    """Return the README's table between its markers."""
    head = "| against | times smaller | save speed, ratio | load or run speed, ratio |"
    lines = [BEGIN]
    for title, rows in (("ahead", AHEAD), ("behind", BEHIND)):
        lines += ["", f"| **{title}** {head}", "|---|---|--:|--:|--:|"]
        for row in rows:
            cells = [_factor(ratio, claims) for ratio in (row.smaller, row.saves, row.loads)]
            lines.append(f"| {row.title} | {row.peer} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", END])


def _factor(ratio: Ratio | None, claims: Claims) -> str:
    if ratio is None:
        return ""
    value = ratio.of(claims)
    if value >= 5:
        return f"{value:.1f}"
    return f"{value:.3f}" if abs(value - 1) < 0.01 else f"{value:.2f}"


def find_block(text: str) -> str:
    """Return the part of a page between the markers, markers included."""
    found = re.search(f"{BEGIN}.*?{END}", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"{BEGIN} … {END} not found")
    return found.group()


def fill(text: str, table: str) -> str:
    """Return the page with the table replaced."""
    return text.replace(find_block(text), table)


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
