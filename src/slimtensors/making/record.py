"""What is known of finished files: written beside them, so that a later run can go on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slimtensors.archive.write import Written
from slimtensors.errors import CorruptFileError
from slimtensors.plan import Plan
from slimtensors.presets import Seen
from slimtensors.sparsity import Sparsity, Zeros
from slimtensors.spec import Json, Spec
from slimtensors.summary import Stored, Summary


@dataclass(frozen=True)
class Pieces:
    """As what a tensor is stored."""

    names: Sequence[str]
    nbytes: Sequence[int]
    checksums: Sequence[int | None]
    plan: Json | None
    is_one_tensor: bool


@dataclass(frozen=True)
class Rows:
    """What was seen of some rows of a tensor."""

    zero: int
    negative: int
    is_24: bool

    @classmethod
    def of(cls, seen: Seen) -> "Rows":
        """Note what was seen."""
        zeros = seen.zeros
        return cls(zeros.zero, zeros.negative, 2 * zeros.zero >= zeros.items and seen.is_24())


def seen(spec: Spec, rows: Sequence[Rows]) -> Seen:
    """Return what would have been seen of a whole tensor."""
    zeros = Zeros(spec.numel, sum(r.zero for r in rows), sum(r.negative for r in rows))
    return Seen(spec, zeros, lambda: all(r.is_24 for r in rows))


@dataclass(frozen=True)
class Record:
    """The tensors of a finished file or part."""

    stored: Sequence[Stored]
    pieces: Mapping[str, Pieces]
    files: Mapping[str, str]
    """The files by their names in the folder, and what must still be true of each."""
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Of a part that holds some rows of a tensor, what was seen of them."""

    @classmethod
    def of(cls, written: Written, found: Mapping[str, Sparsity]) -> "Record":
        """Note what was written."""
        summary = written.summary()
        return cls(
            summary.tensors,
            {
                done.item.name: Pieces(
                    [piece.name for piece in done.pieces],
                    [piece.spec.nbytes for piece in done.pieces],
                    [piece.checksum for piece in done.pieces],
                    done.packed.plan.to_json() if done.packed.plan else None,
                    done.packed.is_one_tensor,
                )
                for done in written.done
            },
            dict.fromkeys(summary.files, ""),
            {t.name: found[t.name] for t in summary.tensors if t.name in found},
        )

    def relative_to(self, folder: Path) -> "Record":
        """Return this with files named as they are in their folder."""

        def name(file: str) -> str:
            return Path(file).relative_to(folder).as_posix()

        stored = [replace(tensor, file=name(tensor.file)) for tensor in self.stored]
        return replace(self, stored=stored, files={name(file): x for file, x in self.files.items()})

    def sealed(self, files: Mapping[str, str]) -> "Record":
        """Return this with what is true of its files."""
        return replace(self, files=files)

    def summary(self) -> Summary:
        """Return it in the words of `inspect`."""
        return Summary(self.stored, sorted(self.files))

    def plan(self, name: str) -> Plan | None:
        """Return the plan by which a tensor was stored."""
        plan = self.pieces[name].plan
        return Plan.from_json(plan) if plan is not None else None

    def to_text(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "Record":
        """Parse the JSON form."""
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(
                [Stored(**{**t, "shape": tuple(t["shape"])}) for t in data["stored"]],
                {name: Pieces(**p) for name, p in data["pieces"].items()},
                data["files"],
                {name: _sparsity(s) for name, s in data["sparsity"].items()},
                {name: Rows(**r) for name, r in data["rows"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"not a record of finished files: {error!r}") from error


def _sparsity(data: Json) -> Sparsity:
    peaks = {int(group): most for group, most in data["peaks"].items()}
    return Sparsity(**{**data, "peaks": peaks})
