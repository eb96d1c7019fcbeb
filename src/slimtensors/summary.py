"""What was stored, tensor by tensor: returned by `save` and by `inspect`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

from slimtensors.spec import Json


@dataclass(frozen=True)
class Stored:
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

    def tied_to(self, home: str) -> "Stored":
        """Return the entry of a name that stands for the tensor `home`."""
        return replace(self, codec="tied", stored_bytes=0, note=f"is {home}")

    @property
    def bits_per_item(self) -> float:
        """Bits that one item costs in the file."""
        items = 1
        for size in self.shape:
            items *= size
        return 8 * self.stored_bytes / items if items else 0.0


@dataclass(frozen=True)
class Summary:
    """All tensors of an archive, and the files that hold them."""

    tensors: Sequence[Stored]
    files: Sequence[str]

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
        tensors = counted(len(self.tensors), "tensor")
        coded = sum(t.codec not in ("plain", "tied") for t in self.tensors)
        sizes = f"{human(self.dense_bytes)} -> {human(self.stored_bytes)}"
        return f"{tensors}, {coded} compressed: {sizes} ({self.ratio:.2f}x smaller)"

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
                }
                for t in self.tensors
            ],
        }


def joined(parts: Sequence[Summary]) -> Summary:
    """Return one summary of what lies in several files."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return Summary(tensors, [file for part in parts for file in part.files])


def counted(number: int, what: str) -> str:
    """Write a number of things: `1 tensor`, `2 tensors`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def human(size: float) -> str:
    """Write a number of bytes for people: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
