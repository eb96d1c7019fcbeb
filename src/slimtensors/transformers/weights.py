"""Weights of a model as tensors to store: collect, compare with stored ones, copy."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from slimtensors.archive import Archive
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.dialects.compressed_tensors import find_prefixes
from slimtensors.archive.write import TensorSource
from slimtensors.checkpoint.store import STATE, StoredState
from slimtensors.codecs.plan import Encoded
from slimtensors.codecs.statistics import Sparsity, merge, sparsity_of
from slimtensors.errors import ConfigError, FormatError, MismatchError, SlimError, shorten_list
from slimtensors.parallel import Each, Workers
from slimtensors.quantization import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.checkpoint_layout import StoredTensor, find_layout
from slimtensors.quantization.state import get_quantization, is_stored_dense
from slimtensors.quantization.state_dict import (
    decompress_weight,
    find_scheme,
    find_stored_layers,
    is_quantization_part,
    join_name,
)
from slimtensors.quantization.stored_codes import WeightCodes, encode_stored
from slimtensors.quantization.targets import choose_format
from slimtensors.runtime import CompressedTensor, from_module
from slimtensors.storage import (
    SINGLE,
    LocalLocation,
    install_model,
    temporary_folder,
    weight_files,
)
from slimtensors.storage.files import copy_file
from slimtensors.tensor import Spec, bitwise_equal, check_storable, to_cpu

_LOG = logging.getLogger(__name__)

QUANTIZED = "quantized"
"""Preset name for weights of compressed-tensors, which can only be copied from their files."""


def collect_weights(
    model: Any, state: dict[str, Tensor], *, save_original_format: bool
) -> list[TensorSource]:
    """Return the tensors that transformers would write dense, read on demand.

    Weights that are compressed in memory are returned as they are. Names in the model's
    `_keys_to_ignore_on_save` are removed from `state`.
    """
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    offloaded = {id(x): name for name, x in state.items() if x.is_meta}
    # Compressed weights have no single address by which transformers could detect tied ones.
    compressed = {name: x for name, x in state.items() if isinstance(x, CompressedTensor)}
    plain = {name: x for name, x in state.items() if name not in compressed}
    tensors: dict[str, Tensor] = remove_tied_weights_from_state_dict(plain, model)
    tensors |= _remove_tied(compressed, model.all_tied_weights_keys if compressed else {})
    if save_original_format:
        tensors = revert_weight_conversion(model, tensors)
        if any(x.is_meta and id(x) not in offloaded for x in tensors.values()):
            # Converting weights that are offloaded to disk requires their values.
            in_memory = {name: _load_offloaded(model, name, x) for name, x in state.items()}
            tensors, offloaded = revert_weight_conversion(model, in_memory), {}

    def make_source(name: str, x: Tensor) -> TensorSource:
        if id(x) in offloaded:
            key = offloaded[id(x)]
            return TensorSource(name, Spec.of(x), lambda each: _load_offloaded(model, key, x))
        if isinstance(x, CompressedTensor):
            return TensorSource(name, Spec(x.dtype, tuple(x.shape)), lambda each: x)
        return TensorSource(name, Spec.of(check_storable(name, x)), lambda each: to_cpu(x))

    # The order of safetensors, so that equal models give equal files.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    return [make_source(name, x) for name, x in ordered]


def _remove_tied(
    weights: Mapping[str, CompressedTensor], tied: Mapping[str, str]
) -> dict[str, CompressedTensor]:
    """Return compressed weights without those that have the parts of the one they are tied to."""

    def is_same(name: str, other: str) -> bool:
        if other not in weights:
            return False
        pairs = zip(weights[name].leaves(), weights[other].leaves(), strict=False)
        return all(a.data_ptr() == b.data_ptr() for (_, a), (_, b) in pairs)

    return {
        name: x for name, x in weights.items() if name not in tied or not is_same(name, tied[name])
    }


def sort_like_safetensors(sources: Iterable[TensorSource]) -> list[TensorSource]:
    """Return sources in the order in which safetensors writes them: by dtype, then by name."""

    def key(source: TensorSource) -> tuple[int, bool, str]:
        dtype = source.spec.dtype
        return -dtype.itemsize, not dtype.is_floating_point, source.name

    return sorted(sources, key=key)


def collect_dense_weights(model: Any) -> list[TensorSource]:
    """Return the tensors that transformers would write dense, also for a quantized model.

    Their order is that of safetensors, by dtype, then by name.
    """
    state = dict(model.state_dict())
    for module in model.modules():
        quantization = get_quantization(module)
        if quantization is None or quantization.status is not QuantizationStatus.COMPRESSED:
            continue
        plan = quantization.plan
        for name in quantization.tensors():
            state.pop(plan.key(name), None)
        for weight in plan.weights:
            state[plan.key(weight.parameter)] = quantization.dense_weight(weight)
    return sort_like_safetensors(collect_weights(model, state, save_original_format=True))


def encode_quantized(
    model: nn.Module, sources: Iterable[TensorSource]
) -> tuple[list[TensorSource], list[str]]:
    """Return dense weights as sources that encode those of quantized layers by their codes.

    Also return a list to which reading them adds the names of quantized weights that stay dense:
    those that codes cannot represent in the layout of a checkpoint.
    """
    quantized = {
        state.plan.key(weight.parameter): (state, weight)
        for module in model.modules()
        if (state := get_quantization(module)) is not None
        for weight in state.plan.weights
    }
    layout = find_layout(model, {name: weight for name, (_, weight) in quantized.items()})
    dense = sorted(layout.untraceable)

    @lru_cache(maxsize=4)  # a stack of experts is read once for each expert
    def read_codes(parameter: str) -> WeightCodes:
        return WeightCodes.read(*quantized[parameter])

    def encode(source: TensorSource, tensor: StoredTensor) -> TensorSource:
        def read(each: Each) -> Tensor | Encoded:
            x = source.read(each)
            assert isinstance(x, Tensor), "weights of a quantized model are tensors"
            encoded = encode_stored(tensor, read_codes, x, each)
            if encoded is None:
                dense.append(tensor.name)
            return x if encoded is None else encoded

        return replace(source, read=read)

    encoded = [
        encode(source, layout.tensors[source.name]) if source.name in layout.tensors else source
        for source in sources
    ]
    return encoded, dense


def check_names(model: Any, stored: Iterable[TensorSource]) -> None:
    """Raise `MismatchError` if tensors are not those that checkpoints of a model contain.

    Args:
        model: the model.
        stored: tensors to store, those of layers in the dialect compressed-tensors in parts.
    """
    specs = {source.name: source.spec for source in stored}
    owners = {
        f"{prefix}.{part}": name
        for prefix, name in find_prefixes(specs.keys()).items()
        for part in ("compressed", "bitmask", "shape", "row_offsets")
    }
    names = {owners.get(name, name) for name in specs}
    layers = find_stored_layers(names)
    names = {name for name in names if not is_quantization_part(name, layers)}
    dense = names & specs.keys()
    names |= {join_name(layer, "weight") for layer in layers}
    expected = {source.name: source.spec for source in collect_dense_weights(model)}
    missing, unexpected = sorted(expected.keys() - names), sorted(names - expected.keys())
    for name in sorted(dense & expected.keys()):
        if specs[name].shape != expected[name].shape:
            unexpected.append(f"{name} ({specs[name]}, not {expected[name]})")
    if missing or unexpected:
        raise MismatchError(
            f"{type(model).__name__} would not load: missing {shorten_list(missing) or 'none'},"
            f" unexpected {shorten_list(unexpected) or 'none'}; nothing was saved"
        )


def measure_sparsity(model: nn.Module) -> Sparsity:
    """Return the sparsity of all weights of a model; tied weights count once."""
    with Workers() as workers:
        results = workers.in_order(
            lambda pair: sparsity_of(to_dense(_load_offloaded(model, *pair))),
            list(_iterate_weights(model)),
            lambda pair: pair[1].nbytes,
        )
        return merge(results)


def to_dense(x: Tensor) -> Tensor:
    """Return a weight as an ordinary tensor; dequantize it if it is compressed in memory."""
    return to_cpu(x.dequantize()) if isinstance(x, CompressedTensor) else x


def _iterate_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True)
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)


def _load_offloaded(model: Any, name: str, x: Tensor) -> Tensor:
    """Return a weight in main memory; read it if accelerate has offloaded it to disk."""
    return to_cpu(load_offloaded_parameter(model, name) if x.is_meta else x)


class QuantizedArchive:
    """An archive of compressed-tensors in which each quantized layer is one weight."""

    def __init__(self, archive: Archive, config: QuantizationConfig, model: nn.Module) -> None:
        if config.transform_config:
            raise ConfigError(
                f"{archive.path}: rotated weights (transform_config) are not supported; load the"
                " folder with an Auto class of transformers and compressed-tensors installed"
            )
        self.path = archive.path
        self._archive, self._config = archive, config
        self._modules = dict(model.named_modules())
        self._layers = find_stored_layers(set(archive))
        self.owners = {key: self._find_owner(name) for key, name in archive.owners.items()}
        """Map from the entries of the files to the weights that they belong to."""
        self._names = set(self.owners.values())

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def load_one(self, name: str, each: Each) -> Tensor:
        """Read one weight, dense."""
        layer = self._find_layer(name)
        if layer is None:
            return self._archive.load_one(name, each)
        with self._name_errors(layer):
            scheme = find_scheme(layer, self._config, self._modules)
            parts = self._read_parts(layer, each)
            return decompress_weight(parts, scheme, self._config, self._modules.get(layer))

    def load_compressed(self, name: str, each: Each) -> Tensor:
        """Read one weight without dequantizing it."""
        layer = self._find_layer(name)
        if layer is None:
            return self._archive.load_compressed(name, each)
        with self._name_errors(layer):
            scheme = find_scheme(layer, self._config, self._modules)
            parts = self._read_parts(layer, each)
            if is_stored_dense(parts):
                return parts["weight"]
            assert scheme.weights is not None, "only schemes with weights have stored layers"
            return from_module(
                parts,
                choose_format(scheme, self._config),
                scheme.weights,
                inputs=scheme.input_activations,
                version=self._config.version,
            )

    @contextmanager
    def _name_errors(self, layer: str) -> Iterator[None]:
        """Add the path and the layer to errors."""
        try:
            yield
        except SlimError as error:
            raise type(error)(f"{self.path}: {layer}: {error}") from error

    def _find_owner(self, name: str) -> str:
        layer = name.rpartition(".")[0]
        is_part = layer in self._layers and is_quantization_part(name, self._layers)
        return join_name(layer, "weight") if is_part else name

    def _find_layer(self, name: str) -> str | None:
        layer, _, parameter = name.rpartition(".")
        return layer if parameter == "weight" and layer in self._layers else None

    def _read_parts(self, layer: str, each: Each) -> dict[str, Tensor]:
        suffixes = self._layers[layer]
        return {s: self._archive.load_one(join_name(layer, s), each) for s in suffixes}


class CheckpointWeights:
    """The weights of the model in a training checkpoint, which may be a delta."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._stored = StoredState(folder)
        self._names = self._stored.find_weights()
        for name in self._names.values():
            if name not in self._stored.tied and not self._stored.has_entry(name):
                raise MismatchError(
                    f"{folder}: {name} has no entry of its own in {STATE}, which transformers"
                    " needs; use load_checkpoint instead"
                )
        self.owners = {name: key for key, name in self._names.items()}
        """Map from the entries of the file to the parameters of the model."""

    def __len__(self) -> int:
        return len(self._names)

    def load_one(self, name: str, each: Each) -> Tensor:
        """Read one weight."""
        return self._stored.load(self._names[name], each)

    load_compressed = load_one


def reuse_stored(sources: Sequence[TensorSource], files: Sequence[Path]) -> list[TensorSource]:
    """Return sources that copy the stored bytes of weights that are unchanged.

    This applies where encoding the weight again would give other bytes: to lossy codecs, and to
    weights that are compressed in memory.
    """
    if not files:
        return list(sources)
    try:
        archive = Archive.from_files(files)
    except (OSError, FormatError) as error:
        _LOG.warning(
            "weights are encoded again, because the original files cannot be read: %s", error
        )
        return list(sources)
    return [_reuse_if_unchanged(source, archive) for source in sources]


def _reuse_if_unchanged(source: TensorSource, archive: Archive) -> TensorSource:
    name = source.name
    plan = archive.plan(name) if name in archive else None
    if plan is None or archive.spec(name) != source.spec:
        return source

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = source.read(each)
        is_compressed = isinstance(x, CompressedTensor)
        if not isinstance(x, Tensor) or not (is_compressed or plan.is_lossy):
            return x
        load = archive.load_compressed if is_compressed else archive.load_one
        return archive.read_packed(name) if _are_equal(load(name, each), x) else x

    return replace(source, read=read)


def check_unchanged(sources: Iterable[TensorSource], archive: QuantizedArchive) -> None:
    """Raise `MismatchError` if a weight is not equal to the stored one."""
    advice = (
        "changed weights are not quantized again; pass save_compressed=False to save dense"
        " weights, or call slimtensors.transformers.enable(model, preset='lossless') first"
    )
    with Workers() as workers:
        for source in sources:
            if source.name not in archive:
                raise MismatchError(f"{archive.path}: {source.name} not found; {advice}")
            x = source.read(workers.each)
            assert isinstance(x, Tensor), "weights of a model are tensors"
            is_compressed = isinstance(x, CompressedTensor)
            load = archive.load_compressed if is_compressed else archive.load_one
            if not _are_equal(load(source.name, workers.each).to(x.dtype), x):
                raise MismatchError(f"{source.name} was changed after loading; {advice}")


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two weights are bitwise equal, dense or compressed."""
    if isinstance(a, CompressedTensor) or isinstance(b, CompressedTensor):
        return type(a) is type(b) and torch.equal(a, b)
    return bitwise_equal(a, b)


def copy_weight_files(source: Path, folder: Path) -> None:
    """Replace the model in `folder` by copies of the weight files in `source`."""
    if folder.exists() and folder.samefile(source):
        return
    with temporary_folder(folder / SINGLE) as temporary:
        for name in weight_files(LocalLocation(source)):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(source / name, temporary / name)
        install_model(temporary, folder)
