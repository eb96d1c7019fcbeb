"""Folders that compressed-tensors quantized: layers in parts, read as what they stand for."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.archive.state import Item
from slimtensors.archive.workers import Workers
from slimtensors.beside import read_config
from slimtensors.compressor.quantized import (
    dense_weight,
    is_number,
    is_stored_dense,
    key_of,
    scheme_of,
    stored_layers,
)
from slimtensors.container import LocalPlace, old_files, weight_files
from slimtensors.errors import ConfigError, MismatchError, SlimError
from slimtensors.integrations.transformers.weights import same
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.plans import format_of
from slimtensors.spec import Each, Json
from slimtensors.tensors import CompressedTensor, from_module

QUANTIZED = "quantized"
"""Stands for a preset where weights can be written as they were, and in no other way."""


class QuantizedFiles:
    """What an archive is to its reader, for one that holds some weights in parts."""

    def __init__(self, archive: Archive, config: QuantizationConfig, model: nn.Module) -> None:
        if config.transform_config:
            raise ConfigError(
                f"{archive.path}: its weights were rotated (transform_config), which only"
                " compressed-tensors can undo; load it with a plain Auto class of transformers"
            )
        self.path = archive.path
        self._archive, self._config = archive, config
        self._modules = dict(model.named_modules())
        self._layers = stored_layers(set(archive))
        self.owners = {key: self._owner(name) for key, name in archive.owners.items()}
        """Which weight each entry of the files belongs to."""
        self._names = set(self.owners.values())

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def load_one(self, name: str, each: Each) -> Tensor:
        """Read one weight, dense."""
        layer = self._layer(name)
        if layer is None:
            return self._archive.load_one(name, each)
        try:
            scheme = scheme_of(layer, self._config, self._modules)
            parts = self._parts(layer, each)
            return dense_weight(parts, scheme, self._config, self._modules.get(layer))
        except SlimError as error:
            raise type(error)(f"{self.path}: {layer}: {error}") from error

    def load_compressed(self, name: str, each: Each) -> Tensor:
        """Read one weight as it is stored, if it is stored quantized."""
        layer = self._layer(name)
        if layer is None:
            return self._archive.load_compressed(name, each)
        try:
            scheme = scheme_of(layer, self._config, self._modules)
            parts = self._parts(layer, each)
            if is_stored_dense(parts):
                return parts["weight"]
            assert scheme.weights is not None, "a scheme was found because it has some"
            return from_module(
                parts,
                format_of(scheme, self._config),
                scheme.weights,
                inputs=scheme.input_activations,
                version=self._config.version,
            )
        except SlimError as error:
            raise type(error)(f"{self.path}: {layer}: {error}") from error

    def _owner(self, name: str) -> str:
        layer = name.rpartition(".")[0]
        is_part = layer in self._layers and is_number(name, self._layers)
        return key_of(layer, "weight") if is_part else name

    def _layer(self, name: str) -> str | None:
        layer, _, parameter = name.rpartition(".")
        return layer if parameter == "weight" and layer in self._layers else None

    def _parts(self, layer: str, each: Each) -> dict[str, Tensor]:
        suffixes = self._layers[layer]
        return {s: self._archive.load_one(key_of(layer, s), each) for s in suffixes}


def check_unchanged(items: Iterable[Item], files: QuantizedFiles) -> None:
    """Raise if any weight is not what it is in the files."""
    advice = (
        "codes are not made anew on saving; pass save_compressed=False for dense weights, or"
        " call slimtensors.transformers.enable(model, preset='lossless') before"
    )
    with Workers() as workers:
        for item in items:
            if item.name not in files:
                raise MismatchError(f"{files.path}: holds no {item.name}, and {advice}")
            x = item.read(workers.each)
            assert isinstance(x, Tensor), "weights of a model are tensors"
            is_held = isinstance(x, CompressedTensor)
            load = files.load_compressed if is_held else files.load_one
            if not same(load(item.name, workers.each).to(x.dtype), x):
                raise MismatchError(f"{item.name}: was changed since it was loaded, and {advice}")


def copy_weights(source: Path, folder: Path) -> None:
    """Make the weights in `folder` those in `source`; each file is there as a whole or not."""
    names = weight_files(LocalPlace(source))
    stale = old_files(folder) - set(names)
    with TemporaryDirectory(prefix=".", dir=folder) as elsewhere:
        for name in reversed(names):  # an index comes when all that it names is there
            target = folder / name
            if target.exists() and target.samefile(source / name):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            copied = Path(shutil.copyfile(source / name, Path(elsewhere, target.name)))
            copied.replace(target)
    for name in stale:
        (folder / name).unlink()


def with_sections_of(config: Json, source: Path) -> Json:
    """Return `config` saying what that of `source` says about its weights, in the same place."""
    before = read_config(source)
    sections = ("quantization_config", "compression_config", "sparsity_config")
    merged = config | {key: before[key] for key in sections if key in before}
    return {key: merged[key] for key in (*before, *merged) if key in merged}
