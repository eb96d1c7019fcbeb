"""Load and run a model as if compressed-tensors were not installed.

python load_without_peer.py FOLDER
"""

import sys

sys.modules["compressed_tensors"] = None

import torch  # noqa: E402  after the package is blocked

from slimtensors.transformers import SparseAutoModelForCausalLM  # noqa: E402

for run_compressed in (False, True):
    model = SparseAutoModelForCausalLM.from_pretrained(sys.argv[1], run_compressed=run_compressed)
    print(type(model.model.layers[0].mlp.up_proj.weight).__name__)
    model.generate(torch.arange(4)[None], max_new_tokens=2)
