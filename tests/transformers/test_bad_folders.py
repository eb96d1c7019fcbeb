"""Errors for folders that cannot be loaded name the file and the solution."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import bert, llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import slimtensors
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    MismatchError,
    MissingDependencyError,
    UnsupportedVersionError,
)
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.delta import diff_folder
from slimtensors.transformers.loading import SlimConfig, SlimQuantizer
from slimtensors.transformers.saving import enable


@pytest.fixture
def folder(tmp_path):
    enable(llama(), preset="lossless").save_pretrained(tmp_path / "model", max_shard_size="60kB")
    return tmp_path / "model"


def edit_section(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def second_shard(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def load_error(folder, error, message):
    with pytest.raises(error, match=message) as found:
        AutoModelForCausalLM.from_pretrained(folder)
    return str(found.value)


def test_a_missing_shard_is_named(folder):
    shard = second_shard(folder)
    shard.unlink()
    assert shard.name in load_error(
        folder, CorruptFileError, "listed in the index but not found; download"
    )


@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_a_truncated_shard_is_named(folder, left):
    shard = second_shard(folder)
    shard.write_bytes(shard.read_bytes()[:left])
    assert shard.name in load_error(folder, CorruptFileError, r"\w")


def test_damage_inside_a_tensor_is_named_with_the_tensor(folder):
    with slimtensors.open(folder) as archive:
        name = next(t.name for t in archive.summary().tensors if t.codec != "plain")
        shard = Path(archive.info(name).file).name
    data = bytearray((folder / shard).read_bytes())
    data[-40] ^= 1
    (folder / shard).write_bytes(data)
    message = load_error(folder, CorruptFileError, "checksum mismatch")
    assert shard in message
    assert "weight" in message


def test_a_config_of_a_newer_format_asks_for_an_upgrade(folder):
    edit_section(folder, version=99, future=True)
    load_error(folder, UnsupportedVersionError, "version 99.*upgrade slimtensors")


def test_a_config_with_an_unknown_key_is_load_error(folder):
    edit_section(folder, presett="lossless")
    load_error(folder, ConfigError, "'presett'; did you mean 'preset'")


def test_weights_quantized_by_another_method_are_refused(folder):
    edit_section(folder, before={"quantization_config": {"quant_method": "gptq"}})
    load_error(folder, ConfigError, "gptq.*slimtensors decompress")


def test_a_delta_without_its_base_is_refused(folder, tmp_path):
    compress_folder(folder, tmp_path / "new")
    diff_folder(tmp_path / "new", folder, tmp_path / "delta")
    for name in ("new", "model"):
        (tmp_path / name).rename(tmp_path / f".{name}")
    load_error(tmp_path / "delta", MismatchError, "its base 'model' was not found")


def test_compressed_weights_are_not_read_from_pickles(folder):
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    load_error(
        folder, ConfigError, r"pytorch_model.bin: compressed weights must be .safetensors files"
    )


def test_a_config_cannot_compress_a_dense_folder(tmp_path):
    bert().save_pretrained(tmp_path / "dense")
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"load the model without it, then .*enable"):
        LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=SlimConfig())


def test_a_missing_dtype_is_an_error():
    """transformers infers the dtype from the first tensor, which may be compressed bytes."""
    with pytest.raises(ConfigError, match="pass dtype="):
        SlimQuantizer(SlimConfig()).update_dtype(torch.uint8)
    assert SlimQuantizer(SlimConfig(dtype="float16")).update_dtype(torch.uint8) is torch.float16
    assert SlimQuantizer(SlimConfig(dtype="float16")).update_dtype(torch.float32) is torch.float32


LOAD_WITHOUT_IMPORT = Path(__file__).parent / "programs" / "load_without_import.py"


@pytest.mark.slow
def test_without_our_import_no_folder_loads(tmp_path):
    folders = []
    for preset in ("sparse", "lossless", "extreme"):
        for shard in ("50GB", "60kB"):
            folders.append(str(tmp_path / f"{preset}-{shard}"))
            enable(llama(), preset=preset).save_pretrained(folders[-1], max_shard_size=shard)
    command = [sys.executable, LOAD_WITHOUT_IMPORT, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["refused: RuntimeError"] * len(folders)


def test_a_missing_transformers_is_an_error_with_the_install_line():
    hide = "import sys; sys.modules['transformers'] = None; import slimtensors.transformers"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert MissingDependencyError.__name__ in done.stderr
    assert "pip install 'slimtensors[transformers]'" in done.stderr
