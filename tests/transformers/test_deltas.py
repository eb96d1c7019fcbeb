"""`from_pretrained` on deltas: the same model as the complete folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from strategies import same_bits
from tiny_models import MODELS, bert, llama, same_answers, same_weights
from transformers import AutoModel, AutoModelForCausalLM, BertModel

import slimtensors
import slimtensors.transformers
from slimtensors.errors import ConfigError, MismatchError, UnsupportedVersionError
from slimtensors.folder import compress_folder, diff_folder, quantize_folder
from slimtensors.quantization import QuantizationConfig
from slimtensors.transformers import SparseAutoModelForCausalLM
from slimtensors.transformers.loading import SlimConfig


def tune(folder, target, *, every=2):
    """Copy a model folder with some of its weights changed."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
            continue
        table = load_file(path)
        for name in sorted(table)[::every]:
            if table[name].dim() > 1:
                table[name] = table[name] * 1.0001
        save_file(table, target / path.name, metadata={"format": "pt"})


def make(model, folder, **options):
    """Write `base`, `new` and `delta`; return the last two."""
    model.save_pretrained(folder / "base", **options)
    tune(folder / "base", folder / "new")
    diff_folder(folder / "new", folder / "base", folder / "delta")
    return folder / "new", folder / "delta"


def load_both(kind, new, delta, **options):
    """Load both folders; return the model of the delta, if all is equal."""
    expected, info = kind.from_pretrained(new, output_loading_info=True, **options)
    loaded, found = kind.from_pretrained(delta, output_loading_info=True, **options)
    assert found == info
    assert same_weights(loaded, expected)
    assert loaded.dtype == expected.dtype
    return loaded


@pytest.mark.parametrize("shard", [None, "60kB"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_loads_like_its_folder(tmp_path, kind, shard):
    build, inputs = MODELS[kind]
    model = build()
    new, delta = make(model, tmp_path, **({"max_shard_size": shard} if shard else {}))
    kinds = json.loads((delta / "config.json").read_text())["quantization_config"]["delta"]
    assert kinds["tensors"].keys() & {"by-exponent", "difference"}
    assert kinds["tensors"]["same"]
    loaded = load_both(type(model), new, delta)
    assert same_answers(loaded, type(model).from_pretrained(new), inputs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_tied_weights_are_those_of_the_folder(tmp_path, dtype, tied):
    new, delta = make(llama(tied=tied).to(dtype), tmp_path)
    loaded = load_both(AutoModelForCausalLM, new, delta)
    assert loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    load_both(AutoModelForCausalLM, new, delta, dtype=torch.float16)
    load_both(AutoModelForCausalLM, new, delta, device_map={"": "cpu"})


def test_weights_may_be_offloaded_to_disk(tmp_path):
    new, delta = make(llama(), tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "offload"}
    loaded = AutoModelForCausalLM.from_pretrained(delta, **options)
    expected = AutoModelForCausalLM.from_pretrained(new)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)


def test_keys_of_another_class_are_reported_as_for_the_folder(tmp_path):
    model = bert()
    new, delta = make(model, tmp_path)
    assert type(model) is not BertModel
    _, info = BertModel.from_pretrained(new, output_loading_info=True)
    _, found = BertModel.from_pretrained(delta, output_loading_info=True)
    assert found == info
    assert info["unexpected_keys"]


def test_a_model_of_the_base_class_finds_its_prefixed_base(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path / "base")
    model.base_model.save_pretrained(tmp_path / "inner")
    tune(tmp_path / "inner", tmp_path / "new")
    summary = diff_folder(tmp_path / "new", tmp_path / "base", tmp_path / "delta")
    assert summary.stored_bytes < summary.dense_bytes / 2
    load_both(AutoModel, tmp_path / "new", tmp_path / "delta")


def test_the_base_may_be_given_by_a_context(tmp_path):
    new, delta = make(llama(), tmp_path)
    base = (tmp_path / "base").rename(tmp_path / ".base")
    with pytest.raises(MismatchError, match="its base 'base' was not found"):
        AutoModelForCausalLM.from_pretrained(delta)
    with slimtensors.using_base(base):
        load_both(AutoModelForCausalLM, new, delta)
        loaded = SparseAutoModelForCausalLM.from_pretrained(delta)
    assert same_weights(loaded, AutoModelForCausalLM.from_pretrained(new))


def test_a_chain_and_compressed_bases_load(tmp_path):
    new, delta = make(llama(), tmp_path)
    compress_folder(tmp_path / "base", tmp_path / "small")
    (tmp_path / "base").rename(tmp_path / ".base")
    tune(new, tmp_path / "newer", every=3)
    diff_folder(tmp_path / "newer", delta, tmp_path / "second")
    new.rename(tmp_path / ".new")
    load_both(AutoModelForCausalLM, tmp_path / "newer", tmp_path / "second")


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_a_quantized_delta_loads_as_dense_weights(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    tune(tmp_path / "dense", tmp_path / "tuned")
    config = QuantizationConfig.preset("W8A16", ignore=["lm_head"])
    for name, target in (("dense", "base"), ("tuned", "new")):
        quantize_folder(tmp_path / name, tmp_path / target, config)
    diff_folder(tmp_path / "new", tmp_path / "base", tmp_path / "delta")
    expected = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "delta")
    assert same_weights(loaded, expected)


def test_a_loaded_delta_is_saved_like_a_dense_model(tmp_path):
    new, delta = make(llama(), tmp_path)
    for folder in (new, delta):
        model = SparseAutoModelForCausalLM.from_pretrained(folder)
        assert not hasattr(model.config, "transformers_weights")
        model.save_pretrained(tmp_path / "again" / folder.name)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / "again" / name).iterdir()}
        for name in ("new", "delta")
    ]
    assert files[0] == files[1]
    model.save_pretrained(tmp_path / "small", save_compressed="lossless")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert same_weights(loaded, model)


def test_nothing_is_restored_to_disk(tmp_path, monkeypatch):
    """The only temporary file lists names, and is gone afterwards."""
    _, delta = make(llama(), tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    sizes = []
    write = slimtensors.transformers.loading.Reader.write_outline

    def record(reader):
        path = write(reader)
        sizes.append((Path(path).stat().st_size, len(list(temporary.rglob("*.*")))))
        return path

    monkeypatch.setattr(slimtensors.transformers.loading.Reader, "write_outline", record)
    model = AutoModelForCausalLM.from_pretrained(delta)
    assert sizes == [(sizes[0][0], 1)]
    assert sizes[0][0] < 5000 < sum(x.nbytes for x in model.parameters())
    assert not list(temporary.iterdir())


def test_a_damaged_residual_is_reported(tmp_path):
    _, delta = make(llama(), tmp_path)
    path = delta / "delta.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Exception, match=r"delta\.safetensors: .*(mismatch|damaged)"):
        AutoModelForCausalLM.from_pretrained(delta)


def test_a_newer_section_is_refused(tmp_path):
    _, delta = make(llama(), tmp_path)
    config = json.loads((delta / "config.json").read_text())
    config["quantization_config"]["version"] = 99
    (delta / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedVersionError, match="version 99"):
        AutoModelForCausalLM.from_pretrained(delta)
    with pytest.raises(ConfigError, match="delta must be a JSON object"):
        SlimConfig(delta=3)


def test_old_deltas_load(tmp_path):
    """Without the hints and the dtype that later versions add to the config."""
    new, delta = make(llama(), tmp_path)
    config = json.loads((delta / "config.json").read_text())
    del config["quantization_config"]["dtype"], config["quantization_config"]["delta"]["base"]
    (delta / "config.json").write_text(json.dumps(config))
    loaded = load_both(AutoModelForCausalLM, new, delta)
    assert same_bits(loaded.lm_head.weight, slimtensors.load(new)["lm_head.weight"])
