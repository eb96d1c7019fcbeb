"""Lifecycle of quantized layers: outputs in each status, and errors."""

import copy

import pytest
import torch
from strategies import same_bits, same_results
from torch import nn

from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError, MismatchError, StatusError
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    compress_quantized_weights,
    decompress_quantized_weights,
    freeze_module_quantization,
)
from slimtensors.quantization.affine import Params, dequantize, fake_quantize, find_params

CHANNEL = QuantizationArgs(num_bits=4, strategy="channel")
STATIC = QuantizationArgs(num_bits=8)


def config(*targets, ignore=(), status=QuantizationStatus.CALIBRATION, **args):
    scheme = QuantizationScheme(targets or ["Linear"], **args)
    return QuantizationConfig({"group_0": scheme}, ignore=list(ignore), quantization_status=status)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def calibrate(model, settings, x=X):
    report = apply_quantization_config(model, settings)
    model(x)
    model.apply(freeze_module_quantization)
    return report


def test_outputs_are_unchanged_until_a_model_is_frozen():
    model, dense = mlp(), mlp()
    apply_quantization_config(model, config(weights=CHANNEL, input_activations=STATIC))
    assert same_results(model(X), dense(X))
    assert model.state_dict().keys() == dense.state_dict().keys()
    model.apply(freeze_module_quantization)
    assert not torch.equal(model(X), dense(X))
    assert model.state_dict().keys() == dense.state_dict().keys()


@torch.no_grad()
def test_a_frozen_model_computes_with_quantized_weights_inputs_and_outputs():
    model, dense = mlp(), mlp()
    settings = config(weights=CHANNEL, input_activations=STATIC, output_activations=STATIC)
    calibrate(model, settings)

    def static(x, seen):
        scale = (seen.abs().amax() / 127.5).reshape(1)
        return fake_quantize(x, Params(scale), STATIC)

    x = seen = X
    for layer in dense:
        if isinstance(layer, nn.Linear):
            after = layer(seen)
            weight = fake_quantize(layer.weight, find_params(layer.weight, CHANNEL), CHANNEL)
            x = static(nn.functional.linear(static(x, seen), weight, layer.bias), after)
            seen = after
        else:
            x, seen = layer(x), layer(seen)
    assert same_bits(model(X), x)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "MXFP8A16"])
def test_a_compressed_model_is_small_and_computes_the_same(preset):
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    settings = QuantizationConfig.preset(preset)
    settings.quantization_status = QuantizationStatus.FROZEN
    apply_quantization_config(model, settings)
    x = torch.randn(3, 64)
    want, dense = model(x), model.state_dict()
    model.apply(compress_quantized_weights)
    assert same_results(model(x), want)
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]
    stored = model.state_dict()
    assert stored.keys() == {"0.weight", "0.weight_scale", "0.bias"}
    assert stored["0.weight"].element_size() == 1
    with pytest.raises(RuntimeError):
        model(x[:, :3])
    assert "weight" not in vars(model[0])  # also after a failure
    model.apply(decompress_quantized_weights)
    assert same_results(model(x), want)
    assert all(same_bits(x, dense[name]) for name, x in model.state_dict().items())


@torch.no_grad()
def test_a_compressed_state_dict_loads_into_a_compressed_model():
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(16, 8)).eval())
        calibrate(models[-1], config(weights=CHANNEL, input_activations=STATIC))
        models[-1].apply(compress_quantized_weights)
    assert not torch.equal(models[0](X), models[1](X))
    models[1].load_state_dict(models[0].state_dict())
    assert same_results(models[0](X), models[1](X))


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(4, 6, 3)
        self.two = nn.Conv2d(1, 5, (2, 3), bias=False)
        self.words = nn.Embedding(9, 12)

    def forward(self, x):
        return self.two(self.one(x)[:, None]), self.words(torch.arange(9))


@torch.no_grad()
def test_convolutions_and_embeddings_are_quantized_per_output():
    torch.manual_seed(0)
    model = Convolved()
    dense = copy.deepcopy(model)
    settings = config("Conv1d", "Conv2d", "Embedding", weights=CHANNEL)
    calibrate(model, settings, torch.randn(2, 4, 8))
    for name in ("one", "two", "words"):
        before = getattr(dense, name).weight
        matrix = before.flatten(1)
        want = fake_quantize(matrix, find_params(matrix, CHANNEL), CHANNEL).view(before.shape)
        assert same_bits(getattr(model, name).weight, want)
    compressor = ModelCompressor(settings)
    state = compressor.compress(model)
    assert state["two.weight_shape"].tolist() == [5, 6]
    back = compressor.decompress(state, model=dense)
    assert all(same_bits(back[name], x) for name, x in model.state_dict().items())
    with pytest.raises(ConfigError, match="pass the model"):
        compressor.decompress(state)
    compressor.restore(dense, state)
    x = torch.randn(1, 4, 8)
    assert all(map(same_results, dense(x), model(x)))


@torch.no_grad()
def test_conv1d_of_gpt2_is_quantized_per_output():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(8, 16))
    before = model[0].weight.clone()
    calibrate(model, config("Conv1D", weights=CHANNEL))
    want = fake_quantize(before.T.contiguous(), find_params(before.T, CHANNEL), CHANNEL).T
    assert torch.equal(model[0].weight, want)
    state = ModelCompressor(config("Conv1D", weights=CHANNEL)).compress(model)
    assert state["0.weight_shape"].tolist() == [8, 16]
    again = nn.Sequential(Conv1D(8, 16))
    ModelCompressor(config("Conv1D", weights=CHANNEL)).restore(again, state)
    assert same_results(again(X), model(X))


def test_params_that_an_algorithm_found_are_used():
    model = nn.Sequential(nn.Linear(16, 8))
    before = model[0].weight.detach().clone()
    apply_quantization_config(model, config(weights=CHANNEL))
    found = Params(torch.full((8, 1), 0.01))
    model[0].quantization.params["weight"] = found
    model.apply(freeze_module_quantization)
    assert same_bits(model[0].weight.detach(), fake_quantize(before, found, CHANNEL))


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantizing_a_rounded_weight_gives_the_same_codes(symmetric):
    args = QuantizationArgs(strategy="channel", symmetric=symmetric)
    torch.manual_seed(0)
    codes = torch.arange(-128, 128).to(torch.int8).repeat(64, 1)
    scale = (torch.rand(64, 1) + 0.5).to(torch.bfloat16)
    zero = None if symmetric else torch.randint(-9, 9, (64, 1), dtype=torch.int8)
    params = Params(scale, zero)
    model = nn.Sequential(nn.Linear(256, 64, dtype=torch.bfloat16))
    model[0].weight.data = dequantize(codes, params, args)
    settings = config(weights=args, format="int-quantized")
    apply_quantization_config(model, settings)
    model[0].quantization.params["weight"] = params
    model.apply(freeze_module_quantization)
    assert torch.equal(ModelCompressor(settings).compress(model)["0.weight"], codes)


class Mixture(nn.Module):
    """A mixture in which two of three experts receive tokens."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(16, 8)}) for _ in range(3))

    def forward(self, x):
        return self.experts[0]["w1"](x[:2]) + self.experts[2]["w1"](2 * x[:2])


def test_an_expert_without_tokens_uses_the_range_of_the_others_and_reports_it(caplog):
    model = Mixture()
    report = calibrate(model, config(weights=CHANNEL, input_activations=STATIC))
    scales = [expert["w1"].quantization.input_scale for expert in model.experts]
    assert torch.equal(scales[1], scales[2])
    assert not torch.equal(scales[1], scales[0])
    assert len(report.notes) == 1
    assert "experts.1.w1: received no token" in report.notes[0]
    assert report.notes[0] in caplog.text


def test_report_lists_layers_and_targets_without_a_match():
    settings = config("Linear", "re:.*attn", ignore=["2", "lmhead"], weights=CHANNEL)
    report = apply_quantization_config(mlp(), settings)
    assert report.groups == {"group_0": ["0"]}
    assert len(report.notes) == 2
    assert "'re:.*attn' matches no layer" in report.notes[0]
    assert "'lmhead' matches nothing" in report.notes[1]


def test_calibration_without_data_raises():
    model = mlp()
    apply_quantization_config(model, config(input_activations=STATIC))
    with pytest.raises(StatusError, match="0: no data was observed in calibration"):
        model.apply(freeze_module_quantization)
    with pytest.raises(StatusError, match="0: no data was observed in calibration"):
        calibrate(mlp(), config(input_activations=STATIC), X[:0])


@pytest.mark.parametrize("targets", [["Linera"], ["re:nothing.*"], ["9"], ["ReLU"]])
def test_a_config_that_matches_nothing_raises(targets):
    with pytest.raises(ConfigError, match="group_0: no layer of the model matches"):
        apply_quantization_config(mlp(), config(*targets, weights=CHANNEL))
    settings = config(weights=CHANNEL)
    settings.kv_cache_scheme = STATIC
    with pytest.raises(ConfigError, match="kv_cache: no layer"):
        apply_quantization_config(mlp(), settings)
    with pytest.raises(ConfigError, match="no layer"):
        apply_quantization_config(mlp(), config(ignore=["Linear"], weights=CHANNEL))


def test_steps_in_the_wrong_order_raise():
    model, settings = mlp(), config(weights=CHANNEL)
    compressor = ModelCompressor(quantization_config=settings)
    with pytest.raises(StatusError, match="not quantized"):
        compressor.compress(model)
    apply_quantization_config(model, settings)
    with pytest.raises(StatusError, match="0: status is calibration, expected frozen"):
        model.apply(compress_quantized_weights)
    with pytest.raises(StatusError, match="0: status is calibration, expected frozen"):
        compressor.compress(model)
    with pytest.raises(StatusError, match="0: already calibration"):
        apply_quantization_config(model, settings)
    model.apply(freeze_module_quantization)
    model.apply(freeze_module_quantization)  # which changes nothing
    model.apply(compress_quantized_weights)
    with pytest.raises(StatusError, match="0: already compressed"):
        model.apply(freeze_module_quantization)
    with pytest.raises(StatusError, match="0: already compressed"):
        apply_quantization_config(model, settings)
    for status in (QuantizationStatus.COMPRESSED, QuantizationStatus.DECOMPRESSED):
        with pytest.raises(StatusError, match=f"quantization_status {status}"):
            apply_quantization_config(mlp(), config(weights=CHANNEL, status=status))
    frozen = config(input_activations=STATIC, status=QuantizationStatus.FROZEN)
    report = apply_quantization_config(model := mlp(), frozen)
    assert "not set" in report.notes[-1]
    with pytest.raises(StatusError, match="0: input_scale is not set"):
        model(X)


def test_a_config_may_be_applied_again_before_calibration():
    model = mlp()
    start = config(weights=CHANNEL, status=QuantizationStatus.INITIALIZED)
    apply_quantization_config(model, start)
    apply_quantization_config(model, config("0", input_activations=STATIC))
    assert len(model[0]._forward_pre_hooks) == 1


def test_tied_weights_raise_unless_ignored():
    model = mlp()
    model.append(nn.Embedding(8, 32))
    model[3].weight = model[2].weight
    with pytest.raises(ConfigError, match=r"2: its weight is tied to \['2.weight', '3.weight'\]"):
        apply_quantization_config(model, config(weights=CHANNEL))
    apply_quantization_config(model, config(weights=CHANNEL, ignore=["2"]))


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda m: None, config(weights=QuantizationArgs(group_size=24)), "0: 16 columns"),
        (lambda m: m[0].weight.data.fill_(torch.nan), config(weights=CHANNEL), "0: contains NaN"),
        (lambda m: m.append(nn.Embedding(3, 4)), config("Embedding", input_activations=STATIC), "3: its input is token ids"),  # noqa: E501
    ],
)  # fmt: skip
def test_unsupported_layers_are_named_in_the_error(change, settings, message):
    model = mlp()
    change(model)
    with pytest.raises(ConfigError, match=message):
        calibrate(model, settings, torch.zeros(1, 16))


def test_compressor_raises_on_mismatch():
    with pytest.raises(ConfigError, match="or both"):
        ModelCompressor()
    model = mlp()
    calibrate(model, config(weights=CHANNEL))
    other = QuantizationConfig({"other": QuantizationScheme(["Linear"], weights=STATIC)})
    with pytest.raises(MismatchError, match="another config"):
        ModelCompressor(other).compress(model)
    state = ModelCompressor(config(weights=CHANNEL)).compress(model)
    state["left.over"] = state.pop("0.bias")
    with pytest.raises(MismatchError, match=r"missing \['0.bias'\], unexpected \['left.over'\]"):
        ModelCompressor(config(weights=CHANNEL)).restore(mlp(), state)
    with pytest.raises(ConfigError, match="0: stored quantized, but no group"):
        ModelCompressor(config("re:5", weights=CHANNEL)).decompress(state)


def test_a_transform_raises():
    settings = config(weights=CHANNEL)
    settings.transform_config = {"config_groups": {}}
    with pytest.raises(ConfigError, match="transform_config"):
        apply_quantization_config(mlp(), settings)
