"""Configs have the same meaning here and in compressed-tensors."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from strategies import same_bits

from slimtensors import ModelCompressor
from slimtensors.quantization import QuantizationConfig, QuantizationScheme
from slimtensors.quantization.scheme import PRESETS

pytestmark = pytest.mark.interop

GOLDEN = Path(__file__).parent.parent / "golden" / "compressed_tensors"

theirs = pytest.importorskip("compressed_tensors.quantization")


def test_all_their_presets_exist():
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert PRESET_SCHEMES.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_equal(name):
    scheme = theirs.preset_name_to_scheme(name, ["Linear"])
    text = scheme.model_dump_json()
    assert QuantizationScheme.from_dict(json.loads(text)) == QuantizationScheme.preset(name)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_configs_are_read_in_both_directions(name):
    ours = QuantizationConfig.preset(name, targets=["re:.*proj"], ignore=["lm_head"])
    ours.format, ours.version = "dense", None
    parsed = theirs.QuantizationConfig.model_validate(json.loads(json.dumps(ours.to_dict())))
    assert parsed.config_groups["group_0"].targets == ["re:.*proj"]
    assert QuantizationConfig.from_dict(json.loads(parsed.model_dump_json())) == ours


@pytest.mark.parametrize("release", ["0.14.0.1", "0.17.1", "0.20.0"])
def test_files_of_each_release_are_read_by_their_config(release):
    layers = json.loads((GOLDEN / release / "quantized.json").read_text())
    groups = {name: {"targets": [name], **about} for name, about in layers.items()}
    config = {"config_groups": groups, "format": "mixed-precision", "version": release}
    compressor = ModelCompressor(QuantizationConfig.from_dict({"quantization_config": config}))
    have = compressor.decompress(GOLDEN / release / "quantized.safetensors")
    want = load_file(GOLDEN / release / "quantized-dense.safetensors")
    assert have.keys() == {f"{name}.weight" for name in want}
    assert all(same_bits(have[f"{name}.weight"], x) for name, x in want.items())
