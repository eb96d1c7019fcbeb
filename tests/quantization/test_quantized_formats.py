"""Stored quantized weights are bitwise equal to those of compressed-tensors 0.20."""

from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs as TheirArgs
from compressed_tensors.quantization import QuantizationScheme as TheirScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.quantization import QuantizationArgs, formats
from slimtensors.quantization import kernels as bits
from slimtensors.quantization.affine import Params, find_params, quantize

BY_TENSOR = {"strategy": "tensor"}
BY_CHANNEL = {"strategy": "channel"}
BY_GROUP = {"strategy": "group", "group_size": 32}
BY_BLOCK = {"strategy": "block", "block_structure": [16, 32]}
FP8 = {"num_bits": 8, "type": "float"}
FP6 = {"num_bits": 6, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = {
    **FP4,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
PACKED = [
    ("pack-quantized", {"num_bits": n, "symmetric": symmetric, **shared})
    for n in range(1, 9)
    for symmetric in (True, False)
    for shared in (BY_TENSOR, BY_CHANNEL, BY_GROUP)
]
INTS = [
    ("int-quantized", {"num_bits": n, "symmetric": symmetric, **shared})
    for n in (4, 8)
    for symmetric in (True, False)
    for shared in (BY_TENSOR, BY_CHANNEL, BY_GROUP, BY_BLOCK)
]
FLOATS = [
    ("float-quantized", {**FP8, "symmetric": symmetric, **shared})
    for symmetric in (True, False)
    for shared in (BY_TENSOR, BY_CHANNEL, BY_GROUP, BY_BLOCK)
]
SMALL = [
    ("naive-quantized", {**FP8, **BY_CHANNEL}),
    ("nvfp4-pack-quantized", NVFP4),
    ("mxfp4-pack-quantized", {**FP4, "group_size": 32, "scale_dtype": torch.uint8}),
    ("mxfp6-pack-quantized", {**FP6, "group_size": 32, "scale_dtype": torch.uint8}),
    ("mxfp8-quantized", {**FP8, "group_size": 32, "scale_dtype": torch.uint8}),
]
CASES = [*PACKED, *INTS, *FLOATS, *SMALL]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(seed, dtype=torch.bfloat16, shape=(12, 96)):
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape[0], 1, generator=generator).mul(3).exp2()
    )
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    x[0] = 0.0
    return x.to(dtype)


def their_state(x, params):
    state = {"weight": x, "weight_scale": params.scale, "weight_zero_point": params.zero_point}
    state["weight_global_scale"] = params.global_scale
    return {key: value for key, value in state.items() if value is not None}


@given(
    st.sampled_from(CASES),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
    st.tuples(st.integers(9, 40), st.integers(1, 4)),  # theirs cannot read one word of zero points
)
@settings(deadline=None, max_examples=300)
def test_bytes_and_values_equal_compressed_tensors(case, dtype, seed, size):
    name, options = case
    ungrouped = "group_size" not in options and "block_structure" not in options
    x = weight(seed, dtype, (size[0], size[1] * 37 if ungrouped else size[1] * 32))
    args, scheme = (
        QuantizationArgs(**options),
        TheirScheme(targets=[], weights=TheirArgs(**options)),
    )
    params = find_params(x, args)
    compressor = BaseCompressor.get_value_from_registry(name)
    expected = compressor.compress(their_state(x, params), scheme)
    ours = formats.find(name)
    parts = ours.compress(x, params, args)
    assert parts.keys() == expected.keys()
    for suffix, part in parts.items():
        assert same_bits(part, expected[suffix]), suffix
    dense = compressor.decompress(expected, scheme)["weight"]
    assert same_bits(ours.decompress(parts, args), dense)
    codes, found = ours.parse(parts, args)
    assert same_bits(codes, quantize(x, params, args))
    again = ours.store(codes, Params(params.scale, found.zero_point, params.global_scale), args)
    assert all(same_bits(again[suffix], part) for suffix, part in parts.items())


@pytest.mark.parametrize(("name", "options"), [*PACKED, *SMALL])
def test_a_stack_of_experts_is_stored_as_a_stack(name, options):
    args, ours = QuantizationArgs(**options), formats.find(name)
    experts = [weight(seed) for seed in range(3)]
    stack = torch.stack(experts)
    parts = ours.compress(stack, find_params(stack, args), args)
    alone = [ours.compress(x, find_params(x, args), args) for x in experts]
    for suffix, part in parts.items():
        if suffix != "weight_shape":
            assert same_bits(part.flatten(), torch.stack([a[suffix] for a in alone]).flatten())
    dense = torch.stack([ours.decompress(a, args) for a in alone])
    assert same_bits(ours.decompress(parts, args), dense)


@dataclass
class Scheme:
    weights: QuantizationArgs | None
    input_activations: QuantizationArgs | None


@pytest.mark.parametrize("inputs", [None, {"num_bits": 8}, FP8])
@pytest.mark.parametrize("options", [None, *(options for _, options in CASES)], ids=str)
def test_inferred_format_equals_compressed_tensors(options, inputs):
    theirs = TheirScheme(
        targets=[],
        weights=options and TheirArgs(**options),
        input_activations=inputs and TheirArgs(**inputs),
    )
    ours = Scheme(options and QuantizationArgs(**options), inputs and QuantizationArgs(**inputs))
    assert formats.infer(ours) == infer_module_format(torch.nn.Linear, theirs).value


def old_pack(codes, width):
    """Pack as releases before 0.18: no code is split across two words."""
    count = 32 // width
    padded = torch.nn.functional.pad(codes.long() + (1 << width - 1), (0, -codes.shape[1] % count))
    words = padded.view(codes.shape[0], -1, count)
    return (words << torch.arange(count) * width).sum(-1).to(torch.int32)


@given(st.sampled_from([3, 5, 6, 7]), st.integers(1, 300), st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=200)
def test_older_layout_is_read_or_refused_but_never_misread(width, columns, seed, symmetric):
    generator = torch.Generator().manual_seed(seed)
    half = 1 << width - 1
    codes = torch.randint(-half, half, (6, columns), generator=generator, dtype=torch.int8)
    args = QuantizationArgs(num_bits=width, strategy="channel", symmetric=symmetric)
    zero = torch.randint(-half, half, (6, 1), generator=generator, dtype=torch.int8)
    params = Params(torch.rand(6, 1, generator=generator), None if symmetric else zero)
    new = formats.find("pack-quantized").store(codes, params, args)
    old = {**new, "weight_packed": old_pack(codes, width)}
    if not symmetric:
        old["weight_zero_point"] = old_pack(zero.T, width).T.contiguous()
    for parts, version in ((old, "0.17.1"), (new, "0.20.0")):
        found, _ = formats.find("pack-quantized", version=version).parse(parts, args)
        assert same_bits(found, codes)
        with suppress(FormatError):
            found, _ = formats.find("pack-quantized").parse(parts, args)
            assert same_bits(found, codes)


def test_ambiguous_layout_raises():
    args = QuantizationArgs(num_bits=3, strategy="channel")
    codes = torch.full((4, 40), -4, dtype=torch.int8)  # all bits zero in both layouts
    parts = formats.find("pack-quantized").store(codes, Params(torch.ones(4, 1)), args)
    with pytest.raises(FormatError, match="pass the release that wrote the file"):
        formats.find("pack-quantized").decompress(parts, args)


def test_invalid_number_of_words_raises():
    with pytest.raises(CorruptFileError, match="3 words per row do not fit 40 codes of 4 bits"):
        bits.find_layouts(torch.zeros(2, 3, dtype=torch.int32), 4, 40)


@pytest.mark.parametrize(
    ("name", "options", "change", "message"),
    [
        ("pack-quantized", BY_GROUP, {"weight_scale": torch.ones(2, 2)}, r"expected \(12, 3\)"),
        ("pack-quantized", BY_GROUP, {"weight_shape": torch.tensor([11, 96])}, "weight_shape"),
        ("pack-quantized", BY_GROUP, {"weight_packed": torch.ones(12, 96)}, "32-bit words"),
        ("pack-quantized", BY_GROUP, {"weight_g_idx": torch.arange(5)}, "for 96 columns"),
        ("pack-quantized", BY_GROUP, {"weight_g_idx": torch.full((96,), 3)}, "there are 3 groups"),
        ("int-quantized", BY_GROUP, {"weight": torch.ones(12, 96)}, "expected torch.int8 codes"),
        ("int-quantized", BY_GROUP, {"weight_scale": None}, "weight_scale is missing"),
        ("nvfp4-pack-quantized", NVFP4, {"weight_global_scale": torch.ones(7)}, "global"),
        ("nvfp4-pack-quantized", NVFP4, {"weight_packed": torch.ones(12)}, "rows of bytes"),
        ("mxfp8-quantized", SMALL[4][1], {"weight_scale": torch.ones(12, 3)}, "exponents"),
    ],
)
def test_mismatched_parts_raise(name, options, change, message):
    args, ours = QuantizationArgs(**options), formats.find(name)
    x = weight(0)
    parts = {**ours.compress(x, find_params(x, args), args), **change}
    with pytest.raises(CorruptFileError, match=message):
        ours.decompress({key: part for key, part in parts.items() if part is not None}, args)


def test_columns_with_g_idx_use_their_group():
    args = QuantizationArgs(num_bits=4, group_size=32, actorder="group")
    x, ours = weight(5), formats.find("pack-quantized")
    found = find_params(x, args)
    g_idx = torch.randint(0, 3, (96,), dtype=torch.int32)
    parts = ours.compress(x, Params(found.scale, g_idx=g_idx), args)
    dense = ours.decompress(parts, args)
    codes, _ = ours.parse(parts, args)
    for column in (0, 17, 95):
        expected = codes[:, column].bfloat16() * found.scale[:, g_idx[column]]
        assert same_bits(dense[:, column].contiguous(), expected)
    neighbours = ours.decompress({**parts, "weight_g_idx": torch.full((96,), -1)}, args)
    assert same_bits(
        neighbours, ours.decompress({**parts, "weight_g_idx": torch.arange(96) // 32}, args)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("pack-quantized", FP8), ("naive-quantized", {**FP4, "group_size": 32})],
)
def test_formats_raise_on_unsupported_arguments(name, options):
    args = QuantizationArgs(**options)
    x = weight(1)
    with pytest.raises(ConfigError, match=name):
        formats.find(name).compress(x, find_params(x, args), args)


def test_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'pack-quantized'"):
        formats.find("packed-quantized")
    with pytest.raises(ConfigError, match="no format stores floats of 4 bits"):
        formats.infer(Scheme(QuantizationArgs(**FP4, group_size=64), None))
