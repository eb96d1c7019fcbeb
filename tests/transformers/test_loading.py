"""Plain `from_pretrained` of transformers on folders of ours."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file
from strategies import same_bits
from tiny_models import (
    MODELS,
    TOKENS,
    bert,
    llama,
    mixtral,
    same_answers,
    same_weights,
    sizes,
    t5,
    vit,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertModel,
    T5ForConditionalGeneration,
)

import slimtensors
import slimtensors.transformers
from slimtensors.folder.compress import compress_folder
from slimtensors.transformers.loading import SlimConfig

PRESETS = ["sparse", "lossless", "extreme"]


def stored(model, folder, preset="lossless", **options):
    """Write a model dense and compressed; return both folders."""
    model.save_pretrained(folder / "dense", **options)
    compress_folder(folder / "dense", folder / "small", preset=preset)
    return folder / "dense", folder / "small"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_loads_unchanged(tmp_path, kind, preset):
    make, inputs = MODELS[kind]
    model = make()
    dense, small = stored(model, tmp_path, preset)
    assert sizes(small) < 0.9 * sizes(dense)
    loaded, info = type(model).from_pretrained(small, output_loading_info=True)
    assert not any(info.values())
    if preset == "extreme":  # the same as what decompressing gives
        slimtensors.transformers.decompress_folder(small, tmp_path / "plain")
        model = type(model).from_pretrained(tmp_path / "plain")
    assert same_weights(loaded, model)
    assert same_answers(loaded, model, inputs)


def test_a_loaded_model_is_an_ordinary_one(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(stored(llama(), tmp_path)[1])
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert model.float().dtype is torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_tensor(tmp_path, tied):
    model = AutoModelForCausalLM.from_pretrained(stored(llama(tied=tied), tmp_path)[1])
    one = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert one == tied


@pytest.mark.parametrize("make", [llama, mixtral])
def test_shards_load(tmp_path, make):
    model = make()
    _, small = stored(model, tmp_path, max_shard_size="60kB")
    assert len(list(small.glob("*.safetensors"))) > 2
    assert same_weights(AutoModelForCausalLM.from_pretrained(small), model)


def test_a_base_model_loads_from_the_checkpoint_of_a_head(tmp_path):
    model = llama()
    loaded = AutoModel.from_pretrained(stored(model, tmp_path)[1])
    assert same_weights(loaded, model.model)


def test_a_head_loads_on_the_checkpoint_of_a_base_model(tmp_path):
    model = bert()
    _, small = stored(model.bert, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(small, num_labels=3)
    assert same_weights(loaded.bert, model.bert)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "auto", "bfloat16"])
def test_floats_are_cast_to_the_requested_dtype(tmp_path, dtype):
    dense, small = stored(llama(dtype=torch.bfloat16), tmp_path)
    want = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    assert same_weights(AutoModelForCausalLM.from_pretrained(small, dtype=dtype), want)


def test_weights_that_a_model_keeps_in_float32_stay_float32(tmp_path):
    dense, small = stored(t5(), tmp_path)
    want = T5ForConditionalGeneration.from_pretrained(dense, dtype=torch.float16)
    assert len({weight.dtype for weight in want.parameters()}) == 2
    have = T5ForConditionalGeneration.from_pretrained(small, dtype=torch.float16)
    assert same_weights(have, want)


def test_the_dtype_is_found_without_config_json(tmp_path):
    dense, small = stored(llama(dtype=torch.bfloat16), tmp_path)
    for folder in (dense, small):
        text = (folder / "config.json").read_text().replace('  "dtype": "bfloat16",\n', "", 1)
        (folder / "config.json").write_text(text)
    assert AutoModelForCausalLM.from_pretrained(small).dtype is torch.bfloat16


def test_integers_stay_integers(tmp_path):
    model = bert()
    model.bert.register_buffer("steps", torch.zeros(4096, dtype=torch.int64))
    stored(model, tmp_path)
    stored_as = slimtensors.inspect(tmp_path / "small").tensors
    assert next(t for t in stored_as if t.name.endswith("steps")).codec != "plain"


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_is_kept(tmp_path, device_map):
    model = llama()
    _, small = stored(model, tmp_path)
    assert same_weights(AutoModelForCausalLM.from_pretrained(small, device_map=device_map), model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [llama, mixtral])
def test_weights_can_be_offloaded_to_the_disk(tmp_path, make, tied):
    model = make(tied=tied) if make is llama else make()
    _, small = stored(model, tmp_path)
    places = {"model.embed_tokens": "disk" if tied else "cpu", "model.layers.0": "disk"}
    places |= {"model.layers.1": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(
        small,
        device_map=places | {"lm_head": places["model.embed_tokens"]},
        offload_folder=tmp_path / "offload",
    )
    assert loaded.model.layers[0].input_layernorm.weight.is_meta
    assert same_answers(loaded, model, {"input_ids": TOKENS})


def test_a_hub_cache_loads(tmp_path, monkeypatch):
    """The hub keeps files as blobs named by hash, and snapshots of links to them."""
    model = llama()
    _, small = stored(model, tmp_path, max_shard_size="60kB")
    repo = tmp_path / "cache" / "models--some--llama"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for i, path in enumerate(sorted(small.iterdir())):
        shutil.copy(path, repo / "blobs" / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    loaded = AutoModelForCausalLM.from_pretrained(
        "some/llama", cache_dir=tmp_path / "cache", local_files_only=True
    )
    assert same_weights(loaded, model)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="60kB")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_weights_of_another_shape_are_an_error(tmp_path, caplog):
    _, small = stored(bert(), tmp_path)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(small, num_labels=7)


def test_weights_of_another_shape_are_initialized_on_request(tmp_path):
    model = bert()
    _, small = stored(model, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(
        small, num_labels=7, ignore_mismatched_sizes=True
    )
    assert loaded.classifier.weight.shape == (7, 64)
    assert same_weights(loaded.bert, model.bert)


def test_a_state_dict_of_the_caller_is_used(tmp_path):
    model = llama()
    _, small = stored(model, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(small).config
    config.quantization_config = {"quant_method": "slimtensors"}
    state = {name: x.clone() for name, x in model.state_dict().items()}
    loaded = type(model).from_pretrained(None, config=config, state_dict=state)
    assert same_weights(loaded, model)


def test_plain_tensors_beside_compressed_ones_load(tmp_path):
    model = vit()
    model.save_pretrained(tmp_path / "dense")
    keep = {"keep": lambda name: "query" in name}
    compress_folder(tmp_path / "dense", tmp_path / "small", preset="sparse", **keep)
    kinds = {t.codec for t in slimtensors.inspect(tmp_path / "small").tensors}
    assert kinds == {"plain", "bitmask"}
    assert same_weights(type(model).from_pretrained(tmp_path / "small"), model)


def test_decompressing_a_folder_gives_back_the_dense_one(tmp_path):
    dense, small = stored(llama(), tmp_path)
    slimtensors.transformers.decompress_folder(small, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(same_bits(x, back[k]) for k, x in load_file(dense / "model.safetensors").items())
    assert (dense / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()


def test_a_class_that_uses_no_weight_is_an_error(tmp_path):
    _, small = stored(llama(), tmp_path)
    with pytest.raises(slimtensors.errors.MismatchError, match=r"small: none of its .* BertModel"):
        BertModel.from_pretrained(small)


def test_a_compressed_config_says_how_to_load_it(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small")
    section = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert "import slimtensors.transformers" in section["how_to_load"]
    assert SlimConfig(**section).to_dict()["how_to_load"] == section["how_to_load"]
