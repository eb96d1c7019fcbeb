"""Random number generators: the state of each, as plain values."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slimtensors.errors import MismatchError


def capture() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, and of each CUDA device's."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check(state: Mapping[str, Any]) -> None:
    """Raise if this machine has not the generators that `state` is of."""
    wanted = len(state.get("cuda", ()))
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted not in (0, have):
        raise MismatchError(
            f"rng: holds the random numbers of {wanted} CUDA devices, but there are {have}; "
            "pass rng_state=False to go on with other ones"
        )


def restore(state: Mapping[str, Any]) -> None:
    """Let all generators go on where they were."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    kind, position = numpy["kind"], numpy["position"]
    np.random.set_state((kind, keys, position, numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if state.get("cuda"):
        torch.cuda.set_rng_state_all(state["cuda"])
