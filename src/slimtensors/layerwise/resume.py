"""Work folders: finished layers survive a killed run."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slimtensors import _core
from slimtensors.errors import CorruptFileError, FormatError, MismatchError
from slimtensors.layerwise.gptq import Rounded
from slimtensors.layerwise.inputs import Layer
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization.affine import Params
from slimtensors.storage import (
    FileOutput,
    LocalLocation,
    StrPath,
    TensorBytes,
    local_path,
    open_file,
    write_json,
)
from slimtensors.tensor import Json, Spec, as_bytes, to_cpu, view_as


def compute_digests(
    model: nn.Module, layers: Iterable[Layer], batches: Iterable[Any], options: object
) -> dict[str, str]:
    """Return a digest of the model, one of the config and one of the data."""
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
    """Yield the bytes of everything in a value, and what tells apart values of the same bytes."""
    if isinstance(value, Tensor):
        x = to_cpu(value)
        yield repr(Spec.of(x)).encode()
        yield as_bytes(x).numpy().data
    elif isinstance(value, Mapping):
        yield b"{%d" % len(value)
        for key, each in value.items():
            yield repr(key).encode()
            yield from _chunks(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield b"[%d" % len(value)
        for each in value:
            yield from _chunks(each)
    else:
        yield repr(value).encode()


STATE = "quantization.json"
_VERSION = 1
_PARAMS = ("scale", "zero_point", "global_scale", "g_idx")
_SUMS = "crc32c"


class WorkFolder:
    """Finished layers in files of their own, and a JSON file that lists them.

    `made_of` are digests of everything the results depend on; a folder that was begun with others
    is refused.
    """

    def __init__(self, folder: StrPath, made_of: Mapping[str, str]) -> None:
        self._folder = local_path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._state: Json = {"version": _VERSION, "made_of": dict(made_of), "finished": {}}
        if (self._folder / STATE).exists():
            self._resume(self._folder / STATE)

    def _resume(self, path: Path) -> None:
        try:
            state = json.loads(path.read_text())
            version, made_of, finished = state["version"], state["made_of"], state["finished"]
            names = {str(entry["file"]) for entry in finished.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"{path}: is not what this library wrote: {error!r}") from error
        if version != _VERSION:
            raise FormatError(f"{path}: is of version {version}, this library knows {_VERSION}")
        if any("/" in name or "\\" in name for name in names):
            raise FormatError(f"{path}: names files outside of its folder")
        want: Mapping[str, str] = self._state["made_of"]
        differing = [key for key in want if made_of.get(key) != want[key]]
        if differing:
            raise MismatchError(
                f"{self._folder}: was begun with another {' and another '.join(differing)}; "
                "give a new folder, or remove this one"
            )
        self._state = state

    def has(self, name: str) -> bool:
        """Tell whether something of this name is finished."""
        return name in self._state["finished"]

    def load(self, name: str) -> tuple[Rounded, LayerReport]:
        """Return a finished layer."""
        tensors = self.load_tensors(name)
        params = Params(**{key: tensors[key] for key in _PARAMS if key in tensors})
        return Rounded(tensors["weight"], params), self.report(name)

    def report(self, name: str) -> LayerReport:
        """Return how a finished layer went."""
        return LayerReport.from_json(self._state["finished"][name]["report"])

    def store(self, name: str, result: Rounded, report: LayerReport) -> None:
        """Keep a finished layer."""
        parts = {key: getattr(result.params, key) for key in _PARAMS}
        tensors = {key: x for key, x in parts.items() if x is not None}
        self.store_tensors(name, {"weight": result.weight, **tensors}, report.to_json())

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that were kept under a name."""
        return _read(self._folder / self._state["finished"][name]["file"])

    def store_tensors(
        self, name: str, tensors: Mapping[str, Tensor], report: Json | None = None
    ) -> None:
        """Keep tensors under a name; they are there once this returns, whatever happens then."""
        file = f"{len(self._state['finished']):05d}.safetensors"
        _write(self._folder / file, tensors)
        self._state["finished"][name] = {"file": file, "report": report}
        write_json(self._folder / STATE, self._state)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with FileOutput(path, reserve=256 + 160 * len(tensors)) as output:
        # Largest items first, so that all tensors lie aligned.
        order = sorted(tensors, key=lambda key: -tensors[key].element_size())
        for key in order:
            x = to_cpu(tensors[key])
            raw = as_bytes(x)
            checksum = _core.crc32c(raw.numpy())
            output.add([TensorBytes(key, Spec.of(x), [raw], checksum)])
        output.commit(order, lambda names, sums, table: {_SUMS: json.dumps(dict(sums))})


def _read(path: Path) -> dict[str, Tensor]:
    file = open_file(LocalLocation(path))
    try:
        sums = json.loads(file.header.metadata[_SUMS])
    except (KeyError, ValueError) as error:
        raise CorruptFileError(f"{path}: has no checksums") from error
    tensors = {}
    for name, entry in file.header.entries.items():
        raw = file.read(entry)
        if _core.crc32c(raw) != sums.get(name):
            raise CorruptFileError(f"{path}: {name}: checksum does not match; remove the folder")
        tensors[name] = view_as(raw, entry.spec).clone()
    return tensors
