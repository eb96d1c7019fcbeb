"""Every layer is calibrated on the inputs that it has in the finished model."""

import threading
import weakref

import pytest
import torch
from architectures import catalogue
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPVisionConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from slimtensors.layerwise import SmoothQuant, SparseGPT, Wanda, find_layers, prune_model
from slimtensors.layerwise.check import collect_hessians, compare_hessians
from slimtensors.layerwise.inputs import InputRecorder, collect_layers
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.layerwise.report import summarize_missing_inputs
from slimtensors.layerwise.survey import iterate_tensors
from slimtensors.layerwise.walk import Walk, find_blocks
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    quantize_model,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def list_untied(model):
    """Return the linear layers that do not share their weight."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    layers = {
        name: layer
        for name, layer in collect_layers(model).items()
        if not isinstance(layer.module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    return {name: layer for name, layer in layers.items() if len(names[id(layer.parameter)]) == 1}


def int4(*, group_size, ignore=()):
    weights = QuantizationArgs(num_bits=4, group_size=group_size)
    scheme = QuantizationScheme(["Linear"], weights=weights)
    return QuantizationConfig({"group_0": scheme}, ignore=list(ignore))


def prune_and_compare(model, batches, *, share=0.5, repeated=False):
    """Prune all layers; return the reports, and the differences of the Hessians."""
    shares = dict.fromkeys(list_untied(model), share)
    with collect_hessians() as used:
        reports = prune_model(model, shares, method=Wanda(), calibration=batches)
    differences = compare_hessians(model, used, batches, repeated=repeated)
    return {r.name: r for r in reports}, differences


def check_model(model, batches):
    """Check all layers of a model that are not used repeatedly, and return the reports."""
    reports, differences = prune_and_compare(model, batches)
    assert differences
    wrong = {name: x for name, x in differences.items() if not x < 1e-3}
    assert not wrong
    return reports


def is_deterministic(model, batch):
    with torch.no_grad():
        first, second = (list(iterate_tensors(model(**batch))) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def make_batches(model, count=3):
    return [catalogue.make_inputs(model, rows=1, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "granitemoe", "xlm", "rembert", "t5", "gemma4_text", "nllb-moe", "mamba", "vit"],
)
def test_hessians_are_those_of_the_finished_model(model_type):
    model = catalogue.find(model_type).build()
    reports, differences = prune_and_compare(model, make_batches(model))
    assert differences.keys() == reports.keys()
    assert max(differences.values()) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("model_type", catalogue.list_model_types())
def test_hessians_of_every_architecture_are_those_of_the_finished_model(model_type):
    try:
        model = catalogue.find(model_type).build()
        batches = make_batches(model)
    except catalogue.CannotBuildError as error:
        pytest.skip(str(error))
    if not list_untied(model):
        pytest.skip("no linear layers")
    if not is_deterministic(model, batches[0]):
        pytest.skip("the forward pass is random")
    _, differences = prune_and_compare(model, batches)
    assert not {name: x for name, x in differences.items() if not x < 1e-3}


def test_blocks_of_several_classes_are_walked_in_order():
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=100,
        **SIZES,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    model = JambaForCausalLM(config).eval()
    assert len({type(block) for block in find_blocks(model).values()}) == 2
    check_model(model, [{"input_ids": torch.randint(1, 100, (1, 30))} for _ in range(3)])


def test_all_parts_of_a_vision_language_model_are_calibrated():
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, image_size=32, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**SIZES, vocab_size=100, num_key_value_heads=2),
        image_token_index=99,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config).eval()
    pictures = [
        {
            "input_ids": torch.tensor([[*range(5), *[99] * 16, *range(5, 10)]]),
            "pixel_values": torch.randn(1, 3, 32, 32),
        }
        for _ in range(2)
    ]
    texts = [{"input_ids": torch.randint(0, 90, (1, 20))}]
    reports = check_model(model, texts + pictures)
    kinds = {name.split(".")[1]: r.tokens for name, r in reports.items() if name != "lm_head"}
    assert kinds == {
        "vision_tower": 2 * 17,
        "multi_modal_projector": 2 * 16,
        "language_model": 2 * 26 + 20,
    }
    assert not summarize_missing_inputs(list(reports.values()))


def test_a_block_that_runs_several_times_is_calibrated_on_all_its_inputs():
    model = catalogue.find("albert").build()
    batches = make_batches(model)
    reports, differences = prune_and_compare(model, batches, share=0.0, repeated=True)
    assert differences.keys() == reports.keys()
    assert max(differences.values()) < 1e-5, "no weight changes, so all inputs stay the same"
    tokens = {r.tokens for name, r in reports.items() if "albert_layers" in name}
    assert tokens == {3 * 16 * model.config.num_hidden_layers}


def test_the_check_finds_wrong_inputs():
    model = catalogue.find("llama").build()
    batches = make_batches(model)
    with collect_hessians() as used:
        layers = find_layers(model, ["Linear"], ["lm_head"])
        prune_model(model, dict.fromkeys(layers, 0.5), method=Wanda(), calibration=batches)
    assert max(compare_hessians(model, used, batches).values()) < 1e-4
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    differences = compare_hessians(model, used, batches)
    assert {name for name, x in differences.items() if x > 1e-3} == {
        name
        for name in layers
        if name == "model.layers.0.mlp.down_proj" or name.startswith("model.layers.1.")
    }


def test_gptq_uses_the_inputs_of_the_quantized_model():
    model = catalogue.find("bart", "seq2seq").build()
    batches = make_batches(model)
    config = int4(group_size=16, ignore=["lm_head"])
    with collect_hessians() as used:
        report = quantize_model(model, config, calibration=batches)
    assert max(compare_hessians(model, used, batches).values()) < 1e-3
    assert {layer.method for layer in report.layers} == {"gptq"}
    assert sum("encoder.layers" in layer.name for layer in report.layers) == 12


class Plain(nn.Module):
    """A model without any list of blocks."""

    def __init__(self):
        super().__init__()
        self.head, self.body, self.first = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, x):
        return self.head(self.body(self.first(x).relu()).relu())


def test_a_model_without_blocks_is_walked_layer_by_layer():
    torch.manual_seed(0)
    model = Plain()
    batches = [torch.randn(16, 6) for _ in range(3)]
    seen = []
    layers = dict.fromkeys(list_untied(model), 0.5)
    prune_model(
        model,
        layers,
        method=SparseGPT(),
        calibration=batches,
        progress=lambda report, *counts: seen.append(report.name),
    )
    assert seen == ["first", "body", "head"]
    check_model(Plain(), batches)


class Adding(nn.Module):
    """A block that changes its input, and a list and an object that are passed to it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, earlier, state):
        state.total = state.total + x.mean()
        x += self.down(self.up(x + state.total).relu())
        earlier.append(x.clone())
        return x


class State:
    total = 0.0


class Stateful(nn.Module):
    """A model whose blocks must not be run twice on the same arguments."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x, earlier, state = x.clone(), [], State()
        for block in self.blocks:
            x = block(x, earlier, state)
        return self.head(sum(earlier))


def test_blocks_that_change_their_arguments_are_calibrated_right():
    torch.manual_seed(0)
    check_model(Stateful(), [torch.randn(2, 8) for _ in range(3)])


class Observability(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scaled = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x) * self.scaled.weight.sum(0))


def test_layers_without_inputs_are_summarized_with_the_reason():
    torch.manual_seed(0)
    model = Observability()
    data = [torch.randn(4, 8)]
    reports = check_model(model, data)
    assert reports["scaled"].method == reports["unused"].method == "magnitude"
    assert summarize_missing_inputs(list(reports.values())) == [
        "1 of 4 layers have no recorded inputs: weight used by torch.Tensor.sum, whose inputs"
        " cannot be observed (scaled)",
        "1 of 4 layers have no recorded inputs: not used with the calibration data (unused)",
    ]
    options = {"calibration": data, "smoothing": SmoothQuant()}
    report = quantize_model(Observability(), int4(group_size=8), **options)
    assert [note.partition(":")[0] for note in report.notes] == [
        "nothing was smoothed",
        "1 of 4 layers have no recorded inputs",
        "1 of 4 layers have no recorded inputs",
    ]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 5, 4, stride=2, padding=1),
        nn.Conv2d(3, 5, (2, 3), padding="same", dilation=2),
        nn.Conv2d(3, 5, 4, stride=4),
        nn.Conv3d(2, 4, 2, padding=(0, 1, 0)),
    ],
)
def test_inputs_of_convolutions_are_their_patches(layer):
    torch.manual_seed(0)
    x = torch.randn(2, layer.in_channels, *[9] * len(layer.kernel_size))
    recorder = InputRecorder(collect_layers(layer, prefix="layer").values())
    with torch.no_grad(), recorder:
        y = layer(x) - layer.bias.view(-1, *[1] * len(layer.kernel_size))
    (inputs,) = recorder.inputs()
    weight = layer.weight.data.flatten(1)
    outputs = y.transpose(0, 1).flatten(1).T
    expected = outputs.T @ outputs / len(outputs)
    torch.testing.assert_close(weight @ inputs.hessian.mean() @ weight.T, expected)


def test_products_are_seen_in_every_form():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    x, weight = torch.randn(2, 4, 6), layer.weight
    expected = x.flatten(0, 1).T @ x.flatten(0, 1) / 8
    for product in (
        lambda: functional.linear(x, weight),
        lambda: functional.linear(input=x, weight=weight),
        lambda: x @ weight.T,
        lambda: x.matmul(weight.mT),
        lambda: weight @ x.mT,
        lambda: torch.mm(x.flatten(0, 1), weight.t()),
    ):
        recorder = InputRecorder(collect_layers(layer, prefix="layer").values())
        with torch.no_grad(), recorder:
            product()
        torch.testing.assert_close(recorder.inputs()[0].hessian.mean(), expected)


def test_products_within_multi_head_attention_are_seen():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    reports = check_model(model, [torch.randn(2, 5, 16) for _ in range(2)])
    assert {r.method for r in reports.values()} == {"wanda"}
    assert reports.keys() == {"self_attn.out_proj", "linear1", "linear2"}


def test_passes_keep_only_the_inputs_of_one_block():
    model = catalogue.find("llama").build()
    embeddings = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: embeddings.append(weakref.ref(output))
    )
    kept = []

    def count(report, finished, total):
        tensors = [x for ref in embeddings if (x := ref()) is not None]
        kept.append((report.name.partition(".self_attn")[0], sum(map(torch.numel, tensors)) > 0))

    layers = dict.fromkeys(find_layers(model, ["re:.*q_proj"], []), 0.5)
    prune_model(model, layers, method=Wanda(), calibration=make_batches(model), progress=count)
    assert kept == [("model.layers.0", True), ("model.layers.1", False)]


class Direct(nn.Module):
    """A model that passes its input, and a tensor it has, to its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.first = torch.randn(1, 8)

    def forward(self, x):
        return self.blocks[0](x) + self.blocks[1](self.first)


def test_tensors_that_belong_to_the_caller_or_the_model_are_kept():
    torch.manual_seed(0)
    model, data = Direct(), [torch.randn(4, 8) for _ in range(2)]
    first, before = model.first.clone(), [x.clone() for x in data]
    check_model(model, data)
    assert torch.equal(model.first, first)
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))


class FailingError(Exception):
    pass


def test_an_error_ends_all_passes_and_restores_the_model():
    model = catalogue.find("llama").build()
    model.config.use_cache = True
    threads = threading.active_count()
    batches = make_batches(model)

    def fail(report, finished, total):
        raise FailingError

    layers = dict.fromkeys(list_untied(model), 0.5)
    with pytest.raises(FailingError):
        prune_model(model, layers, method=Wanda(), calibration=batches, progress=fail)
    model.model.norm.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        prune_model(model, layers, method=Wanda(), calibration=batches)
    assert threading.active_count() == threads
    assert model.config.use_cache
    assert not any("forward" in vars(block) for block in find_blocks(model).values())


def test_caches_are_disabled_in_all_configs():
    model = catalogue.find("llava").build()
    configs = [model.config, model.config.text_config]
    for config in configs:
        config.use_cache = True
    with evaluation_mode(model):
        assert [config.use_cache for config in configs] == [False, False]
    assert [config.use_cache for config in configs] == [True, True]


def test_layers_of_a_block_are_grouped_by_their_dependencies():
    model = catalogue.find("llama").build()
    layers = find_layers(model, ["Linear"], [])
    with evaluation_mode(model):
        units = Walk.plan(model, layers, make_batches(model)).iterate_units()
        groups = [
            [{layer.name.rpartition(".")[2] for layer in group} for group in unit.groups]
            for unit in units
        ]
    block = [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]
    assert groups == [block, block, [{"lm_head"}]]
