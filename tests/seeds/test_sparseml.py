"""The code of sparseml's note on compressed safetensors, with only its imports and paths changed.

What it says about files is in test_sparseml_format; `train` and `oneshot` need recipes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import TOKENS, llama, pruned, same_weights
from transformers import AutoModelForCausalLM

import slimtensors

LOAD = """
from slimtensors.transformers import SparseAutoModelForCausalLM

# should contain model.safetensors or model.safetensors.index.json
model_path = "/PATH/TO/COMPRESSED_MODEL"

model = SparseAutoModelForCausalLM.from_pretrained(
    model_name_or_path=model_path,
    **model_kwargs,
)
"""

SAVE_EXPLICIT = """
from slimtensors.transformers.compression import BitmaskConfig

output_dir = "/PATH/TO/SAVE/COMPRESSED_MODEL"
sparsity_config = BitmaskConfig()

model.save_pretrained(
    save_directory=output_dir,
    sparsity_config=sparsity_config,
)
"""

SAVE_INFERRED = """
model.save_pretrained(
    save_directory=output_dir,
    save_compressed=True
)
"""

SAVE_DENSE = """
model.save_pretrained(
    save_directory=output_dir
)
"""

SAVE_DENSE_SILENTLY = """
model.save_pretrained(
    save_directory=output_dir,
    skip_compression_stats=True
)
"""

EXAMPLE = """
from slimtensors.transformers import SparseAutoModelForCausalLM
from slimtensors.transformers import measure_memory as measure_cuda_memory
import torch

MODEL_PATH = "zoo:llama2-7b-open_platypus_orca_llama2_pretrain-pruned60"
OUTPUT_PATH = "./test_compress_output"
RECIPE = "zoo:llama2-7b-open_platypus_orca_llama2_pretrain-pruned60"

torch.cuda.set_device(0)
with measure_cuda_memory() as m:
    model = SparseAutoModelForCausalLM.from_pretrained(MODEL_PATH, device_map="cuda:0")
print(f"Load dense model peak GPU {m.overall_peak_memory / float(2**30):.4f} GB")

sparsity_config = getattr(model,"sparsity_config", None)
print(f"Sparsity config before compression: {sparsity_config}")
with measure_cuda_memory() as m:
    model.save_pretrained(OUTPUT_PATH, save_compressed=True)
print(f"Save compressed model peak GPU {m.overall_peak_memory / float(2**30):.4f} GB")

torch.cuda.set_device(1)
with measure_cuda_memory() as m:
    model_again = SparseAutoModelForCausalLM.from_pretrained(
        OUTPUT_PATH, device_map="cuda:1"
    )
print(f"Load compressed model peak GPU {m.overall_peak_memory / float(2**30):.4f} GB")
sparsity_config = getattr(model_again,"sparsity_config", None)
print(f"Sparsity config after compression: {sparsity_config}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sparse(folder):
    """A model of which 60 % are zeros, stored dense."""
    model = pruned(llama(), 0.6)
    model.save_pretrained(folder / "sparse")
    return model


def run(code, names, **replaced):
    for old, new in replaced.items():
        code = re.sub(rf'"[^"]*{old}[^"]*"', json.dumps(str(new)), code)
    exec(compile(code, "seed", "exec"), names)
    return names


def config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def codecs(folder):
    return {t.codec for t in slimtensors.inspect(folder).tensors}


def suffixes(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118


def model_of(folder, path):
    return run(LOAD, {"model_kwargs": {"dtype": torch.float32}}, COMPRESSED_MODEL=path)


def test_loading_needs_no_other_interface(sparse, folder):
    assert same_weights(model_of(folder, folder / "sparse")["model"], sparse)


def test_an_explicit_config_is_saved_with_the_model(sparse, folder):
    names = model_of(folder, folder / "sparse")
    run(SAVE_EXPLICIT, names, SAVE=folder / "small")
    assert "bitmask" in codecs(folder / "small")
    section = config(folder / "small")["sparsity_config"]
    assert section["format"] == "sparse_bitmask"
    assert section["sparsity_structure"] == "unstructured"
    assert 0.55 < float(section["global_sparsity"]) < 0.65
    assert {"bitmask", "compressed", "row_offsets", "shape"} <= suffixes(folder / "small")
    assert same_weights(model_of(folder, folder / "small")["model"], sparse)


def test_a_config_is_inferred(sparse, folder):
    names = model_of(folder, folder / "sparse") | {"output_dir": folder / "small"}
    run(SAVE_INFERRED, names)
    assert "bitmask" in codecs(folder / "small")
    assert config(folder / "small")["sparsity_config"]["format"] == "sparse_bitmask"
    assert {"bitmask", "compressed", "row_offsets", "shape"} <= suffixes(folder / "small")


def test_dense_weights_are_described(sparse, folder):
    names = model_of(folder, folder / "sparse") | {"output_dir": folder / "again"}
    run(SAVE_DENSE, names)
    assert codecs(folder / "again") == {"plain"}
    assert config(folder / "again")["sparsity_config"]["format"] == "dense_sparsity"


def test_or_they_are_not(sparse, folder):
    names = model_of(folder, folder / "sparse") | {"output_dir": folder / "again"}
    run(SAVE_DENSE_SILENTLY, names)
    assert codecs(folder / "again") == {"plain"}
    assert "sparsity_config" not in config(folder / "again")


def test_the_example_runs_and_prints_its_memory(sparse, folder, capsys):
    code = EXAMPLE
    if torch.cuda.device_count() < 2:
        code = re.sub(r"torch.cuda.set_device\(\d\)\n", "", code)
        code = re.sub(r'"cuda:\d"', '"cpu"', code)
    names = run(code, {}, pruned60=folder / "sparse")
    assert same_weights(names["model_again"], sparse)
    lines = capsys.readouterr().out.splitlines()
    peaks = [float(found[1]) for line in lines if (found := re.search(r"GPU ([\d.]+) GB", line))]
    assert len(peaks) == 3
    assert all(peak > 0 for peak in peaks)
    assert "Sparsity config before compression: None" in lines
    assert any(line.startswith("Sparsity config after compression: Bitmask") for line in lines)
    assert names["sparsity_config"].global_sparsity > 0.55
    plain = AutoModelForCausalLM.from_pretrained("test_compress_output")
    assert torch.equal(plain(TOKENS).logits, sparse(TOKENS).logits)
