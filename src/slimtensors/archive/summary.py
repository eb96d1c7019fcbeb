"""Summaries of archives, returned by `save` and `inspect`, and their text form."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath

from slimtensors.errors import escape_text
from slimtensors.tensor import Json


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a plain text table; the first `left` columns are left-aligned, the others right."""
    rows = [[escape_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def format_row(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([format_row(head), *map(format_row, rows)])


def format_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a Markdown table."""
    rows = [[escape_text(cell).replace("|", "\\|") for cell in row] for row in rows]
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


@dataclass(frozen=True)
class TensorSummary:
    """One tensor in an archive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    """The plan, such as `bitmask(values=…)`, or `plain`.

    `tied`: the same memory as another tensor. `copy`: the same bits as another tensor, stored once.
    """
    dense_bytes: int
    stored_bytes: int
    file: str
    note: str = ""
    error: float | None = None
    """Relative RMS error of the stored values; None if lossless."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each part, by its dotted path in the plan."""
    bound: float | None = None
    """Order-0 entropy in bits per item; None if not measured."""

    def tied_to(self, home: str) -> "TensorSummary":
        """Return the entry of an alias of the tensor `home`."""
        return replace(
            self, codec="tied", stored_bytes=0, note=f"tied to {home}", parts={}, bound=None
        )

    def copy_of(self, home: str) -> "TensorSummary":
        """Return the entry of a tensor with the bits of the tensor `home`."""
        return replace(self.tied_to(home), codec="copy", note=f"same bits as {home}")

    @property
    def items(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def bits_per_item(self) -> float:
        """Stored bits per item."""
        return 8 * self.stored_bytes / self.items if self.items else 0.0


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer, or a stack of them, that a quantized model stores dense."""

    name: str
    reason: str
    parameters: int


@dataclass(frozen=True)
class LayerGroupSize:
    """A layer that the group size of a preset does not fit."""

    name: str
    columns: int
    group_size: int
    """The group size that is used; -1 is one scale per row."""
    requested: int
    """The group size of the preset."""


def describe_group_sizes(layers: Sequence[LayerGroupSize]) -> list[str]:
    """Return a sentence for each group size that differs from the requested one."""
    counts = Counter((x.requested, x.group_size, x.columns) for x in layers)
    return [
        f"group size {'channel' if size == -1 else size} instead of {requested}:"
        f" {count_noun(count, 'layer')} with {columns} columns"
        for (requested, size, columns), count in sorted(counts.items())
    ]


@dataclass(frozen=True)
class QuantizationSummary:
    """How much of a model is quantized, and which linear layers stay dense."""

    layers: int
    """Number of linear layers, quantized or dense; a stack of experts counts as one."""
    parameters: int
    """Number of parameters of the whole model."""
    quantized_parameters: int
    dense_layers: Sequence[DenseLayer] = ()
    group_sizes: Sequence[LayerGroupSize] = ()
    """Layers with another group size than the preset."""

    def __str__(self) -> str:
        total = self.parameters or 1
        in_layers = sum(layer.parameters for layer in self.dense_layers)
        others = self.parameters - self.quantized_parameters - in_layers
        reasons = Counter(layer.reason for layer in self.dense_layers)
        why = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        text = f"dense: {len(self.dense_layers)} of {count_noun(self.layers, 'linear layer')}"
        if why:
            text += f" with {in_layers / total:.1%} of the parameters ({why})"
        dense = f"{text}; embeddings and other tensors: {others / total:.1%}"
        return "\n".join([*describe_group_sizes(self.group_sizes), dense])

    def to_json(self) -> Json:
        """Return a JSON object (`quantization` in `docs/schemas/summary.json`)."""
        return {
            "linear_layers": self.layers,
            "parameters": self.parameters,
            "quantized_parameters": self.quantized_parameters,
            "dense_layers": [asdict(layer) for layer in self.dense_layers],
            "group_sizes": [asdict(layer) for layer in self.group_sizes],
        }

    @classmethod
    def from_json(cls, data: Json) -> "QuantizationSummary":
        """Parse the output of `to_json`."""
        return cls(
            int(data["linear_layers"]),
            int(data["parameters"]),
            int(data["quantized_parameters"]),
            [
                DenseLayer(str(layer["name"]), str(layer["reason"]), int(layer["parameters"]))
                for layer in data["dense_layers"]
            ],
            [
                LayerGroupSize(
                    str(layer["name"]),
                    int(layer["columns"]),
                    int(layer["group_size"]),
                    int(layer["requested"]),
                )
                for layer in data.get("group_sizes", ())  # absent in older reports
            ],
        )


@dataclass(frozen=True)
class Summary:
    """The tensors of an archive and its files."""

    tensors: Sequence[TensorSummary]
    files: Sequence[str]
    quantization: QuantizationSummary | None = None
    """What was quantized, if the tensors were quantized as they were written."""

    @property
    def items(self) -> int:
        """Number of items of all tensors; tied tensors count once."""
        return sum(t.items for t in self.tensors if t.codec != "tied")

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors in memory; tied tensors count once."""
        return sum(t.dense_bytes for t in self.tensors if t.codec != "tied")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files, without headers."""
        return sum(t.stored_bytes for t in self.tensors)

    @property
    def ratio(self) -> float:
        """Dense bytes divided by stored bytes."""
        return self.dense_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        tensors = count_noun(len(self.tensors), "tensor")
        coded = sum(t.codec not in ("plain", "tied", "copy") for t in self.tensors)
        sizes = f"{format_bytes(self.dense_bytes)} -> {format_bytes(self.stored_bytes)}"
        errors = [t.error for t in self.tensors if t.error is not None and t.codec != "tied"]
        lost = f"; {len(errors)} rounded, relative error {max(errors):.4f}" if errors else ""
        return f"{tensors}, {coded} compressed: {sizes} ({self.ratio:.2f}x smaller){lost}"

    def to_json(self) -> Json:
        """Return the summary as JSON (schema: `docs/schemas/summary.json`)."""
        quantization = self.quantization and {"quantization": self.quantization.to_json()}
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
            **(quantization or {}),
        }


def merge_summaries(parts: Sequence[Summary]) -> Summary:
    """Return one summary of several files."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return Summary(tensors, [file for part in parts for file in part.files])


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(size: float) -> str:
    """Return a human-readable size: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
