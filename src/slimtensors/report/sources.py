"""The tensors of all that can be looked at: files, folders, quantized folders, checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.checkpoint import state_file
from slimtensors.checkpoint.store import StoredState
from slimtensors.errors import ConfigError, SlimError
from slimtensors.folder.compress import is_model
from slimtensors.folder.config_json import read_config
from slimtensors.folder.convert import COMPRESSED_TENSORS, quantization_of
from slimtensors.parallel import Each
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.plans import choose_format
from slimtensors.quantization.state_dict import (
    decompress_weight,
    find_scheme,
    find_stored_layers,
    join_name,
)
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, dtype_name


@dataclass(frozen=True)
class TensorHandle:
    """A tensor as it is stored, and the way to its numbers."""

    stored: TensorSummary
    """Shape and dtype may be those of the codes; the numbers tell those of the tensor."""
    load: Callable[[Each], Tensor]
    plan: Json | None = None
    is_lossy: bool = False
    bound_bits: float = 0.0
    """Order-0 entropy of all of it."""


@dataclass(frozen=True)
class ReportSource:
    """Tensors by name, and names that stand for some of them."""

    path: str
    tensors: Mapping[str, TensorHandle]
    tied: Mapping[str, str]

    def find(self, name: str) -> TensorHandle | None:
        """Return the tensor of a name, if there is one."""
        return self.tensors.get(self.tied.get(name, name))


def open_source(
    source: StrPath, look: Callable[[Archive], Summary] = Archive.summary
) -> ReportSource:
    """Find the tensors; `look` says how they are stored, and their entropies if it knows them."""
    path = state_file(source)
    archive = Archive(path)
    own = {stored.name: stored for stored in look(archive).tensors if stored.codec != "tied"}
    if path != source:
        return _checkpoint(StoredState(Path(source)), archive, own)
    config = _quantization(source)
    if config is not None:
        return _quantized(archive, own, config)
    archive.check_whole()
    return ReportSource(str(source), _plain(archive, own), archive.tied())


def _plain(archive: Archive, own: Mapping[str, TensorSummary]) -> dict[str, TensorHandle]:
    return {name: _held(archive, stored) for name, stored in own.items()}


def _held(archive: Archive, stored: TensorSummary) -> TensorHandle:
    plan = archive.plan(stored.name)
    return TensorHandle(
        stored,
        partial(archive.load_one, stored.name),
        plan.to_json() if plan else None,
        is_lossy=plan is not None and plan.is_lossy,
        bound_bits=(stored.bound or 0.0) * stored.items,
    )


def _quantization(source: StrPath) -> QuantizationConfig | None:
    data = read_config(source) if is_model(source) else {}
    method = (data.get("quantization_config") or {}).get("quant_method", COMPRESSED_TENSORS)
    if method not in (COMPRESSED_TENSORS, "slimtensors"):
        return None  # what other libraries mean by their tensors is theirs to say
    try:
        return quantization_of(data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _quantized(
    archive: Archive, own: Mapping[str, TensorSummary], config: QuantizationConfig
) -> ReportSource:
    """Return layers that compressed-tensors stores in parts as one tensor each."""
    layers = find_stored_layers(own.keys())
    tensors: dict[str, TensorHandle] = {}
    for name, stored in own.items():
        layer, _, suffix = name.rpartition(".")
        if suffix not in layers.get(layer, ()):
            tensors[name] = _held(archive, stored)
        elif (weight := join_name(layer, "weight")) not in tensors:
            parts = {part: own[join_name(layer, part)] for part in layers[layer]}
            tensors[weight] = _in_parts(archive, layer, parts, config)
    return ReportSource(archive.path, tensors, archive.tied())


def _in_parts(
    archive: Archive, layer: str, parts: Mapping[str, TensorSummary], config: QuantizationConfig
) -> TensorHandle:
    try:
        scheme = find_scheme(layer, config, {})
        form = choose_format(scheme, config)
    except SlimError as error:
        raise type(error)(f"{archive.path}: {layer}: {error}") from error
    assert scheme.weights is not None, "a scheme was found because it has some"

    def load(each: Each) -> Tensor:
        read = {suffix: archive.load_one(join_name(layer, suffix), each) for suffix in parts}
        return decompress_weight(read, scheme, config, None)

    first = next(iter(parts.values()))
    sizes = {suffix: part.stored_bytes for suffix, part in parts.items()}
    return TensorHandle(
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
        bound_bits=sum((part.bound or 0.0) * part.items for part in parts.values()),
    )


def _checkpoint(
    state: StoredState, archive: Archive, own: Mapping[str, TensorSummary]
) -> ReportSource:
    """Return the tensors of a training state; of a difference, what the difference costs."""
    if archive.delta is None:
        return ReportSource(str(state.folder), _plain(archive, own), archive.tied())
    tensors: dict[str, TensorHandle] = {}
    for name in state.names():
        spec, kind = state.spec(name), state.kind(name)
        same = TensorSummary(
            name, dtype_name(spec.dtype), spec.shape, kind, spec.nbytes, 0, archive.path
        )
        held = (
            _held(archive, own[name])
            if name in own
            else TensorHandle(same, partial(state.load, name))
        )
        codec = f"{kind}({held.stored.codec})" if name in own else kind
        error = state.manifest.errors.get(name)
        tensors[name] = replace(
            held,
            stored=replace(held.stored, codec=codec, error=error),
            load=partial(state.load, name),
            is_lossy=error is not None,
        )
    return ReportSource(str(state.folder), tensors, state.tied)
