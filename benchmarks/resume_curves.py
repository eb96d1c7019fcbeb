"""Draw the results of `checkpoint_resume.py`: differences of each run from the exact one.

python benchmarks/resume_curves.py gpt-late docs/checkpoint-resume.svg
"""

import json
import math
import sys
from pathlib import Path

from measure import RESULTS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 60, 230, 14, 34
LOWEST, HIGHEST = -7, 0
"""Range of the axis, as powers of ten."""
SMOOTH = 10
COLOURS = (
    *("#000000", "#666666", "#999999", "#bbbbbb", "#e6ab02"),
    *("#1b9e77", "#d95f02", "#7570b3", "#66a61e", "#e7298a", "#a6761d"),
)


def main() -> None:
    case, target = sys.argv[1], Path(sys.argv[2])
    rows = json.loads((RESULTS / f"checkpoint_resume-{case}.json").read_text())["rows"]
    target.write_text(picture(rows))


def picture(rows) -> str:
    """Return an SVG image with a line for each row."""
    steps = len(rows[0]["curve"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(LOWEST, HIGHEST + 1):
        y = _y(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for step in range(0, steps + 1, 20):
        x = _x(step, steps)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">steps after the first restore</text>')
    for i, (row, colour) in enumerate(zip(rows, COLOURS, strict=True)):
        points = (f"{_x(s, steps):.1f},{_y(d):.1f}" for s, d in enumerate(_smooth(row["curve"]), 1))
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"'
            ' stroke-width="1.5"/>'
        )
        times = f", {row['restores']} restores" if row["restores"] > 1 else ""
        x, y = WIDTH - RIGHT + 12, TOP + 14 + 18 * i
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{row["what"]}{times}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _smooth(curve):
    """Return the moving average of the absolute differences."""
    sizes = [abs(x) for x in curve]
    windows = (sizes[max(0, i - SMOOTH) : i] for i in range(1, len(sizes) + 1))
    return [sum(window) / len(window) for window in windows]


def _x(step: int, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps


def _y(difference: float) -> float:
    power = min(HIGHEST, max(LOWEST, math.log10(max(difference, 1e-30))))
    return TOP + (HEIGHT - TOP - BOTTOM) * (HIGHEST - power) / (HIGHEST - LOWEST)


if __name__ == "__main__":
    main()
