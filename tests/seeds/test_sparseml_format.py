"""What sparseml's note on compressed safetensors says about files and config.json."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategies import same_bits

from slimtensors.cli import main
from slimtensors.compat.sparse_formats import load_compressed, save_compressed
from slimtensors.folder.config_json import BitmaskConfig, SparsityConfig

ROWS, COLUMNS = 24, 61


@pytest.fixture
def weight():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=g).bfloat16()
    x[torch.rand(ROWS, COLUMNS, generator=g) < 0.5] = 0
    x[3] = 0
    return x


@pytest.fixture
def compressed(weight, tmp_path):
    save_compressed({"PARAM_NAME": weight}, tmp_path / "model.safetensors", "sparse-bitmask")
    return load_file(tmp_path / "model.safetensors")


def test_a_parameter_is_stored_as_four_tensors(compressed):
    assert compressed.keys() == {
        "PARAM_NAME.compressed",
        "PARAM_NAME.bitmask",
        "PARAM_NAME.shape",
        "PARAM_NAME.row_offsets",
    }


def test_the_compressed_tensor_is_1d_and_holds_the_nonzero_values(compressed, weight):
    assert same_bits(compressed["PARAM_NAME.compressed"], weight[weight != 0])


def test_the_bitmask_is_2d_with_a_bit_per_column_lowest_first(compressed, weight):
    mask = compressed["PARAM_NAME.bitmask"]
    assert mask.dtype is torch.uint8
    assert mask.shape == (ROWS, -(-COLUMNS // 8))
    bits = (mask[:, :, None] >> torch.arange(8) & 1).view(ROWS, -1).bool()
    assert torch.equal(bits[:, :COLUMNS], weight != 0)
    assert not bits[:, COLUMNS:].any()


def test_the_shape_is_that_of_the_uncompressed_tensor(compressed):
    assert compressed["PARAM_NAME.shape"].dtype is torch.int64
    assert compressed["PARAM_NAME.shape"].tolist() == [ROWS, COLUMNS]


def test_the_row_offsets_say_where_the_values_of_each_row_start(compressed, weight):
    offsets = compressed["PARAM_NAME.row_offsets"]
    assert offsets.dtype is torch.int64
    assert offsets.shape == (ROWS,)
    counts = (weight != 0).sum(1)
    assert torch.equal(offsets, counts.cumsum(0) - counts)


def test_the_config_section_of_the_note_is_read():
    text = """
    {
        "sparsity_config": {
            "format": "sparse_bitmask",
            "sparsity_structure": "unstructured",
            "global_sparsity": "0.5"
        }
    }
    """
    config = BitmaskConfig.from_dict(json.loads(text)["sparsity_config"])
    assert (config.format, config.global_sparsity) == ("sparse_bitmask", 0.5)
    dense = SparsityConfig.from_dict({"format": "dense_sparsity"})
    assert dense.sparsity_structure == "unstructured"


def test_the_note_s_config_loads_the_note_s_file(weight, tmp_path):
    path = tmp_path / "model.safetensors"
    config = BitmaskConfig(format="sparse_bitmask", global_sparsity=0.5)
    save_compressed({"PARAM_NAME": weight}, path, config.format)
    assert same_bits(dict(load_compressed(path, config))["PARAM_NAME"], weight)


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_config_json_says_format_structure_and_sparsity(weight, tmp_path, dialect):
    (tmp_path / "dense").mkdir()
    save_file({"x.weight": weight}, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text('{"model_type": "llama"}')
    source, target = str(tmp_path / "dense"), str(tmp_path / "small")
    assert main(["compress", source, "-o", target, "--dialect", dialect, "-q"]) == 0
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    zeros = (weight == 0).sum().item() / weight.numel()
    assert config["sparsity_config"] == {
        "format": "sparse_bitmask",
        "sparsity_structure": "unstructured",
        "global_sparsity": str(round(zeros, 4)),
    }
    assert BitmaskConfig.from_dict(config["sparsity_config"]).global_sparsity > 0.5
    with safe_open(tmp_path / "small" / "model.safetensors", "pt") as file:
        assert ("x.weight.bitmask" in set(file.keys())) == (dialect == "compressed-tensors")
