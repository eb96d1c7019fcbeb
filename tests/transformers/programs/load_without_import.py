"""Load folders with transformers alone; print the outcomes.

python load_without_import.py FOLDER ...
"""

import sys

from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        print("refused:", type(error).__name__)
    else:
        print("LOADED", folder)
assert "slimtensors" not in sys.modules
