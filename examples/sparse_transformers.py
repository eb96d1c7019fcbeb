"""Load a sparse model through transformers, save it compressed, and load it again.

Follows sparseml's note on compressed safetensors: loading does not change, saving takes one more
argument. The model is random, with 60 % of its weights zero.

Prints:

    before: None
    dense 3.2 MB, compressed 1.5 MB
    after: sparse_bitmask, unstructured, 60 % zeros
    the weights are equal: True
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slimtensors.transformers.auto import SparseAutoModelForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes)
random_model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
for x in random_model.parameters():
    if x.dim() == 2:
        x.data[torch.rand(x.shape) < 0.6] = 0
random_model.save_pretrained("pruned")

model = SparseAutoModelForCausalLM.from_pretrained("pruned")
print("before:", json.loads(Path("pruned/config.json").read_text()).get("sparsity_config"))

model.save_pretrained("compressed", save_compressed=True)
sizes = [
    sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e6
    for folder in ("pruned", "compressed")
]
print("dense {:.1f} MB, compressed {:.1f} MB".format(*sizes))

found = json.loads(Path("compressed/config.json").read_text())["sparsity_config"]
zeros = 100 * float(found["global_sparsity"])
print(f"after: {found['format']}, {found['sparsity_structure']}, {zeros:.0f} % zeros")

again = SparseAutoModelForCausalLM.from_pretrained("compressed")
pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
print("the weights are equal:", all(torch.equal(a, b) for a, b in pairs))
