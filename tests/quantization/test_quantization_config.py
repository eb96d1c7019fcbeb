"""Quantization configs: presets, current and older JSON, and the group of a layer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimtensors.errors import ConfigError
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from slimtensors.quantization.scheme import PRESETS
from slimtensors.quantization.targets import find_group, make_disjoint

LINEAR = ["Linear", "Module"]


def section(**more):
    return QuantizationConfig.preset("W4A16").to_dict() | more


@given(name=st.sampled_from(sorted(PRESETS)), ignore=st.lists(st.text(max_size=9)))
def test_config_round_trips_through_json(name, ignore):
    config = QuantizationConfig.preset(name, ignore=ignore)
    assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_group_may_be_a_list_of_targets_under_a_preset_name():
    config = QuantizationConfig.from_dict({"config_groups": {"w8a8": ["Linear", "re:.*x"]}})
    scheme = config.config_groups["w8a8"]
    assert scheme == QuantizationScheme.preset("W8A8", ["Linear", "re:.*x"])
    assert scheme.input_activations.dynamic is True


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'W4A16'"):
        QuantizationConfig.from_dict({"config_groups": {"W4A17": ["Linear"]}})


def test_a_file_may_be_the_section_or_a_whole_config(tmp_path):
    for number, data in enumerate(
        [
            section(),
            {"model_type": "llama", "quantization_config": section()},
            {"model_type": "llama", "compression_config": section(ignore=None)},
            {"quantization_config": {"quantization_config": section(run_compressed=True)}},
        ]
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(data))
        assert QuantizationConfig.parse_file(file) == QuantizationConfig.preset("W4A16")


def test_section_without_version_stays_without_version():
    data = section()
    del data["version"]
    assert QuantizationConfig.from_dict(data).version is None
    assert QuantizationConfig.from_dict(data).to_dict() == data


def test_an_old_sparsity_section_is_kept():
    zeros = {"format": "sparse-bitmask", "global_sparsity": 0.5}
    inside = {"quantization_config": section(sparsity_config=zeros)}
    beside = {"compression_config": {"quantization_config": section(), "sparsity_config": zeros}}
    for data in (inside, beside):
        assert QuantizationConfig.from_dict(data).sparsity_config == zeros


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_gruops": {}}, "did you mean 'config_groups'"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weight": {}}}}, "a: .*'weights'"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "list of targets"),
        ({"config_groups": {"a": 3}}, "a: expected a scheme"),
        ({"quantization_status": "calibrated"}, "did you mean 'calibration'"),
        ({"quant_method": "gptq"}, "expected 'compressed-tensors'"),
        ({"kv_cache_scheme": {"bits": 8}}, "num_bits"),
    ],
)
def test_invalid_config_raises(change, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig.from_dict(section(**change))


def test_invalid_config_file_is_named_in_the_error(tmp_path):
    file = tmp_path / "config.json"
    for text in ("{", "[]", '{"model_type": "llama"}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=str(file)):
            QuantizationConfig.parse_file(file)


@pytest.mark.parametrize(
    "args",
    [
        {"weights": QuantizationArgs(dynamic=True)},
        {"input_activations": QuantizationArgs(group_size=-1)},
        {"input_activations": QuantizationArgs(group_size=32)},
        {"format": "mixed-precision"},
    ],
)
def test_invalid_scheme_raises(args):
    with pytest.raises(ConfigError):
        QuantizationScheme(["Linear"], **args)


def test_only_static_activations_need_data():
    needs = {name for name in PRESETS if QuantizationConfig.preset(name).needs_data}
    assert needs == {"FP8", "NVFP4"}
    assert QuantizationConfig(kv_cache_scheme=QuantizationArgs()).needs_data


def test_a_status_may_be_assigned_as_in_the_readme():
    config = QuantizationConfig.preset("W4A16")
    config.quantization_status = QuantizationStatus.CALIBRATION
    assert config.to_dict()["quantization_status"] == "calibration"


def groups(**targets):
    return {name: QuantizationScheme.preset("W4A16", x) for name, x in targets.items()}


def test_names_precede_patterns_and_patterns_precede_classes():
    by = groups(c=["Linear"], p=["re:.*down"], n=["a.down"])
    assert find_group(by, [], "a.down", LINEAR) == "n"
    assert find_group(by, [], "b.down", LINEAR) == "p"
    assert find_group(by, [], "b.up", LINEAR) == "c"
    assert find_group(by, [], "b.norm", ["LayerNorm"]) is None


def test_ignored_layers_have_no_group():
    by = groups(n=["head"], c=["Linear"])
    assert find_group(by, ["re:.*ead$"], "head", LINEAR) is None
    assert find_group(by, ["head"], "head", LINEAR) is None
    assert find_group(by, ["Linear"], "head", LINEAR) is None
    assert find_group(by, ["lm_head"], "head", LINEAR) == "n"


def test_two_groups_that_match_equally_well_raise():
    with pytest.raises(ConfigError, match=r"x\.down: the groups a and b"):
        find_group(groups(a=["re:.*down"], b=["re:x.*"]), [], "x.down", LINEAR)


def test_invalid_pattern_raises():
    with pytest.raises(ConfigError, match="regular expression"):
        find_group(groups(a=["re:("]), [], "x", LINEAR)


def test_overlapping_groups_are_written_layer_by_layer():
    by = groups(z=["Linear"], a=["re:.*down"], e=["Embedding"])
    layers = {
        "2.down": ("a", LINEAR),
        "1.down": ("a", LINEAR),
        "1.up": ("z", LINEAR),
        "emb": ("e", ["Embedding"]),
    }
    written = make_disjoint(by, layers)
    assert {name: list(g.targets) for name, g in written.items()} == {
        "a": ["1.down", "2.down"],
        "e": ["Embedding"],
        "z": ["1.up"],
    }
    assert list(written) == sorted(written)


def test_disjoint_groups_are_unchanged():
    by = groups(a=["re:.*down"], b=["re:.*up"])
    layers = {"down": ("a", LINEAR), "up": ("b", LINEAR)}
    assert make_disjoint(by, layers) == by
