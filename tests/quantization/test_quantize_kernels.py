"""C++ quantization kernels against slow twins in torch, with and without vector code."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors import _core
from slimtensors.quantization import QuantizationArgs
from slimtensors.quantization.affine import Params, dequantize, quantize
from slimtensors.tensor import as_bytes, dtype_name

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
relaxed = settings(deadline=None, max_examples=60)


def framed(size):
    """Return bytes at an odd address between guards, and the guards."""
    whole = torch.full((size + 65,), 0xA5, dtype=torch.uint8)
    start = 32 + (whole.data_ptr() + 1) % 2
    return whole[start : start + size], (whole[:start], whole[start + size :])


def untouched(guards):
    return all(bool((guard == 0xA5).all()) for guard in guards)


def slow_pack(codes, bits):
    """Return packed codes, computed with one long integer per row."""
    size = 4 * -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes.tolist():
        stream = sum((code + (1 << bits - 1)) << i * bits for i, code in enumerate(row))
        rows.append(stream.to_bytes(size, "little"))
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).copy())


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**32))
@relaxed
def test_packed_codes_equal_the_slow_twin(bits, rows, row, seed):
    generator = torch.Generator().manual_seed(seed)
    half = 1 << bits - 1
    codes = torch.randint(-half, half, (rows, row), generator=generator, dtype=torch.int8)
    expected = slow_pack(codes, bits)
    words, guards = framed(expected.numel())
    _core.pack_codes(as_bytes(codes), bits, row, words)
    assert same_bits(words, expected)
    assert untouched(guards)
    back, guards = framed(codes.numel())
    _core.unpack_codes(words, bits, row, back)
    assert same_bits(back.view(torch.int8).view(rows, row), codes)
    assert untouched(guards)


def numbers(count, dtype, seed):
    """Return finite floats: raw bits, zeros of both signs, ordinary values, halves."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    x = raw.to(WORDS[dtype]).view(dtype)
    x = torch.where(torch.isfinite(x), x, torch.zeros((), dtype=dtype))
    plain = (torch.randn(count, generator=generator) * 8).to(dtype)
    halves = torch.randint(-40, 40, (count,), generator=generator).to(dtype) / 4
    kind = torch.randint(0, 3, (count,), generator=generator)
    return torch.where(kind == 0, x, torch.where(kind == 1, plain, halves))


@given(
    st.sampled_from(FLOATS),
    st.sampled_from(["same", "float32"]),
    st.sampled_from([*(("int", b) for b in range(1, 9)), ("fp8", 8), ("fp4", 4)]),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([1, 2, 7, 8, 40, 96, 513, 1024]),
    st.integers(0, 2**32),
)
@relaxed
def test_quantize_and_dequantize_equal_torch(dtype, steps, kind, signed, rows, group, seed):
    name, bits = kind
    row = group * (2 if group % 2 else 3)
    x = numbers(rows * row, dtype, seed).view(rows, row)
    scale_dtype = dtype if steps == "same" else torch.float32
    scale = numbers(rows * (row // group), scale_dtype, seed + 1).abs()
    scale = torch.where(scale == 0, torch.ones((), dtype=scale_dtype), scale).view(rows, -1)
    asymmetric = signed and name == "int"
    half = 1 << bits - 1
    zero = torch.randint(-half, half, scale.shape, dtype=torch.int8) if asymmetric else None
    args = QuantizationArgs(
        num_bits=bits,
        type="int" if name == "int" else "float",
        symmetric=not asymmetric,
        group_size=group,
    )
    params = Params(scale, zero)
    expected = quantize(x, params, args)
    packed = expected[:, ::2] | expected[:, 1::2] << 4 if name == "fp4" else expected
    codes, guards = framed(packed.numel())
    zeros = None if zero is None else as_bytes(zero)
    layout = {
        "scales": _core.Scales(
            as_bytes(scale), dtype_name(scale_dtype), (row, group, 1), zero_points=zeros
        ),
        "format": _core.CodeFormat(name, bits),
    }
    found = _core.quantize(
        as_bytes(x), codes, dtype=dtype_name(dtype), compute_dtype=dtype_name(scale_dtype), **layout
    )
    assert found
    assert same_bits(codes, as_bytes(packed))
    assert untouched(guards)
    dense = dequantize(expected, params, args, dtype)
    finite = torch.isfinite(dense)
    if scale_dtype is dtype:
        out, guards = framed(x.nbytes)
        _core.dequantize(codes, out, dtype=dtype_name(dtype), **layout)
        back = out.clone().view(dtype).view(rows, row)
        assert same_bits(back[finite], dense[finite])
        assert torch.equal(torch.isnan(back), torch.isnan(dense))
        assert untouched(guards)


@given(st.sampled_from(FLOATS), st.integers(1, 4), st.integers(1, 70), st.integers(1, 40))
@relaxed
def test_ranges_equal_torch(dtype, rows, row, columns):
    x = numbers(rows * row, dtype, rows + row).view(rows, row)
    runs = torch.split(x.float(), columns, 1)
    low, high = (torch.empty(rows, len(runs), dtype=dtype) for _ in range(2))
    _core.find_ranges(as_bytes(x), dtype_name(dtype), row, columns, as_bytes(low), as_bytes(high))
    assert torch.equal(low.float(), torch.stack([run.amin(1) for run in runs], 1))
    assert torch.equal(high.float(), torch.stack([run.amax(1) for run in runs], 1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_are_reported(dtype, bad):
    x = torch.ones(1, 77, dtype=dtype)
    x[0, 70] = bad
    low, high = torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype)
    _core.find_ranges(as_bytes(x), dtype_name(dtype), 77, 77, as_bytes(low), as_bytes(high))
    assert not (torch.isfinite(low) and torch.isfinite(high))
    name, codes = dtype_name(dtype), torch.empty(77, dtype=torch.uint8)
    scales = _core.Scales(as_bytes(torch.ones(1, dtype=dtype)), name, (77, 77, 1))
    int8 = _core.CodeFormat("int", 8)
    assert not _core.quantize(
        as_bytes(x), codes, dtype=name, compute_dtype=name, scales=scales, format=int8
    )


def test_every_small_float_equals_torch():
    every = torch.arange(256).to(torch.uint8)
    one = _core.Scales(as_bytes(torch.ones(1)), "float32", (256, 256, 1))
    out = torch.empty(256)
    fp8, int8 = _core.CodeFormat("fp8", 8), _core.CodeFormat("int", 8)
    _core.dequantize(every, as_bytes(out), dtype="float32", scales=one, format=fp8)
    expected = every.view(torch.float8_e4m3fn).float()
    number = ~torch.isnan(expected)
    assert same_bits(out[number], expected[number])
    assert torch.isnan(out[~number]).all()
    codes = torch.full((256,), 4, dtype=torch.int8)
    for kind in ("float8_e4m3fn", "float8_e8m0fnu"):
        scales = _core.Scales(every, kind, (256, 1, 1))
        _core.dequantize(
            as_bytes(codes), as_bytes(out), dtype="float32", scales=scales, format=int8
        )
        scale = every.view(getattr(torch, kind)).float()
        if kind == "float8_e8m0fnu":
            scale[255] = torch.inf  # as in compressed-tensors; NaN in the standard
        assert torch.equal((4 * scale)[number], out[number])


GOOD = {
    "items": bytes(16),
    "dtype": "float16",
    "values": bytes(2),
    "zero_points": b"",
    "blocks": (8, 8, 1),
    "kind": "int",
    "bits": 8,
}


def quantize_float16(codes, items, dtype, values, zero_points, blocks, kind, bits):
    scales = _core.Scales(values, "float16", blocks, zero_points=zero_points)
    code_format = _core.CodeFormat(kind, bits)
    _core.quantize(
        items, codes, dtype=dtype, compute_dtype="float16", scales=scales, format=code_format
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": bytes(15)}, "whole rows"),
        ({"dtype": "float64"}, "unknown float type"),
        ({"dtype": "float8_e4m3fn"}, "items must be"),
        ({"values": bytes(4)}, "one scale per block"),
        ({"zero_points": bytes(2)}, "one zero point"),
        ({"blocks": (0, 8, 1)}, "empty"),
        ({"blocks": (8, 0, 1)}, "empty"),
        ({"blocks": (8, 8, 0)}, "empty"),
        ({"blocks": (1 << 62, 8, 1)}, "whole rows"),
        ({"kind": "fp3"}, "unknown code format"),
        ({"bits": 9}, "1 to 8 bits"),
        ({"kind": "packed", "bits": 3}, "size of their items"),
    ],
)
def test_invalid_sizes_raise_before_anything_is_written(change, message):
    codes = bytearray(b"x" * 8)
    with pytest.raises(ValueError, match=message):
        quantize_float16(codes, **GOOD | change)
    assert codes == b"x" * 8


def test_rows_of_odd_length_raise_for_pairs():
    with pytest.raises(ValueError, match="even number"):
        quantize_float16(
            bytearray(1),
            **GOOD | {"items": bytes(6), "blocks": (3, 3, 1), "kind": "fp4", "bits": 4},
        )


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="this is the run with the other code")
def test_plain_code_passes_the_same_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "SLIMTENSORS_CPU": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
