"""Write the golden model folder in the layout of SparseML, in two shards.

    python tests/golden/slim/make_sparseml.py tests/golden/slim/2/sparseml

The files here were made once and are never rewritten.
"""

import sys
from pathlib import Path

import torch
from expected import write_expected
from transformers import AutoModelForCausalLM, LlamaConfig

import slimtensors
from slimtensors.transformers import enable
from slimtensors.transformers.compression import BitmaskConfig

SIZES = {"vocab_size": 40, "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 1}


@torch.no_grad()
def make_model() -> AutoModelForCausalLM:
    """Return a model with 60 % zeros, -0.0 and a NaN, whose rows do not fill bytes of masks."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.normal_(generator=generator)
        if weight.dim() == 2:
            weight[torch.rand(weight.shape, generator=generator) < 0.6] = 0
    model.model.embed_tokens.weight[0, :2] = torch.tensor([-0.0, float("nan")])
    return model


folder = Path(sys.argv[1])
model = enable(make_model())
model.save_pretrained(folder / "model", sparsity_config=BitmaskConfig(), max_shard_size="4kB")
state = model.state_dict()
stored = {name: state[name] for name in slimtensors.open(folder / "model")}
write_expected(stored, folder / "expected-model.json")
