"""Tables and the chart of fit.py.

python benchmarks/fit_chart.py      # docs/images/fit.svg from fit.csv
"""

import bisect
import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
DATA = HERE / "fit.csv"
TARGET = HERE.parent / "docs" / "images" / "fit.svg"

OURS = "slimtensors fit"
COLUMNS = (
    *("teacher", "method", "tensor_bytes", "file_bytes", "bits", "kl", "kl_error", "perplexity"),
    *("top1", "relative_error", "tokens", "cpu_seconds", "note"),
)
TITLES = {
    "smollm2": "SmolLM2-135M",
    "native": "Llama, 14.7 M parameters, trained here",
}
GOAL, GOAL_ABOVE_Q4 = 0.7, 0.8


@dataclass(frozen=True)
class Point:
    """One row of fit.csv, as far as the chart and the comparison need it."""

    teacher: str
    method: str
    size: int
    """Bytes that are compared: the tensors of a peer, the weight files of ours."""
    kl: float

    @property
    def group(self) -> str:
        """Return the legend entry."""
        if self.method.startswith("GGUF"):
            return "GGUF, blocks across rows" if self.method.endswith("folded") else "GGUF"
        for prefix in ("GPTQ", "bitsandbytes NF4", "HQQ", "AWQ", "AutoRound", "data-free"):
            if self.method.startswith(prefix):
                return prefix
        return OURS


@dataclass(frozen=True)
class Comparison:
    """Ours against one peer; NaN where ours was not measured on both sides of it."""

    peer: str
    size: int
    kl: float
    bytes_ratio: float
    """Our bytes at the peer's divergence, divided by the peer's bytes."""
    kl_ratio: float
    """Our divergence at the peer's bytes, divided by the peer's divergence."""
    goal: float

    def describe(self) -> str:
        ratios = f"bytes at equal KL {self.bytes_ratio:.3f} (<= {self.goal})"
        ratios += f", KL at equal bytes {self.kl_ratio:.3f} (<= 0.5)"
        return f"{self.peer:44} {self.size / 1e6:7.2f} MB KL {self.kl:.4f}: {ratios}"


def compare(points: Sequence[Any]) -> list[Comparison]:
    """Compare ours with every GGUF row that no smaller GGUF row beats."""
    ours = sorted((p.size, p.kl) for p in points if p.method.startswith(OURS))
    ours = frontier(ours)
    found = []
    theirs = sorted((p for p in points if p.method.startswith("GGUF")), key=lambda p: p.size)
    best = math.inf
    for peer in theirs:
        if peer.kl >= best:
            continue
        best = peer.kl
        size = interpolate(
            [(-math.log(kl), math.log(size)) for size, kl in ours], -math.log(peer.kl)
        )
        kl = interpolate([(math.log(size), math.log(kl)) for size, kl in ours], math.log(peer.size))
        goal = GOAL_ABOVE_Q4 if "Q5_K_M" in peer.method else GOAL
        ratios = math.exp(size) / peer.size, math.exp(kl) / peer.kl
        found.append(Comparison(peer.method, peer.size, peer.kl, *ratios, goal))
    return found


def frontier(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points, sorted by size, that no smaller point beats."""
    kept: list[tuple[int, float]] = []
    for size, kl in sorted(points):
        if not kept or kl < kept[-1][1]:
            kept.append((size, kl))
    return kept


def interpolate(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x between the points of an ascending line, or NaN outside."""
    at = bisect.bisect_left([point[0] for point in line], x)
    if at < len(line) and line[at][0] == x:
        return line[at][1]
    if not 0 < at < len(line):
        return math.nan
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def write_table(rows: Sequence[Any]) -> None:
    """Write fit.csv."""
    with DATA.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: (row.teacher, row.method)):
            values = {name: getattr(row, name) for name in COLUMNS if hasattr(row, name)}
            values |= {name: row.quality[name] for name in COLUMNS if name in row.quality}
            rounded = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in values.items()}
            writer.writerow(rounded)


def read_points(path: Path = DATA) -> list[Point]:
    """Return the rows of fit.csv."""
    with path.open(newline="") as file:
        return [
            Point(
                row["teacher"],
                row["method"],
                int(row["file_bytes" if row["method"].startswith(OURS) else "tensor_bytes"]),
                float(row["kl"]),
            )
            for row in csv.DictReader(file)
        ]


PANEL, HEIGHT, LEFT, TOP, GAP, LEGEND = 380, 260, 48, 48, 56, 22
COLOURS = {  # light and dark
    OURS: ("#1f6feb", "#4493f8"),
    "GGUF": ("#bc4c00", "#f0883e"),
    "GGUF, blocks across rows": ("#9a6700", "#d29922"),
    "GPTQ": ("#57606a", "#9198a1"),
    "bitsandbytes NF4": ("#8250df", "#a371f7"),
    "HQQ": ("#bf3989", "#db61a2"),
    "AWQ": ("#1a7f37", "#3fb950"),
    "AutoRound": ("#0a7d8c", "#39c5cf"),
    "data-free": ("#a40e26", "#ff7b72"),
}
"""Colours by group, in the order of the legend."""


def _style() -> str:
    def rules(i: int) -> str:
        classes = enumerate(COLOURS.values())
        return "\n".join(
            f".c{k} {{ fill: {pair[i]} }} .l{k} {{ stroke: {pair[i]}; fill: none }}"
            for k, pair in classes
        )

    return f"""
text {{ font: 12px system-ui, sans-serif; fill: #24292f }}
.title {{ font-weight: 600; font-size: 13px }}
.note {{ fill: #57606a; font-size: 11px }}
.grid {{ stroke: #d0d7de; stroke-width: 1 }}
{rules(0)}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3 }}
  .note {{ fill: #9198a1 }}
  .grid {{ stroke: #30363d }}
{rules(1)}
}}
"""


def draw(points: Sequence[Point]) -> str:
    """Return the SVG: a panel per language model, divergence over bytes."""
    teachers = [t for t in TITLES if any(p.teacher == t for p in points)]
    shown = [p for p in points if p.teacher in teachers and p.kl > 0]
    groups = [group for group in COLOURS if any(p.group == group for p in shown)]
    width = LEFT + len(teachers) * (PANEL + GAP)
    height = TOP + HEIGHT + 40 + LEGEND * math.ceil(len(groups) / 4)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Divergence from the original model over size; lower and further left is'
        ' better">',
        f"<style>{_style()}</style>",
    ]
    for i, teacher in enumerate(teachers):
        own = [p for p in shown if p.teacher == teacher]
        lines += _draw_panel(TITLES[teacher], own, LEFT + i * (PANEL + GAP))
    for i, group in enumerate(groups):
        x, y = LEFT + (i % 4) * 190, TOP + HEIGHT + 52 + (i // 4) * LEGEND
        lines.append(f'<circle class="c{list(COLOURS).index(group)}" cx="{x}" cy="{y - 4}" r="4"/>')
        lines.append(f'<text x="{x + 10}" y="{y}">{escape(group)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _draw_panel(title: str, points: Sequence[Point], left: int) -> Iterator[str]:
    low, high = min(p.size for p in points), max(p.size for p in points)
    low, high = low - (high - low) * 0.05, high + (high - low) * 0.05
    bottom = math.floor(math.log10(min(p.kl for p in points)) * 2) / 2
    top = math.ceil(math.log10(max(p.kl for p in points)) * 2) / 2

    def across(size: float) -> float:
        return left + PANEL * (size - low) / (high - low)

    def down(kl: float) -> float:
        return TOP + HEIGHT * (top - math.log10(kl)) / (top - bottom)

    yield f'<text class="title" x="{left}" y="18">{escape(title)}</text>'
    note = "KL per token (log) over megabytes of weights"
    yield f'<text class="note" x="{left}" y="35">{note}</text>'
    for kl in (x * 10.0**e for e in range(-5, 2) for x in (1, 3)):
        if bottom <= math.log10(kl) <= top:
            y = f"{down(kl):.1f}"
            yield f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>'
            place = f'x="{left - 6}" y="{y}" dy="4" text-anchor="end"'
            yield f'<text class="note" {place}>{kl:g}</text>'
    step = _nice_step((high - low) / 6)
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        x, label = f"{across(k * step):.1f}", f"{k * step / 1e6:g}"
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT + 4}"/>'
        place = f'x="{x}" y="{TOP + HEIGHT + 18}" text-anchor="middle"'
        yield f'<text class="note" {place}>{label}</text>'
    for k, group in enumerate(COLOURS):
        own = [p for p in points if p.group == group]
        if group.startswith((OURS, "GGUF")) and len(own) > 1:
            line = frontier([(p.size, p.kl) for p in own])
            path = " ".join(f"{across(size):.1f},{down(kl):.1f}" for size, kl in line)
            yield f'<polyline class="l{k}" points="{path}"/>'
        for p in own:
            where = f'cx="{across(p.size):.1f}" cy="{down(p.kl):.1f}"'
            label = escape(f"{p.method}: {p.size / 1e6:.1f} MB, KL {p.kl:.4f}")
            yield f'<circle class="c{k}" {where} r="3.5"><title>{label}</title></circle>'


def _nice_step(x: float) -> float:
    power = 10.0 ** math.floor(math.log10(x))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= x)


def write_chart(points: Sequence[Point]) -> None:
    """Write the SVG."""
    TARGET.write_text(draw(points))


if __name__ == "__main__":
    write_chart(read_points())
