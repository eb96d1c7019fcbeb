"""Write quantized weights with the code of one compressed-tensors release, and what it reads back.

Made as `make.py` is, in the same environment, one process per release:

    for v in 0.14.0.1 0.17.1 0.20.0; do
        venv/bin/pip install --no-deps --target ct/$v compressed-tensors==$v
        PYTHONPATH=ct/$v venv/bin/python make_quantized.py
    done
    PYTHONPATH=ct/0.20.0 venv/bin/python make_quantized.py floats
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

VERSION = version("compressed-tensors")
RELEASE = tuple(int(part) for part in VERSION.split("."))
HERE = Path(__file__).parent

FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
CHANNEL = {"strategy": "channel"}
BLOCK = {"strategy": "block"}
GROUP = {"strategy": "group", "group_size": 16}
E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
NVFP4 = {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": BYTE, "zp_dtype": BYTE}

CASES = {
    "int8-channel": ("int-quantized", {"num_bits": 8, **CHANNEL}),
    "int8-tensor-asym": ("int-quantized", {"num_bits": 8, "symmetric": False}),
    "int4-group-asym": ("int-quantized", {"num_bits": 4, "symmetric": False, **GROUP}),
    "fp8-channel": ("float-quantized", {**FP8, **CHANNEL}),
    "fp8-tensor": ("float-quantized", FP8),
    "fp8-block": ("float-quantized", {**FP8, **BLOCK, "block_structure": [5, 32]}),
    "fp8-block-ragged": ("float-quantized", {**FP8, **BLOCK, "block_structure": [8, 32]}),
    "fp8-naive": ("naive-quantized", {**FP8, **CHANNEL}),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4),
    "mxfp4": ("mxfp4-pack-quantized", {**FP4, **MX}),
    "mxfp8": ("mxfp8-quantized", {**FP8, **MX}),
    "int8-order": ("int-quantized", {"num_bits": 8, **GROUP, "actorder": "group"}),
    "w4-group-order": ("pack-quantized", {"num_bits": 4, **GROUP, "actorder": "group"}),
    "w3-asym-order": (
        "pack-quantized",
        {"num_bits": 3, "symmetric": False, **GROUP, "actorder": "group"},
    ),
    "w4-tensor-asym": ("pack-quantized", {"num_bits": 4, "symmetric": False}),
}
FLOATS = {
    "mxfp6": ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", **MX}),
    "fp8-tensor-asym": ("float-quantized", {**FP8, "symmetric": False}),
    "fp8-block-asym": (
        "float-quantized",
        {**FP8, "symmetric": False, **BLOCK, "block_structure": [5, 32]},
    ),
    "nvfp4-32": ("nvfp4-pack-quantized", {**NVFP4, "group_size": 32}),
}
for bits in range(1, 9):
    CASES[f"w{bits}-group"] = ("pack-quantized", {"num_bits": bits, **GROUP})
    CASES[f"w{bits}-channel-asym"] = (
        "pack-quantized",
        {"num_bits": bits, "symmetric": False, **CHANNEL},
    )


def weight(seed):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 64, generator=made) * torch.randn(10, 1, generator=made).exp2()
    x[torch.rand(x.shape, generator=made) < 0.2] = 0.0
    x[3] = 0.0
    return x.to((torch.bfloat16, torch.float16, torch.float32)[seed % 3])


def params(x, args, ordered):
    state = {"weight": x}
    if ordered:
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
        groups = torch.empty(x.shape[1], dtype=torch.int32)
        groups[order] = torch.arange(x.shape[1], dtype=torch.int32) // args.group_size
        state["weight_g_idx"] = groups
        x = x[:, order]
    if args.strategy == "tensor":
        low, high = x.aminmax()
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        groups = x.unflatten(1, (-1, args.group_size or x.shape[1]))
        low, high = groups.aminmax(dim=-1)
    whole = None
    if args.strategy == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(low.min(), high.max())
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    return state


def both_ways(name, state, scheme):
    """Return what the release stores, and the dense weight that it reads from that."""
    if RELEASE < (0, 15):
        compressor = BaseCompressor.load_from_registry(name)
        named = {f"x.{key}": value for key, value in state.items()}
        parts = compressor.compress(named, {"x": scheme})
        dense = compressor.decompress_module_from_state_dict("x", dict(parts), scheme)["x.weight"]
        return {key.removeprefix("x."): value for key, value in parts.items()}, dense
    compressor = BaseCompressor.get_value_from_registry(name)
    parts = compressor.compress(state, scheme)
    return parts, compressor.decompress(parts, scheme)["weight"]


def main(cases, out):
    stored, dense, about = {}, {}, {}
    for seed, (case, (name, options)) in enumerate(cases.items()):
        ordered = "actorder" in options
        unread = name.startswith("mx") and RELEASE < (0, 15)
        misread = case == "fp8-block-ragged" and RELEASE < (0, 18)  # it guesses blocks of 5 rows
        if unread or misread or (ordered and RELEASE >= (0, 20)):
            print(VERSION, "cannot read back", case)
            continue
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        parts, dense[case] = both_ways(name, params(weight(seed), args, ordered), scheme)
        stored |= {f"{case}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        about[case] = {"format": name, "weights": scheme.model_dump(mode="json")["weights"]}
    out.mkdir(exist_ok=True)
    save_file(stored, out / "quantized.safetensors")
    save_file(
        {case: x.contiguous() for case, x in dense.items()}, out / "quantized-dense.safetensors"
    )
    (out / "quantized.json").write_text(json.dumps(about, indent=1) + "\n")


if sys.argv[1:] == ["floats"]:
    main(FLOATS, HERE / f"{VERSION}-floats")
else:
    main(CASES, HERE / VERSION)
