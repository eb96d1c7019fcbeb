"""Tensors that several processes encode, some rows each, into the bytes that one would write."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.state import Item
from slimtensors.codecs import Divisible
from slimtensors.codecs.pieces import joined as laid_end_to_end
from slimtensors.dialects import Packed
from slimtensors.making.record import Rows, seen
from slimtensors.plan import Encoded, Plan, decode, encode
from slimtensors.presets import Choice, Rule, Seen
from slimtensors.sparsity import Sparsity, sparsity_of_rows
from slimtensors.spec import Each, Spec, as_bytes

_ITEMS = 3 << 20
"""Whole chunks of Huffman codes of values, of masks and of 2:4 values end at its multiples."""


def row_step(spec: Spec) -> int:
    """Return the number of rows at whose multiples a tensor may be cut."""
    row = math.prod(spec.shape[1:])
    return _ITEMS // math.gcd(_ITEMS, row) if row else 1


def some_rows(archive: Archive, item: Item, begin: int, end: int) -> Item:
    """Return some rows of a tensor as if they were all."""
    spec = Spec(item.spec.dtype, (end - begin, *item.spec.shape[1:]))
    return replace(item, spec=spec, read=lambda each: archive.load_rows(item.name, begin, end))


class Noting:
    """Chooses how to store rows as if they were all, and notes what was seen of them."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.rows: dict[str, Rows] = {}
        self.sparsity: dict[str, Sparsity] = {}

    def __call__(self, name: str, x: Tensor) -> Choice:
        """Choose."""
        seen = Seen.of(x)
        self.rows[name], self.sparsity[name] = Rows.of(seen), sparsity_of_rows(x)
        return self._rule(seen)


def whole(
    item: Item, rule: Rule, rows: Sequence[Rows], parts: Sequence[Archive], notes: dict[str, str]
) -> Item:
    """Return a tensor whose rows are in `parts`, to be written as if it had never been cut."""

    def read(each: Each) -> Tensor | Encoded | Packed | None:
        choice = rule(seen(item.spec, rows))
        notes[item.name] = choice.note
        if choice.plan is None:
            return item.read(each)
        pieces = [part.encoded(item.name, each) or part.load_one(item.name, each) for part in parts]
        found = joined(choice.plan, pieces, each)
        size = sum(leaf.nbytes for _, leaf in found.leaves())
        return found if size < item.spec.nbytes else item.read(each)

    return replace(item, read=read)


def joined(plan: Plan, pieces: Sequence[Tensor | Encoded], each: Each) -> Encoded:
    """Return what encoding the whole would give.

    What a codec made of pieces is laid end to end. Where that would be something else, because
    pieces were stored otherwise or end within a chunk, they are decoded and encoded once more.
    """
    first = pieces[0]
    if not isinstance(first, Encoded) or not _are_chunks(plan, pieces):
        dense = [decode(piece, each) if isinstance(piece, Encoded) else piece for piece in pieces]
        return encode(plan, _stacked(dense), each)
    parts: dict[str, Tensor | Encoded] = {}
    for name in first.parts:
        inner = [piece.parts[name] for piece in pieces if isinstance(piece, Encoded)]
        if name in plan.then:
            parts[name] = joined(plan.then[name], inner, each)
        else:
            plain = [decode(part, each) if isinstance(part, Encoded) else part for part in inner]
            parts[name] = _stacked(plain)
    return Encoded(plan.codec, _stacked_spec([_spec(piece) for piece in pieces]), parts)


def _are_chunks(plan: Plan, pieces: Sequence[Tensor | Encoded]) -> bool:
    codec = plan.codec
    if not isinstance(codec, Divisible):
        return False
    steps = [_spec(piece).numel % codec.step(_spec(piece)) for piece in pieces[:-1]]
    return not any(steps) and all(
        isinstance(piece, Encoded) and piece.codec == codec for piece in pieces
    )


def _spec(piece: Tensor | Encoded) -> Spec:
    return piece.spec if isinstance(piece, Encoded) else Spec.of(piece)


def _stacked_spec(specs: Sequence[Spec]) -> Spec:
    return Spec(specs[0].dtype, (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]))


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    spec = _stacked_spec([Spec.of(piece) for piece in pieces])
    return laid_end_to_end([as_bytes(piece) for piece in pieces]).view(spec.dtype).view(spec.shape)
