"""Work folders: finished layers on disk, from which an interrupted run resumes."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slimtensors import _core
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    MismatchError,
    MissingFileError,
    report_malformed,
)
from slimtensors.layerwise.inputs import Layer
from slimtensors.storage import (
    FileOutput,
    LocalLocation,
    StrPath,
    TensorBytes,
    is_inside,
    local_path,
    open_file,
    read_text,
    write_json,
)
from slimtensors.tensor import Json, Spec, as_bytes, to_cpu, view_as

INDEX_FILE = "quantization.json"
_VERSION = 2
_CHECKSUMS = "crc32c"


class WorkFolder:
    """Tensors of finished layers and blocks, one file each, listed in a JSON file.

    `digests` identify everything the results depend on; a folder with other digests is rejected.
    """

    def __init__(self, folder: StrPath, digests: Mapping[str, str]) -> None:
        self._folder = local_path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._state: Json = {"version": _VERSION, "made_of": dict(digests), "finished": {}}
        if (self._folder / INDEX_FILE).exists():
            self._resume(self._folder / INDEX_FILE)

    def _resume(self, path: Path) -> None:
        with report_malformed(f"{path}: malformed work folder index"):
            state = json.loads(read_text(path))
            version, digests, finished = state["version"], state["made_of"], state["finished"]
            if version != _VERSION:
                raise FormatError(f"unsupported version {str(version)[:20]}, expected {_VERSION}")
            for name, entry in finished.items():
                file, report = entry["file"], entry["report"]
                if not is_inside(file) or "/" in file or not isinstance(report, dict | None):
                    raise FormatError(f"{name[:80]!r}: invalid file name or report")
            expected: Mapping[str, str] = self._state["made_of"]
            differing = [key for key in expected if digests.get(key) != expected[key]]
        if differing:
            raise MismatchError(
                f"{self._folder} was started with a different {' and '.join(differing)}; "
                "choose a new folder, or remove this one"
            )
        self._state = state

    def has(self, name: str) -> bool:
        """Return True if the layer or block is finished."""
        return name in self._state["finished"]

    def list_finished(self) -> list[str]:
        """Return the names of the finished layers and blocks, in their order."""
        return list(self._state["finished"])

    def load(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a finished layer or block."""
        path = self._folder / self._state["finished"][name]["file"]
        try:
            return _read_tensors(path)
        except OSError as error:
            raise MissingFileError(f"{path}: cannot be read: {error.strerror}") from error

    def load_report(self, name: str) -> Json:
        """Return the JSON report of a finished layer."""
        report: Json = self._state["finished"][name]["report"]
        return report

    def store(self, name: str, tensors: Mapping[str, Tensor], report: Json | None = None) -> None:
        """Write the tensors of a finished layer or block; they are durable on return.

        Those that were stored under the same name are replaced.
        """
        finished = self._state["finished"]
        known = finished.get(name)
        file = known["file"] if known else f"{len(finished):05d}.safetensors"
        if (self._folder / file).is_symlink():  # else its target would be replaced
            (self._folder / file).unlink()
        _write_tensors(self._folder / file, tensors)
        finished[name] = {"file": file, "report": report}
        write_json(self._folder / INDEX_FILE, self._state)


def compute_digests(
    model: nn.Module, layers: Iterable[Layer], batches: Iterable[Any], options: object
) -> dict[str, str]:
    """Return digests of the model, the config and the calibration data."""
    schemes = {layer.name: layer.args.to_dict() for layer in layers if layer.args}
    return {
        "model": _digest(dict(model.state_dict())),
        "config": _digest([schemes, repr(options)]),
        "calibration": _digest(list(batches)),
    }


def _digest(value: object) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(value):
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(value: object) -> Iterable[bytes | memoryview]:
    """Yield the bytes of all items of a value, with types and shapes to make them unambiguous."""
    if isinstance(value, Tensor):
        x = to_cpu(value)
        yield repr(Spec.of(x)).encode()
        yield as_bytes(x).numpy().data
    elif isinstance(value, Mapping):
        yield b"{%d" % len(value)
        for key, item in value.items():
            yield repr(key).encode()
            yield from _chunks(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield b"[%d" % len(value)
        for item in value:
            yield from _chunks(item)
    else:
        yield repr(value).encode()


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with FileOutput(path, reserve=256 + 160 * len(tensors)) as output:
        # Largest item sizes first, so that all tensors are aligned.
        order = sorted(tensors, key=lambda key: -tensors[key].element_size())
        for key in order:
            x = to_cpu(tensors[key])
            raw = as_bytes(x)
            checksum = _core.crc32c(raw.numpy())
            output.add([TensorBytes(key, Spec.of(x), [raw], checksum)])
        output.commit(
            order,
            lambda names, checksums, table, generation: {_CHECKSUMS: json.dumps(dict(checksums))},
        )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = open_file(LocalLocation(path))
    with report_malformed(f"{path}: checksums"):
        checksums = dict(json.loads(file.header.metadata[_CHECKSUMS]))
    tensors = {}
    for name, entry in file.header.entries.items():
        raw = file.read(entry)
        if _core.crc32c(raw) != checksums.get(name):
            raise CorruptFileError(f"{path}: {name}: checksum mismatch; remove the folder")
        tensors[name] = view_as(raw, entry.spec).clone()
    return tensors
