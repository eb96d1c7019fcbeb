"""`quantize_` with the configurations, options and older names of torchao."""

import re
import warnings

import pytest
import torch
from strategies import same_bits
from torch import nn

from slimtensors import quantization as ours
from slimtensors.errors import ConfigError
from slimtensors.quantization import QuantizationStrategy, get_model_size_in_bytes, quantize_
from slimtensors.runtime import QuantizedTensor, is_linear_or_embedding

X = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own imports
        return pytest.importorskip("torchao", exc_type=ImportError)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16().eval()


def error(found, expected):
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


CALLS = [
    # torchao 0.4 to 0.7: functions
    (lambda m: m.int8_weight_only(), 8, "channel"),
    (lambda m: m.int8_weight_only(group_size=32), 8, "group"),
    (lambda m: m.int4_weight_only(group_size=32), 4, "group"),
    (lambda m: m.int4_weight_only(32, inner_k_tiles=4), 4, "group"),
    (
        lambda m: m.int4_weight_only(
            group_size=32, layout=m.TensorCoreTiledLayout(inner_k_tiles=4)
        ),
        4,
        "group",
    ),
    (
        lambda m: m.int4_weight_only(group_size=32, layout=m.Int4CPULayout(), use_hqq=False),
        4,
        "group",
    ),
    (
        lambda m: m.int4_weight_only(group_size=32, zero_point_domain=m.ZeroPointDomain.INT),
        4,
        "group",
    ),
    (lambda m: m.int8_dynamic_activation_int8_weight(), 8, "channel"),
    (lambda m: m.int8_dynamic_activation_int8_weight(layout=m.PlainLayout()), 8, "channel"),
    (
        lambda m: m.int8_dynamic_activation_int8_weight(act_mapping_type=m.MappingType.ASYMMETRIC),
        8,
        "channel",
    ),
    (lambda m: m.int8_dynamic_activation_int4_weight(), 4, "group"),
    (lambda m: m.int8_dynamic_activation_int4_weight(group_size=16), 4, "group"),
    (lambda m: m.int8_dynamic_activation_int4_weight(group_size=None), 4, "channel"),
    (
        lambda m: m.int8_dynamic_activation_int4_weight(mapping_type=m.MappingType.ASYMMETRIC),
        4,
        "group",
    ),
    (lambda m: m.float8_weight_only(weight_dtype=torch.float8_e4m3fn), 8, "channel"),
    (lambda m: m.float8_dynamic_activation_float8_weight(), 8, "tensor"),
    (lambda m: m.float8_dynamic_activation_float8_weight(granularity=m.PerRow()), 8, "channel"),
    (lambda m: m.uintx_weight_only(torch.uint6, group_size=32), 6, "group"),
    # torchao 0.9 to 0.18: classes
    (
        lambda m: m.Int4WeightOnlyConfig(group_size=32, set_inductor_config=False, version=2),
        4,
        "group",
    ),
    (lambda m: m.Int4WeightOnlyConfig(32, int4_packing_format="tile_packed_to_4d"), 4, "group"),
    (lambda m: m.Int8WeightOnlyConfig(granularity=m.PerTensor()), 8, "tensor"),
    (
        lambda m: m.Int8DynamicActivationInt8WeightConfig(granularity=[m.PerTensor(), m.PerRow()]),
        8,
        "channel",
    ),
    (lambda m: m.Int8DynamicActivationInt8WeightConfig(granularity=None), 8, "channel"),
    (lambda m: m.Int8DynamicActivationInt4WeightConfig(group_size=32), 4, "group"),
    (lambda m: m.Float8WeightOnlyConfig(granularity=m.PerTensor()), 8, "tensor"),
    (
        lambda m: m.Float8DynamicActivationFloat8WeightConfig(granularity=(m.PerRow(), m.PerRow())),
        8,
        "channel",
    ),
    (
        lambda m: m.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=m.PerGroup(32)),
        3,
        "group",
    ),
    (
        lambda m: m.IntxWeightOnlyConfig(torch.int4, m.PerAxis(0), m.MappingType.ASYMMETRIC),
        4,
        "channel",
    ),
    (lambda m: m.Int8DynamicActivationIntxWeightConfig(torch.int4, m.PerGroup(32)), 4, "group"),
    (lambda m: m.UIntXWeightOnlyConfig(dtype=torch.uint8, group_size=32), 8, "group"),
]


@pytest.mark.parametrize(("make", "bits", "strategy"), CALLS)
def test_calls_of_all_releases_are_accepted(make, bits, strategy):
    dense, model = make_model(), make_model()
    config = make(ours)
    quantize_(model, config)
    weight = model[0].weight
    assert isinstance(weight, QuantizedTensor)
    args = weight.config.args
    assert (args.num_bits, args.strategy) == (bits, QuantizationStrategy(strategy))
    assert ("DynamicActivation" in type(config).__name__) == (weight.config.inputs is not None)
    allowed = {3: 0.4, 4: 0.2, 6: 0.06, 8: 0.06}[bits]
    assert error(model(X), dense(X)) < allowed


REFUSED = [
    (lambda m: m.int4_weight_only(use_hqq=True), "use_hqq=True"),
    (lambda m: m.int4_weight_only(layout="MarlinSparseLayout"), "layout='MarlinSparseLayout'"),
    (lambda m: m.int4_weight_only(zero_point_domain="float"), "zero_point_domain='float'"),
    (lambda m: m.int4_weight_only(group_size=-5), "group_size"),
    (
        lambda m: m.Int4WeightOnlyConfig(int4_choose_qparams_algorithm="hqq"),
        "int4_choose_qparams_algorithm",
    ),
    (lambda m: m.Int4WeightOnlyConfig(int4_packing_format="marlin_sparse"), "int4_packing_format"),
    (lambda m: m.Int8WeightOnlyConfig(32, granularity=m.PerTensor()), "granularity=PerTensor"),
    (lambda m: m.int4_weight_only(group_size=0), "group_size"),
    (lambda m: m.Int8WeightOnlyConfig(granularity=m.PerAxis(1)), "granularity=PerAxis"),
    (lambda m: m.Int8WeightOnlyConfig(granularity=m.PerRow(0)), "granularity=PerRow"),
    (
        lambda m: m.int8_dynamic_activation_int8_weight(weight_only_decode=True),
        "weight_only_decode=True",
    ),
    (lambda m: m.int8_dynamic_activation_int8_weight(layout="SemiSparseLayout"), "layout="),
    (lambda m: m.Int8DynamicActivationInt8WeightConfig(reduce_range=True), "reduce_range=True"),
    (
        lambda m: m.Int8DynamicActivationInt8WeightConfig(granularity=m.PerGroup(32)),
        "granularity=PerGroup",
    ),
    (
        lambda m: m.int8_dynamic_activation_int4_weight(mapping_type="symmetric_no_clipping_err"),
        "mapping_type",
    ),
    (
        lambda m: m.float8_weight_only(weight_dtype=torch.float8_e5m2),
        "weight_dtype=torch.float8_e5m2",
    ),
    (
        lambda m: m.float8_dynamic_activation_float8_weight(activation_value_lb=1.0),
        "activation_value_lb=1.0",
    ),
    (
        lambda m: m.float8_dynamic_activation_float8_weight(packing_format="sparse_1d"),
        "packing_format",
    ),
    (lambda m: m.IntxWeightOnlyConfig(weight_dtype=torch.int1), "weight_dtype=torch.int1"),
    (lambda m: m.IntxWeightOnlyConfig(scale_dtype=torch.bfloat16), "scale_dtype=torch.bfloat16"),
    (lambda m: m.uintx_weight_only(torch.uint4, use_hqq=True), "use_hqq=True"),
]


@pytest.mark.parametrize(("make", "option"), REFUSED)
def test_options_that_would_change_the_numbers_are_refused_by_name(make, option):
    with pytest.raises(ConfigError, match=re.escape(option)):
        make(ours)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="grup_size"):
        ours.int4_weight_only(grup_size=32)


@pytest.mark.interop
@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.Int8WeightOnlyConfig(),
        lambda m: m.Int8DynamicActivationInt8WeightConfig(),
        lambda m: m.Int8DynamicActivationInt8WeightConfig(granularity=m.PerTensor()),
        lambda m: m.Float8WeightOnlyConfig(),
        lambda m: m.Float8WeightOnlyConfig(granularity=m.PerTensor()),
        lambda m: m.IntxWeightOnlyConfig(torch.int4, m.PerGroup(32)),
        lambda m: m.IntxWeightOnlyConfig(torch.int4, m.PerGroup(32), m.MappingType.ASYMMETRIC),
        lambda m: m.IntxWeightOnlyConfig(torch.int3, m.PerAxis(0)),
        lambda m: m.Int8DynamicActivationIntxWeightConfig(torch.int4, m.PerGroup(32)),
    ],
)
def test_results_are_those_of_torchao(make, torchao):
    """The same call from both libraries, and torchao's configuration in our `quantize_`."""
    dense, theirs, mine, mixed = make_model(), make_model(), make_model(), make_model()
    torchao.quantization.quantize_(theirs, make(torchao.quantization))
    quantize_(mine, make(ours))
    quantize_(mixed, make(torchao.quantization))
    assert torch.equal(mine[0].weight, mixed[0].weight)
    loss = error(theirs(X), dense(X))
    assert error(mine(X), dense(X)) < 1.1 * loss + 0.005
    assert error(mine[0].weight.dequantize(), dense[0].weight) < (
        1.1 * error(theirs[0].weight.dequantize(), dense[0].weight) + 0.001
    )


@pytest.mark.interop
def test_configurations_of_torchao_without_an_equivalent_are_refused(torchao):
    config = torchao.quantization.Float8DynamicActivationInt4WeightConfig()
    with pytest.raises(ConfigError, match="Float8DynamicActivationInt4WeightConfig of torchao"):
        quantize_(make_model(), config)


@pytest.mark.parametrize("config", ["int8", ours.Int8WeightOnlyConfig, None])
def test_other_values_are_no_configuration(config):
    with pytest.raises(ConfigError, match="expected a configuration"):
        quantize_(make_model(), config)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_model_is_on_the_given_device_afterwards(device):
    with torch.device("cpu"):
        model = make_model()
    expected = make_model()
    quantize_(expected, ours.int8_weight_only())
    quantize_(model, ours.int8_weight_only(), None, device)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(model[0].weight, expected[0].weight)


def test_a_device_that_does_not_exist_leaves_the_model_unchanged():
    model = make_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises((RuntimeError, AssertionError)):
        quantize_(model, ours.int8_weight_only(), device="cuda:99")
    assert all(same_bits(x, before[name]) for name, x in model.state_dict().items())


def test_filter_gets_module_and_name():
    calls = []

    def select(module, name):
        calls.append((type(module).__name__, name))
        return name == "2"

    model = make_model()
    quantize_(model, ours.int8_weight_only(), filter_fn=select)
    assert calls == [("Sequential", ""), ("Linear", "0"), ("ReLU", "1"), ("Linear", "2")]
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[2].weight, QuantizedTensor)


@pytest.mark.parametrize(
    "config", [ours.int4_weight_only(group_size=64), ours.int8_dynamic_activation_int4_weight(64)]
)
def test_int4_leaves_weights_whose_columns_are_not_whole_groups(config, caplog):
    """As torchao does, which logs it below the default level."""
    model = make_model()
    quantize_(model, config)
    assert isinstance(model[0].weight, QuantizedTensor)
    assert type(model[2].weight) is nn.Parameter
    assert [record.getMessage() for record in caplog.records] == [
        "2.weight: columns are not divisible by group_size; not quantized"
    ]


@pytest.mark.interop
def test_the_default_filter_selects_the_modules_of_torchao(torchao):
    """It excludes a layer that `nn.MultiheadAttention` does not call."""

    def list_quantized(library):
        model = nn.TransformerEncoderLayer(64, 4, 128).bfloat16()
        library.quantize_(model, library.Int8WeightOnlyConfig())
        return [name for name, x in model.named_parameters() if type(x) is not nn.Parameter]

    assert list_quantized(ours) == ["linear1.weight", "linear2.weight"]
    assert list_quantized(ours) == list_quantized(torchao.quantization)


def test_models_on_the_meta_device_are_quantized():
    """As a first step to load them: by `assign=True`, or in place after `to_empty`."""
    model = make_model()
    quantize_(model, ours.int4_weight_only(group_size=32))
    for assign in (True, False):
        with torch.device("meta"):
            loaded = make_model()
            quantize_(loaded, ours.int4_weight_only(group_size=32))
        assert loaded[0].weight.is_meta
        if not assign:
            loaded.to_empty(device="cpu")
        loaded.load_state_dict(model.state_dict(), assign=assign)
        assert isinstance(loaded[0].weight, QuantizedTensor)
        assert torch.equal(loaded(X), model(X))


class Experts(nn.Module):
    """A layer with matrices that are not called weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))
        self.down = nn.Parameter(torch.randn(4, 64, 64))
        self.router = nn.Linear(64, 4)


@pytest.mark.interop
@pytest.mark.parametrize(
    "make",
    [
        lambda m: {"up": m.Int8WeightOnlyConfig()},
        lambda m: {"re:up|down": m.Int8WeightOnlyConfig(), "down": None},
        lambda m: {"re:router[.]weight": m.Int8WeightOnlyConfig()},
        lambda m: {"router": None, "router.weight": m.Int8WeightOnlyConfig()},
        lambda m: {"re:rout.*r": None, "_default": m.Int8WeightOnlyConfig()},
        lambda m: {"router.weight": None, "router": m.Int8WeightOnlyConfig()},
    ],
)
@pytest.mark.filterwarnings("ignore:Config Deprecation")
def test_names_select_the_parameters_of_torchao(make, torchao):
    def list_quantized(library, config):
        model = Experts()
        library.quantize_(model, config, None)
        return [name for name, x in model.named_parameters() if type(x) is not nn.Parameter]

    theirs = torchao.quantization.FqnToConfig(make(torchao.quantization))
    expected = list_quantized(torchao.quantization, theirs)
    assert list_quantized(ours, ours.FqnToConfig(make(ours))) == expected
    assert list_quantized(ours, theirs) == expected


def test_names_that_select_nothing_are_reported(caplog):
    config = {"0": ours.int8_weight_only(), "layer": None, "re:layer.*": None}
    quantize_(make_model(), ours.FqnToConfig(config))
    assert [record.getMessage() for record in caplog.records] == [
        f"FqnToConfig: {key!r} selects no module or parameter" for key in ("layer", "re:layer.*")
    ]


def test_names_are_checked_when_the_configuration_is_made():
    config = {"0": ours.int8_weight_only()}
    with pytest.raises(ConfigError, match="differ"):
        ours.FqnToConfig(config, module_fqn_to_config={"1": None})
    with pytest.raises(ConfigError, match="expected a configuration"):
        ours.FqnToConfig({"0": "int8"})
    with pytest.raises(ConfigError, match="cannot contain another"):
        ours.FqnToConfig({"0": ours.FqnToConfig(config)})


def test_names_select_configurations():
    def build():
        return nn.ModuleDict({
            "embed": nn.Embedding(8, 64),
            "first": nn.Linear(64, 64),
            "second": nn.Linear(64, 64),
            "third": nn.Linear(64, 64),
            "head": nn.Linear(64, 8),
        })  # fmt: skip

    model = build()
    config = ours.FqnToConfig(
        {
            "first": ours.int4_weight_only(group_size=32),
            "re:sec.*": ours.float8_weight_only(),
            "head": None,
            "_default": ours.int8_weight_only(),
        }
    )
    quantize_(model, config)
    kinds = {
        name: layer.weight.describe() if isinstance(layer.weight, QuantizedTensor) else None
        for name, layer in model.items()
    }
    assert kinds == {
        "embed": None,
        "first": "4-bit int per group 32",
        "second": "8-bit float per channel",
        "third": "8-bit int per channel",
        "head": None,
    }
    with pytest.raises(ConfigError, match="filter_fn"):
        quantize_(build(), config, is_linear_or_embedding)


def test_model_size_is_that_of_the_seed():
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    quantize_(model.bfloat16(), ours.int4_weight_only())
    assert get_model_size_in_bytes(model) / 1024 / 1024 == 1.0625
