"""`save_pretrained` of enabled models."""

import copy
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import MODELS, TOKENS, llama, mixtral, pruned, same_answers, same_weights, sizes
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import slimtensors
from slimtensors.errors import ConfigError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig
from slimtensors.transformers.auto import SparseAutoModelForCausalLM
from slimtensors.transformers.saving import enable


def config(folder):
    return json.loads((folder / "config.json").read_text())


def codecs(folder):
    return {t.codec.partition("(")[0] for t in slimtensors.inspect(folder).tensors}


def loaded(model, folder, **options):
    """Save a model to a dense folder and load it."""
    model.save_pretrained(folder / "dense")
    return SparseAutoModelForCausalLM.from_pretrained(folder / "dense", **options)


@torch.no_grad()
def structured(model, kept, group):
    for weight in model.parameters():
        if weight.dim() == 2:
            groups = torch.rand(weight.shape).add_(0.1).view(-1, group)
            groups.scatter_(1, torch.rand(groups.shape).argsort(1)[:, kept:], 0)
            weight.copy_(groups.view_as(weight))
    return model


@pytest.mark.parametrize("preset", ["sparse", "lossless", "extreme"])
@pytest.mark.parametrize("kind", MODELS)
def test_saving_a_loaded_model_gives_the_same_bytes(tmp_path, kind, preset):
    make, _ = MODELS[kind]
    make().save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", preset=preset)
    for source, target in (("small", "again"), ("again", "thrice")):
        type(make()).from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
    for read in (read_tensors, read_config_text):
        want = read(tmp_path / "small")
        assert read(tmp_path / "again") == want
        assert read(tmp_path / "thrice") == want
    want = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (tmp_path / "thrice" / "model.safetensors").read_bytes() == want


def read_tensors(folder):
    """Return what follows the header, which only compress_folder adds original headers to."""
    raw = (folder / "model.safetensors").read_bytes()
    return raw[8 + int.from_bytes(raw[:8], "little") :]


def read_config_text(folder):
    return (folder / "config.json").read_bytes()


def test_changed_weights_of_a_lossy_model_are_encoded_again(tmp_path):
    enable(llama(), preset="extreme").save_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        model.lm_head.weight[3, 5] = 4.0
    model.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.allclose(again.lm_head.weight, model.lm_head.weight, atol=0.02)
    assert again.lm_head.weight[3, 5] == 4.0
    assert same_weights(again.model, model.model)


def test_a_lossy_model_is_saved_if_its_source_was_removed(tmp_path, caplog):
    enable(llama(), preset="extreme").save_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "b")
    assert "encoded again" in caplog.text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").dtype is torch.float32


def test_a_model_can_be_saved_to_its_source_folder(tmp_path):
    enable(llama(), preset="extreme").save_pretrained(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("make", [llama, mixtral])
def test_shards_have_the_index_that_the_hub_expects(tmp_path, make):
    model = enable(make(), preset="lossless")
    model.save_pretrained(tmp_path / "small", max_shard_size="40kB")
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    shards = list((tmp_path / "small").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    stored = slimtensors.inspect(tmp_path / "small")
    assert index["metadata"]["total_size"] == stored.stored_bytes
    type(model).save_pretrained(model, tmp_path / "dense")
    assert set(index["weight_map"]) == set(slimtensors.open(tmp_path / "dense"))
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)
    model.save_pretrained(tmp_path / "small")
    assert {p.name for p in (tmp_path / "small").glob("model*")} == {"model.safetensors"}


def test_compressing_a_folder_of_shards_counts_its_parameters(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "dense", max_shard_size="40kB")
    compress_folder(tmp_path / "dense", tmp_path / "small")
    name = "model.safetensors.index.json"
    want, have = (json.loads((tmp_path / f / name).read_text()) for f in ("dense", "small"))
    assert have["weight_map"] == want["weight_map"]
    assert have["metadata"]["total_parameters"] == want["metadata"]["total_parameters"]


def test_an_explicit_bitmask_is_written_and_described(tmp_path):
    model = loaded(llama(), tmp_path)
    assert model.sparsity_config is None
    model.save_pretrained(tmp_path / "small", sparsity_config=BitmaskConfig())
    assert "bitmask" in codecs(tmp_path / "small")
    section = config(tmp_path / "small")["sparsity_config"]
    assert (section["format"], section["sparsity_structure"]) == ("sparse_bitmask", "unstructured")
    share = float(section["global_sparsity"])
    assert 0.4 < share < 0.6
    assert model.sparsity_config == BitmaskConfig(global_sparsity=share)
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert again.sparsity_config == model.sparsity_config
    assert same_weights(again, model)


@pytest.mark.parametrize("kept, group", [(2, 4), (8, 16), (4, 8), (3, 16)])  # noqa: PT006
def test_the_structure_is_inferred(tmp_path, kept, group):
    model = loaded(structured(llama(), kept, group), tmp_path)
    model.save_pretrained(tmp_path / "small", save_compressed=True)
    section = config(tmp_path / "small")["sparsity_config"]
    assert section["sparsity_structure"] == f"{kept}:{group}"
    assert model.sparsity_config.sparsity_structure == f"{kept}:{group}"
    assert codecs(tmp_path / "small") == {"plain", "bitmask"}
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)


def test_two_of_four_can_be_requested(tmp_path):
    model = loaded(structured(llama(), 2, 4), tmp_path)
    model.save_pretrained(tmp_path / "small", sparsity_config=Sparse24BitmaskConfig())
    assert config(tmp_path / "small")["sparsity_config"]["format"] == "sparse_24_bitmask"
    assert isinstance(model.sparsity_config, Sparse24BitmaskConfig)


def test_a_dense_model_is_compressed_without_loss(tmp_path):
    model = loaded(pruned(llama(), 0.01), tmp_path)
    with torch.no_grad():
        for weight in model.parameters():
            weight[weight == 0] = 0.01
    model.save_pretrained(tmp_path / "small", save_compressed=True)
    assert "huffman" in codecs(tmp_path / "small")
    assert config(tmp_path / "small")["quantization_config"]["preset"] == "lossless"
    assert model.sparsity_config is None
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)


def test_a_plain_save_of_a_sparse_model_describes_its_sparsity(tmp_path):
    model = loaded(structured(llama(), 2, 4), tmp_path)
    model.save_pretrained(tmp_path / "again")
    assert codecs(tmp_path / "again") == {"plain"}
    section = config(tmp_path / "again")["sparsity_config"]
    assert (section["format"], section["sparsity_structure"]) == ("dense_sparsity", "2:4")
    assert float(section["global_sparsity"]) == pytest.approx(0.5, abs=0.01)
    assert model.sparsity_config == SparsityConfig.from_dict(section)
    assert "quantization_config" not in config(tmp_path / "again")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.sparsity_config == model.sparsity_config
    again.save_pretrained(tmp_path / "thrice", skip_compression_stats=True)
    assert "sparsity_config" not in config(tmp_path / "thrice")
    assert again.sparsity_config is None
    assert sizes(tmp_path / "again") == sizes(tmp_path / "dense")


@pytest.mark.parametrize(("fraction", "is_described"), [(0.03, False), (0.08, True)])
def test_few_zeros_are_not_described(tmp_path, fraction, is_described):
    model = enable(llama())
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0).view(-1)[: round(fraction * weight.numel())] = 0
    model.save_pretrained(tmp_path / "a")
    assert ("sparsity_config" in config(tmp_path / "a")) == is_described


def test_a_compressed_model_can_be_saved_dense(tmp_path):
    enable(llama(), preset="sparse").save_pretrained(tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "dense", save_compressed=False, skip_compression_stats=True)
    assert codecs(tmp_path / "dense") == {"plain"}
    assert not {"quantization_config", "sparsity_config"} & config(tmp_path / "dense").keys()


def test_enabling_an_ordinary_model_is_enough(tmp_path):
    model = enable(llama())
    model.save_pretrained(tmp_path / "a", sparsity_config=BitmaskConfig())
    assert same_weights(LlamaForCausalLM.from_pretrained(tmp_path / "a"), model)
    with pytest.raises(ConfigError, match="did you mean 'lossless'"):
        enable(model, preset="losless")


def test_a_state_dict_of_the_caller_is_saved(tmp_path):
    model = enable(llama(), preset="lossless")
    state = {name: x + 1 for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "a", state_dict=dict(state))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    assert all(torch.equal(back[name], x) for name, x in state.items())


def test_only_the_main_process_writes(tmp_path):
    enable(llama(), preset="lossless").save_pretrained(tmp_path / "a", is_main_process=False)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity_config": BitmaskConfig(), "preset": "sparse"}, "sparsity_config"),
        ({"save_compressed": False, "preset": "sparse"}, "dense weights"),
        ({"preset": "spars"}, "did you mean 'sparse'"),
        ({"sparsity_config": BitmaskConfig(format="sparse-bitmusk")}, "did you mean"),
        ({"save_compressed": True, "push_to_hub": True}, "model.push_to_hub"),
        ({"save_compressed": True, "variant": "fp16"}, "another folder"),
    ],
)
def test_unsupported_options_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        enable(llama()).save_pretrained(tmp_path / "a", **options)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_older_model_stays_until_the_new_one_is_complete(tmp_path):
    llama().save_pretrained(tmp_path / "a", max_shard_size="60kB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    model = enable(llama(layers=1), preset="lossless")
    model.broken_layer = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match="broken_layer"):
        model.save_pretrained(tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    del model.broken_layer
    model.save_pretrained(tmp_path / "a")
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".json", ".safetensors"}
    assert len(list((tmp_path / "a").glob("*.safetensors*"))) == 1
    with pytest.raises(ConfigError, match="is a file"):
        model.save_pretrained(tmp_path / "a" / "config.json")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_saves_itself(tmp_path, copied):
    model = enable(llama(), preset="lossless")
    twin = copied(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    twin.save_pretrained(tmp_path / "a")
    assert "bitmask" in codecs(tmp_path / "a")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert not back.lm_head.weight.any()
    assert model.lm_head.weight.any()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mixtral"])
def test_weights_on_the_disk_are_saved_too(tmp_path, kind):
    model = MODELS[kind][0]()
    enable(model, preset="lossless").save_pretrained(tmp_path / "a")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a",
        device_map={"model": "disk", "lm_head": "disk"},
        offload_folder=tmp_path / "offload",
    )
    offloaded.save_pretrained(tmp_path / "b")
    want = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == want
    assert same_answers(
        AutoModelForCausalLM.from_pretrained(tmp_path / "b"), model, {"input_ids": TOKENS}
    )


def test_pushing_to_the_hub_uploads_compressed_weights(tmp_path, monkeypatch):
    from transformers.utils import hub

    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda path: Path(path).write_text("a card"))
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
    model = enable(llama(), preset="lossless")
    uploaded = tmp_path / "hub"
    model._upload_modified_files = lambda folder, *_, **__: shutil.copytree(folder, uploaded)
    model.push_to_hub("some/llama")
    assert same_weights(AutoModelForCausalLM.from_pretrained(uploaded), model)
    assert "bitmask" in codecs(uploaded)


def test_a_base_model_is_saved_by_itself(tmp_path):
    enable(llama(), preset="lossless").save_pretrained(tmp_path / "a")
    base = AutoModel.from_pretrained(tmp_path / "a")
    base.save_pretrained(tmp_path / "b")
    assert same_weights(AutoModel.from_pretrained(tmp_path / "b"), base)
    assert "embed_tokens.weight" in slimtensors.open(tmp_path / "b")


def test_the_trainer_saves_compressed_weights(tmp_path):
    """The Trainer passes its own state dict."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    enable(llama(), preset="lossless").save_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    Trainer(model, arguments).save_model(str(tmp_path / "b"))
    want = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == want
