"""Write the golden pool.

    python tests/golden/slim/make_pool.py tests/golden/slim/3/pools

The files there were made once and are never rewritten.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from expected import sha256
from make_states import normal
from safetensors.torch import save_file

from slimtensors.sync import Pool


def main(folder: Path) -> None:
    """Write a pool with a base and a difference, and the digests of their files."""
    base = {"a": normal(1, 48, 32).bfloat16(), "b": normal(2, 40), "empty": torch.empty(0, 3)}
    models = {"base": base, "tuned": {**base, "a": (base["a"] * 1.01)}}
    sums = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, table in models.items():
            model = Path(temporary, name)
            model.mkdir()
            save_file(table, model / "model.safetensors", metadata={"by": name})
            (model / "notes.txt").write_text("notes of both")
            Pool(folder / "family").add(model)
            files = sorted(path for path in model.iterdir())
            sums[name] = {path.name: sha256(path.read_bytes()) for path in files}
    (folder / "expected-family.json").write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
