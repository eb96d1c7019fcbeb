"""Decompressed and restored folders are identical to their sources, byte for byte."""

import json

import pytest
import torch
from models import CONFIG, pruned, weights, write_folder, write_llama, write_shards
from safetensors.torch import save_file

import slimtensors
from slimtensors.errors import ConfigError, FormatError
from slimtensors.folder import (
    compress_folder,
    convert_folder,
    decompress_folder,
    diff_folder,
    restore_folder,
)


def read_files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
@pytest.mark.parametrize("shard", [None, "100KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_saved_by_transformers_comes_back(tmp_path, dialect, shard, tied):
    source = write_llama(tmp_path / "model", shard=shard, tied=tied)
    (source / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    compress_folder(source, tmp_path / "small", dialect=dialect)
    assert slimtensors.verify(tmp_path / "small", against=source).files == "identical"
    decompress_folder(tmp_path / "small", tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("size", ["4KB", "1GB"])
def test_changed_shards_come_back(tmp_path, shards, size):
    source = write_folder(tmp_path / "model", shards=shards)
    compress_folder(source, tmp_path / "small", max_shard_size=size)
    assert slimtensors.verify(tmp_path / "small", against=source).files == "identical"
    decompress_folder(tmp_path / "small", tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)
    compress_folder(tmp_path / "small", tmp_path / "again", dialect="compressed-tensors")
    decompress_folder(tmp_path / "again", tmp_path / "and-back")
    weights_only = {n: d for n, d in read_files(source).items() if n != "config.json"}
    assert read_files(tmp_path / "and-back").items() >= weights_only.items()


def test_shards_in_a_subfolder_come_back(tmp_path):
    source = tmp_path / "model"
    (source / "part one").mkdir(parents=True)
    save_file({"a": pruned(64, 64)}, source / "part one" / "x.safetensors", {"ü": "1"})
    save_file({"b": pruned(64, 64, seed=1)}, source / "y.safetensors")
    names = {"b": "y.safetensors", "a": "part one/x.safetensors"}
    index = {"weight_map": names, "extra": [1.0, None]}
    (source / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    compress_folder(source, tmp_path / "small")
    decompress_folder(tmp_path / "small", tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


def test_a_file_with_another_name_comes_back(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    save_file(weights(), source / "other.safetensors")
    compress_folder(source, tmp_path / "small", max_shard_size="1GB")
    assert (tmp_path / "small" / "model.safetensors").exists()
    decompress_folder(tmp_path / "small", tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


TEXTS = {
    "one line": json.dumps(CONFIG),
    "tabs": json.dumps(CONFIG, indent="\t"),
    "escapes": json.dumps(CONFIG | {"author": "ü"}, indent=2) + "\n",
    "numbers": '{"model_type": "llama", "eps": 0.00001, "n": 1.0, "big": 1E3}\r\n',
    "sections first": '{"quantization_config": {"quant_method": "gptq"}, "model_type": "llama"}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_the_text_of_a_config_comes_back(tmp_path, text):
    source = write_folder(tmp_path / "model")
    (source / "config.json").write_bytes(text.encode())
    compress_folder(source, tmp_path / "small")
    compress_folder(tmp_path / "small", tmp_path / "smaller", preset="sparse")
    decompress_folder(tmp_path / "smaller", tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_an_edited_config_is_not_replaced_by_the_old_text(tmp_path):
    compress_folder(write_folder(tmp_path / "model"), tmp_path / "small")
    edit_config(tmp_path / "small", lambda config: config.update(hidden_size=True))
    decompress_folder(tmp_path / "small", tmp_path / "back")
    expected = CONFIG | {"hidden_size": True}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == expected


@pytest.mark.parametrize("text", ["%", "AAAA", 7, None])
def test_a_forged_config_text_is_refused(tmp_path, text):
    compress_folder(write_folder(tmp_path / "model"), tmp_path / "small")
    section = {"original": text}
    edit_config(tmp_path / "small", lambda c: c["quantization_config"].update(section))
    if text is None:
        decompress_folder(tmp_path / "small", tmp_path / "back")
        return
    with pytest.raises(ConfigError, match=r"config\.json: original"):
        decompress_folder(tmp_path / "small", tmp_path / "back")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_restored_folder_is_identical(tmp_path, shards):
    base = write_folder(tmp_path / "base")
    changed = {name: x + 1 if "mlp" in name else x for name, x in weights().items()}
    new = write_folder(tmp_path / "new", shards=shards, table=changed)
    diff_folder(new, base, tmp_path / "delta")
    restore_folder(tmp_path / "delta", base, tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(new)


def test_conversion_to_dense_gives_back_the_files(tmp_path):
    source = write_folder(tmp_path / "model", shards=2)
    compress_folder(source, tmp_path / "small")
    convert_folder(tmp_path / "small", tmp_path / "back", to="dense")
    assert read_files(tmp_path / "back") == read_files(source)


def test_a_file_with_the_name_of_an_original_is_not_overwritten(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    write_shards(source, weights(), 2)
    compress_folder(source, tmp_path / "small", max_shard_size="1GB")
    (tmp_path / "small" / "model-00001-of-00002.safetensors").write_bytes(b"another file")
    with pytest.raises(FormatError, match="model-00001-of-00002"):
        decompress_folder(tmp_path / "small", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_folder_without_headers_is_decompressed_as_before(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    slimtensors.save(weights(), folder / "model.safetensors")
    decompress_folder(folder, tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=folder)
    assert torch.equal(
        slimtensors.load(tmp_path / "back")["model.layers.0.norm.weight"],
        weights()["model.layers.0.norm.weight"],
    )
