"""Load a model folder with transformers alone: python load_with_transformers.py FOLDER."""

import sys

from transformers import AutoModelForCausalLM

assert "slimtensors" not in sys.modules
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("LOADED")
