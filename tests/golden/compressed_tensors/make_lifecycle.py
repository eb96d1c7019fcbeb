"""Quantize a small model with the code of an early compressed-tensors release, and save it.

Made as `make_quantized.py` is:

    for v in 0.4.0 0.6.0; do
        venv/bin/pip install --no-deps --target ct/$v compressed-tensors==$v
        PYTHONPATH=ct/$v venv/bin/python make_lifecycle.py
    done

`lifecycle-<case>.safetensors` has the tensors of the model, `lifecycle-dense.safetensors` its input
and the output of each case, `lifecycle.json` the config of each case.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    freeze_module_quantization,
)
from safetensors.torch import save_file
from torch import nn

VERSION = version("compressed-tensors")
HERE = Path(__file__).parent
STATIC = {"num_bits": 8}
CASES = {
    "frozen": ("fakequant", {"weights": {"num_bits": 8}, "input_activations": STATIC}),
    "int8": ("int-quantized", {"weights": {"strategy": "channel"}, "input_activations": STATIC}),
    "token": ("int-quantized", {"weights": {}, "input_activations": {"strategy": "token"}}),
    "w4": ("pack-quantized", {"weights": {"num_bits": 4, "group_size": 16, "symmetric": False}}),
    "w4-channel": (
        "pack-quantized",
        {"weights": {"num_bits": 4, "strategy": "channel", "symmetric": False}},
    ),
}
if VERSION == "0.4.0":  # later releases refuse it
    CASES["channel"] = ("int-quantized", {"weights": {"strategy": "channel", "group_size": 16}})


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).eval()


@torch.no_grad()
def main():
    dense, about = {"input": torch.randn(6, 32, generator=torch.Generator().manual_seed(1))}, {}
    out = HERE / VERSION
    out.mkdir(exist_ok=True)
    for case, (name, scheme) in CASES.items():
        group = {"targets": ["Linear"], **scheme}
        config = QuantizationConfig(
            config_groups={"group_0": group},
            format=name,
            quantization_status=QuantizationStatus.CALIBRATION,
        )
        model = make_model()
        apply_quantization_config(model, config)
        try:
            model(dense["input"])
            model.apply(freeze_module_quantization)
            dense[case] = model(dense["input"])
        except Exception as error:
            print(VERSION, "cannot calibrate", case, type(error), error)
            continue
        section = json.loads(config.model_dump_json()) | {"quantization_status": "frozen"}
        state = model.state_dict()
        if name != "fakequant":
            section["quantization_status"] = "compressed"
            state = ModelCompressor(quantization_config=config).compress(model)
        state = {key: x.contiguous() for key, x in state.items() if "observer" not in key}
        save_file(state, out / f"lifecycle-{case}.safetensors")
        about[case] = section
    save_file(dense, out / "lifecycle-dense.safetensors")
    (out / "lifecycle.json").write_text(json.dumps(about, indent=1) + "\n")


main()
