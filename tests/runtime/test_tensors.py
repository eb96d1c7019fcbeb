"""Tensors that stay compressed while a model runs."""

import copy
import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import same_bits, same_results
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    UnsupportedOperationError,
    UnsupportedVersionError,
)
from slimtensors.quantization import (
    QuantizationArgs,
    dequantize_,
    float8_weight_only,
    get_model_size_in_bytes,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
    sparse_int8_weight,
    sparse_weight,
)
from slimtensors.quantization.affine import fake_quantize, find_params
from slimtensors.runtime import (
    CompressedTensor,
    CsrTensor,
    QuantizedConfig,
    QuantizedTensor,
    SparseTensor,
    is_linear_or_embedding,
    kernels,
    quantized,
    rebuild,
)

KINDS = {
    "int8": int8_weight_only(),
    "int8 in groups": int8_weight_only(group_size=32),
    "int4": int4_weight_only(group_size=32),
    "int4 symmetric": int4_weight_only(group_size=32, symmetric=True),
    "int8 dynamic": int8_dynamic_activation_int8_weight(),
    "float8": float8_weight_only(),
    "sparse": SparseTensor.from_dense,
    "csr": CsrTensor.from_dense,
    "sparse int8": sparse_int8_weight(),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

each_kind = pytest.mark.parametrize("compress", KINDS.values(), ids=KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def matrix(rows=48, columns=64, *, dtype=torch.bfloat16, keep=0.05, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return torch.where(torch.rand(rows, columns, generator=g) < keep, x, 0.0).to(dtype)


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("shift", torch.ones(width))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return self.down(self.up(self.embed(tokens))) * self.scale + self.shift


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Model().to(dtype).eval()


TOKENS = torch.arange(12).view(2, 6)


def close(a, b, tolerance):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm()) < tolerance


def tolerance(dtype):
    return 8 * torch.finfo(dtype).eps


@each_dtype
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantized_codes_equal_fake_quantization(dtype, bits, symmetric):
    args = QuantizationArgs(bits, symmetric=symmetric, group_size=32)
    weight = matrix(dtype=dtype, keep=1)
    compressed = QuantizedTensor.quantize(weight, QuantizedConfig(args))
    assert same_bits(
        compressed.dequantize(), fake_quantize(weight, find_params(weight, args), args)
    )


@each_dtype
@pytest.mark.parametrize("form", [SparseTensor, CsrTensor])
def test_sparse_tensors_are_bitwise_lossless(form, dtype):
    weight = matrix(dtype=dtype, keep=0.3)
    weight[3, 5] = -0.0
    assert same_bits(form.from_dense(weight).dequantize(), weight)


def test_sparse_weights_skip_zeros_from_ninety_percent():
    assert isinstance(sparse_weight()(matrix(keep=0.05)), CsrTensor)
    assert isinstance(sparse_weight()(matrix(keep=0.3)), SparseTensor)


def test_sparse_codes_are_the_same_codes():
    weight = matrix()
    compressed, plain = sparse_int8_weight()(weight), int8_weight_only()(weight)
    assert isinstance(compressed.codes, SparseTensor)
    assert same_bits(compressed.dequantize(), plain.dequantize())
    assert sum(leaf.nbytes for _, leaf in compressed.leaves()) < plain.codes.nbytes / 2


@each_dtype
@each_kind
@pytest.mark.parametrize("count", [1, 3, 40])
def test_product_equals_that_of_the_dense_weight(compress, dtype, count):
    weight = compress(matrix(dtype=dtype))
    x = torch.randn(count, 2, 64, dtype=dtype)
    bias = torch.randn(48, dtype=dtype)
    expected = functional.linear(x, weight.dequantize(), bias)
    found = functional.linear(x, weight, bias)
    assert found.dtype is dtype
    assert found.shape == expected.shape
    rounding = 0.02 if getattr(weight.config, "inputs", None) else 0.0
    assert close(found, expected, tolerance(dtype) + rounding)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 40),
    groups=st.integers(1, 4),
    count=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_products_are_correct_for_any_shape(kind, rows, groups, count, dtype, seed):
    weight = KINDS[kind](matrix(rows, 32 * groups, dtype=dtype, keep=0.7, seed=seed))
    x = torch.randn(count, 32 * groups, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = x.double() @ weight.dequantize().double().t()
    rounding = 0.05 if kind == "int8 dynamic" else 0.0
    error = (functional.linear(x, weight).double() - expected).abs().max()
    size = x.double().norm(dim=1).max() * weight.dequantize().double().norm(dim=1).max()
    assert error <= (tolerance(dtype) + rounding) * size


@each_dtype
@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_many_inputs_are_multiplied_piece_by_piece(kind, dtype, monkeypatch):
    monkeypatch.setattr(quantized, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(kernels, "_is_slow", lambda dtype: False)
    weight = KINDS[kind](matrix(dtype=dtype))
    x = torch.randn(3, 50, 64).to(dtype)
    expected = functional.linear(x, weight.dequantize())
    assert close(functional.linear(x, weight), expected, tolerance(dtype))


def test_inputs_receive_gradients():
    weight = int8_weight_only()(matrix(dtype=torch.float32, keep=1))
    x = torch.randn(3, 64, requires_grad=True)
    functional.linear(x, weight).sum().backward()
    assert close(x.grad[0], weight.dequantize().sum(0), 1e-5)


@each_kind
def test_embeddings_look_rows_up(compress):
    dense = matrix(keep=1)
    weight = compress(dense)
    assert same_bits(functional.embedding(TOKENS, weight), weight.dequantize()[TOKENS])


@each_kind
def test_copies_and_slices_stay_compressed(compress):
    weight = compress(matrix())
    dense = weight.dequantize()
    for copied in (weight.clone(), weight.detach(), weight.data, copy.deepcopy(weight)):
        assert type(copied) is type(weight)
        assert torch.equal(copied, weight)
    (_, mine), (_, copied) = next(weight.leaves()), next(weight.clone().leaves())
    assert mine.data_ptr() != copied.data_ptr()
    rows = weight[7:30]
    assert isinstance(rows, CompressedTensor)
    assert same_bits(rows.dequantize(), dense[7:30])
    assert weight[0:0].dequantize().shape == (0, 64)
    x = torch.randn(3, 64).bfloat16()
    assert close(functional.linear(x, weight[::3]), functional.linear(x, weight)[:, ::3], 0.02)


@each_kind
def test_single_rows_are_dense(compress):
    weight = compress(matrix(keep=1))
    dense = weight.dequantize()
    assert same_bits(weight[5].clone(), dense[5].clone())
    assert same_bits(weight[-1].clone(), dense[-1].clone())


STACKS = {
    "int8": QuantizationArgs(8, group_size=-1),
    "int8 per tensor": QuantizationArgs(8),
    "int4": QuantizationArgs(4, symmetric=False, group_size=32),
    "blocks": QuantizationArgs.from_dict(
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}
    ),
    "nvfp4": QuantizationArgs.from_dict(
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ),
}


@pytest.mark.parametrize("args", STACKS.values(), ids=STACKS)
def test_matrices_of_a_stack_can_be_taken(args):
    experts = torch.stack([matrix(keep=1, seed=seed) * (seed + 1) for seed in range(3)])
    compressed = QuantizedTensor.quantize(experts, QuantizedConfig(args))
    dense = compressed.dequantize()
    some = compressed[1:]
    assert isinstance(some, QuantizedTensor)
    assert same_bits(some.dequantize(), dense[1:].clone())
    x = torch.randn(2, 64).bfloat16()
    for i, expert in enumerate(compressed):
        assert isinstance(expert, QuantizedTensor)
        expert.check()
        assert same_bits(expert.dequantize(), dense[i].clone())
        assert close(functional.linear(x, expert), functional.linear(x, dense[i]), 0.02)


@pytest.mark.parametrize("args", STACKS.values(), ids=STACKS)
def test_shards_of_a_stack_can_be_written(args):
    """FSDP2 makes zeros of the shape of a shard and copies it."""
    experts = torch.stack([matrix(keep=1, seed=seed) * (seed + 1) for seed in range(4)])
    compressed = QuantizedTensor.quantize(experts, QuantizedConfig(args))
    shard = compressed.new_zeros(2, 48, 64)
    shard.narrow(0, 0, 2).copy_(compressed.chunk(2)[1])
    shard.check()
    assert same_bits(shard.dequantize(), compressed.dequantize()[2:].clone())


@each_kind
@each_dtype
def test_cast_to_another_dtype_rounds_the_values(compress, dtype):
    weight = compress(matrix(keep=0.4))
    changed = weight.to(dtype)
    assert isinstance(changed, CompressedTensor)
    assert changed.dtype is dtype
    assert same_bits(changed.dequantize(), weight.dequantize().to(dtype))
    assert functional.linear(torch.randn(2, 64, dtype=dtype), changed).dtype is dtype


@each_kind
def test_memory_can_be_shared_with_other_processes(compress):
    toy = model()
    quantize_(toy, compress)
    before = toy(TOKENS)
    toy.share_memory()
    assert toy.up.weight.is_shared()
    assert same_results(toy(TOKENS), before)


@each_kind
def test_moving_to_another_device_moves_all_parts(compress):
    weight = compress(matrix()).to("meta")
    assert weight.device.type == "meta"
    assert all(leaf.device.type == "meta" for _, leaf in weight.leaves())
    assert weight.dequantize().shape == weight.shape


@each_kind
def test_changes_in_place_raise(compress):
    weight = compress(matrix())
    before = weight.clone()
    for change in (
        lambda: weight.add_(1),
        lambda: weight.zero_(),
        lambda: weight.clip_(0),
        lambda: weight.fill_diagonal_(0),
        lambda: weight.t_(),
        lambda: nn.init.normal_(weight),
        lambda: torch.mul(weight, 2, out=weight),
        lambda: weight.__setitem__(5, 0.0),
        lambda: weight.__setitem__((slice(None), 3), 0.0),
        lambda: weight.__setitem__(slice(2), torch.zeros(2, 64)),
        lambda: weight[:, :32].copy_(weight[:, 32:]),
    ):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(UnsupportedOperationError):
                change()
    assert torch.equal(weight, before)


def test_input_of_another_dtype_or_width_raises():
    weight = int8_weight_only()(matrix())
    with pytest.raises(
        ConfigError, match=r"input is torch\.float32, but the weight is torch\.bfloat16"
    ):
        functional.linear(torch.randn(1, 64), weight)
    with pytest.raises(ConfigError, match="shape"):
        functional.linear(torch.randn(1, 63).bfloat16(), weight)


def test_autocast_decides_the_dtype():
    weight = int8_weight_only()(matrix(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert functional.linear(torch.randn(1, 64), weight).dtype is torch.bfloat16


def test_invalid_group_size_raises_with_the_name():
    toy = model()
    with pytest.raises(ConfigError, match=r"up\.weight: 64 columns are not divisible .* 48"):
        quantize_(toy, int8_weight_only(group_size=48))
    assert not any(isinstance(p, CompressedTensor) for p in toy.parameters())


def test_a_model_is_compressed_once():
    toy = model()
    quantize_(toy, int8_weight_only())
    with pytest.raises(ConfigError, match="already compressed"):
        quantize_(toy, int8_weight_only())


def test_filter_selects_modules():
    toy = model()
    quantize_(toy, int8_weight_only(), lambda module, name: name == "down")
    assert isinstance(toy.down.weight, QuantizedTensor)
    assert type(toy.up.weight) is nn.Parameter
    dequantize_(toy)
    assert type(toy.down.weight) is nn.Parameter


def test_shared_weights_stay_shared_and_count_once():
    toy = model()
    toy.down = nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
    toy.down.weight = toy.embed.weight
    quantize_(toy, int8_weight_only(), is_linear_or_embedding)
    assert toy.down.weight is toy.embed.weight
    codes = 40 * 64 + 128 * 64
    scales = 2 * (40 + 128)
    others = 2 * (128 + 64 + 1)
    assert get_model_size_in_bytes(toy) == codes + scales + others


@each_kind
@each_dtype
def test_state_dict_round_trips_through_torch_save(compress, dtype, tmp_path):
    toy = model(dtype)
    quantize_(toy, compress, is_linear_or_embedding)
    expected = toy(TOKENS)
    torch.save(toy.state_dict(), tmp_path / "state.pt")
    for mmap in (False, True):
        state = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
        with torch.device("meta"):
            loaded = Model().to(dtype).eval()
        loaded.load_state_dict(state, assign=True)
        assert type(loaded.up.weight) is type(toy.up.weight)
        assert not loaded.up.weight.requires_grad
        assert same_results(loaded(TOKENS), expected)
        assert loaded.state_dict().keys() == toy.state_dict().keys()


@each_kind
def test_whole_models_are_copied_and_converted(compress):
    toy = model()
    quantize_(toy, compress, is_linear_or_embedding)
    copied = copy.deepcopy(toy)
    assert isinstance(copied.up.weight, nn.Parameter)
    assert same_results(copied(TOKENS), toy(TOKENS))
    wider = copied.to(torch.float32)
    assert isinstance(wider.up.weight, CompressedTensor)
    assert wider(TOKENS).dtype is torch.float32
    assert close(wider(TOKENS), toy(TOKENS), 0.05)


def test_weights_of_the_same_kind_are_copied_in_place():
    toy, other = model(), model()
    nn.init.normal_(other.up.weight)
    quantize_(toy, int4_weight_only(group_size=32))
    quantize_(other, int4_weight_only(group_size=32))
    assert not same_bits(toy(TOKENS), other(TOKENS))
    toy.load_state_dict(other.state_dict())
    assert same_results(toy(TOKENS), other(TOKENS))
    with pytest.raises(RuntimeError, match="dequantize"):
        toy.load_state_dict(model().state_dict())


def test_gradients_stay_off():
    toy = model()
    quantize_(toy, int8_weight_only())
    toy.requires_grad_(True)
    assert toy.embed.weight.requires_grad
    assert not toy.up.weight.requires_grad
    toy.up.weight.requires_grad = True
    assert not toy.up.weight.requires_grad


def test_newer_state_dict_raises():
    compressed = io.BytesIO()
    torch.save({"w": int8_weight_only()(matrix())}, compressed)
    newer = io.BytesIO(compressed.getvalue().replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(UnsupportedVersionError, match=r"version 9.*upgrade"):
        torch.load(newer)
    with pytest.raises(UnsupportedVersionError):
        rebuild('{"version": 2}', {})


@each_kind
def test_compilers_see_one_graph(compress):
    torch._dynamo.reset()
    toy = model()
    quantize_(toy, compress, is_linear_or_embedding)
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert close(compiled(TOKENS), toy(TOKENS), 0.02)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(TOKENS + 1)


@each_kind
def test_shapes_are_known_in_fake_tensor_mode(compress):
    toy = model()
    quantize_(toy, compress, is_linear_or_embedding)
    with torch.no_grad():
        want = toy(TOKENS)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert toy(TOKENS).shape == want.shape
            assert toy.up.weight.dequantize().shape == toy.up.weight.shape
        assert same_results(toy(TOKENS), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_default_compiler_supports_them():
    torch._dynamo.reset()
    toy = model()
    quantize_(toy, int4_weight_only(group_size=32), is_linear_or_embedding)
    with torch.no_grad():
        assert close(torch.compile(toy, fullgraph=True)(TOKENS), toy(TOKENS), 0.02)


def test_repr_describes_the_encoding():
    assert "4-bit int per group 32" in repr(int4_weight_only(group_size=32)(matrix()))
    assert "sparse 8-bit int per channel" in repr(sparse_int8_weight()(matrix()))


def test_parts_from_a_file_must_fit():
    for compressed, change in (
        (CsrTensor.from_dense(matrix()), {"columns": lambda part: part + 64}),
        (CsrTensor.from_dense(matrix()), {"starts": lambda part: part.flip(0)}),
        (int8_weight_only()(matrix()), {"codes": lambda part: part[1:]}),
        (int8_weight_only()(matrix()), {"scale": lambda part: part[1:]}),
        (int4_weight_only(32)(matrix()), {"codes": lambda part: part.view(torch.uint8)}),
    ):
        leaves = {k: change[k](v) if k in change else v for k, v in compressed.leaves()}
        with pytest.raises(CorruptFileError):
            rebuild(json.dumps(compressed.form()), leaves)


@each_dtype
@each_kind
@pytest.mark.parametrize("count", [1, 5, 20])
def test_parts_and_inputs_may_have_any_alignment(compress, dtype, count):
    def shifted(part):
        raw = torch.zeros(part.nbytes + 128, dtype=torch.uint8)
        start = -raw.data_ptr() % 64 + part.element_size()
        raw = raw[start : start + part.nbytes]
        return (
            raw.copy_(part.contiguous().view(-1).view(torch.uint8)).view(part.dtype).view_as(part)
        )

    weight = compress(matrix(48, 96, dtype=dtype, keep=1))
    x = torch.randn(count, 96, dtype=dtype)
    expected = functional.linear(x, weight)
    assert close(
        functional.linear(shifted(x), weight.map_leaves(shifted)), expected, tolerance(dtype)
    )


@pytest.mark.parametrize("columns", [1, 7, 17, 24, 40])
def test_rows_may_have_any_length(columns):
    for dtype in DTYPES:
        for name in ("int8", "int8 dynamic", "float8", "sparse", "csr", "sparse int8"):
            weight = KINDS[name](matrix(33, columns, dtype=dtype, keep=1))
            x = torch.randn(5, columns, dtype=dtype)
            expected = functional.linear(x, weight.dequantize())
            rounding = 0.02 if name == "int8 dynamic" else 0.0
            assert close(functional.linear(x, weight), expected, tolerance(dtype) + rounding)
