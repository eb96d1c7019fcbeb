"""Boxes: intersections, and splitting chunks into pieces."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slimtensors.checkpoint.distributed.pieces import Box, find_overlap, split_box


@st.composite
def boxes(draw, dims):
    at = tuple(draw(st.integers(0, 6)) for _ in range(dims))
    return Box(at, tuple(draw(st.integers(0, 6)) for _ in range(dims)))


@st.composite
def pairs(draw):
    dims = draw(st.integers(0, 3))
    return draw(boxes(dims)), draw(boxes(dims))


def mark_box(box):
    """Return a mask of the elements of a box."""
    x = torch.zeros([12] * len(box.offset), dtype=torch.bool)
    box.narrow(x, Box.whole(tuple(x.shape))).fill_(True)
    return x


@given(pairs())
def test_intersect_returns_the_common_elements(pair):
    a, b = pair
    both = mark_box(a) & mark_box(b)
    common = a.intersect(b)
    assert both.any() == (common is not None)
    if common is not None:
        assert torch.equal(mark_box(common), both)


@given(st.integers(1, 3).flatmap(lambda dims: st.lists(boxes(dims), max_size=6)))
def test_find_overlap_finds_any_intersecting_pair(several):
    found = find_overlap(several)
    pairs = itertools.combinations(several, 2)
    assert (found is not None) == any(a.intersect(b) is not None for a, b in pairs)
    if found is not None:
        assert found[0].intersect(found[1])


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 60))
def test_split_box_covers_the_chunk_in_rows_within_the_limit(chunk, limit):
    found = list(split_box(chunk, torch.float32, limit))
    total = sum(mark_box(piece).int() for piece in found)
    assert torch.equal(total, mark_box(chunk).int())
    for piece in found:
        row = 4 * math.prod(chunk.shape[1:])
        assert piece.shape[:1] in ((), (0,), (1,)) or piece.shape[0] * row <= limit


@given(st.integers(1, 3).flatmap(boxes), st.integers(1, 60), st.data())
def test_split_box_yields_only_pieces_that_intersect_the_part(chunk, limit, data):
    if not chunk.numel:
        return
    at = tuple(data.draw(st.integers(0, n - 1)) for n in chunk.shape)
    shape = tuple(data.draw(st.integers(1, n - i)) for i, n in zip(at, chunk.shape, strict=True))
    part = Box(tuple(i + j for i, j in zip(at, chunk.offset, strict=True)), shape)
    needed = list(split_box(chunk, torch.float32, limit, part))
    assert needed == [p for p in split_box(chunk, torch.float32, limit) if p.intersect(part)]
