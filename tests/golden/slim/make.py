"""Write the golden files of our own format, version 1, with the library that is installed.

    python tests/golden/slim/make.py tests/golden/slim/1

The files here were made once and are never rewritten: `tests/codecs/test_golden.py` checks that
they load, and that today's library still writes the same bytes. A new version gets new files.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import slimtensors
from slimtensors.codecs import Bins, Density, Gaps, Huffman, IntBlocks
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.plan import Plan, chain
from slimtensors.quantization import Quantized
from slimtensors.runtime.serialization import DynamicInputs

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16]
STRANGE = [torch.complex128, torch.complex32, torch.bits16, torch.int4, torch.float4_e2m1fn_x2]
"""The first four have no name in safetensors."""

NAN = 0x7FC12345
"""A quiet NaN with a payload."""


def noise(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return items of any bits but zero, the same in every release of numpy and torch."""
    numbers = np.arange(1, count * dtype.itemsize + 1, dtype=np.uint64) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    raw = (numbers >> np.uint64(56)).astype(np.uint8) | 1
    return torch.from_numpy(raw).view(dtype)


def half_zero(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return about a quarter of nonzero items, in no order."""
    words = noise(seed, rows * columns, dtype).view(torch.uint8).view(-1, dtype.itemsize).clone()
    words[noise(seed + 99, rows * columns, torch.uint8) > 64] = 0
    return words.view(-1).view(dtype).view(rows, columns)


def two_four(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return two of four; groups in the second row have one item, in the third none."""
    words = noise(seed, rows * columns, dtype).view(torch.uint8).view(-1, 4, dtype.itemsize).clone()
    kinds = noise(seed + 99, rows * columns // 4, torch.uint8) // 2 % 6
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2], [0, 3], [1, 3], [2, 3]])[kinds.long()]
    keep = torch.zeros(rows * columns // 4, 4, dtype=torch.bool).scatter(1, pairs, True)
    keep.view(rows, columns)[1, ::2] = False
    keep.view(rows, columns)[2] = False
    words[~keep] = 0
    return words.view(-1).view(dtype).view(rows, columns)


def special() -> torch.Tensor:
    """Return -0.0, NaN with a payload, infinity, a subnormal, all ones; the rest zeros."""
    x = torch.zeros(200, dtype=torch.int32)
    x[3:8] = torch.tensor([-(2**31), NAN, 0x7F800000, 1, -1], dtype=torch.int32)
    return x.view(torch.float32)


def mixed() -> dict[str, torch.Tensor]:
    """Return what a model has, and what it seldom has."""
    weight = half_zero(1, 20, 33, torch.bfloat16)
    return {
        "z.weight": weight,
        "bits": special(),
        "plain": noise(2, 30, torch.float32).view(5, 6),
        "scalar": noise(3, 1, torch.float64)[0],
        "none": torch.empty(0, 3, dtype=torch.int64),
        "bool": noise(4, 600, torch.uint8).view(20, 30) > 250,
        "cube": half_zero(5, 40, 7, torch.float32).view(2, 20, 7),
        "tied.weight": weight,
        "ü 🙂": half_zero(6, 12, 24, torch.float32),
    }


def strange() -> dict[str, torch.Tensor]:
    """Return tensors, sparse and full, of dtypes that files seldom hold."""
    return {str(d)[6:]: half_zero(10, 9, 20, d) for d in STRANGE} | {
        f"full {str(d)[6:]}": noise(11, 6, d).view(2, 3) for d in STRANGE
    }


CONTENT = {
    "mixed": mixed,
    "bitmask": lambda: {str(d)[6:]: half_zero(7, 9, 33, d) for d in DTYPES},
    "bitmask24": lambda: {str(d)[6:]: two_four(8, 9, 36, d) for d in DTYPES},
    "dense": lambda: {"x": noise(9, 20, torch.float32), "y": torch.zeros(9, 9)},
    "strange": strange,
    "coded": lambda: {name: x.clone() for name, x in coded().items()},
    "rounded": lambda: {
        name: on_grid(-127, 127) if name == "int-blocks" else on_grid(-8, 7) for name in ROUNDED
    },
    "trees": lambda: {
        "a": half_zero(12, 30, 20, torch.float32),
        "b": two_four(13, 30, 20, torch.float32),
    },
}

CODED = {
    "floats": Plan(Huffman()),
    "integers": Plan(Huffman()),
    "bytes": chain(Bitmask(), mask=Huffman(), values=Huffman()),
    "gaps": chain(Bitmask(), mask=chain(Gaps(), tokens=Huffman()), values=Huffman()),
    "density": chain(Bitmask(), mask=Density(), values=Huffman()),
}


def coded() -> dict[str, torch.Tensor]:
    """Return tensors whose exponents, integers and masks are far from random."""
    near = noise(20, 600, torch.uint16).view(torch.int16) // 256
    sparse = half_zero(21, 24, 40, torch.uint8)
    sparse[::2] *= half_zero(22, 12, 40, torch.uint8) > 0
    return {
        "floats": (near.float() / 64).bfloat16().view(20, 30),
        "integers": near.abs().to(torch.int32),
        **dict.fromkeys(("bytes", "gaps", "density"), sparse),
    }


WEIGHTS = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}

ROUNDED = {
    "bins": Plan(Bins()),
    "int-blocks": Plan(IntBlocks(32)),
    "quantized": Plan(Quantized(WEIGHTS)),
    "dynamic-inputs": chain(
        DynamicInputs({"num_bits": 8, "strategy": "token", "dynamic": True}),
        weight=chain(Quantized(WEIGHTS, packed=False), q=Huffman()),
    ),
}


def on_grid(low: int, high: int) -> torch.Tensor:
    """Return eighths that rounding leaves as they are: every 32 of them have both these bounds."""
    x = noise(23, 12 * 64, torch.uint8).view(12, 64).float() % (high - low) + low
    x[:, ::32], x[:, 1::32] = low, high
    return x / 8


TREES = {
    "a": chain(Bitmask(), mask=Dense(), values=chain(Bitmask(), values=Dense())),
    "b": chain(Bitmask24(), codes=Bitmask(), values=Dense()),
}

FILES = {
    "slim/mixed": {},
    "slim/bitmask": {"preset": "bitmask"},
    "slim/bitmask24": {"preset": "bitmask24"},
    "slim/dense": {"preset": "dense"},
    "slim/strange": {},
    "slim/coded": {"preset": lambda name, x: CODED[name]},
    "slim/rounded": {"preset": lambda name, x: ROUNDED[name]},
    "slim/trees": {"preset": lambda name, x: TREES[name]},
    "slim/shards/mixed": {"max_shard_size": 1200},
    "compressed-tensors/mixed": {},
    "compressed-tensors/bitmask": {"preset": "bitmask"},
    "compressed-tensors/bitmask24": {"preset": "bitmask24"},
}
"""Dialect/content, and how it is saved."""


def write(name: str, path: Path) -> None:
    """Write the golden file (or folder of shards) called `name`."""
    dialect, *_, content = name.split("/")
    slimtensors.save(
        CONTENT[content](), path, dialect=dialect, **{"preset": "sparse"} | FILES[name]
    )


def target(folder: Path, name: str) -> Path:
    """Return where the golden file called `name` lies in `folder`."""
    return folder / (name if "max_shard_size" in FILES[name] else f"{name}.safetensors")


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return plain integers of the same bits, which every safetensors reader understands."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: torch.view_as_real(x).view(torch.int64).clone()
        if x.dtype is torch.complex128
        else x.view(words[x.element_size()]).clone()
        for name, x in tensors.items()
    }


def main(folder: Path) -> None:
    """Write all files, and the bits that they hold."""
    for name in FILES:
        path = target(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(name, path)
    for content, make in CONTENT.items():
        save_file(bits(make()), folder / f"expected-{content}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
