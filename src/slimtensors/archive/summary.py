"""What was stored, tensor by tensor: returned by `save` and by `inspect`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath

from slimtensors.tensor import Json


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Lay out a table in plain text: the first `left` columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), *map(line, rows)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Lay out a table in Markdown."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


@dataclass(frozen=True)
class TensorSummary:
    """One tensor in an archive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    """The plan, as `bitmask(values=…)`; `plain` if there is none, `tied` if stored elsewhere."""
    dense_bytes: int
    stored_bytes: int
    file: str
    note: str = ""
    error: float | None = None
    """How far it is from what was given, relative RMS; none if it is the same, bit for bit."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of everything it is stored as, by the dotted path in its plan."""
    bound: float | None = None
    """The order-0 entropy, in bits per item; none if nobody asked for it."""

    def tied_to(self, home: str) -> "TensorSummary":
        """Return the entry of a name that stands for the tensor `home`."""
        return replace(self, codec="tied", stored_bytes=0, note=f"is {home}", parts={}, bound=None)

    @property
    def items(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def bits_per_item(self) -> float:
        """Bits that one item costs in the file."""
        return 8 * self.stored_bytes / self.items if self.items else 0.0


@dataclass(frozen=True)
class Summary:
    """All tensors of an archive, and the files that hold them."""

    tensors: Sequence[TensorSummary]
    files: Sequence[str]

    @property
    def items(self) -> int:
        """Number of items of all tensors; tied ones count once."""
        return sum(t.items for t in self.tensors if t.codec != "tied")

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors in memory; tied ones count once."""
        return sum(t.dense_bytes for t in self.tensors if t.codec != "tied")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files, without headers."""
        return sum(t.stored_bytes for t in self.tensors)

    @property
    def ratio(self) -> float:
        """How many times smaller."""
        return self.dense_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        tensors = count_noun(len(self.tensors), "tensor")
        coded = sum(t.codec not in ("plain", "tied") for t in self.tensors)
        sizes = f"{format_bytes(self.dense_bytes)} -> {format_bytes(self.stored_bytes)}"
        errors = [t.error for t in self.tensors if t.error is not None and t.codec != "tied"]
        lost = f"; {len(errors)} rounded, relative error {max(errors):.4f}" if errors else ""
        return f"{tensors}, {coded} compressed: {sizes} ({self.ratio:.2f}x smaller){lost}"

    def to_json(self) -> Json:
        """Return everything as JSON; `docs/schemas/summary.json` describes it."""
        return {
            "files": [PurePath(file).name for file in self.files],
            "dense_bytes": self.dense_bytes,
            "stored_bytes": self.stored_bytes,
            "tensors": [
                {
                    **asdict(t),
                    "shape": list(t.shape),
                    "file": PurePath(t.file).name,
                    "bits_per_item": round(t.bits_per_item, 4),
                    "bound": None if t.bound is None else round(t.bound, 4),
                }
                for t in self.tensors
            ],
        }


def joined(parts: Sequence[Summary]) -> Summary:
    """Return one summary of what lies in several files."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return Summary(tensors, [file for part in parts for file in part.files])


def count_noun(number: int, what: str) -> str:
    """Write a number of things: `1 tensor`, `2 tensors`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_bytes(size: float) -> str:
    """Write a number of bytes for people: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
