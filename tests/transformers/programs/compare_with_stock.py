"""Load a folder with transformers and compressed-tensors alone; compare its weights.

python compare_with_stock.py CLASS FOLDER WEIGHTS
"""

import sys

import transformers
from safetensors.torch import load_file

name, folder, weights = sys.argv[1:]
model = getattr(transformers, name).from_pretrained(folder)
model.hf_quantizer.compressor.decompress_model(model)
have = model.state_dict()
for key, x in load_file(weights).items():
    print("same" if have[key].equal(x) else "differs", key)
assert "slimtensors" not in sys.modules
