"""The samples of compressed-tensors' README, as written but for the line that imports them."""

import pytest
import torch
from strategies import same_bits
from transformers import LlamaConfig, LlamaForCausalLM

from slimtensors import inspect


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

    from slimtensors import BitmaskConfig, load_compressed, save_compressed

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

    from slimtensors import BitmaskConfig, load_compressed, save_compressed_model

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
