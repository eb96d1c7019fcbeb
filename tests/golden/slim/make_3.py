"""Write the golden files of version 3.

    python tests/golden/slim/make_3.py tests/golden/slim/3

The files here were made once and are never rewritten. Every file or folder has `expected` values
beside it. A new version gets new files, from a program of its own.
"""

import argparse
import datetime
import decimal
import fractions
import io
import pathlib
import sys
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any

from expected import write_expected
from lightning.fabric.utilities.data import AttributeDict
from make_states import normal
from omegaconf import DictConfig, ListConfig, OmegaConf
from slimtensors.distributed import StorageWriter
from torch.distributed import checkpoint as dcp

import slimtensors


def make_state() -> dict[str, Any]:
    """Return a state with every type of value that version 3 adds."""
    stream = io.BytesIO(b"stream")
    stream.seek(4)
    west = datetime.timezone(-datetime.timedelta(hours=3, microseconds=5), "west")
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    config = OmegaConf.create({"a": {"b": "${n}", "c": "???", "d": None}, "n": [1, {"x": 2.5}]})
    OmegaConf.set_readonly(config.a, True)
    OmegaConf.set_struct(config, False)
    return {
        "ranges": [range(3), range(2**2001, -1, -7), slice(None, 4, None), slice("a", (1,))],
        "numbers": [decimal.Decimal("-1.10E+5"), decimal.Decimal("NaN"), fractions.Fraction(-2, 3)],
        "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
        "bytes": [bytearray(b"\0\xff"), stream, b"abc" + bytes(66_000)],
        "long": [bytearray(70_000), io.BytesIO(bytes(70_000) + b"a")],
        "paths": [
            pathlib.PurePosixPath("/a/é"),
            pathlib.PureWindowsPath("C:\\a b"),
        ],
        "dates": [
            datetime.datetime(2020, 1, 31, 12, 0, 0, 1),
            datetime.datetime(2020, 10, 25, 2, 30, tzinfo=zone, fold=1),
            datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
            datetime.date(2020, 2, 29),
            datetime.time(23, 59, 59, tzinfo=west),
            datetime.timedelta(-1, 2, 3),
        ],
        "zones": [datetime.UTC, west, zone],
        "namespaces": [argparse.Namespace(lr=0.1, data=["x"]), types.SimpleNamespace(self=1)],
        "configs": [config, DictConfig(None), ListConfig("${a}")],
        "hyperparameters": AttributeDict(lr=0.1, nested=AttributeDict({1: 2})),
    }


def write_states(folder: Path) -> None:
    """Write a state with all types."""
    folder.mkdir(parents=True)
    slimtensors.save(make_state(), folder / "everything.safetensors")
    write_expected(make_state(), folder / "expected-everything.json")


def write_distributed(folder: Path) -> None:
    """Write a distributed checkpoint into a folder that contains other files."""
    target = folder / "other-files"
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_text("{}")
    options = argparse.Namespace(path=pathlib.PurePosixPath("x"), long=bytes(70_000))
    state = {"model": {"weight": normal(500, 6, 4)}, "options": options, "step": 3}
    for _ in range(2):  # the second save replaces the first
        dcp.save(state, storage_writer=StorageWriter(target), no_dist=True)
    write_expected(state, folder / "expected-other-files.json")


def main(folder: Path) -> None:
    """Write what does not exist yet."""
    for name, write in (("states", write_states), ("distributed", write_distributed)):
        if not (folder / name).exists():
            write(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
