"""Write the golden files of the codec `trellis`.

    python tests/golden/slim/make_trellis.py tests/golden/slim/3/codecs

The files here were made once and are never rewritten. `expected-*.json` describes their content.
"""

import sys
from pathlib import Path

import torch
from expected import write_expected
from make_states import normal

import slimtensors
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.codecs.trellis import Steps, round_matrix
from slimtensors.tensor import Spec

STEPS = {"coarse": 1.0, "usual": 0.4, "fine": 0.02}


def make_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of all dtypes, shapes with partial groups of columns, and large weights."""
    large = normal(7, 40, 50).bfloat16()
    large[3, 5], large[30, 49] = 1e4, -3e5
    scaled = normal(8, 33, 70) * torch.exp2(torch.arange(70) / 16 - 3)
    return {
        "matrix": normal(1, 48, 96).bfloat16(),
        "half": normal(2, 20, 33).half(),
        "single": scaled,
        "cube": normal(4, 4, 5, 9).bfloat16(),
        "vector": normal(5, 77).bfloat16(),
        "item": normal(6, 1).bfloat16()[0],
        "zeros": torch.zeros(5, 6),
        "large": large,
    }


def make_layouts() -> dict[str, Encoded]:
    """Return tensors in every layout, with fine steps of rows."""
    layouts = [(1, False), (2, False), (2, True), (1, True)]
    encoded = {}
    for fineness, (row_dims, transposed) in enumerate(layouts):
        x = normal(20 + fineness, 3, 20, 34).bfloat16()
        codec = Trellis(row_dims=row_dims, transposed=transposed)
        matrix = codec.to_matrix(x)
        rows = torch.exp2(torch.arange(len(matrix)) / 37 - 4)
        steps = Steps(rows, torch.ones(matrix.shape[1]), row_fineness=fineness)
        name = f"{row_dims} row dims, fineness {fineness}{', transposed' * transposed}"
        encoded[name] = Encoded(codec, Spec.of(x), round_matrix(matrix, steps).encode())
    return encoded


def main(folder: Path) -> None:
    """Write the file and the values that it decodes to."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{step} {k}": x for step in STEPS for k, x in make_tensors().items()}
    path = folder / "trellis.safetensors"

    def choose(name: str, x: torch.Tensor) -> Plan:
        return Plan(Trellis(STEPS[name.split()[0]]))

    slimtensors.save(tensors, path, preset=choose)
    write_expected(slimtensors.load(path), folder / "expected-trellis.json")

    path = folder / "trellis-layouts.safetensors"
    slimtensors.save(make_layouts(), path)
    write_expected(slimtensors.load(path), folder / "expected-trellis-layouts.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
