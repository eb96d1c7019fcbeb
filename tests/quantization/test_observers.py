"""Observers: the ranges they find for every strategy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization import QuantizationArgs
from slimtensors.quantization.affine import fake_quantize, find_params
from slimtensors.quantization.observers import OBSERVERS, ActivationObserver, observe_weight

SHARED = {
    "tensor": {},
    "channel": {"strategy": "channel"},
    "group": {"group_size": 8},
    "block": {"strategy": "block", "block_structure": [6, 8]},
}
KINDS = [
    *[{"num_bits": bits, "symmetric": s} for bits in (2, 3, 4, 8) for s in (True, False)],
    {"num_bits": 8, "type": "float"},
    {"num_bits": 4, "type": "float"},
]
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 8,
    "scale_dtype": torch.float8_e4m3fn,
}


def weight(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 0] *= 5
    return x.to(dtype)


def loss(x, args):
    return float((fake_quantize(x, observe_weight(x, args), args) - x).double().pow(2).sum())


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    shared=st.sampled_from(sorted(SHARED)),
    observer=st.sampled_from(sorted(OBSERVERS)),
    experts=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_observer_finds_params_of_the_same_shape(kind, shared, observer, experts, dtype):
    x = weight(*((3, 12, 16) if experts else (12, 16)), dtype=dtype)
    plain = QuantizationArgs.from_dict(kind | SHARED[shared])
    args = QuantizationArgs.from_dict(kind | SHARED[shared] | {"observer": observer})
    want, have = find_params(x, plain), observe_weight(x, args)
    assert have.scale.shape == want.scale.shape
    assert have.scale.dtype == want.scale.dtype
    assert (have.zero_point is None) == (want.zero_point is None)
    assert torch.isfinite(fake_quantize(x, have, args)).all()


@pytest.mark.parametrize("shape", [(12, 16), (3, 12, 16)])
@pytest.mark.parametrize("kind", [NVFP4, *[k | SHARED["group"] for k in KINDS]])
def test_mse_without_shrinking_is_minmax(kind, shape):
    x = weight(*shape, dtype=torch.bfloat16)
    options = {"observer": "mse", "observer_kwargs": {"maxshrink": 0}}
    have = observe_weight(x, QuantizationArgs.from_dict(kind | options))
    want = find_params(x, QuantizationArgs.from_dict(kind))
    assert same_bits(have.scale, want.scale)
    assert want.zero_point is None or same_bits(have.zero_point, want.zero_point)
    assert want.global_scale is None or same_bits(have.global_scale, want.global_scale)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shared", sorted(SHARED))
def test_mse_never_loses_more_than_minmax(shared, symmetric):
    x = weight(24, 32)
    kind = {"num_bits": 4, "symmetric": symmetric} | SHARED[shared]
    norm = {"observer": "mse", "observer_kwargs": {"norm": 2.0, "maxshrink": 0.8}}
    assert loss(x, QuantizationArgs.from_dict(kind | norm)) < loss(
        x, QuantizationArgs.from_dict(kind)
    )


def observed_range(name, batches, **more):
    args = QuantizationArgs(observer=name, observer_kwargs=more)
    observer = ActivationObserver(args)
    for x in batches:
        observer.observe(x)
    return [float(end) for end in observer.range()]


def test_minmax_covers_all_batches():
    batches = [torch.tensor([[1.0, -3.0]]), torch.tensor([[4.0, 0.0]])]
    assert observed_range("minmax", batches) == [-3.0, 4.0]


def test_moving_average_weights_batches_by_its_constant():
    batches = [torch.tensor([[1.0, -1.0]]), torch.tensor([[5.0, -1.0]])]
    assert observed_range("moving_average", batches, averaging_constant=0.25) == [-1.0, 2.0]


def test_percentile_excludes_extremes():
    x = torch.arange(-500.0, 501.0)[None]
    assert observed_range("percentile", [x], percentile=99) == [-490.0, 490.0]
    assert observed_range("percentile", [x], percentile=100) == [-500.0, 500.0]
    assert observed_range("percentile", [x, 2 * x], percentile=100) == [-750.0, 750.0]


@pytest.mark.parametrize("batches", [1, 5])
def test_histogram_is_as_good_as_a_search_over_all_values(batches):
    x = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    x[0, 7] = 40.0
    args = QuantizationArgs(num_bits=4)
    errors = {}
    for step in range(1, 65):
        top = float(x.abs().amax()) * step / 64
        scale = torch.tensor([top / 7.5])
        errors[top] = float(((x / scale).clamp(-8, 7).round() * scale - x).pow(2).sum())
    observer = ActivationObserver(QuantizationArgs(num_bits=4, observer="histogram"))
    for part in x.chunk(batches, dim=1):
        observer.observe(part)
    have = fake_quantize(x, observer.params(), args)
    assert float((have - x).pow(2).sum()) <= 1.01 * min(errors.values())


def test_attention_heads_are_observed_separately():
    args = QuantizationArgs(strategy="attn_head")
    observer = ActivationObserver(args)
    x = torch.randn(2, 4, 5, 8)
    observer.observe(x)
    low, high = observer.range()
    assert low.shape == (4, 1, 1)
    assert torch.equal(high.flatten(), x.amax((0, 2, 3)))
    assert fake_quantize(x, observer.params(), args).shape == x.shape


def test_local_activations_have_only_a_global_scale():
    args = QuantizationArgs.from_dict(NVFP4 | {"dynamic": "local"})
    observer = ActivationObserver(args)
    observer.observe(torch.tensor([[2.0, -3.0]]))
    assert observer.params().global_scale.tolist() == [448 * 6 / 3]


def test_no_data_and_bad_data_raise():
    empty = ActivationObserver(QuantizationArgs())
    empty.observe(torch.zeros(0, 8))
    with pytest.raises(StatusError, match="no data was observed"):
        empty.params()
    for observer in OBSERVERS:
        args = QuantizationArgs(observer=observer)
        with pytest.raises(ConfigError, match="NaN or infinity"):
            observe_weight(torch.tensor([[1.0, torch.inf]]), args)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("minmaks", {}, "did you mean 'minmax'"),
        ("mse", {"girds": 3}, "girds"),
        ("percentile", {"percentile": 2}, "percentile must be in"),
        ("moving_average", {"averaging_constant": 0}, "averaging_constant"),
        ("histogram", {"bins": 3}, "got 3"),
    ],
)
def test_invalid_observers_and_options_raise(name, options, message):
    with pytest.raises(ConfigError, match=message):
        ActivationObserver(QuantizationArgs(observer=name, observer_kwargs=options))
