"""The kernel that multiplies inputs by quantized weights, against a slow twin."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimtensors import _core
from slimtensors.quantization import kernels as bits
from slimtensors.tensor import as_bytes, dtype_name

NOTHING = torch.empty(0, dtype=torch.uint8)


def product(codes, kind, scale, zero, block, x, threads=1):
    rows, columns = len(codes), x.shape[1]
    out = torch.full((len(x), rows), torch.nan)
    stored = bits.pack_bits(codes, 4) if kind == "packed" else codes
    _core.multiply_codes(
        as_bytes(x),
        as_bytes(stored),
        as_bytes(out),
        scales=_core.Scales(
            as_bytes(scale),
            dtype_name(scale.dtype),
            (columns, block, 1),
            zero_points=None if zero is None else as_bytes(zero),
        ),
        format=_core.CodeFormat(kind, 4 if kind == "packed" else 8),
        threads=threads,
    )
    return out


def slow(codes, scale, zero, block, x):
    numbers = codes.double()
    for start in range(0, codes.shape[1], block):
        run = slice(start, start + block)
        if zero is not None:
            numbers[:, run] -= zero[:, start // block : start // block + 1]
        numbers[:, run] *= scale[:, start // block : start // block + 1].double()
    return x.double() @ numbers.t(), x.double().abs() @ numbers.t().abs()


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["int", "packed", "fp8"]))
    rows = draw(st.integers(1, 15))
    # Around one piece of a row, too, and of whole vectors, which are never floats in memory.
    columns = draw(st.integers(1, 150) | st.integers(1000, 1100) | st.sampled_from([32, 96, 1024]))
    block = min(2 * draw(st.integers(1, 80) | st.sampled_from([16, 32])), columns)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=g).mul(50).to(torch.float8_e4m3fn)
    else:
        half = 8 if kind == "packed" else 128
        codes = torch.randint(-half, half, (rows, columns), generator=g, dtype=torch.int8)
    across = -(-columns // block)
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    scale = torch.rand(rows, across, generator=g).to(dtype)
    zero = None
    if kind != "fp8" and draw(st.booleans()):
        zero = torch.randint(-8, 8, (rows, across), generator=g, dtype=torch.int8)
    x = torch.randn(draw(st.integers(0, 9) | st.integers(63, 66)), columns, generator=g)
    return codes, kind, scale, zero, block, x


@settings(max_examples=300, deadline=None)
@given(case=cases(), threads=st.integers(1, 5))
def test_products_equal_the_slow_twin(case, threads):
    codes, _, scale, zero, block, x = case
    expected, size = slow(codes, scale, zero, block, x)
    found = product(*case)
    assert bool(((found - expected).abs() <= 1e-5 * size + 1e-30).all())
    assert torch.equal(product(*case, threads=threads), found)
    assert torch.equal(product(*case[:-1], x[-1:]), found[-1:])  # whatever else is multiplied


@pytest.mark.parametrize("code", range(256))
def test_every_8_bit_float_has_its_value(code):
    codes = torch.full((1, 40), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(1, 40)
    x[0, 3] = 1.0
    found = product(codes, "fp8", torch.ones(1, 1), None, 40, x)
    number = codes[0, 0].float()
    assert torch.equal(found[0, 0], number) or (found.isnan().all() and number.isnan())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": NOTHING.new_zeros(63)}, "whole rows"),
        ({"values": NOTHING.new_zeros(4)}, "one scale per block"),
        ({"dtype": "float8_e4m3fn"}, "scales must be"),
        ({"zero_points": NOTHING.new_zeros(3)}, "one zero point"),
        ({"blocks": (32, 32, 2)}, "one row high"),
        ({"blocks": (32, 0, 1)}, "one row high"),
        ({"blocks": (0, 1, 1)}, "one row high"),
        ({"blocks": (2**63, 1, 1)}, "too long"),
        ({"inputs": NOTHING.new_zeros(100)}, "whole rows"),
        ({"products": NOTHING.new_zeros(4)}, "one product"),
        ({"kind": "packed", "bits": 3}, "codes must be"),
        ({"kind": "packed", "bits": 4, "blocks": (32, 3, 1)}, "two blocks"),
        ({"kind": "fp4", "bits": 4}, "codes must be"),
        ({"kind": "fp8", "zero_points": NOTHING.new_zeros(2)}, "no zero points"),
    ],
)
def test_invalid_sizes_raise(change, message):
    fitting = {
        "codes": NOTHING.new_zeros(64),
        "kind": "int",
        "bits": 8,
        "values": NOTHING.new_zeros(8),
        "dtype": "float32",
        "zero_points": NOTHING,
        "blocks": (32, 32, 1),
        "inputs": NOTHING.new_zeros(128),
        "products": NOTHING.new_zeros(8),
    }
    multiply(**fitting)
    with pytest.raises(ValueError, match=message):
        multiply(**fitting | change)


def multiply(inputs, codes, products, kind, bits, values, dtype, blocks, zero_points):
    scales = _core.Scales(values, dtype, blocks, zero_points=zero_points)
    code_format = _core.CodeFormat(kind, bits)
    _core.multiply_codes(inputs, codes, products, scales=scales, format=code_format, threads=1)


@pytest.mark.skipif("SLIMTENSORS_CPU" in os.environ, reason="this is the run with the other code")
@pytest.mark.parametrize("kind", ["plain", "avx2"])
def test_code_for_other_processors_passes_the_same_tests(kind):
    environment = {**os.environ, "SLIMTENSORS_CPU": kind}
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
