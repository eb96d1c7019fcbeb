"""Division of work and of tensors among processes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import bits

from slimtensors.codecs import Bins, Bitmask, Bitmask24, Density, Gaps, Huffman, Int
from slimtensors.codecs.plan import Plan, chain, encode
from slimtensors.codecs.statistics import merge_rows, sparsity_of, sparsity_of_rows
from slimtensors.folder.processes import FileSizes, divide_work
from slimtensors.folder.rows import concatenate_encoded, find_row_step
from slimtensors.parallel import serially
from slimtensors.tensor import Spec, as_bytes

PLANS = [
    Plan(Huffman()),
    Plan(Bitmask()),
    Plan(Bins()),
    chain(Bitmask(), values=Huffman()),
    chain(Bitmask(), mask=Huffman(), values=Huffman()),
    chain(Bitmask(), mask=chain(Gaps(), tokens=Huffman()), values=Huffman()),
    chain(Bitmask(), mask=Density(), values=Bins()),
    chain(Int(8, per_row=True), q=Huffman()),
]
DTYPES = [torch.bfloat16, torch.float32, torch.int8]


def leaves(encoded):
    return [(path, Spec.of(x), bytes(as_bytes(x).numpy())) for path, x in encoded.leaves()]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_separately_encoded_pieces_join_to_the_encoding_of_the_whole(plan, data):
    width, rows = data.draw(st.sampled_from([5, 12, 16, 24])), data.draw(st.integers(2, 300))
    dtype = torch.float32 if isinstance(plan.codec, Int) else data.draw(st.sampled_from(DTYPES))
    density = data.draw(st.sampled_from([0.1, 0.6, 1.0]))
    x = bits(rows, rows * width, dtype, density).view(rows, width)
    if isinstance(plan.codec, Int):
        x = torch.nan_to_num(x, 0.5, 1, -1).clamp(-9, 9) + 1
    cuts = data.draw(st.sets(st.integers(1, rows - 1), min_size=1, max_size=3))
    assert_joined(plan, x, [0, *sorted(cuts), rows])


def assert_joined(plan, x, ends):
    """Join encoded pieces, then a mix of encoded and plain ones."""
    spans = list(pairwise(ends))
    pieces = [encode(plan, x[begin:end].clone()) for begin, end in spans]
    some = [pieces[0], *(x[begin:end] for begin, end in spans[1:])]
    want = encode(plan, x)
    for given_pieces in (pieces, some):
        found = concatenate_encoded(plan, given_pieces, serially)
        assert (found.spec, found.plan, leaves(found)) == (want.spec, want.plan, leaves(want))


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[4]], ids=str)
def test_pieces_of_whole_chunks_join_to_the_encoding_of_the_whole(plan):
    step = find_row_step(Spec(torch.int8, (1, 64)))
    x = bits(1, (2 * step + 7) * 64, torch.int8, 0.5).view(-1, 64)
    assert_joined(plan, x, [0, step, 2 * step, len(x)])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 200), cut=st.integers(1, 199), dtype=st.sampled_from(DTYPES))
def test_pieces_of_2_4_sparse_tensors_join_to_the_encoding_of_the_whole(rows, cut, dtype):
    x = bits(rows, rows * 24, dtype, 1.0).view(-1, 4)
    x[:, 1::2] = 0
    x = x.view(rows, 24)
    plan = chain(Bitmask24(), values=Huffman())
    pieces = [encode(plan, part.clone()) for part in (x[:cut], x[cut:]) if len(part)]
    assert leaves(concatenate_encoded(plan, pieces, serially)) == leaves(encode(plan, x))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), density=st.floats(0, 1), cut=st.integers(1, 39))
def test_sparsity_of_rows_adds_up_to_that_of_the_tensor(seed, density, cut):
    x = bits(seed, 40 * 32, torch.float32, density).view(40, 32)
    x[: cut // 2] = 0
    assert merge_rows(map(sparsity_of_rows, (x[:cut], x[cut:]))) == sparsity_of(x)


@pytest.mark.parametrize("shape", [(9, 4096), (7, 64, 3), (5, 1), (3, 0), (40, 3 << 20)])
def test_rows_are_divided_where_chunks_of_every_codec_end(shape):
    step = find_row_step(Spec(torch.bfloat16, shape))
    row = torch.Size(shape[1:]).numel()
    assert step >= 1
    assert step * row % (24 * (1 << 17)) == 0
    assert row == 0 or (step - 1) * row % (24 * (1 << 17)) or step == 1


@st.composite
def models(draw):
    """Draw the files of a model, some tensors of which are divisible."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        names = [f"{i}.{j}" for j in range(draw(st.integers(1, 8)))]
        sizes = {name: draw(st.integers(0, 5000)) for name in names}
        rows = {
            name: (draw(st.integers(1, 50)), draw(st.integers(1, 9)))
            for name in names
            if sizes[name] and draw(st.booleans())
        }
        found.append(FileSizes(f"file{i}", sizes, rows))
    return found


@settings(max_examples=200, deadline=None)
@given(files=models(), count=st.integers(1, 9), least=st.integers(1, 3000))
def test_every_row_of_every_tensor_is_assigned_to_one_rank(files, count, least):
    division = divide_work(files, count, min_part_bytes=least)
    assert divide_work(files, count, min_part_bytes=least) == division
    assert len(division.tasks) == count
    tasks = [task for rank in division.tasks for task in rank]
    for file in files:
        mine = [task for task in tasks if task.file == file.key]
        if file.key not in division.parts:
            (whole,) = mine
            assert (whole.names, whole.nbytes) == ((), file.nbytes)
            continue
        parts = division.parts[file.key]
        assert sorted(map(str, mine)) == sorted(map(str, parts))
        assert len({task.key for task in parts}) == len(parts)
        assert list(dict.fromkeys(n for task in parts for n in task.names)) == list(file.sizes)
        for name in file.sizes:
            spans = [task.rows for task in parts if name in task.names]
            if spans == [None]:
                continue
            rows, step = file.rows[name]
            assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
            assert spans[-1][1] == rows
            assert all(begin % step == 0 for begin, _ in spans)


def test_divisible_work_is_divided_evenly():
    files = [FileSizes(f"{i}", {f"{i}.{j}": 1000 for j in range(10)}, {}) for i in range(7)]
    files.append(FileSizes("large", {"x": 50_000}, {"x": (1000, 1)}))
    shares = [
        sum(t.nbytes for t in tasks) for tasks in divide_work(files, 16, min_part_bytes=100).tasks
    ]
    assert sum(shares) == 120_000
    assert max(shares) <= 1.5 * min(shares)
