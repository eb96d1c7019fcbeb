"""Draw the README's chart from chart.csv.

    python benchmarks/chart.py

Every value in chart.csv is a figure from the section of RESULTS.md named in its last column; a test
compares them. Change both after a new run.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
DATA = HERE / "chart.csv"
TARGET = HERE.parent / "docs" / "images" / "chart.svg"

PANEL, GAP, LEFT, BAR, STEP, TOP = 276, 24, 12, 12, 36, 60
DENSE_PERPLEXITY = 4.395
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 13px }
.note { fill: #57606a; font-size: 11px }
.bar { fill: #b6bec8 }
.ours { fill: #1f6feb }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note { fill: #9198a1 }
  .bar { fill: #565f6b }
  .ours { fill: #4493f8 }
}
"""


@dataclass(frozen=True)
class Bar:
    """One bar: its length in units of the panel's scale, and the value printed beside it."""

    label: str
    ours: bool
    length: float
    text: str


@dataclass(frozen=True)
class Panel:
    """A group of bars; `full` is the length that fills the panel."""

    title: str
    note: str
    full: float
    bars: list[Bar]


def read(path: Path = DATA) -> list[dict[str, str]]:
    """Return the rows of chart.csv."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def make_panels(rows: list[dict[str, str]]) -> list[Panel]:
    """Return the three panels in the order in which they are drawn."""

    def bars(panel: str) -> Iterator[tuple[str, bool, float]]:
        for row in rows:
            if row["panel"] == panel:
                yield row["label"], row["ours"] == "yes", float(row["value"])

    percent = [Bar(label, ours, x, f"{x:g} %") for label, ours, x in bars("lossless")]
    states = [
        Bar(label, ours, 100 / x, f"{100 / x:.0f} %") for label, ours, x in bars("checkpoint")
    ]
    quality = [
        Bar(label, ours, max(x - DENSE_PERPLEXITY, 0), f"{x:.3f}")
        for label, ours, x in bars("quality")
    ]
    return [
        Panel("Lossless bf16 weights", "bytes, % of dense (MiniLM)", 100, percent),
        Panel("Training checkpoint", "bytes, % of torch.save (MiniLM, AdamW)", 100, states),
        Panel(
            "Quality after one-shot compression",
            "perplexity; bars show the increase over dense, 4.395",
            0.06,
            quality,
        ),
    ]


def draw(panels: list[Panel]) -> str:
    """Return the SVG."""
    width = LEFT + len(panels) * (PANEL + GAP)
    height = TOP + STEP * max(len(panel.bars) for panel in panels) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Size and quality of slimtensors and its peers; shorter bars are better">',
        f"<style>{STYLE}</style>",
    ]
    for i, panel in enumerate(panels):
        lines += _draw_panel(panel, LEFT + i * (PANEL + GAP))
    return "\n".join([*lines, "</svg>\n"])


def _draw_panel(panel: Panel, x: int) -> Iterator[str]:
    yield f'<text class="title" x="{x}" y="20">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{x}" y="38">{escape(panel.note)}</text>'
    for i, bar in enumerate(panel.bars):
        y = TOP + i * STEP
        length = max(bar.length / panel.full * (PANEL - 50), 1)
        kind = "bar ours" if bar.ours else "bar"
        yield f'<text x="{x}" y="{y + 8}">{escape(bar.label)}</text>'
        size = f'width="{length:.1f}" height="{BAR}"'
        yield f'<rect class="{kind}" x="{x}" y="{y + 13}" {size} rx="2"/>'
        yield f'<text class="note" x="{x + length + 6:.1f}" y="{y + 23}">{bar.text}</text>'


if __name__ == "__main__":
    TARGET.write_text(draw(make_panels(read())))
