"""Write quantized weights whose codes are stored sparse, with compressed-tensors 0.14.0.1.

    PYTHONPATH=ct/0.14.0.1 venv/bin/python make_sparse_quantized.py

Packages as in `make.py`. The dense weights are what the release itself decompresses from the same
codes without the sparse format: with it, its ModelCompressor rounds bfloat16 scales to float16, and
its 2:4 format drops the code -128, which the scales avoid.
"""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
LAYERS = {"gate_proj": (12, 24), "up_proj": (9, 40)}


def make_model():
    """A model with two 2:4 sparse linear layers, and one that is ignored."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in {**LAYERS, "lm_head": (5, 24)}.items():
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
        weight = torch.randn(shape, generator=generator)
        groups = weight.view(-1, 4)
        groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0)
        layer.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        model.add_module(name, layer)
    return model


def main():
    for kind, largest, form in (
        ("int", 120.0, "int-quantized"),
        ("float", 448.0, "float-quantized"),
    ):
        args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        settings = {"ignore": ["lm_head"], "quantization_status": "calibration", "format": form}
        config = QuantizationConfig(config_groups={"group_0": scheme}, **settings)
        model = make_model()
        apply_quantization_config(model, config)
        for name in LAYERS:
            layer = getattr(model, name)
            layer.weight_scale.data.copy_(layer.weight.abs().amax(1, keepdim=True) / largest)
        only = {"targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.5}
        for sparsity in (BitmaskConfig(**only), Sparse24BitMaskConfig(**only)):
            write(
                model, config, sparsity, f"sparse-{kind}8-{sparsity.format.removeprefix('sparse-')}"
            )


def write(model, config, sparsity, name):
    out = HERE / version("compressed-tensors")
    codes = ModelCompressor(quantization_config=config)
    (format,) = codes.quantization_compressor.values()
    dense = {"lm_head.weight": model.lm_head.weight.data}
    with tempfile.TemporaryDirectory() as folder:
        save_file(codes.compress(model), Path(folder) / "model.safetensors")
        schemes = dict.fromkeys(LAYERS, config.config_groups["group_0"])
        for layer, parts in format.decompress(folder, names_to_scheme=schemes):
            dense[f"{layer}.weight"] = parts["weight"]
        compressor = ModelCompressor(sparsity_config=sparsity, quantization_config=config)
        save_file(compressor.compress(model), out / f"{name}.safetensors")
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        compressor.update_config(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
    (out / f"{name}-config.json").write_text(json.dumps(written, indent=2) + "\n")
    save_file(dense, out / f"{name}-dense.safetensors")


main()
