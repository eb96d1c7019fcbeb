"""Open files, model folders, quantized folders and checkpoints as tensors loaded on demand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.checkpoint import state_file
from slimtensors.checkpoint.store import StoredState
from slimtensors.errors import ConfigError, SlimError
from slimtensors.folder.compress import is_model_folder
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    METHOD,
    parse_quantization,
    read_config,
    read_method,
    read_quantization_section,
)
from slimtensors.parallel import Each
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.state_dict import (
    decompress_weight,
    find_scheme,
    find_stored_layers,
    join_name,
)
from slimtensors.quantization.targets import choose_format
from slimtensors.storage import StrPath, locate_folder
from slimtensors.tensor import Json, dtype_name


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a source, loaded on demand."""

    summary: TensorSummary
    """Dtype and shape may be those of the stored codes; the loaded tensor has the real ones."""
    load: Callable[[Each], Tensor]
    plan: Json | None = None
    is_lossy: bool = False
    entropy_bits: float = 0.0
    """Order-0 entropy of the whole tensor."""


@dataclass(frozen=True)
class ModelTensors:
    """All tensors of a source by name, and the tied names."""

    path: str
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    """Tied name -> name of the tensor that is stored."""

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor with this name, tied or not, or None."""
        return self.tensors.get(self.tied.get(name, name))


def open_tensors(
    source: StrPath, summarize: Callable[[Archive], Summary] = Archive.summary
) -> ModelTensors:
    """Open a source; `summarize` may be `Archive.bounds` to include entropies."""
    path = state_file(source)
    archive = open_archive(path)
    summaries = {t.name: t for t in summarize(archive).tensors if t.codec != "tied"}
    if path != source:
        return _open_checkpoint(StoredState(locate_folder(source)), archive, summaries)
    config = _quantization_config(source)
    if config is not None:
        return _open_quantized(archive, summaries, config)
    archive.check_not_delta()
    return _open_archive(str(source), archive, summaries)


def _open_archive(
    path: str, archive: Archive, summaries: Mapping[str, TensorSummary]
) -> ModelTensors:
    tensors = {name: _archive_tensor(archive, summary) for name, summary in summaries.items()}
    return ModelTensors(path, tensors, archive.tied())


def _archive_tensor(archive: Archive, summary: TensorSummary) -> StoredTensor:
    plan = archive.plan(summary.name)
    return StoredTensor(
        summary,
        partial(archive.load_one, summary.name),
        plan.to_json() if plan else None,
        is_lossy=plan is not None and plan.is_lossy,
        entropy_bits=(summary.bound or 0.0) * summary.items,
    )


def _quantization_config(source: StrPath) -> QuantizationConfig | None:
    data = read_config(source) if is_model_folder(source) else {}
    if read_method(read_quantization_section(data)) not in (COMPRESSED_TENSORS, METHOD):
        return None  # formats of other libraries are shown as stored
    try:
        return parse_quantization(data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _open_quantized(
    archive: Archive, summaries: Mapping[str, TensorSummary], config: QuantizationConfig
) -> ModelTensors:
    """Return each layer that compressed-tensors stores in several parts as one tensor."""
    layers = find_stored_layers(summaries.keys())
    tensors: dict[str, StoredTensor] = {}
    for name, summary in summaries.items():
        layer, _, suffix = name.rpartition(".")
        if suffix not in layers.get(layer, ()):
            tensors[name] = _archive_tensor(archive, summary)
        elif (weight := join_name(layer, "weight")) not in tensors:
            parts = {part: summaries[join_name(layer, part)] for part in layers[layer]}
            tensors[weight] = _quantized_tensor(archive, layer, parts, config)
    return ModelTensors(archive.path, tensors, archive.tied())


def _quantized_tensor(
    archive: Archive, layer: str, parts: Mapping[str, TensorSummary], config: QuantizationConfig
) -> StoredTensor:
    try:
        scheme = find_scheme(layer, config, {})
        form = choose_format(scheme, config)
    except SlimError as error:
        raise type(error)(f"{archive.path}: {layer}: {error}") from error
    assert scheme.weights is not None, "layers without a weight scheme are not stored in parts"

    def load(each: Each) -> Tensor:
        loaded = {suffix: archive.load_one(join_name(layer, suffix), each) for suffix in parts}
        return decompress_weight(loaded, scheme, config, None)

    first = next(iter(parts.values()))
    sizes = {suffix: part.stored_bytes for suffix, part in parts.items()}
    return StoredTensor(
        replace(
            first,
            name=join_name(layer, "weight"),
            codec=form,
            stored_bytes=sum(sizes.values()),
            parts=sizes,
        ),
        load,
        {"codec": {"name": form, **scheme.weights.to_dict()}},
        is_lossy=True,
        entropy_bits=sum((part.bound or 0.0) * part.items for part in parts.values()),
    )


def _open_checkpoint(
    state: StoredState, archive: Archive, summaries: Mapping[str, TensorSummary]
) -> ModelTensors:
    """Return the tensors of a checkpoint; sizes are those of the delta if it is one."""
    if archive.delta is None:
        return _open_archive(str(state.folder), archive, summaries)
    tensors: dict[str, StoredTensor] = {}
    for name in state.names():
        spec, kind = state.spec(name), state.kind(name)
        load = partial(state.load, name)
        if name in summaries:
            tensor = _archive_tensor(archive, summaries[name])
            codec = f"{kind}({tensor.summary.codec})"
        else:  # unchanged since the base: no bytes in this checkpoint
            codec = kind
            summary = TensorSummary(
                name, dtype_name(spec.dtype), spec.shape, codec, spec.nbytes, 0, archive.path
            )
            tensor = StoredTensor(summary, load)
        error = state.manifest.errors.get(name)
        tensors[name] = replace(
            tensor,
            summary=replace(tensor.summary, codec=codec, error=error),
            load=load,
            is_lossy=error is not None,
        )
    return ModelTensors(str(state.folder), tensors, state.tied)
