"""Divide large tensors by rows among processes, and join the encoded rows again."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.write import TensorSource
from slimtensors.codecs import Sliceable
from slimtensors.codecs.plan import Encoded, Plan, decode, encode
from slimtensors.codecs.presets import Choice, StatsRule, TensorStats
from slimtensors.codecs.statistics import Sparsity, sparsity_of_rows
from slimtensors.folder.build import RowStatistics
from slimtensors.parallel import Each
from slimtensors.tensor import Spec, Zeros, as_bytes, concatenate

_CHUNK_ITEMS = 3 << 20
"""Common multiple of the chunk sizes of Huffman codes, masks and 2:4 values."""


def find_row_step(spec: Spec) -> int:
    """Return the number of rows at whose multiples all codecs start a new chunk."""
    row = math.prod(spec.shape[1:])
    return _CHUNK_ITEMS // math.gcd(_CHUNK_ITEMS, row) if row else 1


def select_rows(archive: Archive, item: TensorSource, begin: int, end: int) -> TensorSource:
    """Return the rows `begin` to `end` of a tensor as a tensor to write."""
    spec = Spec(item.spec.dtype, (end - begin, *item.spec.shape[1:]))
    return replace(item, spec=spec, read=lambda each: archive.load_rows(item.name, begin, end))


class RowChooser:
    """A chooser for rows of a tensor that collects their statistics."""

    def __init__(self, rule: StatsRule) -> None:
        self._rule = rule
        self.rows: dict[str, RowStatistics] = {}
        self.sparsity: dict[str, Sparsity] = {}

    def __call__(self, name: str, x: Tensor) -> Choice:
        """Choose a plan as if the rows were the whole tensor."""
        stats = TensorStats.of(x)
        zeros = stats.zeros
        is_24 = 2 * zeros.zero >= zeros.items and stats.is_24()
        self.rows[name] = RowStatistics(zeros.zero, zeros.negative, is_24)
        self.sparsity[name] = sparsity_of_rows(x)
        return self._rule(stats)


def join_rows(
    item: TensorSource,
    rule: StatsRule,
    rows: Sequence[RowStatistics],
    parts: Sequence[Archive],
    notes: dict[str, str],
) -> TensorSource:
    """Return a tensor whose rows are in `parts`, to be written as if it had not been divided."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        choice = rule(_merge_statistics(item.spec, rows))
        notes[item.name] = choice.note
        if choice.plan is None:
            return item.read(each)
        pieces = [
            part.read_encoded(item.name, each) or part.load_one(item.name, each) for part in parts
        ]
        encoded = concatenate_encoded(choice.plan, pieces, each)
        size = sum(leaf.nbytes for _, leaf in encoded.leaves())
        return encoded if size < item.spec.nbytes else item.read(each)

    return replace(item, read=read)


def concatenate_encoded(plan: Plan, pieces: Sequence[Tensor | Encoded], each: Each) -> Encoded:
    """Return the same result as encoding the concatenated pieces.

    The chunks of the pieces are concatenated. Pieces that have another plan, or end within a chunk,
    are decoded and encoded again.
    """
    first = pieces[0]
    if not isinstance(first, Encoded) or not _are_chunks(plan, pieces):
        dense = [decode(piece, each) if isinstance(piece, Encoded) else piece for piece in pieces]
        return encode(plan, _stack(dense), each)
    parts: dict[str, Tensor | Encoded] = {}
    for name in first.parts:
        inner = [piece.parts[name] for piece in pieces if isinstance(piece, Encoded)]
        if name in plan.then:
            parts[name] = concatenate_encoded(plan.then[name], inner, each)
        else:
            plain = [decode(part, each) if isinstance(part, Encoded) else part for part in inner]
            parts[name] = _stack(plain)
    return Encoded(plan.codec, _stack_specs([_spec_of(piece) for piece in pieces]), parts)


def _merge_statistics(spec: Spec, rows: Sequence[RowStatistics]) -> TensorStats:
    """Return the statistics of a tensor from those of its rows."""
    zeros = Zeros(spec.numel, sum(r.zero for r in rows), sum(r.negative for r in rows))
    return TensorStats(spec, zeros, lambda: all(r.is_24 for r in rows))


def _are_chunks(plan: Plan, pieces: Sequence[Tensor | Encoded]) -> bool:
    codec = plan.codec
    if not isinstance(codec, Sliceable):
        return False
    remainders = [_spec_of(piece).numel % codec.step(_spec_of(piece)) for piece in pieces[:-1]]
    return not any(remainders) and all(
        isinstance(piece, Encoded) and piece.codec == codec for piece in pieces
    )


def _spec_of(piece: Tensor | Encoded) -> Spec:
    return piece.spec if isinstance(piece, Encoded) else Spec.of(piece)


def _stack_specs(specs: Sequence[Spec]) -> Spec:
    return Spec(specs[0].dtype, (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]))


def _stack(pieces: Sequence[Tensor]) -> Tensor:
    spec = _stack_specs([Spec.of(piece) for piece in pieces])
    return concatenate([as_bytes(piece) for piece in pieces]).view(spec.dtype).view(spec.shape)
