"""Folders that were fitted to a size: load, run coded, save again, and the command line."""

import json
import shutil
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from strategies import same_bits
from tiny_models import MODELS, llama, same_weights, sizes
from torch import nn
from transformers import AutoModelForCausalLM

import slimtensors
import slimtensors.transformers
from slimtensors.cli import main
from slimtensors.codecs import Trellis, presets
from slimtensors.codecs.plan import Plan
from slimtensors.errors import FormatError
from slimtensors.folder import compress_folder
from slimtensors.report import Report, collect
from slimtensors.runtime import CodedTensor, CompressedTensor
from slimtensors.runtime.coded import Prefetcher
from slimtensors.transformers import SparseAutoModelForCausalLM
from slimtensors.transformers.auto import load_pretrained
from slimtensors.transformers.fit import fit

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
WEIGHTS = "model.safetensors"


def check_schema(data, name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)


def choose_trellis(name, x):
    return Plan(Trellis()) if x.dim() == 2 and x.numel() >= 4096 else presets.lossless(name, x)


def write_rounded(model, folder):
    """Write a model folder whose matrices are coded by `trellis`."""
    model.save_pretrained(folder / "dense")
    compress_folder(folder / "dense", folder / "rounded", preset=choose_trellis)
    return folder / "rounded"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Return a folder of a tied Llama in bfloat16 that was fitted to 7 bits per parameter."""
    folder = tmp_path_factory.mktemp("fitted")
    model = llama(tied=True, dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, 0, 0.05)
    model.save_pretrained(folder / "dense")
    random = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(0, 96, (2, 48), generator=random)} for _ in range(6)]
    budget = sum(x.numel() for x in model.parameters()) * 7 // 8
    fit(folder / "dense", budget, batches, output_dir=folder / "fitted")
    assert sizes(folder / "fitted") <= budget
    return folder / "fitted"


def load_both(auto, folder):
    return auto.from_pretrained(folder), load_pretrained(auto, folder, run_compressed=True)


def to_dense(x):
    return x.dequantize() if isinstance(x, CompressedTensor) else x


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "bert", "t5", "mixtral", "vit"])
def test_coded_models_agree_with_dense_ones(kind, tmp_path):
    make, inputs = MODELS[kind]
    model = make()
    dense, coded = load_both(type(model), write_rounded(model, tmp_path))
    for name, x in dense.state_dict().items():
        assert same_bits(to_dense(coded.state_dict()[name]), x), name
    with torch.no_grad():
        torch.testing.assert_close(coded(**inputs).logits, dense(**inputs).logits)
    for name, module in coded.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.numel() >= 4096:
            assert isinstance(module.weight, CodedTensor), name


def test_tied_embedding_and_head_are_one_coded_tensor(fitted):
    _, coded = load_both(AutoModelForCausalLM, fitted)
    assert coded.lm_head.weight is coded.model.embed_tokens.weight
    assert isinstance(coded.lm_head.weight, CodedTensor)


@pytest.mark.parametrize("threads", [1, 2])
def test_generate_gives_the_same_tokens_dense_and_coded(fitted, threads):
    dense, coded = load_both(AutoModelForCausalLM, fitted)
    tokens = torch.tensor([[3, 14, 15], [9, 2, 6]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(coded.generate(tokens, **options), dense.generate(tokens, **options))
    finally:
        torch.set_num_threads(before)


def test_no_matrix_is_decoded_as_a_whole(tmp_path, monkeypatch):
    model = llama(tied=True, vocab_size=4096, hidden_size=256)
    _, coded = load_both(AutoModelForCausalLM, write_rounded(model, tmp_path))
    decoded = []
    monkeypatch.delattr(CodedTensor, "decompress")
    monkeypatch.setattr(
        "slimtensors.codecs.trellis.allocate",
        lambda like: decoded.append(like.numel) or torch.empty(like.shape, dtype=like.dtype),
    )
    coded(torch.tensor([[1, 2, 4000]]))
    assert decoded
    assert max(decoded) < coded.lm_head.weight.numel()


def test_weights_are_decoded_ahead_in_the_order_of_execution(fitted, monkeypatch):
    coded = SparseAutoModelForCausalLM.from_pretrained(fitted, run_compressed=True)
    threads = []
    start = Prefetcher._start

    def observe(self, weight):
        threads.append(threading.current_thread() is threading.main_thread())
        return start(self, weight)

    monkeypatch.setattr(Prefetcher, "_start", observe)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        coded(torch.tensor([[1, 2, 3]]))
    finally:
        torch.set_num_threads(before)
    used = [m for m in coded.modules() if isinstance(m, nn.Linear) if type(m.weight) is CodedTensor]
    assert len(threads) == len(used)
    assert threads.count(True) == 1, "only the first weight is decoded on demand"


@pytest.mark.parametrize("run_compressed", [False, True])
def test_an_unchanged_model_is_saved_with_the_same_bytes(fitted, tmp_path, run_compressed):
    model = SparseAutoModelForCausalLM.from_pretrained(fitted, run_compressed=run_compressed)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (fitted / WEIGHTS).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same_weights(again, AutoModelForCausalLM.from_pretrained(fitted))


def test_a_coded_model_is_saved_with_the_same_bytes_without_its_folder(fitted, tmp_path):
    shutil.copytree(fitted, tmp_path / "moved")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "moved", run_compressed=True)
    shutil.rmtree(tmp_path / "moved")
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (fitted / WEIGHTS).read_bytes()


@pytest.mark.parametrize("run_compressed", [False, True])
def test_changed_weights_and_other_dtypes_are_saved_losslessly(fitted, tmp_path, run_compressed):
    model = SparseAutoModelForCausalLM.from_pretrained(
        fitted, run_compressed=run_compressed, dtype=torch.float32
    )
    with torch.no_grad():
        model.model.norm.weight += 0.125
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype is torch.float32
    assert all(same_bits(x, to_dense(model.state_dict()[n])) for n, x in again.state_dict().items())


def test_archives_of_coded_tensors_are_saved_with_the_same_blobs(fitted, tmp_path):
    tensors = slimtensors.load(fitted / WEIGHTS, run_compressed=True)
    slimtensors.save(tensors, tmp_path / WEIGHTS)
    again = slimtensors.load(tmp_path / WEIGHTS, run_compressed=True)
    for name, x in tensors.items():
        assert type(again[name]) is type(x)
        assert torch.equal(again[name], x)
    one, other = (
        {t.name: (t.codec, t.parts.get("stream")) for t in slimtensors.inspect(file).tensors}
        for file in (fitted / WEIGHTS, tmp_path / WEIGHTS)
    )
    assert one == other


def test_a_cast_coded_tensor_is_saved_with_its_new_dtype(fitted, tmp_path):
    tensors = slimtensors.load(fitted / WEIGHTS, run_compressed=True)
    cast = {name: x.float() for name, x in tensors.items()}
    slimtensors.save(cast, tmp_path / WEIGHTS)
    for name, x in slimtensors.load(tmp_path / WEIGHTS).items():
        assert same_bits(x, to_dense(cast[name])), name


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_the_report_of_a_fit_matches_its_schema(fitted):
    check_schema(json.loads((fitted / "fit_report.json").read_text()), "fit-report")


def test_inspect_shows_bits_and_loss(fitted, capsys):
    assert run("inspect", fitted) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" trellis " in line for line in lines) > 8
    assert lines[-3].startswith("budget: ")
    assert lines[-3].endswith("bits per parameter")
    assert lines[-2].startswith("predicted loss: KL ")
    assert "held-out predictions, perplexity" in lines[-1]
    assert "top-1 agreement" in lines[-1]
    assert "acceptance rate" in lines[-1]
    assert run("inspect", fitted, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    check_schema(data, "summary")
    assert data["fit"] == json.loads((fitted / "fit_report.json").read_text())


def test_a_malformed_report_is_refused(fitted, tmp_path):
    shutil.copytree(fitted, tmp_path / "broken")
    path = tmp_path / "broken" / "fit_report.json"
    data = json.loads(path.read_text())
    for key in data:
        path.write_text(json.dumps({**data, key: "x"}))
        with pytest.raises(FormatError, match="fit_report"):
            collect(tmp_path / "broken")


def test_the_page_report_contains_the_fit(fitted):
    report = collect(fitted)
    check_schema(report.to_json(), "report")
    assert report.fit == json.loads((fitted / "fit_report.json").read_text())
    assert Report.from_json(report.to_json()).fit == report.fit


def test_compress_and_convert_keep_the_codes(fitted, tmp_path):
    assert run("compress", fitted, "-o", tmp_path / "same") == 0
    assert (tmp_path / "same" / WEIGHTS).read_bytes() == (fitted / WEIGHTS).read_bytes()
    assert (tmp_path / "same" / "fit_report.json").exists()
    options = ("--to", "slim", "--max-shard-size", "20kB")
    assert run("convert", fitted, *options, "-o", tmp_path / "shards") == 0
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert sizes(tmp_path / "shards") < 1.1 * sizes(fitted)
    dense, coded = load_both(AutoModelForCausalLM, tmp_path / "shards")
    assert same_weights(dense, AutoModelForCausalLM.from_pretrained(fitted))
    coded.save_pretrained(tmp_path / "again", max_shard_size="20kB")
    for path in (tmp_path / "shards").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_decompress_writes_the_rounded_weights_dense(fitted, tmp_path, capsys):
    assert run("verify", fitted) == 0
    assert run("verify", fitted, "--against", fitted.parent / "dense") == 1
    assert run("decompress", fitted, "-o", tmp_path / "dense") == 0
    assert not (tmp_path / "dense" / "fit_report.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert run("verify", fitted, "--against", tmp_path / "dense") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "dense") == 0
    assert "predicted" not in capsys.readouterr().out


def test_a_delta_restores_the_rounded_weights(fitted, tmp_path):
    base = fitted.parent / "dense"
    assert run("diff", fitted, "--base", base, "-o", tmp_path / "delta") == 0
    assert run("restore", tmp_path / "delta", "--base", base, "-o", tmp_path / "model") == 0
    assert run("verify", tmp_path / "model", "--against", fitted) == 0
