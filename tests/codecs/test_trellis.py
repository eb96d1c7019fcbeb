"""The codec `trellis`: rates close to the theoretical limit, and no weight beyond its step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from independent.reader import trellis as slow
from independent.reader.tensor import Tensor as Items
from strategies import same_bits

from slimtensors.codecs import Trellis
from slimtensors.codecs.trellis import Rounded, Steps, round_matrix, scale_rows
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Workers
from slimtensors.tensor import Spec, as_bytes, relative_distance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def count_bits(parts, x):
    return 8 * sum(part.numel() for part in parts.values()) / x.numel()


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (70,), (7, 33), (3, 4, 5), (40, 64), (33, 100), (1, 40)]),
    st.sampled_from([0.02, 0.3, 1.5]),
    st.sampled_from([1.0, 0.0, 1e-4, 3e-30]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=60)
def test_items_are_decoded_as_the_format_page_says(dtype, shape, step, size, seed):
    x = (normal(seed, *shape) * size).to(dtype)
    if x.numel() > 3:
        x.view(-1)[2] *= 1000
    codec = Trellis(step)
    parts = codec.encode(x)
    back = codec.decode(parts, Spec.of(x))
    bits = {name: Items("uint8", tuple(p.shape), bytes(p.numpy())) for name, p in parts.items()}
    want = slow.decode(bits, str(dtype)[6:], tuple(shape), x.numel())
    assert back.reshape(-1).view(torch.uint8).numpy().tobytes() == want.data
    into = torch.full_like(x, 7)
    codec.decode_into(parts, into)
    assert same_bits(into, back)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("row_dims", "fineness"), [(1, 0), (2, 1), (2, 3)])
def test_other_layouts_are_decoded_as_the_format_page_says(row_dims, fineness, transposed):
    x = normal(3, 4, 20, 36).bfloat16()
    codec = Trellis(row_dims=row_dims, transposed=transposed)
    weights = codec.to_matrix(x)
    rows = torch.exp2(torch.arange(len(weights)) / 61 - 4)
    steps = Steps(rows, torch.ones(weights.shape[1]), row_fineness=fineness)
    parts = round_matrix(weights, steps).encode()
    back = codec.decode(parts, Spec.of(x))
    assert relative_distance(back, x) < 0.5
    bits = {name: Items("uint8", tuple(p.shape), bytes(p.numpy())) for name, p in parts.items()}
    want = slow.decode(
        bits, "bfloat16", (4, 20, 36), x.numel(), row_dims=row_dims, transposed=transposed
    )
    assert as_bytes(back).numpy().tobytes() == want.data
    assert same_bits(codec.decode_range(parts, Spec.of(x), 77, 1500), back.view(-1)[77:1500])


def test_rows_are_scaled_without_new_integers():
    x = normal(4, 60, 40)
    codec = Trellis()
    steps = Steps(torch.full((60,), 0.3), torch.ones(40), row_fineness=3)
    parts = round_matrix(x, steps).encode()
    factors = 1 + 0.1 * normal(5, 60).clamp(-2, 2)
    scaled = scale_rows(parts, codec, Spec.of(x), factors)
    want = codec.decode(parts, Spec.of(x)) * factors[:, None]
    error = (codec.decode(scaled, Spec.of(x)) / want - 1)[want != 0]
    assert error.abs().max() < 0.006  # half of 1/64 octave
    same = scale_rows(parts, codec, Spec.of(x), torch.ones(60))
    assert all(same_bits(same[name], parts[name]) for name in parts)


@pytest.mark.parametrize(("step", "excess"), [(1.0, 0.15), (0.5, 0.15), (0.1, 0.13), (0.03, 0.13)])
def test_the_rate_is_close_to_the_limit_for_normal_weights(step, excess):
    x = normal(1, 1024, 512)
    codec = Trellis(step)
    parts = codec.encode(x)
    error = relative_distance(codec.decode(parts, Spec.of(x)), x)
    limit = -math.log2(error)  # no code of any kind is smaller at this error
    assert limit < count_bits(parts, x) < limit + excess


def test_rows_and_columns_of_other_scales_share_a_budget():
    scales = torch.exp2(torch.arange(256) / 32)
    x = normal(2, 512, 256) * scales
    even = Trellis(0.5).encode(normal(2, 512, 256))
    steps = Steps(torch.full((512,), 0.5), scales)
    scaled = round_matrix(Trellis().to_matrix(x), steps).encode()
    assert abs(count_bits(scaled, x) - count_bits(even, x)) < 0.05


@pytest.mark.parametrize("value", [1e3, -1e5, 2e7])
def test_a_huge_weight_is_never_clipped(value):
    x = normal(3, 64, 64)
    x[5, 6] = value
    steps = Steps(torch.full((64,), 0.25), torch.ones(64))
    parts = round_matrix(Trellis().to_matrix(x), steps).encode()
    back = Trellis().decode(parts, Spec.of(x))
    assert abs(float(back[5, 6]) - value) <= 0.5
    assert count_bits(parts, x) < 8


def test_feedback_lowers_the_error_of_outputs():
    inputs = normal(4, 500, 48) @ normal(5, 48, 96) * 0.2 + 0.1 * normal(6, 500, 96)
    hessian = inputs.double().T @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(96)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    weights = normal(7, 128, 96)
    rows, columns = torch.full((128,), 0.5), torch.ones(96)
    for order in (None, torch.argsort(hessian.diagonal(), descending=True)):
        chosen = inverse if order is None else torch.cholesky_inverse(
            torch.linalg.cholesky(hessian[order][:, order])
        )  # fmt: skip
        factor = torch.linalg.cholesky(chosen, upper=True).float().contiguous()
        errors = []
        for steps in (Steps(rows, columns), Steps(rows, columns, factor=factor, order=order)):
            back = Trellis().decode(round_matrix(weights, steps).encode(), Spec.of(weights))
            errors.append(float(((back - weights) @ inputs.T).square().sum()))
        assert errors[1] < 0.6 * errors[0]


def test_zeros_stay_zero_if_asked():
    weights = normal(8, 100, 70)
    weights[normal(9, 100, 70) > 0] = 0
    steps = Steps(torch.full((100,), 0.2), torch.ones(70), keep_zeros=True)
    back = Trellis().decode(round_matrix(weights, steps).encode(), Spec.of(weights))
    assert (back[weights == 0] == 0).all()
    assert (back != 0).sum() > 2500


def test_threads_and_ranges_give_the_same_items():
    x = normal(10, 3000, 300).bfloat16()
    codec = Trellis(0.4)
    with Workers(3) as workers:
        parts = codec.encode(x, workers.each)
        back = codec.decode(parts, Spec.of(x), workers.each)
    alone = codec.encode(x)
    assert all(same_bits(parts[name], alone[name]) for name in alone)
    assert same_bits(back, codec.decode(parts, Spec.of(x)))
    for begin, end in ((0, 1), (5, 5), (899_000, 900_000), (250_000, 600_123)):
        found = codec.decode_range(parts, Spec.of(x), begin, end)
        assert same_bits(found, back.view(-1)[begin:end])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_tensors_that_cannot_be_rounded_are_refused(bad):
    with pytest.raises(ConfigError, match="NaN and infinity"):
        Trellis().encode(torch.tensor([[1.0, bad]]))
    with pytest.raises(ConfigError, match="empty tensor"):
        Trellis().encode(torch.ones(0, 4))
    with pytest.raises(ConfigError, match="int8"):
        Trellis().encode(torch.ones(3, 4, dtype=torch.int8))
    with pytest.raises(ConfigError, match="step must be"):
        Trellis(0.0)
    steps = Steps(torch.tensor([1e-30]), torch.ones(1))
    with pytest.raises(ValueError, match="too large for its step"):
        round_matrix(torch.ones(1, 1), steps)


@pytest.mark.hostile
def test_damaged_parts_are_refused():
    x = normal(11, 50, 40).bfloat16()
    parts = Trellis(0.4).encode(x)
    rng = np.random.default_rng(0)
    for name, part in parts.items():
        for at in rng.integers(0, part.numel(), 60):
            damaged = part.clone()
            damaged[at] ^= int(rng.integers(1, 256))
            with pytest.raises(CorruptFileError):
                Trellis().decode({**parts, name: damaged}, Spec.of(x))
        for size in (0, 3, 11, part.numel() - 1):
            with pytest.raises(CorruptFileError):
                Trellis().decode({**parts, name: part[:size]}, Spec.of(x))
    with pytest.raises(CorruptFileError):
        Trellis().decode(parts, Spec(torch.bfloat16, (51, 40)))


def test_rounded_integers_describe_themselves():
    rounded = round_matrix(normal(12, 30, 40), Steps(torch.full((30,), 0.3), torch.ones(40)))
    assert isinstance(rounded, Rounded)
    assert rounded.integers.shape == (30, 40)
    assert rounded.integers.abs().max() < 20
