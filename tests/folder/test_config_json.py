"""`config.json` of folders that somebody else has made."""

import json

import pytest
from models import write_folder

from slimtensors.errors import ConfigError
from slimtensors.folder import compress_folder, config_json
from slimtensors.quantization import QuantizationConfig

pytestmark = pytest.mark.hostile

MALFORMED = {
    "not JSON": "{",
    "nested too deeply": '{"a":' * 100_000,
    "a long number": '{"a": ' + "9" * 5000 + "}",
    "not an object": "[]",
    "not UTF-8": "\udcff",
    "text that cannot be written": r'{"a": "\ud800"}',
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_config_raises_with_its_path(text, tmp_path):
    folder = write_folder(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(text, errors="surrogateescape")
    for read in (
        lambda: config_json.read_config(folder),
        lambda: config_json.update_config(folder, lambda config: {**config, "b": 1}),
        lambda: compress_folder(folder, tmp_path / "small"),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(path) in str(caught.value)
    if "written" not in text and r"\ud800" not in text:
        with pytest.raises(ConfigError, match=r"config\.json"):
            QuantizationConfig.parse_file(path)


STRANGE = [1, True, "x", [1], {"x": 1}, 1e300]


@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_a_malformed_section_raises_config_error(value):
    section = QuantizationConfig.preset("W4A16").to_dict()
    for key in section:
        for config in ({**section, key: value}, {**section, "config_groups": {"g": {key: value}}}):
            try:
                found = config_json.parse_quantization({"quantization_config": config})
            except ConfigError as error:
                assert "config.json" in str(error)  # noqa: PT017
            else:
                json.dumps(found and found.to_dict())


def test_a_malformed_group_raises_config_error():
    section = QuantizationConfig.preset("W4A16").to_dict()
    weights = section["config_groups"]["group_0"]["weights"]
    for key in (*weights, "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        for value in STRANGE:
            group = {"targets": ["Linear"], "weights": {**weights, key: value}}
            config = {"quantization_config": {**section, "config_groups": {"g": group}}}
            try:
                found = config_json.parse_quantization(config)
            except ConfigError:
                continue
            assert QuantizationConfig.from_dict(found.to_dict()) == found
