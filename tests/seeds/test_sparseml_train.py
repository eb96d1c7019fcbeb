"""`train` of sparseml's note on compressed safetensors, with only its import and model changed."""

import json
import re

import pytest
import torch
from tiny_models import llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import slimtensors
from slimtensors.transformers.auto import SparseAutoModelForCausalLM

SAMPLE = """
from slimtensors.transformers import train

train(
    save_compressed=True,
    model="neuralmagic/TinyLlama-1.1B-Chat-v1.0-pruned2.4",
    recipe=RECIPE,
    dataset=DATASET
)
"""

RECIPE = """
finetuning_stage:
  finetuning_modifiers:
    ConstantPruningModifier:
      targets: ["re:.*q_proj.weight", "re:.*k_proj.weight", "re:.*v_proj.weight",
        "re:.*o_proj.weight", "re:.*gate_proj.weight", "re:.*up_proj.weight",
        "re:.*down_proj.weight"]
      start: 0
"""


@pytest.fixture
def pruned24(tmp_path):
    """A 2:4 model, stored compressed, with its tokenizer."""
    folder = tmp_path / "TinyLlama-pruned2.4"
    model = llama()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn_like(weight) / 8)
            if "proj" in name:
                groups = weight.view(-1, 4)
                groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0)
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"])}
    inner = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", model_max_length=16
    )
    slimtensors.transformers.enable(model).save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_sample_runs_and_keeps_the_structure(pruned24, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.sub('"neural[^"]*"', repr(str(pruned24)), SAMPLE)
    names = {"RECIPE": RECIPE, "DATASET": ["a b c d e f", "g h i j", "k l m n o p q"]}
    exec(compile(code, "seed", "exec"), names)

    before = SparseAutoModelForCausalLM.from_pretrained(pruned24)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    moved = 0
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        moved += int((a != b).sum())
        if "proj" in name:
            assert torch.equal(a == 0, b == 0), name
    assert moved > 10_000
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert config["sparsity_config"]["format"] == "sparse_bitmask"
    assert config["sparsity_config"]["sparsity_structure"] == "2:4"
    assert "bitmask" in {t.codec for t in slimtensors.inspect(tmp_path / "output").tensors}
    assert (tmp_path / "output" / "recipe.yaml").exists()
