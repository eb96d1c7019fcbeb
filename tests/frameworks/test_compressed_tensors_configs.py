"""Arguments, schemes, configs and functions: accepted, refused and written as by theirs."""

import itertools
import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from strategies import same_bits

import slimtensors.quantization as ours
from slimtensors import compat
from slimtensors.errors import ConfigError
from slimtensors.quantization.scheme import PRESETS

theirs = pytest.importorskip("compressed_tensors.quantization")
import compressed_tensors.config as their_config  # noqa: E402
from compressed_tensors.quantization import utils as their_utils  # noqa: E402

pytestmark = pytest.mark.interop

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
OPTIONS = {
    "num_bits": (4, 6, 8),
    "type": ("int", "float", "FLOAT"),
    "symmetric": (True, False),
    "strategy": (None, *ours.QuantizationStrategy),
    "group_size": (None, -2, -1, 32),
    "block_structure": (None, [8, 16], "8x16", (0, 1)),
    "dynamic": (False, True, "local"),
}
REFUSED = (ValueError, NotImplementedError, KeyError)


def build(make, **values):
    """Return an object, or None if its arguments are refused."""
    try:
        return make(**values)
    except REFUSED:
        return None


def test_combinations_of_arguments_are_accepted_and_written_as_by_theirs():
    accepted = 0
    for combination in itertools.product(*OPTIONS.values()):
        values = dict(zip(OPTIONS, combination, strict=True))
        have, want = (
            build(ours.QuantizationArgs, **values),
            build(theirs.QuantizationArgs, **values),
        )
        small = values["type"] != "int" and values["num_bits"] < 8
        if small and not values["symmetric"]:
            assert have is None, values  # theirs refuses it when scales are computed
            continue
        assert (have is None) == (want is None), values
        if have is not None:
            accepted += 1
            assert have.model_dump_json() == want.model_dump_json(), values
            assert have.model_dump() == want.model_dump()
            assert ours.QuantizationArgs.model_validate_json(want.model_dump_json()) == have
    assert accepted > 100


@pytest.mark.parametrize(
    "values",
    [
        {"actorder": "weight", "group_size": 8},
        {"actorder": "weight", "strategy": "channel"},
        {"actorder": False},
        {"actorder": "sideways"},
        {"scale_dtype": torch.uint8, "zp_dtype": torch.int8},
        {"scale_dtype": "torch.uint8", "zp_dtype": "int8"},
        {"scale_dtype": "float13"},
        {"zp_dtype": torch.int16, "symmetric": False},
        {"zp_dtype": torch.float8_e4m3fn, "symmetric": True},
        {"observer": "mse", "observer_kwargs": {"maxshrink": 0.1}},
        {"observer": None, "observer_kwargs": {}},
        {"strategy": "TOKEN", "dynamic": True},
        {"strategy": "token"},
        {"strategy": "attn_head", "dynamic": True},
        {"dynamic": None},
        {"type": None},
        {"type": "complex"},
        {"num_bits": 3, "type": "float"},
        {"unknown": 1},
    ],
)
def test_other_arguments_are_accepted_and_written_as_by_theirs(values):
    def make(**values):
        return ours.QuantizationArgs.model_validate(values)

    have, want = build(make, **values), build(theirs.QuantizationArgs, **values)
    assert (have is None) == (want is None)
    assert have is None or have.model_dump_json() == want.model_dump_json()


def test_activation_order_by_group_is_kept_although_they_removed_it():
    for order in (True, "group", "dynamic"):
        assert build(theirs.QuantizationArgs, group_size=8, actorder=order) is None
        args = ours.QuantizationArgs(group_size=8, actorder=order)
        assert args.actorder is ours.ActivationOrdering.GROUP is ours.ActivationOrdering.DYNAMIC
    args = ours.QuantizationArgs(group_size=8, actorder="static")
    assert args.actorder is ours.ActivationOrdering.STATIC is ours.ActivationOrdering.WEIGHT


INT4 = {"num_bits": 4, "group_size": 128}
TOKEN = {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "values",
    [
        {"targets": ["Linear"]},
        {"targets": ("Linear", "re:.*proj"), "weights": INT4},
        {"targets": ["Linear"], "weights": INT4, "input_activations": TOKEN},
        {"targets": ["Linear"], "output_activations": TOKEN},
        {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        {"targets": ["Linear"], "weights": {}},
        {"targets": ["Linear"], "format": "mixed-precision"},
        {"targets": ["Linear"], "format": "packed"},
        {"targets": ["Linear"], "input_activations": {"group_size": -1}},
        {"targets": ["Linear"], "input_activations": {**TOKEN, "actorder": "weight"}},
        {"targets": ["Linear"], "weights": {"bits": 4}},
        {"targets": ["Linear"], "weight": INT4},
        {"weights": INT4},
        {"targets": "Linear"},
    ],
)
def test_schemes_are_accepted_and_written_as_by_theirs(values):
    def make(**values):
        return ours.QuantizationScheme.model_validate(values)

    have, want = build(make, **values), build(theirs.QuantizationScheme, **values)
    assert (have is None) == (want is None)
    if have is not None:
        assert have.model_dump_json() == want.model_dump_json()
        assert have.targets == want.targets
        assert ours.QuantizationScheme.model_validate(want.model_dump()) == have


CONFIGS = [
    {"config_groups": {}},
    {"config_groups": {"W4A16": ["Linear"]}, "ignore": ["lm_head"]},
    {"config_groups": {"fp8": ("Linear",)}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    {"config_groups": {"a": {"targets": ["x"], "weights": INT4}}, "format": "pack-quantized"},
    {"config_groups": {"a": {"targets": ["x"]}}, "quantization_status": "frozen"},
    {"config_groups": {"a": {"targets": ["x"], "weights": {}, "input_activations": None}}},
    {"config_groups": {"W4A17": ["Linear"]}},
    {"config_groups": {"a": 3}},
    {"config_groups": {}, "quantization_status": "calibrated"},
    {"config_groups": {}, "global_compression_ratio": 2.5},
    {"config_groups": {"a": {"targets": [], "weights": {**INT4, "observer": "imatrix_mse"}}}},
    {"config_groups": {}, "kv_cache_scheme": ["num_bits"]},
    {"config_groups": {}, "ignore": "lm_head"},
]


@pytest.mark.parametrize("values", CONFIGS)
def test_configs_are_accepted_and_written_as_by_theirs(values):
    have, want = (build(x.QuantizationConfig, **values) for x in (ours, theirs))
    assert (have is None) == (want is None)
    if have is None:
        return
    assert have.model_dump_json() == want.model_dump_json()
    assert have.model_dump(exclude=["format"]) == want.model_dump(exclude=["format"])
    assert have.requires_calibration_data() == want.requires_calibration_data()
    assert have.to_dict().items() >= json.loads(want.model_dump_json()).items()


def test_copies_and_dtypes_of_arguments_are_theirs():
    for library in (ours, theirs):
        args = library.QuantizationArgs(group_size=128)
        copied = args.model_copy(update={"num_bits": 4})
        assert (copied.num_bits, copied.group_size, args.num_bits) == (4, 128, 8)
        assert args.pytorch_dtype() is torch.int8
        assert library.QuantizationArgs(type="float").pytorch_dtype() is torch.float8_e4m3fn
        local = library.DynamicType.LOCAL
        args = library.QuantizationArgs(strategy="tensor_group", group_size=16, dynamic=local)
        assert args.dynamic == "local"
        four = library.QuantizationArgs(num_bits=4, type="float", group_size=16)
        with pytest.raises(REFUSED):
            four.pytorch_dtype()


def test_stricter_than_theirs_on_purpose():
    with pytest.raises(ConfigError, match="did you mean 'config_groups'"):
        ours.QuantizationConfig.model_validate({"config_groups": {}, "config_group": {}})
    assert theirs.QuantizationConfig.model_validate({"config_groups": {}, "config_group": {}})
    with pytest.raises(ConfigError, match="num_bits 16 is not supported"):
        ours.QuantizationArgs(num_bits=16)
    assert theirs.QuantizationArgs(num_bits=16)
    for values in ({"num_bits": "8"}, {"group_size": 128.0}, {"symmetric": 1}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            ours.QuantizationArgs(**values)
        assert theirs.QuantizationArgs(**values)
    with pytest.raises(ConfigError, match="cannot be quantized dynamically"):
        ours.QuantizationScheme(["Linear"], weights={"dynamic": True})
    with pytest.raises(ConfigError, match="group requires dynamic=True"):
        ours.QuantizationScheme(["Linear"], input_activations={"group_size": 8})
    with pytest.raises(FrozenInstanceError):
        ours.QuantizationArgs().num_bits = 4


def test_a_config_without_ignore_is_accepted():
    assert ours.QuantizationConfig({}, ignore=None).ignore == []


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_found_by_name_as_theirs(name):
    assert ours.is_preset_scheme(name.lower())
    have, want = (x.preset_name_to_scheme(name, ["Linear"]) for x in (ours, theirs))
    assert have.model_dump_json() == want.model_dump_json()
    configs = [x.QuantizationConfig(config_groups={name: ["Linear"]}) for x in (ours, theirs)]
    assert configs[0].requires_calibration_data() == configs[1].requires_calibration_data()


def test_unknown_presets_are_refused():
    assert not ours.is_preset_scheme("W4A17")
    with pytest.raises(ConfigError, match="did you mean 'W4A16'"):
        ours.preset_name_to_scheme("W4A17", ["Linear"])


@pytest.mark.filterwarnings("ignore:Attempting to merge")
@pytest.mark.parametrize("status", ["initialized", "compressed"])
@pytest.mark.parametrize("name", ["group_0", "W4A16", "other_7"])
@pytest.mark.parametrize("format", [None, "pack-quantized", "int-quantized"])
def test_merged_configs_are_theirs(status, name, format):
    def merge(library):
        first = {"targets": ["re:.*mlp.*"], "weights": INT4, "format": "pack-quantized"}
        second = {"targets": ["re:.*attn.*", "lm_head"], "weights": INT4, "format": format}
        config = library.QuantizationConfig(
            config_groups={"group_0": first, "W4A16": first, "other_7": first},
            ignore=["lm_head", "re:lm_.*", "x.attn.q", "router"],
            quantization_status="frozen",
        )
        config.merge(
            library.QuantizationConfig(config_groups={name: second}, quantization_status=status)
        )
        return json.loads(config.model_dump_json())

    assert merge(ours) == merge(theirs)


def test_statuses_are_ordered_as_theirs():
    names = [str(status) for status in ours.LIFECYCLE_ORDER]
    assert names == [status.value for status in theirs.LIFECYCLE_ORDER]
    for a, b in itertools.product(names, [*names, None]):
        results = [
            [x < y, x <= y, x > y, x >= y, x == y]
            for library in (ours, theirs)
            for x in [library.QuantizationStatus(a)]
            for y in [b and library.QuantizationStatus(b)]
        ]
        assert results[0] == results[1], (a, b)
    assert max(ours.QuantizationStatus) is ours.QuantizationStatus.DECOMPRESSED


SHARED = [
    ({"strategy": "tensor"}, (6, 32), None),
    ({"strategy": "channel"}, (6, 32), -1),
    ({"strategy": "group", "group_size": 8}, (6, 32), "group"),
    ({"strategy": "block", "block_structure": [3, 8]}, (6, 32), "block"),
    ({"strategy": "token", "dynamic": True}, (2, 3, 32), -1),
    ({"strategy": "attn_head"}, (2, 3, 5, 32), (0, 2, 3)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [(8, "int"), (4, "int"), (8, "float"), (4, "float"), (6, "float")])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shared", "shape", "over"), SHARED)
def test_functions_on_tensors_give_their_results(shared, shape, over, symmetric, kind, dtype):
    if kind[1] == "float" and kind[0] < 8 and not symmetric:
        return  # refused by both
    options = {"num_bits": kind[0], "type": kind[1], "symmetric": symmetric, **shared}
    args, their_args = ours.QuantizationArgs(**options), theirs.QuantizationArgs(**options)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    match over:
        case "group":
            low, high = x.unflatten(-1, (-1, 8)).aminmax(dim=-1)
        case "block":
            blocks = x.reshape(2, 3, 4, 8)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        case None:
            low, high = x.aminmax()
        case int():
            low, high = x.aminmax(dim=over, keepdim=True)
        case _:
            low, high = x.amin(over)[:, None, None], x.amax(over)[:, None, None]
    scale, zero = ours.calculate_qparams(low, high, args)
    their_scale, their_zero = their_utils.calculate_qparams(low, high, their_args)
    assert same_bits(scale, their_scale)
    assert torch.equal(zero.float(), their_zero.float())
    assert zero.dtype is their_zero.dtype or kind[0] < 8
    values = ours.fake_quantize(x, scale, zero, args)
    want = theirs.fake_quantize(x, scale, zero, their_args)
    assert values.dtype is want.dtype
    assert torch.equal(values, want)  # theirs may be -0.0 where integers have no sign
    codes = ours.quantize(x, scale, zero, args)
    their_codes = theirs.quantize(x, scale, zero, their_args)
    assert codes.dtype is their_codes.dtype
    assert torch.equal(codes, their_codes)
    narrow = torch.int8 if kind[1] == "int" else torch.float8_e4m3fn
    codes, their_codes = (
        f(x, scale, zero, a, dtype=narrow)
        for f, a in ((ours.quantize, args), (theirs.quantize, their_args))
    )
    assert torch.equal(codes.float(), their_codes.float())
    want = theirs.dequantize(their_codes, scale, zero, args=their_args)
    assert same_bits(ours.dequantize(codes, scale, zero, args=args), want)
    for have, limit in zip(
        ours.calculate_range(args, "cpu"),
        their_utils.calculate_range(their_args, "cpu"),
        strict=True,
    ):
        assert same_bits(have, limit)


def test_where_their_functions_are_wrong_ours_differ():
    zeros, ones = torch.zeros(3, 1), torch.ones(3, 1)
    options = {"type": "float", "symmetric": False, "strategy": "channel"}
    args, their_args = ours.QuantizationArgs(**options), theirs.QuantizationArgs(**options)
    assert ours.calculate_qparams(zeros, zeros, args)[1].float().tolist() == zeros.tolist()
    assert their_utils.calculate_qparams(zeros, zeros, their_args)[1].isnan().all()
    assert ours.dequantize(ones, ones, args=args, dtype=torch.float16).dtype is torch.float16
    want = theirs.dequantize(ones, ones, args=their_args, dtype=torch.float16)
    assert want.dtype is torch.float32  # although asked for another
    options = {"num_bits": 4, "type": "float", "group_size": 64, "scale_dtype": torch.uint8}
    args, their_args = ours.QuantizationArgs(**options), theirs.QuantizationArgs(**options)
    scale, zero = ours.calculate_qparams(-ones / 8, ones / 8, args)
    assert (
        ours.fake_quantize(ones.expand(3, 64) / 8, scale, zero, args).tolist() == [[1 / 8] * 64] * 3
    )
    their_scale, _ = their_utils.calculate_qparams(-ones / 8, ones / 8, their_args)
    assert not theirs.fake_quantize(ones.expand(3, 64) / 8, their_scale, None, their_args).any()


def test_dequantize_without_arguments_is_refused_as_by_theirs():
    for library in (ours, theirs):
        with pytest.raises(ValueError, match=r"(?i)infer"):
            library.dequantize(torch.ones(2, 2), torch.ones(1))


def config_of_release_0_6(**args):
    """Return a config as release 0.6 wrote it."""
    common = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "strategy": "tensor",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": common | args, "output_activations": None}
    return {
        "config_groups": {"group_0": {**group, "input_activations": common | args}},
        "format": "int-quantized",
        "global_compression_ratio": 1.2,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
    }


def test_static_scales_per_token_in_older_files_are_scales_per_tensor():
    config = ours.QuantizationConfig.from_dict(config_of_release_0_6(strategy="token"))
    scheme = config.config_groups["group_0"]
    assert scheme.input_activations == ours.QuantizationArgs(observer="minmax")
    assert config.quantization_status is ours.QuantizationStatus.FROZEN


def test_a_group_size_beside_channels_in_older_files_is_ignored():
    section = config_of_release_0_6()
    section["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": 128}
    scheme = ours.QuantizationConfig.from_dict(section).config_groups["group_0"]
    assert scheme.weights == ours.QuantizationArgs(strategy="channel", observer="minmax")


@pytest.mark.parametrize("module", [theirs, their_config])
def test_every_public_name_exists_or_is_listed_as_not_provided(module):
    page = PAGE.read_text()
    section = page[page.index("## compressed-tensors") :].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", section.partition("### Not provided")[2]))
    public = {
        name
        for name in vars(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), type(pytest))
    }
    missing = {name for name in public if not hasattr(ours, name) and not hasattr(compat, name)}
    assert missing <= listed
