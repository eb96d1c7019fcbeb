"""Weights of a model as they are stored: names, tied weights, quantized layers in parts."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from slimtensors.archive import Archive
from slimtensors.archive.write import TensorSource
from slimtensors.codecs.statistics import Sparsity, merge, sparsity_of
from slimtensors.errors import ConfigError, MismatchError, SlimError
from slimtensors.folder.config_json import read_config
from slimtensors.parallel import Each, Workers
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.plans import choose_format
from slimtensors.quantization.state_dict import (
    decompress_weight,
    find_scheme,
    find_stored_layers,
    is_quantization_part,
    is_stored_dense,
    join_name,
)
from slimtensors.runtime import CompressedTensor, from_module
from slimtensors.storage import LocalLocation, find_model_files, weight_files
from slimtensors.tensor import Json, Spec, bitwise_equal, check_storable, to_cpu


def weight_items(
    model: Any, given: dict[str, Tensor], *, save_original_format: bool
) -> list[TensorSource]:
    """Return what transformers would write dense, to be read when its turn comes.

    Weights that run compressed are read as they are.
    """
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        given.pop(name, None)
    homes = {id(x): name for name, x in given.items() if x.is_meta}
    # What runs compressed is never tied, and has no one place in memory to tell it by.
    held = {name: x for name, x in given.items() if isinstance(x, CompressedTensor)}
    plain = {name: x for name, x in given.items() if name not in held}
    tensors: dict[str, Tensor] = remove_tied_weights_from_state_dict(plain, model) | held
    if save_original_format:
        tensors = revert_weight_conversion(model, tensors)
        if any(x.is_meta and id(x) not in homes for x in tensors.values()):
            # Some weights are on the disk, and converting them takes their numbers.
            here = {name: _present(model, name, x) for name, x in given.items()}
            tensors, homes = revert_weight_conversion(model, here), {}

    def item(name: str, x: Tensor) -> TensorSource:
        if id(x) in homes:
            return TensorSource(name, Spec.of(x), lambda each: _present(model, homes[id(x)], x))
        if isinstance(x, CompressedTensor):
            return TensorSource(name, Spec(x.dtype, tuple(x.shape)), lambda each: x)
        return TensorSource(name, Spec.of(check_storable(name, x)), lambda each: to_cpu(x))

    # In the order in which safetensors itself lists them, so that equal models give equal files.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    return [item(name, x) for name, x in ordered]


def measured_weights(model: nn.Module) -> Sparsity:
    """Return how sparse all weights of a model are; tied ones count once."""
    with Workers() as workers:
        results = workers.in_order(
            lambda pair: sparsity_of(dense_weights(_present(model, *pair))),
            list(_weights(model)),
            lambda pair: pair[1].nbytes,
        )
        return merge(results)


def same_weights(a: Tensor, b: Tensor) -> bool:
    """Tell whether two weights are the same bits, dense or in the form in which they run."""
    if isinstance(a, CompressedTensor) or isinstance(b, CompressedTensor):
        return type(a) is type(b) and torch.equal(a, b)
    return bitwise_equal(a, b)


def dense_weights(x: Tensor) -> Tensor:
    """Return a weight as an ordinary tensor, also if it runs compressed."""
    return to_cpu(x.dequantize()) if isinstance(x, CompressedTensor) else x


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True)
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)


def _present(model: Any, name: str, x: Tensor) -> Tensor:
    """Return a weight in main memory, from the disk if accelerate has put it there."""
    return to_cpu(load_offloaded_parameter(model, name) if x.is_meta else x)


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
        self._layers = find_stored_layers(set(archive))
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
            scheme = find_scheme(layer, self._config, self._modules)
            parts = self._parts(layer, each)
            return decompress_weight(parts, scheme, self._config, self._modules.get(layer))
        except SlimError as error:
            raise type(error)(f"{self.path}: {layer}: {error}") from error

    def load_compressed(self, name: str, each: Each) -> Tensor:
        """Read one weight as it is stored, if it is stored quantized."""
        layer = self._layer(name)
        if layer is None:
            return self._archive.load_compressed(name, each)
        try:
            scheme = find_scheme(layer, self._config, self._modules)
            parts = self._parts(layer, each)
            if is_stored_dense(parts):
                return parts["weight"]
            assert scheme.weights is not None, "a scheme was found because it has some"
            return from_module(
                parts,
                choose_format(scheme, self._config),
                scheme.weights,
                inputs=scheme.input_activations,
                version=self._config.version,
            )
        except SlimError as error:
            raise type(error)(f"{self.path}: {layer}: {error}") from error

    def _owner(self, name: str) -> str:
        layer = name.rpartition(".")[0]
        is_part = layer in self._layers and is_quantization_part(name, self._layers)
        return join_name(layer, "weight") if is_part else name

    def _layer(self, name: str) -> str | None:
        layer, _, parameter = name.rpartition(".")
        return layer if parameter == "weight" and layer in self._layers else None

    def _parts(self, layer: str, each: Each) -> dict[str, Tensor]:
        suffixes = self._layers[layer]
        return {s: self._archive.load_one(join_name(layer, s), each) for s in suffixes}


def check_unchanged(items: Iterable[TensorSource], files: QuantizedFiles) -> None:
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
            if not same_weights(load(item.name, workers.each).to(x.dtype), x):
                raise MismatchError(f"{item.name}: was changed since it was loaded, and {advice}")


def copy_weights(source: Path, folder: Path) -> None:
    """Make the weights in `folder` those in `source`; each file is there as a whole or not."""
    names = weight_files(LocalLocation(source))
    stale = find_model_files(folder) - set(names)
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
