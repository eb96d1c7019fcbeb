"""Configs mean the same here and in compressed-tensors."""

import json

import pytest

from slimtensors.quantization import QuantizationConfig, QuantizationScheme
from slimtensors.quantization.presets import PRESETS

theirs = pytest.importorskip("compressed_tensors.quantization")

SIX_BITS = {"MXFP6A16", "MXFP6A8"}
"""Floats of six bits have no vLLM kernel and are not ours."""


def test_every_preset_of_theirs_is_known():
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert PRESET_SCHEMES.keys() - SIX_BITS == PRESETS.keys()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_the_same_numbers(name):
    scheme = theirs.preset_name_to_scheme(name, ["Linear"])
    text = scheme.model_dump_json()
    assert QuantizationScheme.from_dict(json.loads(text)) == QuantizationScheme.preset(name)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_they_read_our_configs_and_we_theirs(name):
    ours = QuantizationConfig.preset(name, targets=["re:.*proj"], ignore=["lm_head"])
    ours.format, ours.version = "dense", None
    parsed = theirs.QuantizationConfig.model_validate(json.loads(json.dumps(ours.to_dict())))
    assert parsed.config_groups["group_0"].targets == ["re:.*proj"]
    assert QuantizationConfig.from_dict(json.loads(parsed.model_dump_json())) == ours
