"""Load folders with transformers alone and print each outcome as a line of JSON."""

import json
import sys

from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    try:
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        outcome = {"missing": len(info["missing_keys"])}
    except Exception as error:
        outcome = {"error": str(error)}
    print(json.dumps(outcome))
assert "slimtensors" not in sys.modules
