"""Sparse folders in the dialect of compressed-tensors, through our Auto classes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import llama, mixtral, same_weights
from transformers import AutoModelForCausalLM

from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import BitmaskConfig
from slimtensors.transformers.auto import SparseAutoModel, SparseAutoModelForCausalLM

SECTION = {"sparsity_config": {"format": "sparse-bitmask", "targets": ["Linear"], "ignore": []}}


def sparse_folder(model, folder, *, shards="50GB"):
    model.save_pretrained(folder / "dense", max_shard_size=shards)
    compress_folder(folder / "dense", folder / "parts", dialect="compressed-tensors")
    return folder / "parts"


def make_foreign(folder, *, short_names, config):
    """Make a folder look as if compressed-tensors had written it."""
    path = folder / "model.safetensors"
    table = load_file(path)
    suffixes = ("compressed", "bitmask", "shape", "row_offsets")
    if short_names:
        table = {
            name.replace(".weight.", ".") if name.endswith(suffixes) else name: x
            for name, x in table.items()
        }
    save_file(table, path, metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    for key in ("quantization_config", "sparsity_config"):
        found.pop(key, None)
    (folder / "config.json").write_text(json.dumps(found | config))


@pytest.mark.parametrize("make", [llama, mixtral])
@pytest.mark.parametrize("shards", ["50GB", "60kB"])
def test_sparse_folders_in_parts_load(tmp_path, make, shards):
    model = make()
    folder = sparse_folder(model, tmp_path, shards=shards)
    loaded, info = SparseAutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, model)
    assert isinstance(loaded.sparsity_config, BitmaskConfig)


@pytest.mark.parametrize("make", [llama, mixtral])
@pytest.mark.parametrize(
    ("short_names", "config"),
    [
        (False, SECTION),  # 0.3
        (False, {"compression_config": SECTION}),  # 0.6
        (False, {"quantization_config": {"quant_method": "compressed-tensors", **SECTION}}),
        (
            True,
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "version": "0.14.0.1",
                    "transform_config": {},
                    **SECTION,
                }
            },
        ),
    ],
)
def test_folders_of_every_release_load(tmp_path, make, short_names, config):
    model = make()
    folder = sparse_folder(model, tmp_path)
    make_foreign(folder, short_names=short_names, config=config)
    loaded, info = SparseAutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, model)


def test_sparse_folders_in_parts_are_saved_in_parts(tmp_path):
    model = llama()
    folder = sparse_folder(model, tmp_path)
    loaded = SparseAutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    want = load_file(folder / "model.safetensors")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == want.keys()
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_options_reach_the_model_and_its_config(tmp_path):
    folder = sparse_folder(llama(), tmp_path)
    loaded = SparseAutoModel.from_pretrained(folder, dtype=torch.float16, use_cache=False)
    assert loaded.dtype is torch.float16
    assert loaded.config.use_cache is False


def test_a_dense_folder_loads(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    loaded = SparseAutoModelForCausalLM.from_pretrained(
        model_name_or_path=str(tmp_path / "dense"), dtype="float32"
    )
    assert same_weights(loaded, model)
    assert loaded.sparsity_config is None
    made = SparseAutoModelForCausalLM.from_config(model.config)
    made.save_pretrained(tmp_path / "made", save_compressed=True)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "made"), made)
