"""Changes of floats since a base: few, or most of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from independent.reader import changes as reader
from independent.reader.tensor import Tensor as Plain
from strategies import bits, same_bits

from slimtensors import _core
from slimtensors.codecs.changes import (
    CHANGE_KINDS,
    DTYPES,
    apply_changes,
    choose_kind,
    encode_changes,
)
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import as_bytes


def any_bits(dtype, count, seed, share):
    """Return tensors of random bits, NaN and infinities included; a share of the items differs."""
    base, other = bits(seed, count, dtype, 0.9), bits(seed + 1, count, dtype, 0.9)
    changed = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) < share
    raw = [as_bytes(x).view(count, -1) for x in (other, base)]
    return torch.where(changed, *raw).view(-1).view(dtype), base


def tuned(dtype, shape, rate, seed=0):
    """Return weights before and after a step whose size depends on row and column."""
    g = torch.Generator().manual_seed(seed)
    old = 0.05 * torch.randn(shape, generator=g)
    scale = torch.randn(shape[0], 1, generator=g).exp() * torch.randn(shape[1], generator=g).exp()
    new = old + rate * scale * torch.randn(shape, generator=g)
    return new.to(dtype), old.to(dtype)


def plain(x):
    """Return a tensor of the independent reader."""
    return Plain(str(x.dtype)[6:], tuple(x.shape), as_bytes(x).numpy().tobytes())


random_pairs = st.builds(
    any_bits,
    st.sampled_from(list(DTYPES)),
    st.integers(1, 700),
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)


@given(random_pairs, st.sampled_from(CHANGE_KINDS))
def test_any_bits_survive_and_an_independent_reader_agrees(pair, kind):
    x, base = pair
    stream = encode_changes(kind, x, base)
    assert same_bits(apply_changes(kind, stream, base), x)
    found = reader.apply(kind, plain(stream), plain(base))
    assert found.data == as_bytes(x).numpy().tobytes()


@pytest.mark.parametrize("kind", CHANGE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate", [1e-7, 1e-4, 0.1])
def test_an_independent_reader_decodes_fine_tuned_weights(kind, dtype, rate):
    x, base = tuned(dtype, (60, 70), rate)
    stream = encode_changes(kind, x, base)
    assert same_bits(apply_changes(kind, stream, base), x)
    assert reader.apply(kind, plain(stream), plain(base)).data == as_bytes(x).numpy().tobytes()


@pytest.mark.parametrize("kind", CHANGE_KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3, 3, 3), (3, 1, 5), (300001,), (700, 800)])
def test_shapes_and_several_chunks_survive(kind, shape):
    g = torch.Generator().manual_seed(1)
    base = torch.randn(shape, generator=g).bfloat16()
    x = base + 0.003 * torch.randn(shape, generator=g).bfloat16()
    stream = encode_changes(kind, x, base)
    assert same_bits(apply_changes(kind, stream, base), x)


def entropy(*columns):
    """Return the bits of the first column, given the others, in an order-0 model."""

    def bits_of(table):
        counts = np.unique(table, return_counts=True, axis=1)[1]
        return -(counts * np.log2(counts / counts.sum())).sum()

    return bits_of(np.stack(columns)) - (bits_of(np.stack(columns[1:])) if columns[1:] else 0)


def test_few_changes_take_no_more_than_position_and_sign():
    x, base = tuned(torch.bfloat16, (512, 512), 2e-7)
    steps = x.view(torch.int16).int() - base.view(torch.int16).int()
    share = (steps != 0).float().mean()
    assert 0.005 < share < 0.05
    assert choose_kind(x, base) == "sparse-change"
    stream = encode_changes("sparse-change", x, base)
    assert 8 * stream.nbytes < 0.95 * entropy(steps.sign().view(-1).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate", [1e-4, 1e-2])
def test_many_changes_take_little_more_than_their_entropy(dtype, rate):
    """Differences up to 64, else sign and size, in the context of the expected change."""
    x, base = tuned(dtype, (256, 256), rate)
    assert choose_kind(x, base) == "expected-change"
    difference = x.double() - base.double()
    total = difference.square().mean().sqrt()
    rows = difference.square().mean(1, keepdim=True).sqrt()
    columns = difference.square().mean(0).sqrt()
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    ulp = base.double().abs().clamp_min(torch.finfo(dtype).tiny).log2().floor() - mantissa
    context = (2 * ((rows * columns / total).log2() - ulp)).floor().int().view(-1).numpy()
    word = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    ordered = [t.view(word).long() for t in (x, base)]
    ordered = [torch.where(t < 0, -(t & torch.iinfo(word).max) - 1, t) for t in ordered]
    steps = (ordered[0] - ordered[1]).view(-1).numpy()
    steps = np.where(base.view(word).view(-1).numpy() < 0, -steps, steps)
    far = np.abs(steps) > 64
    lengths = np.where(far, np.log2(np.maximum(np.abs(steps), 1)).astype(int), 0)
    symbols = np.where(far, np.sign(steps) * (100 + lengths), steps)
    bound = entropy(symbols, context) + lengths.sum()
    found = 8 * encode_changes("expected-change", x, base).nbytes
    assert found < 1.04 * bound


@pytest.mark.parametrize("kind", CHANGE_KINDS)
def test_damaged_streams_are_refused_or_give_other_items(kind):
    x, base = tuned(torch.float16, (40, 50), 1e-4)
    stream = encode_changes(kind, x, base)
    g = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = stream.clone()
        at = int(g.integers(len(damaged)))
        damaged[at] ^= int(g.integers(1, 256))
        damaged = damaged[: int(g.integers(len(damaged)))] if g.random() < 0.3 else damaged
        try:
            apply_changes(kind, damaged, base)
        except CorruptFileError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("kind", CHANGE_KINDS)
def test_streams_that_do_not_fit_the_base_are_refused(kind):
    x, base = tuned(torch.bfloat16, (40, 50), 1e-4)
    stream = encode_changes(kind, x, base)
    others = [base.float()[:3], base[:3], base.double(), base.view(torch.int16)]
    for other in others:
        with pytest.raises(CorruptFileError):
            apply_changes(kind, stream, other)
    for bad in (stream[:0], stream[:5], stream[:-1], torch.cat([stream, stream[:1]]), stream.int()):
        with pytest.raises(CorruptFileError):
            apply_changes(kind, bad, base)


def test_the_core_checks_its_arguments():
    raw = np.zeros(64, np.uint8)
    small, out = np.zeros(2, np.uint8), np.zeros(4096, np.uint8)
    model = _core.sparse_fit(raw, raw, "bfloat16")
    for work in (
        lambda: _core.sample_changes(raw, raw[:2], "bfloat16"),
        lambda: _core.sample_changes(raw[:3], raw[:3], "bfloat16"),
        lambda: _core.sparse_fit(raw, raw, "float64"),
        lambda: _core.sparse_encode(raw, raw, "bfloat16", model, small),
        lambda: _core.sparse_encode(raw, raw, "bfloat16", model[:-1], out),
        lambda: _core.sparse_decode(small, raw[:0], "bfloat16", model, out[:0]),
        lambda: _core.sparse_decode(small, raw, "bfloat16", model, out),
        lambda: _core.expected_fit(raw, raw, "bfloat16", 0),
        lambda: _core.expected_fit(raw, raw, "bfloat16", 33),
        lambda: _core.expected_fit(raw[:0], raw[:0], "bfloat16", 1),
        lambda: _core.ExpectedModel(small, "bfloat16", 32),
        lambda: _core.ExpectedModel(_core.expected_fit(raw, raw, "float32", 4), "float32", 3),
    ):
        with pytest.raises(ValueError, match=r"."):
            work()
    coder = _core.ExpectedModel(_core.expected_fit(raw, raw, "bfloat16", 8), "bfloat16", 32)
    size = coder.encode(0, raw, raw, out)
    for work in (
        lambda: coder.encode(0, raw, raw, small),
        lambda: coder.encode(1, raw, raw, out),
        lambda: coder.decode(1, out[:size], raw, raw.copy()),
        lambda: coder.decode(0, out[: size - 1], raw, raw.copy()),
        lambda: coder.decode(0, out[: size + 2], raw, raw.copy()),
    ):
        with pytest.raises(ValueError, match=r"."):
            work()
