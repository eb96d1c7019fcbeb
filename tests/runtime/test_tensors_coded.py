"""Weights that are entropy-coded in memory."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from strategies import same_bits, same_results
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import slimtensors
from slimtensors import tensor as memory
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Plan
from slimtensors.errors import CorruptFileError
from slimtensors.quantization import (
    coded_weight,
    decode_ahead,
    get_model_size_in_bytes,
    int8_weight_only,
    quantize_,
)
from slimtensors.runtime import CodedTensor
from slimtensors.runtime import coded as coded_tensors
from slimtensors.runtime.coded import Prefetcher

TOKENS = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def model(blocks=3):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    generator = nn.Sequential(*(copy.deepcopy(block) for _ in range(blocks)))
    return generator.bfloat16().eval().requires_grad_(False)


def test_outputs_are_exact_and_memory_is_smaller():
    dense = model()
    coded = copy.deepcopy(dense)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    assert get_model_size_in_bytes(coded) < 0.8 * get_model_size_in_bytes(dense)
    for _ in range(2):
        assert same_results(coded(TOKENS), dense(TOKENS))


@pytest.fixture(autouse=True, params=[1, 2])
def threads_of_torch(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_the_next_weight_is_decoded_on_another_thread(monkeypatch, threads_of_torch):
    coded = model()
    quantize_(coded, coded_weight())
    threads = []
    decode = Prefetcher._decode

    def observed(self, weight):
        threads.append(threading.current_thread().name.partition("_")[0])
        return decode(self, weight)

    monkeypatch.setattr(Prefetcher, "_decode", observed)
    ahead = decode_ahead(coded)
    expected = coded(TOKENS)
    on_others = ["MainThread"] + ["slimtensors-prefetch"] * 5
    assert threads == (on_others if threads_of_torch == 1 else [])
    ahead.remove()
    threads.clear()
    assert same_results(coded(TOKENS), expected)
    assert not threads


def test_copying_into_a_used_weight_compares_checksums_again():
    coded = model(1)
    quantize_(coded, coded_weight())
    coded(TOKENS)
    state = {name: copy.deepcopy(x) for name, x in coded.state_dict().items()}
    chunks = next(part for _, part in state["0.0.weight"].leaves() if part.dtype is torch.uint32)
    chunks.view(torch.int32)[0, 0] ^= 1
    coded.load_state_dict(state)
    with pytest.raises(CorruptFileError, match="checksum"):
        coded(TOKENS)


def test_copying_into_a_used_weight_updates_its_pieces(monkeypatch):
    monkeypatch.setattr(coded_tensors, "_PIECE_BYTES", 1 << 19)
    random = torch.Generator().manual_seed(0)
    halves = [torch.randn(512, 1024, generator=random).bfloat16() for _ in range(2)]
    halves[0] = halves[0].clamp(1, 2)  # which takes fewer bytes
    used, other = (coded_weight()(torch.cat(order)) for order in (halves, halves[::-1]))
    x = torch.randn(3, 1024, generator=random).bfloat16()
    for _ in range(3):
        functional.linear(x, used)
    used.copy_(other)
    for _ in range(3):
        assert same_results(functional.linear(x, used), functional.linear(x, other.dequantize()))


def test_memory_of_large_indivisible_weights_is_not_reused(monkeypatch):
    monkeypatch.setattr(coded_tensors, "_MAX_SCRATCH_BYTES", 1 << 20)
    # float32: only a product by all rows is exact
    compressed = coded_weight()(torch.randn(512, 1024))
    with ThreadPoolExecutor(1) as thread:  # which has kept nothing yet
        thread.submit(functional.linear, torch.ones(1, 1024), compressed).result()
        assert thread.submit(memory.scratch, 1).result().nbytes == 1


def test_meta_weight_gives_the_shape_of_a_product():
    coded = model(1)
    quantize_(coded, coded_weight())
    weight = coded[0][0].weight.to("meta")
    assert functional.linear(TOKENS.to("meta"), weight).shape == (4, 256)


def test_used_weight_gives_the_shape_of_a_product_in_fake_tensor_mode():
    compressed = coded_weight()(torch.randn(512, 1024).bfloat16())
    x = torch.ones(3, 1024).bfloat16()
    want = [functional.linear(x, compressed) for _ in range(3)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert functional.linear(x, compressed).shape == (3, 512)
    assert same_results(functional.linear(x, compressed), want[0])


def test_weight_decoded_first_by_another_thread_is_split_again(monkeypatch):
    compressed = coded_weight()(torch.randn(512, 1024).bfloat16())
    piece = coded_tensors._Piece

    def cut_late(*what):
        compressed._cache.is_verified = True  # by the other thread
        return piece(*what)

    monkeypatch.setattr(coded_tensors, "_Piece", cut_late)
    for _ in range(2):
        functional.linear(torch.ones(3, 1024).bfloat16(), compressed)
    assert all(one.unchecked is not None for one in compressed._cache.pieces[1])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1024, 1408, 1001])  # whole chunks, with others, never
def test_large_weights_are_multiplied_in_exact_pieces(columns, dtype, ahead, monkeypatch):
    monkeypatch.setattr(coded_tensors, "_PIECE_BYTES", 1 << 19)
    monkeypatch.setattr(coded_tensors, "_PREFETCH_BYTES", 1 << 19)
    random = torch.Generator().manual_seed(0)
    dense = nn.Linear(columns, 1100)
    dense.weight.data = torch.randn(1100, columns, generator=random) / columns**0.5
    dense = dense.to(dtype).requires_grad_(False)
    compressed = nn.Sequential(copy.deepcopy(dense))
    quantize_(compressed, coded_weight())
    if ahead:
        decode_ahead(compressed)
    for shape in [(1,), (5,), (2, 16)]:
        x = torch.randn(*shape, columns, generator=random).to(dtype)
        assert same_results(compressed(x), dense(x))
    pieces = coded_tensors._split(compressed[0].weight, 1 << 19)
    assert (len(pieces) > 1) == (dtype is not torch.float32 and columns != 1001)
    rows = [piece.rows for piece in pieces]
    assert [row for some in rows for row in range(1100)[some]] == list(range(1100))


def test_the_first_use_of_a_weight_compares_checksums():
    compressed = coded_weight()(torch.randn(512, 1024).bfloat16())
    compressed.leaf1[-1] ^= 1
    with pytest.raises(CorruptFileError):
        functional.linear(torch.ones(1, 1024).bfloat16(), compressed)


def test_inputs_of_prefetched_weights_receive_gradients():
    dense = model()
    coded = copy.deepcopy(dense)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    x, y = (TOKENS.clone().requires_grad_() for _ in range(2))
    coded(x).sum().backward()
    dense(y).sum().backward()
    assert same_results(x.grad, y.grad)


def test_weights_may_be_used_in_any_order():
    dense = model(4)
    coded = copy.deepcopy(dense)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    for order in ([2, 0, 1, 3], [1, 1, 0], [3, 2, 1, 0], [0, 1, 2, 3]):
        x = y = TOKENS
        for i in order:
            x, y = coded[i](x), dense[i](y)
        assert same_results(x, y)


def test_prefetched_weights_may_be_used_by_several_threads():
    dense = model()
    coded = copy.deepcopy(dense)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    with ThreadPoolExecutor(4) as pool:
        inputs = [TOKENS * i for i in range(12)]
        found = list(pool.map(coded, inputs))
    assert all(same_results(y, dense(x)) for x, y in zip(inputs, found, strict=True))


def test_buffers_of_decoded_weights_are_reused_and_freed():
    coded = model(4)
    quantize_(coded, coded_weight())
    ahead = decode_ahead(coded)
    kept = coded[0][0].weight.dequantize()
    before = kept.clone()
    rooms = set()
    for layer in [layer for block in coded for layer in block if isinstance(layer, nn.Linear)]:
        layer(torch.randn(1, layer.in_features).bfloat16())
        rooms |= {room.data_ptr() for room in ahead._free_buffers}
    assert len(rooms) <= 2
    assert not ahead._free_buffers
    assert same_bits(kept, before)


def test_embeddings_decode_only_the_requested_rows(monkeypatch):
    weight = torch.randn(4096, 256).bfloat16()
    compressed = coded_weight()(weight)
    monkeypatch.delattr(CodedTensor, "decompress")
    for tokens in (torch.tensor([[4, 4095], [4, 0]]), torch.tensor([[7]])):
        assert same_bits(functional.embedding(tokens, compressed), weight[tokens])
    monkeypatch.undo()
    many = torch.randint(0, 4096, (500,))
    assert same_bits(functional.embedding(many, compressed), weight[many])


@pytest.mark.parametrize("preset", ["lossless", "extreme", "sparse", "dense"])
def test_every_preset_is_supported(preset, tmp_path):
    weight = torch.randn(64, 128).bfloat16()
    weight[torch.rand(64, 128) < 0.7] = 0
    compressed = coded_weight(preset)(weight)
    slimtensors.save({"w": weight}, tmp_path / "file", preset=preset)
    assert same_bits(compressed.dequantize(), slimtensors.load(tmp_path / "file")["w"])
    torch.save({"w": compressed}, tmp_path / "pickle")
    assert torch.equal(torch.load(tmp_path / "pickle")["w"], compressed)
    slimtensors.save({"w": compressed}, tmp_path / "again", preset=preset)
    assert same_bits(slimtensors.load(tmp_path / "again")["w"], compressed.dequantize())
    assert compressed.to(torch.float32).dequantize().dtype is torch.float32


def test_quantized_and_coded_weights_can_be_combined():
    mixed = model()
    quantize_(mixed, int8_weight_only(), lambda module, name: name.endswith(".0"))
    quantize_(mixed, coded_weight(), lambda module, name: name.endswith(".2"))
    decode_ahead(mixed)
    assert mixed(TOKENS).isfinite().all()


def rounded_weight(rows, columns, dtype=torch.bfloat16, **options):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=random).to(dtype)
    return coded_weight(Plan(Trellis(**options)))(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ahead", [False, True])
def test_trellis_weights_are_multiplied_chunk_by_chunk(ahead, dtype, monkeypatch):
    layer = nn.Linear(300, 2000, dtype=dtype).requires_grad_(False)
    layer.weight = nn.Parameter(rounded_weight(2000, 300, dtype), requires_grad=False)
    if ahead:
        decode_ahead([layer])
    x = torch.randn(5, 300).to(dtype)
    expected = functional.linear(x, layer.weight.dequantize(), layer.bias)
    monkeypatch.delattr(CodedTensor, "decompress")
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_trellis_rows_are_looked_up_chunk_by_chunk(monkeypatch):
    compressed = rounded_weight(4000, 300)
    weight = compressed.dequantize()
    monkeypatch.delattr(CodedTensor, "decompress")
    for tokens in (torch.tensor([[7]]), torch.tensor([[3999, 0], [7, 0]]), torch.arange(4000)):
        with torch.inference_mode():
            assert same_bits(functional.embedding(tokens, compressed), weight[tokens])
    assert functional.embedding(torch.empty(0, dtype=torch.long), compressed).shape == (0, 300)
    for token in (4000, 100_000, -1):
        with pytest.raises(IndexError):
            functional.embedding(torch.tensor([token]), compressed)


def test_transposed_trellis_weights_are_decoded_as_a_whole():
    compressed = rounded_weight(500, 700, transposed=True)
    x = torch.randn(3, 700).bfloat16()
    weight = compressed.dequantize()
    assert same_results(functional.linear(x, compressed), functional.linear(x, weight))
    assert same_bits(functional.embedding(torch.tensor([3, 499]), compressed), weight[[3, 499]])


def test_copying_into_a_looked_up_trellis_weight_parses_it_again():
    compressed, other = rounded_weight(2000, 300), rounded_weight(2000, 300)
    functional.embedding(torch.tensor([1]), compressed)
    other.leaf1[-1] ^= 1
    compressed.copy_(other)
    with pytest.raises(CorruptFileError, match="checksum"):
        functional.embedding(torch.tensor([1999]), compressed)


def test_embeddings_are_not_decoded_ahead_but_tied_heads_are():
    compressed = nn.Parameter(rounded_weight(512, 64), requires_grad=False)
    embedding, head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
    embedding.weight = head.weight = compressed
    first = nn.Linear(64, 64, bias=False).bfloat16()
    first.weight = nn.Parameter(rounded_weight(64, 64), requires_grad=False)
    ahead = decode_ahead([embedding, first, head])
    assert [id(x) for x in ahead._weights] == [id(first.weight), id(compressed)]


def test_another_order_of_weights_is_learned(monkeypatch, threads_of_torch):
    coded = model(3)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    order = [2, 0, 1]
    starts = []
    start = Prefetcher._start

    def observe(self, weight):
        starts.append(threading.current_thread() is threading.main_thread())
        return start(self, weight)

    monkeypatch.setattr(Prefetcher, "_start", observe)
    for _ in range(3):
        starts.clear()
        for i in order:
            coded[i](TOKENS)
    # Nothing is decoded ahead of the weight that follows the last one in the list.
    assert starts.count(True) == (1 if threads_of_torch == 1 else 0)
