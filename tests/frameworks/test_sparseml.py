"""SparseML: its layout of sparse models, read and written through transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategies import same_bits
from tiny_models import MODELS, SMALL, TOKENS, llama, pruned, same_answers, same_weights
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    OPTConfig,
    Qwen2MoeConfig,
)

import slimtensors
from slimtensors.errors import ConfigError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import MagnitudePruning, Quantize
from slimtensors.runtime import CompressedTensor
from slimtensors.transformers import (
    SparseAutoConfig,
    SparseAutoModelForCausalLM,
    SparseAutoTokenizer,
    enable,
    oneshot,
)

PARTS = {"bitmask", "compressed", "row_offsets", "shape"}
GOLDEN = Path(__file__).parents[1] / "golden" / "slim" / "2" / "sparseml" / "model"
PROGRAM = Path(__file__).parents[1] / "transformers" / "programs" / "load_without_import.py"


def opt():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=96,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=64,
    )
    return pruned(AutoModelForCausalLM.from_config(config))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return pruned(AutoModelForCausalLM.from_config(config))


def qwen2_moe():
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return pruned(AutoModelForCausalLM.from_config(config))


ARCHITECTURES = MODELS | {
    "opt": (opt, {"input_ids": TOKENS}),
    "gpt2": (gpt2, {"input_ids": TOKENS}),
    "qwen2-moe": (qwen2_moe, {"input_ids": TOKENS}),
}


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def list_suffixes(folder):
    """Return the last components of the names of sparse tensors in the files of a folder."""
    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    return {
        name.rpartition(".")[2] for name in names if f"{name.rpartition('.')[0]}.bitmask" in names
    }


def edit_config(folder, edit):
    (folder / "config.json").write_text(json.dumps(edit(read_config(folder))))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_sparse_model_is_stored_in_parts_and_loads_unchanged(tmp_path, kind):
    make, inputs = ARCHITECTURES[kind]
    model = enable(make())
    type(model).save_pretrained(model, tmp_path / "dense")
    model.save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    assert list_suffixes(tmp_path / "small") == PARTS
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    whole = {name for name in stored if name in dense}
    assert {f"{name}.{part}" for name in dense.keys() - whole for part in PARTS} | whole == set(
        stored
    )

    loaded, info = type(model).from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, model)
    assert same_answers(loaded, model, inputs)
    loaded.save_pretrained(tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        want = (tmp_path / "small" / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == want


def test_the_config_is_that_of_the_note(tmp_path):
    model = enable(llama())
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(1).view(-1)[: x.numel() // 2] = 0
    model.save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    assert read_config(tmp_path / "small")["sparsity_config"] == {
        "format": "sparse_bitmask",
        "sparsity_structure": "unstructured",
        "global_sparsity": "0.5",
    }
    assert model.sparsity_config == BitmaskConfig(global_sparsity=0.5)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, SparseAutoModelForCausalLM])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_and_tied_weights_load_with_every_auto_class(tmp_path, auto, tied):
    model = enable(llama(tied=tied))
    model.save_pretrained(tmp_path / "small", save_compressed=True, max_shard_size="40kB")
    assert list_suffixes(tmp_path / "small") == PARTS
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "model.layers.0.mlp.up_proj.weight.row_offsets" in index["weight_map"]
    loaded = auto.from_pretrained(tmp_path / "small")
    assert same_weights(loaded, model)
    is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert is_tied == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_survives(tmp_path, dtype):
    model = enable(llama(dtype=dtype))
    with torch.no_grad():
        row = model.lm_head.weight[0]
        row[:4] = torch.tensor([-0.0, float("nan"), float("inf"), torch.finfo(dtype).tiny])
    model.save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert loaded.dtype is dtype
    assert same_weights(loaded, model)


@pytest.mark.slow
def test_transformers_alone_stops_instead_of_using_random_weights(tmp_path):
    enable(llama()).save_pretrained(tmp_path / "a", save_compressed=True)
    type(llama()).save_pretrained(llama(), tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "b", dialect="compressed-tensors")
    folders = [str(tmp_path / name) for name in ("a", "b", "dense")]
    result = subprocess.run(
        [sys.executable, PROGRAM, *folders], capture_output=True, text=True, check=True
    )
    refused = ["refused: ValueError"] * 2
    assert result.stdout.splitlines()[-3:] == [*refused, f"LOADED {folders[2]}"]
    # transformers quotes this key in its error.
    reasons = [read_config(tmp_path / name)["transformers_weights"] for name in ("a", "b")]
    assert "import slimtensors.transformers" in reasons[0]
    assert "SparseAutoModel of slimtensors.transformers" in reasons[1]


def test_a_dense_copy_has_no_trace_of_the_sparse_one(tmp_path):
    model = llama()
    enable(model).save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    loaded.save_pretrained(tmp_path / "a", save_compressed=False, skip_compression_stats=True)
    slimtensors.transformers.decompress_folder(tmp_path / "small", tmp_path / "b")
    type(model).save_pretrained(model, tmp_path / "c")
    want = read_config(tmp_path / "c")
    assert read_config(tmp_path / "a") == read_config(tmp_path / "b") == want
    assert not {"transformers_weights", "quantization_config"} & want.keys()


def test_dense_weights_are_saved_with_a_config_if_compression_is_off(tmp_path):
    model = enable(llama())
    model.save_pretrained(
        tmp_path / "dense", sparsity_config=BitmaskConfig(), save_compressed=False
    )
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    assert all(same_bits(x, stored[name]) for name, x in model.state_dict().items())
    assert read_config(tmp_path / "dense")["sparsity_config"]["format"] == "dense_sparsity"
    assert "quantization_config" not in read_config(tmp_path / "dense")


def test_the_slim_layout_is_chosen_by_its_preset(tmp_path):
    model = enable(llama())
    model.save_pretrained(tmp_path / "slim", preset="sparse")
    assert not list_suffixes(tmp_path / "slim")
    assert read_config(tmp_path / "slim")["quantization_config"]["preset"] == "sparse"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "slim")
    assert same_weights(loaded, model)
    loaded.save_pretrained(tmp_path / "again", save_compressed=True)
    assert not list_suffixes(tmp_path / "again"), "a folder keeps its layout"
    loaded.save_pretrained(tmp_path / "parts", sparsity_config=BitmaskConfig())
    assert list_suffixes(tmp_path / "parts") == PARTS


def test_two_of_four_is_stored_as_by_compressed_tensors(tmp_path):
    model = enable(llama())
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 2:
                x.fill_(1).view(-1, 4)[:, 1:3] = 0
    model.save_pretrained(tmp_path / "small", sparsity_config=Sparse24BitmaskConfig())
    assert list_suffixes(tmp_path / "small") == PARTS - {"row_offsets"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert same_weights(loaded, model)
    assert isinstance(loaded.sparsity_config, Sparse24BitmaskConfig)
    loaded.save_pretrained(tmp_path / "again")
    want = (tmp_path / "small" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == want


def test_sparse_weights_run_compressed(tmp_path):
    model = enable(pruned(llama(), 0.9))
    model.save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small", run_compressed=True)
    assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, CompressedTensor)
    assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    want = (tmp_path / "small" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == want


@pytest.mark.parametrize("method", ["sparseml", "compressed_tensors"])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, SparseAutoModelForCausalLM])
@pytest.mark.parametrize("form", ["sparse-bitmask", "sparse_bitmask"])
def test_sparse_folders_with_former_method_names_load(tmp_path, auto, method, form):
    model = llama()
    enable(model).save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())

    def edit(config):
        del config["sparsity_config"], config["transformers_weights"]
        sparsity = {"format": form, "global_sparsity": 0.5, "registry_requires_subclass": False}
        section = {"quant_method": method, "sparsity_config": sparsity}
        return config | {"quantization_config": section}

    edit_config(tmp_path / "small", edit)
    loaded, info = auto.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, model)
    assert loaded.sparsity_config == BitmaskConfig(global_sparsity=0.5)
    loaded.save_pretrained(tmp_path / "again")
    assert list_suffixes(tmp_path / "again") == PARTS


@pytest.mark.parametrize("method", ["sparseml", "compressed_tensors"])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, SparseAutoModelForCausalLM])
def test_quantized_folders_with_former_method_names_load(tmp_path, auto, method):
    llama().save_pretrained(tmp_path / "dense")
    config = QuantizationConfig.preset("W8A8", ignore=["lm_head"])
    quantize_folder(tmp_path / "dense", tmp_path / "small", config)
    want = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small")

    def edit(config):
        return config | {
            "quantization_config": config["quantization_config"] | {"quant_method": method}
        }

    edit_config(tmp_path / "small", edit)
    loaded, info = auto.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, want)
    slimtensors.transformers.decompress_folder(tmp_path / "small", tmp_path / "back")
    assert read_config(tmp_path / "back")["quantization_config"]["quant_method"] == method


@pytest.mark.parametrize("method", ["sparseml", "compressed-tensors"])
def test_dense_weights_with_a_sparsity_config_stay_dense(tmp_path, method):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    sparsity = {"format": "dense", "global_sparsity": 49.8}
    section = {"quant_method": method, "sparsity_config": sparsity}
    edit_config(tmp_path / "dense", lambda config: config | {"quantization_config": section})
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert same_weights(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    assert not list_suffixes(tmp_path / "again")
    assert "quantization_config" not in read_config(tmp_path / "again")
    loaded.save_pretrained(tmp_path / "small", save_compressed=True)
    assert list_suffixes(tmp_path / "small") == PARTS


def test_oneshot_writes_and_reads_the_layout(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    pruning = [MagnitudePruning(sparsity=0.6)]
    for source, target in (("dense", "small"), ("small", "again")):
        made, report = oneshot(tmp_path / source, pruning, output_dir=tmp_path / target)
        assert list_suffixes(tmp_path / target) == PARTS
        assert report.format == "bitmask"
        assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / target), made)
    oneshot(tmp_path / "small", pruning, output_dir=tmp_path / "plain", save_compressed=False)
    assert not list_suffixes(tmp_path / "plain")


def test_a_quantized_model_is_saved_in_the_format_of_compressed_tensors(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    made, _ = oneshot(tmp_path / "dense", [Quantize("W8A8", ignore=["lm_head"])])
    made.save_pretrained(tmp_path / "small", save_compressed=True)
    section = read_config(tmp_path / "small")["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "int-quantized")
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert same_weights(loaded, made)
    assert not hasattr(made.config, "quantization_config")
    made.save_pretrained(
        tmp_path / "both", sparsity_config=BitmaskConfig(), quantization_format="int-quantized"
    )
    assert list_suffixes(tmp_path / "both") >= PARTS
    assert same_weights(SparseAutoModelForCausalLM.from_pretrained(tmp_path / "both"), made)
    made.save_pretrained(tmp_path / "slim", preset="lossless", save_compressed=True)
    assert read_config(tmp_path / "slim")["quantization_config"]["preset"] == "lossless"
    made.save_pretrained(tmp_path / "plain", save_compressed=False)
    assert "quantization_config" not in read_config(tmp_path / "plain")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), made)
    with pytest.raises(ConfigError, match="requires a model that is quantized"):
        enable(model).save_pretrained(tmp_path / "x", quantization_format="int-quantized")


def test_a_plain_auto_class_stops_at_quantized_weights_in_parts(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    made, _ = oneshot(tmp_path / "dense", [Quantize("W8A8", ignore=["lm_head"])])
    made.save_pretrained(tmp_path / "both", sparsity_config=BitmaskConfig())
    SparseAutoModelForCausalLM.from_pretrained(tmp_path / "both").save_pretrained(
        tmp_path / "again"
    )
    for name in ("both", "again"):
        with pytest.raises((ValueError, ImportError), match=r"SparseAutoModel|compressed-tensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path / name)
        loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert same_weights(loaded, made)
    slimtensors.transformers.decompress_folder(tmp_path / "both", tmp_path / "plain")
    assert "transformers_weights" not in read_config(tmp_path / "plain")


def test_options_of_from_pretrained_also_select_the_weights(tmp_path):
    models = {name: enable(llama()) for name in ("a", "b")}
    with torch.no_grad():
        models["b"].lm_head.weight.zero_()
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, sparsity_config=BitmaskConfig())
    models["a"].save_pretrained(tmp_path, sparsity_config=BitmaskConfig())
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path, subfolder="b")
    assert same_weights(loaded, models["b"])


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16, None])
def test_the_dtype_of_from_pretrained_is_that_of_transformers(tmp_path, dtype):
    model = enable(llama(dtype=torch.float16))
    model.save_pretrained(tmp_path, sparsity_config=BitmaskConfig())
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype is want.dtype
    assert same_weights(loaded, want)


def test_parts_load_without_a_section_in_the_config(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    slimtensors.save_compressed_model(model, tmp_path / "model.safetensors")
    assert list_suffixes(tmp_path) == PARTS
    loaded, info = SparseAutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same_weights(loaded, model)


def test_a_config_that_fits_no_weight_is_reported(tmp_path, caplog):
    model = enable(llama())
    for config in (BitmaskConfig(targets=["Conv2d"]), Sparse24BitmaskConfig()):
        caplog.clear()
        model.save_pretrained(tmp_path / "dense", sparsity_config=config)
        assert f"no weight gets smaller as {config.format}" in caplog.text
        assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), model)
    with pytest.raises(ConfigError, match="must be an object such as BitmaskConfig"):
        model.save_pretrained(tmp_path / "x", sparsity_config={"format": "sparse-bitmask"})


def test_the_other_auto_classes_of_sparseml_exist(tmp_path):
    llama().save_pretrained(tmp_path)
    assert SparseAutoConfig.from_pretrained(tmp_path).model_type == "llama"
    assert SparseAutoTokenizer is AutoTokenizer
    model = SparseAutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path)
    assert same_weights(model, llama())
    with pytest.raises(TypeError, match="model_name_or_path"):
        SparseAutoModelForCausalLM.from_pretrained()
    with pytest.raises(ConfigError, match="SparseZoo is offline"):
        SparseAutoModelForCausalLM.from_pretrained("zoo:llama2-7b-pruned60")


def test_a_model_with_few_zeros_is_compressed_losslessly(tmp_path):
    model = enable(llama())
    with torch.no_grad():
        for x in model.parameters():
            x[x == 0] = 0.01
    model.save_pretrained(tmp_path / "small", save_compressed=True)
    assert read_config(tmp_path / "small")["quantization_config"]["preset"] == "lossless"
    assert "sparsity_config" not in read_config(tmp_path / "small")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)


def test_dense_weights_are_described_unless_statistics_are_skipped(tmp_path):
    model = enable(llama())
    model.save_pretrained(tmp_path / "a")
    section = read_config(tmp_path / "a")["sparsity_config"]
    assert section["format"] == "dense_sparsity"
    assert 0.4 < float(section["global_sparsity"]) < 0.6
    model.save_pretrained(tmp_path / "b", skip_compression_stats=True)
    assert "sparsity_config" not in read_config(tmp_path / "b")


def test_a_plain_auto_class_stops_at_sparse_folders_of_compressed_tensors(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", dialect="compressed-tensors")
    with pytest.raises((ValueError, ImportError), match=r"SparseAutoModel|compressed-tensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert same_weights(loaded, llama())


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, SparseAutoModelForCausalLM])
def test_a_golden_folder_loads_and_is_saved_again(tmp_path, auto):
    loaded, info = auto.from_pretrained(GOLDEN, output_loading_info=True)
    assert not any(info.values())
    want = slimtensors.load(GOLDEN)
    assert all(same_bits(loaded.get_parameter(name).data, x) for name, x in want.items())
    loaded.save_pretrained(tmp_path, max_shard_size="4kB")
    names = sorted(path.name for path in GOLDEN.glob("*.safetensors"))
    assert len(names) > 1
    tables = [
        {k: x for name in names for k, x in load_file(f / name).items()} for f in (GOLDEN, tmp_path)
    ]
    assert tables[0].keys() == tables[1].keys()
    assert all(same_bits(x, tables[1][name]) for name, x in tables[0].items())


def test_a_recipe_is_refused_and_its_default_accepted(tmp_path):
    llama().save_pretrained(tmp_path)
    SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe=None)
    with pytest.raises(ConfigError, match="call oneshot"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe="prune.yaml")
