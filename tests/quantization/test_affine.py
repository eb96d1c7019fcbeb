"""Affine quantization is bitwise equal to compressed-tensors 0.20."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs as TheirArgs
from compressed_tensors.quantization.lifecycle import forward as theirs
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors.errors import ConfigError
from slimtensors.quantization import QuantizationArgs
from slimtensors.quantization.affine import (
    FP4,
    Params,
    compute_global_scale,
    compute_params,
    dequantize,
    encode_fp4,
    fake_quantize,
    find_dynamic_params,
    find_params,
    quantize,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = range(1, 9)
WHOLE = {"strategy": "tensor"}
SHARED = [
    WHOLE,
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 16},
    {"strategy": "block", "block_structure": [8, 32]},
]
INTS = [
    {"num_bits": bits, "symmetric": symmetric, **shared}
    for bits in BITS
    for symmetric in (True, False)
    for shared in SHARED
]
FP8 = [{"num_bits": 8, "type": "float", **shared} for shared in SHARED]
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
MX = [
    {"num_bits": bits, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}
    for bits in (4, 8)
]
ALL = [*INTS, *FP8, *MX, NVFP4]


def weight(seed, dtype, shape=(12, 96)):
    """Return a weight with rows of all scales, signed zeros, subnormals, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape[0], 1, generator=generator).mul(3).exp2()
    )
    kind = torch.rand(shape, generator=generator)
    x[kind < 0.1] = 0.0
    x[(kind >= 0.1) & (kind < 0.15)] = -0.0
    x[(kind >= 0.15) & (kind < 0.2)] *= 1e-38
    x[0] = 0.0
    if shape[0] > 2:
        x[1] = x[1].abs()
        x[2] = -x[2].abs()
    return x.to(dtype)


def ranges(x, options):
    """Return min and max of each part, computed by torch independently of our code."""
    match options.get("strategy", "group"):
        case "tensor":
            return x.min(), x.max()
        case "channel":
            return x.min(1, keepdim=True).values, x.max(1, keepdim=True).values
        case "block":
            height, width = options["block_structure"]
            blocks = [[b.aminmax() for b in r.split(width, 1)] for r in x.split(height, 0)]
            low = torch.stack([torch.stack([b.min for b in row]) for row in blocks])
            return low, torch.stack([torch.stack([b.max for b in row]) for row in blocks])
    groups = x.view(x.shape[0], -1, options["group_size"])
    return groups.min(-1).values, groups.max(-1).values


def their_params(x, options):
    args = TheirArgs(**options)
    low, high = ranges(x, options)
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(x.min(), x.max())
    scale, zero = calculate_qparams(low, high, args, global_scale=global_scale)
    return args, scale, None if args.symmetric else zero, global_scale


@given(
    st.sampled_from(ALL), st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([96, 160])
)
@settings(deadline=None, max_examples=250)
def test_scales_codes_and_values_equal_compressed_tensors(options, dtype, seed, columns):
    x = weight(seed, dtype, (12, columns))
    args, scale, zero, global_scale = their_params(x, options)
    ours = QuantizationArgs(**options)
    params = find_params(x, ours)
    assert same_bits(params.scale, scale)
    assert zero is None if params.zero_point is None else same_bits(params.zero_point, zero)
    if global_scale is not None:
        assert same_bits(params.global_scale, global_scale)
    # Theirs keeps the sign of what rounds to zero, which no integer in a file can.
    fake = theirs.fake_quantize(x, scale, zero, args, global_scale=global_scale)
    assert same_bits(fake_quantize(x, params, ours) + 0.0, fake.to(dtype) + 0.0)
    codes = theirs.quantize(x, scale, zero, args, global_scale=global_scale)
    found = quantize(x, params, ours)
    if found.dtype is torch.uint8:
        table = torch.tensor([*FP4, *(-v for v in FP4)], dtype=codes.dtype)
        assert same_bits(table[found.int()], codes)
    else:
        codes = codes.to(ours.dtype)
        assert same_bits(found, codes)
        back = theirs.dequantize(codes, scale, zero, args, global_scale=global_scale)
        assert same_bits(dequantize(found, params, ours), back)


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.sampled_from(ALL))
@settings(deadline=None, max_examples=60)
def test_observed_ranges_need_not_contain_zero(seed, dtype, options):
    low, high = weight(seed, dtype, (6, 2)).sort(dim=1).values.split(1, dim=1)
    args, ours = TheirArgs(**options), QuantizationArgs(**options)
    whole = generate_gparam(low.min(), high.max()) if args.strategy == "tensor_group" else None
    if whole is not None:
        assert same_bits(compute_global_scale(low.min(), high.max()), whole)
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    params = compute_params(low, high, ours, global_scale=whole)
    assert same_bits(params.scale, scale)
    if not ours.symmetric:
        assert same_bits(params.zero_point, zero)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_bits": 8, "strategy": "token"},
        {"num_bits": 8, "strategy": "token", "symmetric": False},
        {"num_bits": 8, "type": "float", "strategy": "token"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {**MX[1], "strategy": "group"},
        {**NVFP4, "dynamic": "local"},
    ],
)
def test_activations_equal_compressed_tensors(options, dtype):
    options = {"dynamic": True, **options}
    x = weight(7, dtype, (3, 64)).repeat(5, 1, 1).transpose(0, 1) + 0.1
    args, ours = TheirArgs(**options), QuantizationArgs(**options)
    whole = generate_gparam(x.min(), x.max()) if args.dynamic == "local" else None
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=whole)
    params = find_dynamic_params(x, ours, global_scale=whole)
    assert same_bits(params.scale, scale)
    zero = None if args.symmetric else zero
    fake = theirs.fake_quantize(x, scale, zero, args, global_scale=whole)
    assert same_bits(fake_quantize(x, params, ours) + 0.0, fake + 0.0)


def test_a_token_of_a_flat_batch_has_its_own_scale():
    x = torch.tensor([[1.0, 2.0], [100.0, -200.0]])
    params = find_dynamic_params(x, QuantizationArgs(strategy="token", dynamic=True))
    assert params.scale.shape == (2, 1)


def test_a_head_of_attention_has_its_own_scale():
    x = weight(3, torch.float32, (4, 30)).view(2, 4, 5, 3)
    args = QuantizationArgs(strategy="attn_head", num_bits=8, type="float")
    params = find_dynamic_params(x, args)
    assert params.scale.shape == (4, 1, 1)
    assert same_bits(params.scale[2, 0, 0], x[:, 2].abs().max() / 448)
    assert fake_quantize(x, params, args).shape == x.shape


@pytest.mark.parametrize("options", ALL, ids=str)
def test_experts_of_a_stack_are_quantized_independently(options):
    args = QuantizationArgs(**options)
    experts = [weight(seed, torch.bfloat16) for seed in range(3)]
    stack = torch.stack(experts)
    params = find_params(stack, args)
    alone = torch.stack([fake_quantize(x, find_params(x, args), args) for x in experts])
    assert same_bits(fake_quantize(stack, params, args), alone)


def test_groups_need_not_be_contiguous():
    args = QuantizationArgs(num_bits=4, group_size=8, symmetric=False, actorder="group")
    x = weight(1, torch.bfloat16, (5, 32))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    found = find_params(x[:, order], args)
    g_idx = torch.empty(32, dtype=torch.int32)
    g_idx[order] = torch.arange(32, dtype=torch.int32) // 8
    params = Params(found.scale, found.zero_point, g_idx=g_idx)
    assert same_bits(
        fake_quantize(x, params, args)[:, order], fake_quantize(x[:, order], found, args)
    )
    with pytest.raises(ConfigError, match="there are 4 groups"):
        quantize(x, Params(found.scale, found.zero_point, g_idx=g_idx + 1), args)


def test_every_4_bit_float_is_its_own_code():
    values = torch.tensor([*FP4, *(-v for v in FP4[1:])])
    codes = encode_fp4(values)
    assert codes.tolist() == [*range(8), *range(9, 16)]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, 30), "30 columns are not divisible by group_size 16"),
        (torch.tensor([[1.0] * 15 + [float("nan")]]), "NaN or infinity"),
        (torch.tensor([[1.0] * 15 + [float("-inf")]]), "NaN or infinity"),
        (torch.ones(0, 16), "empty weight"),
        (torch.ones(16), "2 or 3 dimensions"),
        (torch.ones(2, 16, dtype=torch.int32), "expected floats"),
    ],
)
def test_unsupported_weights_raise(x, message):
    with pytest.raises(ConfigError, match=message):
        find_params(x, QuantizationArgs(num_bits=4, group_size=16))
