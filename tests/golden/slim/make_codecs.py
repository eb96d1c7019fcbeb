"""Write golden files of every codec with all its options, version 1.

    python tests/golden/slim/make_codecs.py tests/golden/slim/1/codecs

The files here were made once and are never rewritten. `expected-NAME.json` describes what
`NAME.safetensors` contains. A new version gets new files.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from expected import raw_bytes, write_expected
from make import half_zero, noise, two_four
from make_states import normal

import slimtensors
from slimtensors.codecs import Bins, Density, Gaps, Huffman, Int, IntBlocks
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.plan import Plan, chain, encode
from slimtensors.quantization import QuantizationArgs, Quantized
from slimtensors.quantization.affine import Params, find_params, quantize
from slimtensors.runtime.serialization import DynamicInputs
from slimtensors.tensor import DTYPES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Content = dict[str, tuple[Any, Plan | None]]


def make_dtypes() -> Content:
    """Return all dtypes, with and without a mask."""
    content: Content = {}
    for name, dtype in DTYPES.items():
        if dtype is torch.bool:
            x = half_zero(1, 6, 5, torch.uint8) > 0
        else:
            x = half_zero(1, 6, 5, dtype)
        content[name] = x, None
        content[f"{name} mask"] = x, Plan(Bitmask())
    content["as bytes"] = half_zero(1, 6, 5, torch.bfloat16), Plan(Dense())
    return content


def make_masks() -> Content:
    """Return sparse tensors of all shapes."""
    x = half_zero(2, 12, 24, torch.bfloat16)
    dense = noise(3, 40, torch.bfloat16).view(5, 8)
    wide = half_zero(4, 40, 96, torch.uint8)
    wide[::3] = 0
    shapes = {
        "matrix": x,
        "odd": x[:, :21].contiguous(),
        "cube": x.view(3, 4, 24),
        "vector": x.view(-1)[:77].clone(),
        "scalar": x[0, 0].clone(),
        "none": x[:0],
        "zeros": torch.zeros(9, 16),
        "full": dense,
    }
    content: Content = {f"bitmask {k}": (x, Plan(Bitmask())) for k, x in shapes.items()}
    for i, dtype in enumerate((torch.float32, torch.int8, torch.bfloat16)):
        for columns in (4, 12, 20):
            y = two_four(5 + i, 5, columns, dtype)
            content[f"bitmask24 {columns} {str(dtype)[6:]}"] = y, Plan(Bitmask24())
    content["bitmask24 none"] = torch.empty(0, 4), Plan(Bitmask24())
    content["bitmask24 cube"] = two_four(9, 6, 8, torch.float16).view(2, 3, 8), Plan(Bitmask24())
    for codec in (Gaps(), Density()):
        for key, mask in {"wide": wide, **shapes}.items():
            content[f"{codec.name} {key}"] = mask, Plan(codec)
    content["density ones"] = wide | 255, Plan(Density())
    inner = chain(Bitmask(), mask=chain(Gaps(), tokens=Huffman()), values=Bins())
    content["bitmask of gaps"] = half_zero(10, 30, 40, torch.float32), inner
    inner = chain(Bitmask(), mask=Density(), values=chain(Bitmask(), mask=Dense()))
    content["bitmask of density"] = half_zero(11, 30, 40, torch.float32), inner
    return content


def make_coded() -> Content:
    """Return tensors for the entropy coders: every item, raw, constant and coded planes."""
    near = normal(20, 10, 40, scale=0.1)
    content: Content = {}
    tensors = {
        **{str(d)[6:]: near.to(d) for d in (*FLOATS, torch.float64)},
        "float8_e4m3fn": (near * 8).to(torch.float8_e4m3fn),
        "complex64": torch.complex(near, near * 2),
        "complex128": torch.complex(near, near * 2).to(torch.complex128),
        "complex32": torch.complex(near.half(), near.half() * 2),
        "int8": (near * 100).to(torch.int8),
        "int16": (near * 1000).to(torch.int16),
        "int32": (near * 100).to(torch.int32),
        "int64": (near * 100).to(torch.int64),
        "uint16": (near.abs() * 100).to(torch.uint16),
        "bool": near > 0.15,
        "wide bf16": near.bfloat16().float(),
        "half in double": near.half().double(),
        "scaled": normal(21, 10, 40) * normal(22, 10, 1, scale=4).exp2(),
        "vector": near.view(-1).clone(),
        "narrow": near.view(-1, 5).clone(),
        "noise": noise(23, 60, torch.float32),
        "constant": torch.full((7, 9), -1.5),
        "one": torch.tensor([3.0]),
        "scalar": torch.tensor(-0.0),
        "none": torch.empty(0, 5),
        "two values": torch.where(near > 0, 1.0, -2.0).bfloat16(),
    }
    for codec in (Huffman(), Bins()):
        for key, x in tensors.items():
            content[f"{codec.name} {key}"] = x, Plan(codec)
    return content


def make_long() -> Content:
    """Return tensors of several chunks, and of all numbers of states."""
    rare = noise(30, 300_000, torch.uint8)
    rare = torch.where(rare > 251, rare, torch.tensor(0, dtype=torch.uint8))
    bits = torch.zeros(300_000, dtype=torch.uint8)
    bits[::97] = 4
    small = (normal(31, 10_000) * 2).to(torch.int8)
    return {
        "huffman": (rare[:140_000].clone(), Plan(Huffman())),
        "bins 9000": (small[:9000].view(90, 100).clone(), Plan(Bins())),
        "bins 70000": (rare[:70_000].view(70, 1000).clone(), Plan(Bins())),
        "bins 140000": (rare[:140_000].clone(), Plan(Bins())),
        "gaps": (bits, Plan(Gaps())),
        "density 40000": (bits[:40_000].view(40, 1000).clone(), Plan(Density())),
        "density 140000": (bits[:140_000].view(140, 1000).clone(), Plan(Density())),
        "density 300000": (bits.view(300, 1000).clone(), Plan(Density())),
        "density vector": (rare[:30_000].clone(), Plan(Density())),
        "bitmask": (bits, chain(Bitmask(), mask=Gaps())),
        "zeros": (torch.zeros(400, 500), Plan(Huffman())),
        "int-blocks": (
            torch.where(rare[:70_000] > 0, 2.5, 0.0),
            chain(IntBlocks(1 << 16), q=Huffman()),
        ),
    }


QUANTIZED: dict[str, dict[str, Any]] = {
    "w8 tensor": {"num_bits": 8},
    "w8 channel": {"num_bits": 8, "group_size": -1},
    "w8 channel asym": {"num_bits": 8, "group_size": -1, "symmetric": False},
    "w4 group": {"num_bits": 4, "group_size": 16},
    "w4 group asym": {"num_bits": 4, "group_size": 16, "symmetric": False},
    "w4 tensor asym": {"num_bits": 4, "symmetric": False},
    "w4 block": {"num_bits": 4, "strategy": "block", "block_structure": [5, 16]},
    **{f"w{b} group": {"num_bits": b, "group_size": 24} for b in (1, 2, 3, 5, 6, 7)},
    "w3 channel asym": {"num_bits": 3, "group_size": -1, "symmetric": False},
    "fp8 tensor": {"num_bits": 8, "type": "float"},
    "fp8 channel": {"num_bits": 8, "type": "float", "group_size": -1},
    "fp8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32]},
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {"num_bits": 4, "type": "float", "group_size": 16, "scale_dtype": "torch.uint8"},
    "mxfp8": {"num_bits": 8, "type": "float", "group_size": 16, "scale_dtype": "torch.uint8"},
}


def make_quantized() -> Content:
    """Return weights rounded in every way."""
    weight = normal(40, 12, 48, scale=0.1)
    content: Content = {}
    for i, (key, args) in enumerate(QUANTIZED.items()):
        for packed in (True, False):
            x = weight.to(FLOATS[(i + packed) % 3])
            content[f"{key} {'packed' if packed else 'bytes'}"] = x, Plan(Quantized(args, packed))
    four = QuantizationArgs(4, group_size=16)
    stack = normal(41, 3, 6, 32, scale=0.1).bfloat16()
    content["stack"] = stack, Plan(Quantized(four))
    content["double"] = weight.double(), Plan(Quantized(four))
    content["odd"] = weight[:, :45].contiguous(), Plan(Quantized(QuantizationArgs(5)))
    content["coded"] = weight, chain(Quantized(four, packed=False), q=Huffman(), scale=Bins())
    content["g_idx"] = order_groups(weight, four), None
    content["dynamic"] = (
        weight,
        chain(
            DynamicInputs({"num_bits": 8, "strategy": "token", "dynamic": True}),
            weight=Plan(Quantized(four)),
        ),
    )
    content["dynamic plain"] = weight, Plan(DynamicInputs({"num_bits": 8, "dynamic": True}))
    for dtype in FLOATS:
        x, name = weight.to(dtype), str(dtype)[6:]
        content[f"int {name}"] = x, Plan(Int(8))
        content[f"int per row {name}"] = x.view(3, 4, 48), Plan(Int(5, per_row=True))
        content[f"int-blocks {name}"] = x[:, :47].contiguous(), Plan(IntBlocks(64))
    content["int scalar"] = torch.tensor(2.5), Plan(Int(8))
    content["int-blocks sparse"] = (
        half_zero(42, 9, 30, torch.uint8).float(),
        chain(IntBlocks(8), q=chain(Bitmask(), values=Huffman()), scale=Bins()),
    )
    return content


def make_floats() -> Content:
    """Return weights rounded to floats of 6 bits, and to floats with zero points."""
    weight = normal(43, 12, 64, scale=0.1) + 0.05
    eight = {"num_bits": 8, "type": "float", "symmetric": False}
    cases: dict[str, dict[str, Any]] = {
        "mxfp6": {"num_bits": 6, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
        "fp8 tensor asym": eight,
        "fp8 channel asym": {**eight, "group_size": -1},
        "fp8 block asym": {**eight, "strategy": "block", "block_structure": [8, 32]},
    }
    content: Content = {}
    for i, (key, args) in enumerate(cases.items()):
        for packed in (True, False):
            x = weight.to(FLOATS[(i + packed) % 3])
            content[f"{key} {'packed' if packed else 'bytes'}"] = x, Plan(Quantized(args, packed))
    stack = normal(44, 3, 6, 32, scale=0.1).bfloat16()
    content["stack"] = stack, Plan(Quantized(cases["mxfp6"]))
    six = Quantized(cases["mxfp6"], packed=False)
    content["coded"] = weight, chain(six, q=Huffman())
    return content


def order_groups(weight: torch.Tensor, args: QuantizationArgs) -> Any:
    """Return codes whose groups are not contiguous."""
    order = torch.arange(weight.shape[1]).view(3, 16).T.reshape(-1)
    params = find_params(weight[:, order], args)
    g_idx = (torch.arange(weight.shape[1]) // 16)[order.argsort()].int()
    params = Params(params.scale, params.zero_point, params.global_scale, g_idx)
    return Quantized(args).encoded(quantize(weight, params, args), params, weight.dtype)


def make_torch_quantized() -> Content:
    """Return quantized tensors of torch."""
    x = normal(50, 4, 10)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, -2, 3])
    content: Content = {}
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        name = str(dtype)[6:]
        content[name] = torch.quantize_per_tensor(x, 0.07, 3, dtype), None
        content[f"{name} channels"] = (
            torch.quantize_per_channel(x, scales, zeros.abs(), 0, dtype),
            None,
        )
    floats = torch.quantize_per_channel(x, scales, zeros.float(), 0, torch.quint8)
    content["float zeros"] = floats, None
    axis = torch.quantize_per_channel(x.T.contiguous(), scales, zeros, 1, torch.qint8)
    content["axis 1"] = axis, Plan(Huffman())
    return content


FILES = {
    "dtypes": make_dtypes,
    "masks": make_masks,
    "coded": make_coded,
    "long": make_long,
    "quantized": make_quantized,
    "floats": make_floats,
    "torch-quantized": make_torch_quantized,
}


def write(name: str, content: Content, path: Path) -> None:
    """Write a golden file and what it contains."""
    tensors = {}
    for key, (x, plan) in content.items():
        is_coded = plan is not None and not plan.is_lossy and not x.is_quantized
        tensors[key] = encode(plan, x) if is_coded else untie(x)
    file = path / f"{name}.safetensors"
    slimtensors.save(tensors, file, preset=lambda key, x: content[key][1])
    write_expected(slimtensors.load(file), path / f"expected-{name}.json")


def untie(x: Any) -> Any:
    """Return a tensor that shares no memory with others: tied ones would be stored once."""
    if not isinstance(x, torch.Tensor) or x.is_quantized:
        return x
    words = torch.frombuffer(bytearray(raw_bytes(x)) or bytearray(16), dtype=torch.uint8)
    return words[: x.nbytes].view(x.dtype).view(x.shape)


def main(path: Path) -> None:
    """Write all files."""
    path.mkdir(parents=True)
    for name, make in FILES.items():
        write(name, make(), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
