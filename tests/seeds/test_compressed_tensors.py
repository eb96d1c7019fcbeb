"""The samples of compressed-tensors' README, as written but for the line that imports them."""

import shutil
from pathlib import Path

import pytest
import torch
from strategies import same_bits
from transformers import LlamaConfig, LlamaForCausalLM

from slimtensors.archive.read import inspect

ROOT = Path(__file__).parents[2]
SENTENCES = ["the quick brown fox", "jumps over the lazy dog", "a dog", "the fox jumps again"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pruned_model(tmp_path_factory):
    """A small Llama with half of its weights zero, as the model on the hub has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight[weight.abs() < weight.float().abs().median()] = 0
    folder = tmp_path_factory.mktemp("pruned50")
    model.save_pretrained(folder)
    return str(folder)


def test_saving_and_loading_compressed_tensors():
    from typing import Dict  # noqa: UP035

    from torch import Tensor

    from slimtensors.compat.sparse_formats import load_compressed, save_compressed
    from slimtensors.folder.config_json import BitmaskConfig

    # the example BitmaskConfig method efficiently compresses
    # tensors with large number of zero entries
    compression_config = BitmaskConfig()

    tensors: Dict[str, Tensor] = {  # noqa: UP006
        "tensor_1": Tensor(
            [
                [0.0, 0.0, 0.0],
                [1.0, 1.0, 1.0],
            ]
        )
    }
    # compress tensors using BitmaskConfig compression format (save them efficiently on disk)
    save_compressed(tensors, "model.safetensors", compression_format=compression_config.format)

    # decompress tensors (load_compressed returns a generator for memory efficiency)
    decompressed_tensors = {}
    for tensor_name, tensor in load_compressed(
        "model.safetensors", compression_config=compression_config
    ):
        decompressed_tensors[tensor_name] = tensor

    assert decompressed_tensors.keys() == {"tensor_1"}
    assert same_bits(decompressed_tensors["tensor_1"], tensors["tensor_1"])


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*is deprecated")
def test_saving_and_loading_compressed_models(pruned_model):
    from transformers import AutoModelForCausalLM

    from slimtensors.compat import save_compressed_model
    from slimtensors.compat.sparse_formats import load_compressed
    from slimtensors.folder.config_json import BitmaskConfig

    model_name = pruned_model
    model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype="auto")

    original_state_dict = model.state_dict()

    compression_config = BitmaskConfig()

    # save compressed model weights
    save_compressed_model(model, "compressed_model.safetensors", compression_format=compression_config.format)  # fmt: skip  # noqa: E501

    # load compressed model weights (`dict` turns generator into a dictionary)
    state_dict = dict(load_compressed("compressed_model.safetensors", compression_config))

    assert state_dict.keys() == original_state_dict.keys()
    assert all(same_bits(state_dict[name], x) for name, x in original_state_dict.items())
    tied = state_dict["lm_head.weight"], state_dict["model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    stored = {t.name: t.codec for t in inspect("compressed_model.safetensors").tensors}
    assert stored["model.layers.0.mlp.up_proj.weight"] == "bitmask"
    assert stored["model.norm.weight"] == "plain"
    model.load_state_dict(state_dict, strict=True)


@pytest.fixture(scope="module")
def tokenized_model(tmp_path_factory):
    """A small Llama and a tokenizer for a few words, in one folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    words = sorted({word for line in SENTENCES for word in line.split()})
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("TinyLlama")
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)
    return str(folder)


class Sentences(list):
    """As much of a dataset as the sample uses."""

    def map(self, function, *, batched):
        columns = function({"sentence": [row["sentence"] for row in self]})
        rows = zip(*columns.values(), strict=True)
        return Sentences(dict(zip(columns, row, strict=True)) for row in rows)


def load_dataset(name):
    return {"train": Sentences({"sentence": line} for line in SENTENCES)}


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*is deprecated")
def test_saving_a_compressed_model_with_ptq(tokenized_model):
    from torch.utils.data import DataLoader
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, DefaultDataCollator

    from slimtensors import ModelCompressor
    from slimtensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        compress_quantized_weights,
        freeze_module_quantization,
    )

    shutil.copytree(ROOT / "examples", "examples")
    device = "cpu"

    model_name = tokenized_model
    model = AutoModelForCausalLM.from_pretrained(model_name, device_map="cpu", torch_dtype="auto")

    config = QuantizationConfig.parse_file("./examples/bit_packing/int4_config.json")
    config.quantization_status = QuantizationStatus.CALIBRATION
    apply_quantization_config(model, config)

    dataset = load_dataset("ptb_text_only")["train"]
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    def tokenize_function(examples):
        return tokenizer(examples["sentence"], padding=False, truncation=True, max_length=1024)

    tokenized_dataset = dataset.map(tokenize_function, batched=True)
    data_loader = DataLoader(tokenized_dataset, batch_size=1, collate_fn=DefaultDataCollator())

    with torch.no_grad():
        for idx, sample in tqdm(enumerate(data_loader), desc="Running calibration"):
            sample = {key: value.to(device) for key, value in sample.items()}
            _ = model(**sample)

            if idx >= 512:
                break

    model.apply(freeze_module_quantization)
    model.apply(compress_quantized_weights)

    output_dir = "./ex_llama1.1b_w4a16_packed_quantize"
    compressor = ModelCompressor(quantization_config=config)
    compressed_state_dict = compressor.compress(model)
    model.save_pretrained(output_dir, state_dict=compressed_state_dict)

    dense = LlamaForCausalLM.from_pretrained(tokenized_model)
    state = compressor.decompress(output_dir)
    assert state.keys() == dense.state_dict().keys()
    lossy = {name for name, x in dense.state_dict().items() if not same_bits(x, state[name])}
    assert lossy == {name for name in state if name.endswith("_proj.weight")}
    dense.load_state_dict(state)
    with torch.no_grad():
        assert same_bits(dense(**sample).logits, model(**sample).logits)
