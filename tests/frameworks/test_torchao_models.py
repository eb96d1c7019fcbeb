"""Models with compressed weights: state dicts, other processes, compilers, shards."""

import copy
import json
from pathlib import Path

import pytest
import torch
from compressed_weights import KINDS, dense_weight
from process_tools import TESTS, torchrun
from strategies import same_bits, same_results
from torch import multiprocessing, nn
from torch.nn import functional

from slimtensors.errors import UnsupportedOperationError
from slimtensors.quantization import coded_weight, int8_weight_only, quantize_
from slimtensors.runtime import CompressedTensor, coded

PROGRAMS = Path(__file__).parent / "programs"
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
each_kind = pytest.mark.parametrize("kind", KINDS)


class Model(nn.Module):
    """A model that uses a weight as code for dense tensors does."""

    def __init__(self, seed=0):
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.up.weight.data = dense_weight(96, 64, dtype=torch.float32, seed=seed)
        self.down.weight.data = dense_weight(64, 96, dtype=torch.float32, seed=seed + 1)
        self.up.bias.data.fill_(0.5)

    def forward(self, x):
        hidden = torch.relu(self.up(x)) @ self.down.weight.t()
        return torch.addmm(x, hidden, self.up.weight[:64].t())


def make_model(kind=None, seed=0):
    model = Model(seed).bfloat16().eval()
    if kind is not None:
        quantize_(model, KINDS[kind])
    return model


def make_shifted(kind, seed=0):
    """Return a model whose weights have as many zeros and bytes, in other rows."""
    model = Model(seed).bfloat16().eval()
    for layer in (model.up, model.down):
        layer.weight.data = layer.weight.data.roll(1, 0)
    quantize_(model, KINDS[kind])
    return model


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "coded"])
def test_a_state_dict_is_loaded_in_place(kind):
    model, other = make_model(kind), make_shifted(kind)
    weight, codes = model.up.weight, next(model.up.weight.leaves())[1]
    expected = other(X)
    assert not same_results(model(X), expected)
    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert model.up.weight is weight
    assert next(model.up.weight.leaves())[1] is codes
    assert same_results(model(X), expected)
    assert not weight.requires_grad


@each_kind
def test_a_state_dict_is_assigned_without_gradients(kind):
    other = make_model(kind, seed=3)
    for model in (make_model(), make_model(kind)):
        assert model.load_state_dict(other.state_dict(), assign=True).missing_keys == []
        assert isinstance(model.up.weight, CompressedTensor)
        assert not model.up.weight.requires_grad
        assert model.up.bias.requires_grad
        assert same_results(model(X), other(X))


@each_kind
def test_dense_weights_are_not_loaded_into_compressed_ones(kind):
    model, before = make_model(kind), make_model(kind)
    with pytest.raises(RuntimeError, match=r"copy_ of dense .*assign=True"):
        model.load_state_dict(make_model(seed=3).state_dict())
    assert torch.equal(model.up.weight, before.up.weight)


@each_kind
def test_compressed_weights_are_loaded_into_dense_ones(kind):
    model, other = make_model(), make_model(kind, seed=3)
    model.load_state_dict(other.state_dict())
    assert type(model.up.weight) is nn.Parameter
    assert same_bits(model.up.weight.data, other.up.weight.dequantize())


def test_writing_to_the_data_of_a_coded_weight_is_noticed(monkeypatch):
    """Offsets of the old bytes were used for the new ones."""
    monkeypatch.setattr(coded, "_PIECE_BYTES", 1 << 19)
    random = torch.Generator().manual_seed(0)
    halves = [torch.randn(512, 1024, generator=random).bfloat16() for _ in range(2)]
    halves[0] = halves[0].clamp(1, 2)  # which takes fewer bytes
    used, other = (coded_weight()(torch.cat(order)) for order in (halves, halves[::-1]))
    x = torch.randn(3, 1024, generator=random).bfloat16()
    for _ in range(3):
        functional.linear(x, used)
    used.data.copy_(other)
    for _ in range(3):
        assert same_results(functional.linear(x, used), functional.linear(x, other.dequantize()))


@each_kind
def test_data_is_replaced_by_compressed_weights_only(kind):
    """torch would replace the dtype and keep the values."""
    model, other = make_model(kind), make_model(kind, seed=3)
    weight = model.up.weight
    weight.data = other.up.weight.data
    assert model.up.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight, other.up.weight)
    with pytest.raises(UnsupportedOperationError, match=r"cannot be replaced by dense"):
        weight.data = torch.zeros(96, 64)
    assert torch.equal(weight, other.up.weight)


@each_kind
def test_models_are_converted_and_copied(kind):
    model = make_model(kind)
    wide = copy.deepcopy(model).float()
    assert wide(X.float()).dtype is torch.float32
    torch.testing.assert_close(wide(X.float()), model(X).float(), rtol=0.1, atol=3)
    assert model.to("cpu").up.weight.dtype is torch.bfloat16
    assert copy.deepcopy(model).to("meta").up.weight.is_meta


def send_products(received, results):
    for _ in KINDS:
        kind, weight = received.get()
        product = functional.linear(X, weight)
        results.put((kind, type(weight).__name__, product.float().tolist()))


@pytest.mark.slow
def test_weights_are_sent_to_spawned_processes():
    context = multiprocessing.get_context("spawn")
    received, results = context.Queue(), context.Queue()
    process = context.Process(target=send_products, args=(received, results))
    process.start()
    weights = {kind: compress(dense_weight()) for kind, compress in KINDS.items()}
    for item in weights.items():
        received.put(item)
    for _ in KINDS:
        kind, name, product = results.get(timeout=60)
        assert name == type(weights[kind]).__name__
        expected = functional.linear(X, weights[kind]).float()
        assert torch.equal(torch.tensor(product), expected)
    process.join(60)
    assert process.exitcode == 0


def check_compiled(kind, backend):
    torch._dynamo.reset()
    model = make_model(kind)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X), rtol=0.05, atol=1.5)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(X + 1)


@each_kind
def test_compilers_see_one_graph(kind):
    check_compiled(kind, "aot_eager")


@each_kind
def test_compiled_models_have_gradients(kind):
    """Biases have, so that a script without `torch.no_grad()` needs them."""
    torch._dynamo.reset()
    model = make_model(kind)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for run, x in zip(
        (model, torch.compile(model, backend="aot_eager", fullgraph=True)), inputs, strict=True
    ):
        run(x).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0.05, atol=1.5)


@each_kind
def test_models_run_on_the_meta_device(kind):
    assert make_model(kind).to("meta")(X.to("meta")).shape == X.shape


@each_kind
def test_models_on_the_meta_device_are_emptied_and_loaded(kind):
    """They became dense."""
    other = make_model(kind)
    model = make_model(kind).to("meta").to_empty(device="cpu")
    model.load_state_dict(other.state_dict())
    assert isinstance(model.up.weight, CompressedTensor)
    assert same_results(model(X), other(X))


INDUCTOR = [
    pytest.param(kind, marks=[] if kind == "int8" else pytest.mark.long, id=kind) for kind in KINDS
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("kind", INDUCTOR)
def test_default_compiler_compiles_one_graph(kind):
    check_compiled(kind, "inductor")


@each_kind
def test_linear_layers_are_exported(kind):
    model = make_model(kind)
    layers = nn.Sequential(model.up, nn.ReLU(), model.down).requires_grad_(False)
    program = torch.export.export(layers, (X,))
    torch.testing.assert_close(program.module()(X), layers(X), rtol=0.05, atol=0.1)


@pytest.fixture(scope="module")
def sharded():
    done = torchrun(2, script=PROGRAMS / "shard_weights.py", PYTHONPATH=str(TESTS))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


QUANTIZED = ["int8", "int8 dynamic", "int4", "float8", "nvfp4"]


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize(("mode", "dtype"), [("fsdp", "bfloat16"), ("fsdp as float32", "float32")])
def test_fsdp2_shards_rows_of_quantized_weights(kind, mode, dtype, sharded):
    found = dict(sharded[mode][kind])
    if kind not in QUANTIZED:
        assert "FSDP2 cannot shard" in found["refused"]
        return
    assert found.pop("dtype") == f"torch.{dtype}"
    assert found == {"error": 0, "rows": 64, "compressed": True, "gathered": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTIZED)
def test_fsdp2_refuses_rows_that_ranks_do_not_divide(kind, sharded):
    assert "67 rows on 2 ranks" in sharded["fsdp of 67 rows"][kind]["refused"]


@pytest.mark.slow
@each_kind
def test_tensor_parallel_layers_have_shards_of_weights(kind, sharded):
    found = sharded["tensor parallel"][kind]
    assert found["error"] < 0.02
    assert found["rows"] == 64
    assert found["compressed"] == (kind != "coded")
    assert found["gathered"]


def test_collectives_refuse_compressed_weights():
    """They would change a dense copy."""
    weight = int8_weight_only()(dense_weight())
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(UnsupportedOperationError, match="c10d"):
            torch.distributed.all_reduce(weight)
    finally:
        torch.distributed.destroy_process_group()
