"""`slimtensors demo`: prune a model, store it in every format, show what it costs."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slimtensors.archive import load, save
from slimtensors.cli import console
from slimtensors.formats import save_compressed
from slimtensors.spec import as_bytes
from slimtensors.summary import human

_FORMATS: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    "dense": save_file,
    "slim": save,
    "compressed-tensors": save_compressed,
}
_PRUNED: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: _prune(x, 0.5),
    "2of4": lambda x: _two_of_four(x),
    "94%": lambda x: _prune(x, 0.94),
}
_HEAD = ("model", "format", "size", "smaller", "bits/weight", "save", "load", "back")


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "demo",
        "prune a small model, store it in every format, show the sizes",
        "slimtensors demo -o demo-output",
    )
    verb.add_argument("-o", "--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).bfloat16()
    rows = []
    for pruned, prune in _PRUNED.items():
        tensors = {name: prune(x.detach()) for name, x in model.state_dict().items()}
        for form, write in _FORMATS.items():
            path = options.output / f"{pruned}-{form}.safetensors"
            begin = time.perf_counter()
            write(tensors, path)
            middle = time.perf_counter()
            back = load(path)
            end = time.perf_counter()
            dense = sum(x.nbytes for x in tensors.values())
            items = sum(x.numel() for x in tensors.values())
            size = path.stat().st_size
            rows.append(
                (
                    f"{pruned} zeros",
                    form,
                    human(size),
                    f"{dense / size:.2f}x",
                    f"{8 * size / items:.2f}",
                    f"{1000 * (middle - begin):.0f} ms",
                    f"{1000 * (end - middle):.0f} ms",
                    "same bits" if _same(tensors, back) else "DIFFERENT",
                )
            )
    print(console.table(_HEAD, rows, left=2))
    print(f"\nThe files are in {options.output}; look at one with: slimtensors inspect FILE")
    return 0 if all(row[-1] == "same bits" for row in rows) else 1


def _prune(x: Tensor, fraction: float) -> Tensor:
    """Zero the smallest weights of a matrix."""
    if x.dim() < 2:
        return x
    limit = x.abs().float().flatten().kthvalue(int(fraction * x.numel())).values
    return torch.where(x.abs().float() > limit, x, torch.zeros_like(x))


def _two_of_four(x: Tensor) -> Tensor:
    """Zero the two smallest of every four weights of a matrix."""
    if x.dim() < 2:
        return x
    groups = x.view(-1, 4)
    smallest = groups.abs().float().argsort(dim=1)[:, :2]
    return groups.scatter(1, smallest, 0).view_as(x)


def _same(tensors: dict[str, Tensor], back: dict[str, Tensor]) -> bool:
    return tensors.keys() == back.keys() and all(
        torch.equal(as_bytes(x), as_bytes(back[name])) for name, x in tensors.items()
    )
