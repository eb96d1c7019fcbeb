"""Quantized weights in the `slim` dialect."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits

import slimtensors
from slimtensors import codecs
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.huffman import Huffman
from slimtensors.codecs.plan import Encoded, Plan, chain, decode, encode
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, UnsupportedTensorError
from slimtensors.parallel import Workers
from slimtensors.quantization import Params, QuantizationArgs, Quantized
from slimtensors.quantization.affine import fake_quantize, find_params, quantize
from slimtensors.tensor import Spec

E4M3 = torch.float8_e4m3fn
W4 = {"num_bits": 4, "group_size": 16}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": E4M3,
}
MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}
KINDS = [
    {},
    W4,
    NVFP4,
    MXFP4,
    {"num_bits": 3, "group_size": -1, "symmetric": False},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 40]},
    {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": torch.uint8},
    {"num_bits": 8, "symmetric": False},
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(seed=0, dtype=torch.bfloat16, shape=(12, 96)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.5] = 0.0
    return x.to(dtype)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([(12, 96), (1, 32), (3, 5, 64)]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=150)
def test_decoded_weight_equals_fake_quantization(options, dtype, packed, shape, seed):
    args = QuantizationArgs(**options)
    x = weight(seed, dtype, shape)
    codec = Quantized(args, packed)
    back = codec.decode(codec.encode(x), Spec.of(x))
    assert same_bits(back + 0.0, fake_quantize(x, find_params(x, args), args) + 0.0)
    assert codecs.from_json(json.loads(json.dumps(codecs.to_json(codec)))) == codec


def test_float64_is_supported():
    args, x = QuantizationArgs(**W4), weight(0, torch.float64)
    codec = Quantized(args)
    back = codec.decode(codec.encode(x), Spec.of(x))
    assert same_bits(back, fake_quantize(x, find_params(x, args), args))


def test_threads_give_the_same_parts():
    x = weight(1, shape=(700, 4096))
    for options in (W4, NVFP4, {"strategy": "block", "block_structure": [128, 128]}):
        plan = Plan(Quantized(QuantizationArgs(**options)))
        whole = encode(plan, x)
        with Workers(3) as workers:
            shared = encode(plan, x, workers.each)
            assert same_bits(decode(whole, workers.each), decode(whole))
        assert all(same_bits(part, shared.parts[name]) for name, part in whole.parts.items())


@pytest.mark.parametrize(
    "then",
    [
        {},
        {"q": chain(Huffman())},
        {"q": chain(Bitmask(), values=Huffman()), "scale": chain(Huffman())},
    ],
)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_codes_can_be_coded_further(options, then, tmp_path):
    args = QuantizationArgs(**options)
    x, path = weight(shape=(64, 960)), tmp_path / "x.safetensors"
    plan = chain(Quantized(args, packed=not then), **then)
    summary = slimtensors.save({"a.weight": x}, path, preset=plan)
    assert summary.tensors[0].codec == str(plan)
    back = slimtensors.load(path)["a.weight"]
    assert same_bits(back + 0.0, fake_quantize(x, find_params(x, args), args) + 0.0)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_codes_computed_elsewhere_are_stored_unchanged(options, tmp_path):
    args = QuantizationArgs(**options)
    x, path = weight(shape=(16, 64)), tmp_path / "x.safetensors"
    found = find_params(x * 0.9, args)
    codes = quantize(x, found, args)
    encoded = Quantized(args, packed=False).encoded(
        codes, found, x.dtype, then={"q": Plan(Huffman())}
    )
    state = {"layer.weight": encoded, "layer.bias": torch.ones(3), "step": 7}
    slimtensors.save(state, path, preset="dense")
    back = slimtensors.load(path)
    assert same_bits(back["layer.weight"] + 0.0, fake_quantize(x, found, args) + 0.0)
    assert back["step"] == 7
    with slimtensors.open(path) as archive:
        assert archive.info("layer.weight").codec == "quantized(q=huffman)"


def test_groups_that_are_not_contiguous_are_supported(tmp_path):
    args = QuantizationArgs(**W4)
    x, path = weight(), tmp_path / "x.safetensors"
    g_idx = torch.randperm(96, generator=torch.Generator().manual_seed(0)).to(torch.int32) % 6
    params = Params(find_params(x, args).scale, g_idx=g_idx)
    codes = quantize(x, params, args)
    slimtensors.save({"w": Quantized(args).encoded(codes, params, x.dtype)}, path)
    assert same_bits(slimtensors.load(path)["w"], fake_quantize(x, params, args))


def test_unsupported_encoded_tensors_raise(tmp_path):
    x = encode(Plan(Quantized(QuantizationArgs(**W4))), weight())
    with pytest.raises(ConfigError, match=r"w: the .* quantizes only tensors named 'weight'"):
        slimtensors.save({"w": x}, tmp_path / "x.safetensors", dialect="compressed-tensors")
    coded = encode(Plan(Huffman()), weight())
    with pytest.raises(ConfigError, match=r"w: the dialect 'compressed-tensors' cannot"):
        slimtensors.save({"w": coded}, tmp_path / "x.safetensors", dialect="compressed-tensors")
    broken = Encoded(x.codec, x.spec, {**x.parts, "scale": torch.eye(2).to_sparse()})
    with pytest.raises(UnsupportedTensorError, match="w: scale: layout"):
        slimtensors.save({"w": broken}, tmp_path / "x.safetensors")
    codec, params = Quantized(QuantizationArgs(**W4)), Params(torch.ones(2, 1))
    codes, then = torch.zeros(2, 16, dtype=torch.int8), {"codes": Plan(Huffman())}
    with pytest.raises(ConfigError, match="unknown part 'codes'"):
        codec.encoded(codes, params, torch.float32, then=then)


@pytest.mark.parametrize(
    ("options", "change", "like"),
    [
        (W4, {"q": torch.zeros(12, 11, dtype=torch.int32)}, None),
        (W4, {"q": torch.zeros(12, 12, dtype=torch.int64)}, None),
        (W4, {"scale": torch.ones(12, 5)}, None),
        (W4, {"scale": torch.ones(12, 6, dtype=torch.int8)}, None),
        (W4, {"zero_point": torch.ones(12, 6, dtype=torch.int8)}, None),
        (W4, {"g_idx": torch.full((96,), -1)}, None),
        (W4, {"g_idx": torch.full((96,), 6)}, None),
        (W4, {"g_idx": torch.zeros(95, dtype=torch.int32)}, None),
        (W4, {}, Spec(torch.int32, (12, 96))),
        (W4, {}, Spec(torch.bfloat16, (12, 97))),
        (W4, {}, Spec(torch.bfloat16, (12 * 96,))),
        (W4, {}, Spec(torch.bfloat16, (0, 96))),
        (NVFP4, {"global_scale": torch.ones(3)}, None),
        (NVFP4, {"global_scale": torch.ones(1, dtype=torch.float64)}, None),
        (NVFP4, {"scale": torch.ones(12, 6, dtype=torch.uint8)}, None),
        (KINDS[4], {"zero_point": torch.ones(12, 1)}, None),
        (KINDS[4], {"zero_point": None}, None),
    ],
)
def test_mismatched_parts_raise(options, change, like):
    codec, x = Quantized(QuantizationArgs(**options)), weight()
    parts = {**codec.encode(x), **change}
    parts = {name: part for name, part in parts.items() if part is not None}
    with pytest.raises(CorruptFileError):
        decode(Encoded(codec, like or Spec.of(x), parts))


def test_invalid_arguments_in_a_file_raise_a_format_error():
    for args in ({"num_bits": 99}, {"nmu_bits": 4}, {"group_size": "x"}):
        with pytest.raises(FormatError):
            codecs.from_json({"name": "quantized", "args": args})
    with pytest.raises(FormatError):
        codecs.from_json({"name": "quantized", "args": 3})
    with pytest.raises(ConfigError, match="packed"):
        Quantized(packed=1)


def test_unsupported_weights_are_named_in_the_error(tmp_path):
    plan = Plan(Quantized(QuantizationArgs(**W4)))
    for x, message in ((torch.ones(4, 30), "30 columns"), (torch.full((4, 32), torch.nan), "NaN")):
        with pytest.raises(ConfigError, match=f"w: .*{message}"):
            slimtensors.save({"w": x}, tmp_path / "x.safetensors", preset=plan)


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_tied_weights_are_tied(tmp_path, bits, limit):
    weight = torch.randn(8, 32)
    args = QuantizationArgs(
        bits, type="float" if bits == 8 else "int", group_size=16 if bits == 4 else -1
    )
    target = tmp_path / ("model" if limit else "model.safetensors")
    slimtensors.save(
        {"a.weight": weight, "bias": weight[0].clone(), "b.weight": weight},
        target,
        dialect="compressed-tensors",
        preset=lambda name, x: Plan(Quantized(args)) if x.dim() > 1 else None,
        max_shard_size=limit,
    )
    back = slimtensors.load(target)
    parts = [name.removeprefix("a.") for name in back if name.startswith("a.")]
    assert len(parts) == (3 if bits == 4 else 2)
    assert back.keys() == {"bias", *(f"{module}.{part}" for part in parts for module in "ab")}
    assert all(same_bits(back[f"a.{part}"], back[f"b.{part}"]) for part in parts)
    assert slimtensors.verify(target)
