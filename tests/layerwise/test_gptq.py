"""GPTQ: smaller output error than rounding to nearest, on the grid, with zeros preserved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors.errors import ConfigError
from slimtensors.layerwise.gptq import gptq, rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.quantization import QuantizationArgs
from slimtensors.quantization.affine import Params, find_params

FP4 = {"type": "float", "num_bits": 4}
KINDS = {
    "int8 tensor": {"num_bits": 8},
    "int4 channel": {"num_bits": 4, "group_size": -1},
    "int4 group": {"num_bits": 4, "group_size": 16},
    "int4 group asymmetric": {"num_bits": 4, "group_size": 16, "symmetric": False},
    "int4 weight order": {"num_bits": 4, "group_size": 16, "actorder": "weight"},
    "int4 group order": {"num_bits": 4, "group_size": 16, "actorder": "group"},
    "int3 group order asymmetric": {
        "num_bits": 3,
        "group_size": 32,
        "actorder": "group",
        "symmetric": False,
    },
    "int2 channel order": {"num_bits": 2, "group_size": -1, "actorder": "group"},
    "fp8 channel": {"type": "float", "num_bits": 8, "group_size": -1},
    "fp8 block": {"type": "float", "strategy": "block", "block_structure": (16, 24)},
    "nvfp4": {
        **FP4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
    "mxfp4": {**FP4, "group_size": 32, "scale_dtype": torch.uint8},
}
ROWS, COLUMNS = 40, 64


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_hessian(columns=COLUMNS, tokens=300, seed=1):
    """Return the Hessian of correlated inputs with very different magnitudes."""
    sizes = random(columns, seed=seed + 1).exp()
    hessian = Hessian(columns)
    hessian.add(random(tokens, columns, seed=seed) @ random(columns, columns, seed=seed) * sizes)
    return hessian.mean()


def reference_gptq(weight, hessian, scale, *, width, damping=0.01):
    """Compute GPTQ as published, with the inverse Hessian, for symmetric 4-bit codes."""
    damped = hessian.double().clone()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    remaining, result = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for j in range(weight.shape[1]):
        step = scale[:, j // width].double()
        result[:, j] = (remaining[:, j] / step).clamp(-8, 7).round() * step
        error = (remaining[:, j] - result[:, j]) / upper[j, j]
        remaining[:, j:] -= error[:, None] * upper[j, j:]
    return result


def test_gptq_matches_the_published_algorithm():
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    args = QuantizationArgs(num_bits=4, group_size=16)
    expected = reference_gptq(weight, hessian, find_params(weight, args).scale, width=16)
    torch.testing.assert_close(gptq(weight, hessian, args).weight, expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_output_error_is_below_rounding_to_nearest(kind, dtype):
    weight, hessian = random(ROWS, COLUMNS).to(dtype), make_hessian()
    args = QuantizationArgs(**KINDS[kind])
    result, nearest = gptq(weight, hessian, args), rtn(weight, args)
    assert result.weight.dtype == dtype
    error = output_error(weight - result.weight, hessian)
    assert error < 0.8 * output_error(weight - nearest.weight, hessian)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "int8" not in kind])
def test_the_result_is_on_the_grid(kind):
    args = QuantizationArgs(**KINDS[kind])
    for dtype in (torch.float32, torch.bfloat16):
        result = gptq(random(ROWS, COLUMNS).to(dtype), make_hessian(), args)
        assert torch.equal(rtn(result.weight, args, params=result.params).weight, result.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["any", "2:4"])
def test_masked_weights_stay_zero(kind, pattern):
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    if pattern == "any":
        mask = random(ROWS, COLUMNS, seed=9) > 0
    else:
        best = weight.view(-1, 4).abs().topk(2).indices
        mask = torch.zeros(ROWS * COLUMNS // 4, 4, dtype=torch.bool).scatter(1, best, True)
        mask = mask.view(ROWS, COLUMNS)
    args = QuantizationArgs(**KINDS[kind])
    pruned = weight * mask
    result = gptq(pruned, hessian, args, mask=mask)
    assert not result.weight[~mask].any()
    codes = result.weight[~mask].view(torch.int32)
    assert not codes.any(), "-0.0 would be another code"
    nearest = output_error(pruned - rtn(pruned, args).weight, hessian)
    assert output_error(pruned - result.weight, hessian) < nearest


def test_kept_weights_compensate_for_a_mask():
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    mask = weight.abs() > 0.5
    args = QuantizationArgs(num_bits=8, group_size=-1)
    result = gptq(weight, hessian, args, mask=mask)
    plain = output_error(weight - weight * mask, hessian)
    assert output_error(weight - result.weight, hessian) < 0.9 * plain


def test_actorder_reduces_the_error():
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    plain = gptq(weight, hessian, QuantizationArgs(num_bits=4, group_size=16))
    for order in ("weight", "group"):
        args = QuantizationArgs(num_bits=4, group_size=16, actorder=order)
        result = gptq(weight, hessian, args)
        better = output_error(weight - result.weight, hessian)
        assert better < output_error(weight - plain.weight, hessian)
        if order == "weight":
            assert result.params.g_idx is None
            assert torch.equal(result.params.scale, plain.params.scale)
        else:
            ranks = hessian.diagonal().argsort(descending=True).argsort()
            assert torch.equal(result.params.g_idx, (ranks // 16).int())


@pytest.mark.parametrize("order", [None, "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_groups_get_other_scales(order, symmetric):
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    args = QuantizationArgs(num_bits=4, group_size=16, actorder=order, symmetric=symmetric)
    early, late = (gptq(weight, hessian, args, static_groups=static) for static in (True, False))
    assert not torch.equal(early.params.scale, late.params.scale)
    assert early.params.scale.shape == late.params.scale.shape
    assert torch.equal(rtn(late.weight, args, params=late.params).weight, late.weight)
    nearest = output_error(weight - rtn(weight, args).weight, hessian)
    assert output_error(weight - late.weight, hessian) < 0.8 * nearest


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 7), size=st.sampled_from([1, 3, 8, 20]))
def test_any_shape_matches_the_published_algorithm(rows, groups, size):
    columns = groups * size
    weight, hessian = random(rows, columns), make_hessian(columns)
    args = QuantizationArgs(num_bits=4, group_size=size)
    params = Params(
        0.2 + random(rows, groups, seed=5).abs() / 3
    )  # observed scales would cause ties
    expected = reference_gptq(weight, hessian, params.scale, width=size)
    got = gptq(weight, hessian, args, params=params).weight
    torch.testing.assert_close(got, expected.float())


def test_given_params_are_used():
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    args = QuantizationArgs(num_bits=4, group_size=16)
    params = find_params(weight / 2, args)
    assert gptq(weight, hessian, args, params=params).params is params


def test_columns_of_zero_inputs_are_rounded_to_nearest_and_noted():
    weight, hessian, notes = random(ROWS, COLUMNS), make_hessian(), []
    hessian[5], hessian[:, 5] = 0, 0
    args = QuantizationArgs(num_bits=4, group_size=16)
    result = gptq(weight, hessian, args, tell=notes.append)
    assert torch.equal(result.weight[:, 5], rtn(weight, args).weight[:, 5])
    assert notes == ["1 of 64 inputs were always zero"]


def test_damping_of_a_singular_hessian_is_raised_and_noted():
    notes = []
    hessian = torch.ones(COLUMNS, COLUMNS)
    args = QuantizationArgs(num_bits=4, group_size=16)
    result = gptq(random(ROWS, COLUMNS), hessian, args, damping=0.0, tell=notes.append)
    assert torch.isfinite(result.weight).all()
    assert "damping raised to 0.0001" in notes[0]


def test_invalid_input_raises():
    weight, hessian = random(ROWS, COLUMNS), make_hessian()
    args = QuantizationArgs(num_bits=4, group_size=16)
    nan = hessian.clone()
    nan[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="NaN or infinity in the Hessian"):
        gptq(weight, nan, args)
    with pytest.raises(ConfigError, match="NaN or infinity"):
        gptq(weight / 0, hessian, args)
    with pytest.raises(ConfigError, match="all inputs were zero"):
        gptq(weight, hessian * 0, args)
    with pytest.raises(ConfigError, match="expected a Hessian of shape"):
        gptq(weight, hessian[:3, :3], args)
    with pytest.raises(ConfigError, match="expected a bool mask"):
        gptq(weight, hessian, args, mask=torch.ones(3))
    with pytest.raises(ConfigError, match="not divisible by group_size"):
        gptq(weight, hessian, QuantizationArgs(num_bits=4, group_size=48))
    with pytest.raises(ConfigError, match="not positive definite"):
        gptq(weight, 2 * torch.eye(COLUMNS) - torch.ones(COLUMNS, COLUMNS), args)
    ordered = QuantizationArgs(num_bits=4, group_size=16, actorder="weight")
    with pytest.raises(ConfigError, match="static_groups=False requires"):
        gptq(weight, hessian, ordered, static_groups=False)
    with pytest.raises(ConfigError, match="NaN or infinity in the inputs"):
        Hessian(2).add(torch.tensor([[1.0, torch.inf]]))
