"""Parts of tensors: what overlaps, and how chunks become pieces."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slimtensors.checkpoint.distributed.manifest import Box, find_overlaps, split_box


@st.composite
def boxes(draw, dims):
    at = tuple(draw(st.integers(0, 6)) for _ in range(dims))
    return Box(at, tuple(draw(st.integers(0, 6)) for _ in range(dims)))


@st.composite
def pairs(draw):
    dims = draw(st.integers(0, 3))
    return draw(boxes(dims)), draw(boxes(dims))


def marked(box):
    """A tensor in which the items of a box are set."""
    x = torch.zeros([12] * len(box.at), dtype=torch.bool)
    box.of(x, Box.whole(tuple(x.shape))).fill_(True)
    return x


@given(pairs())
def test_two_boxes_overlap_where_both_have_items(pair):
    a, b = pair
    both = marked(a) & marked(b)
    common = a.overlap(b)
    assert both.any() == (common is not None)
    if common is not None:
        assert torch.equal(marked(common), both)


@given(st.integers(1, 3).flatmap(lambda dims: st.lists(boxes(dims), max_size=6)))
def test_boxes_overlap_if_two_of_them_do(several):
    found = find_overlaps(several)
    pairs = itertools.combinations(several, 2)
    assert (found is not None) == any(a.overlap(b) is not None for a, b in pairs)
    if found is not None:
        assert found[0].overlap(found[1])


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 60))
def test_the_pieces_of_a_chunk_are_rows_that_fit_and_follow_each_other(chunk, limit):
    found = list(split_box(chunk, torch.float32, limit))
    total = sum(marked(piece).int() for piece in found)
    assert torch.equal(total, marked(chunk).int())
    for piece in found:
        row = 4 * math.prod(chunk.shape[1:])
        assert piece.shape[:1] in ((), (0,), (1,)) or piece.shape[0] * row <= limit


@given(st.integers(1, 3).flatmap(boxes), st.integers(1, 60), st.data())
def test_a_part_of_a_chunk_needs_the_pieces_that_it_touches(chunk, limit, data):
    if not chunk.numel:
        return
    at = tuple(data.draw(st.integers(0, n - 1)) for n in chunk.shape)
    shape = tuple(data.draw(st.integers(1, n - i)) for i, n in zip(at, chunk.shape, strict=True))
    part = Box(tuple(i + j for i, j in zip(at, chunk.at, strict=True)), shape)
    needed = list(split_box(chunk, torch.float32, limit, part))
    assert needed == [p for p in split_box(chunk, torch.float32, limit) if p.overlap(part)]
