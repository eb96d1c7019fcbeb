"""Load and write quantized folders with transformers and compressed-tensors alone.

python stock_loader.py: reads one JSON request per line from stdin and answers with one JSON line:

    {"do": "load", "folder": ..., "class": ..., "output": ...}
        Load a folder, decompress it and write its weights to the safetensors file `output`.
    {"do": "quantize", "folder": ..., "class": ..., "config": ..., "output": ...}
        Quantize a dense folder with compressed-tensors and write it to the folder `output`.
"""

import contextlib
import json
import logging
import sys
import traceback
import warnings
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn


def load(request):
    cls = getattr(transformers, request["class"])
    model, info = cls.from_pretrained(request["folder"], output_loading_info=True)
    quantized = [n for n, m in model.named_modules() if hasattr(m, "quantization_scheme")]
    if quantized:
        model.hf_quantizer.compressor.decompress_model(model)
    state = {name: x.detach().clone().contiguous() for name, x in model.state_dict().items()}
    save_file(state, request["output"])
    return {"quantized": quantized} | {
        kind: sorted(str(key) for key in info[kind])
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }


@torch.no_grad()
def quantize(request):
    cls = getattr(transformers, request["class"])
    model = cls.from_pretrained(request["folder"])
    apply_quantization_config(model, QuantizationConfig.model_validate(request["config"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme") and isinstance(module, nn.Linear):
            _set_weight_scale(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(request["output"])
    compressor.update_config(request["output"])
    _ignore_module_names(model, Path(request["output"], "config.json"))
    return {}


def _ignore_module_names(model, path):
    """Add the names of modules to `ignore`, which contains the names in the files only."""
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] += [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not hasattr(module, "quantization_scheme")
    ]
    path.write_text(json.dumps(config))


def _set_weight_scale(module):
    args = module.quantization_scheme.weights
    weight = module.weight
    groups = weight.shape[1] // args.group_size if args.group_size else 1
    values = weight.reshape(weight.shape[0], groups, -1)
    scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), args)
    module.weight_scale.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero)


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    answers = sys.stdout
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = {"load": load, "quantize": quantize}[request["do"]](request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
        assert "slimtensors" not in sys.modules
        print(json.dumps(answer), file=answers, flush=True)


main()
