"""Parse and forge files, and run programs in child processes."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slimtensors
from slimtensors import _core
from slimtensors.errors import FormatError

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}
"""Environment of a program that imports modules of the tests."""
LOAD_WITH_LIMIT = TESTS / "archive" / "programs" / "load_with_limit.py"


def sample() -> dict[str, Tensor]:
    """Return a few small tensors: dense, sparse, 2:4, small items, empty, scalar, tied."""
    random = torch.Generator().manual_seed(0)
    sparse = torch.randn(12, 10, generator=random)
    sparse[torch.rand(12, 10, generator=random) < 0.7] = 0
    halves = torch.randn(6, 4, 4, generator=random).bfloat16()
    halves[..., 1::2] = 0
    return {
        "steps": torch.arange(3),
        "sparse": sparse,
        "halves": halves.view(6, 16),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(-0.0),
        "again": sparse,
    }


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the parsed header and the data of a safetensors file."""
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def read_table(path: Path) -> dict[str, Any]:
    """Return the tensor entries of a file's header."""
    header, _ = split(path.read_bytes())
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def build_file(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header: JSON text, or a value to serialize."""
    text = header if isinstance(header, bytes) else _text(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def plain_file(tensors: dict[str, Tensor]) -> bytes:
    """Return the file that safetensors itself writes."""
    from safetensors.torch import save

    return save(tensors)


def blob(header: object, payload: bytes = b"", *, version: int = 1) -> bytes:
    """Return a compressed tensor with this JSON header and payload and valid checksums."""
    if isinstance(header, dict):
        header = {**header, "crc32c": _core.crc32c(payload)}
    text = header if isinstance(header, bytes) else _text(header).encode()
    start = struct.pack("<4sII", b"SLIM", version, len(text))
    seal = _core.crc32c(text, _core.crc32c(start))
    return start + struct.pack("<I", seal) + text + payload


def split_blob(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the parsed header and the payload of a compressed tensor."""
    _, _, size, _ = struct.unpack_from("<4sIII", raw)
    return json.loads(raw[16 : 16 + size]), raw[16 + size :]


def blob_file(raw: bytes, name: str = "x") -> bytes:
    """Return a file that contains one compressed tensor."""
    entry = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]}
    return build_file({name: entry}, raw)


def seal_manifest(manifest: dict[str, Any], *, ensure_ascii: bool = False) -> str:
    """Return the text of a manifest with its checksum."""
    fields = {key: value for key, value in manifest.items() if key != "crc32c"}
    body = json.dumps(fields, separators=(",", ":"), ensure_ascii=ensure_ascii)[:-1]
    raw = body.encode("utf-8", "surrogatepass")
    return f'{body},"crc32c":{_core.crc32c(raw)}}}'


def edit_manifest(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the file with a changed manifest and a valid checksum."""
    header, data = split(raw)
    manifest = json.loads(header["__metadata__"]["slimtensors"])
    change(manifest)
    header["__metadata__"]["slimtensors"] = seal_manifest(manifest)
    return build_file(header, data)


def assert_refused(
    path: Path | str,
    *,
    tensor: str | None = None,
    kind: type[Exception] = FormatError,
    where: Path | str | None = None,
) -> str:
    """Assert that loading raises an error that names file and tensor; return its message."""
    with pytest.raises(kind) as caught:
        slimtensors.load(path, threads=1)
    message = str(caught.value)
    assert str(where or path) in message
    assert tensor is None or tensor in message
    return message


def run_program(
    program: Path,
    *args: object,
    command: Sequence[object] = (),
    timeout: float = 60,
    env: Mapping[str, str] = ENVIRONMENT,
    **options: Any,
) -> str:
    """Run a Python file in a child process, which must succeed; return its output.

    `command` is a program that starts Python, with its arguments.
    """
    done = subprocess.run(
        [*map(str, command), sys.executable, program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load_with_limit(paths: list[Path], valid: Path, *, memory: int = 64 << 20) -> list[str]:
    """Load files in a child process limited to `memory` more bytes; return the outcomes."""
    text = json.dumps([str(path) for path in paths])
    output = run_program(LOAD_WITH_LIMIT, memory, valid, input=text, timeout=100)
    return [json.loads(line) for line in output.splitlines()]


def leftovers(folder: Path) -> list[str]:
    """List the temporary files that are still in a folder."""
    return sorted(path.name for path in folder.rglob("*slimtensors-*"))


def _text(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
