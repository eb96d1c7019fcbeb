"""Convert model folders between dialects, or to dense weights."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, as_source
from slimtensors.codecs import Huffman, presets
from slimtensors.codecs.plan import Encoded, Plan, decode, decode_parts
from slimtensors.errors import ConfigError, CorruptFileError, SlimError, group_names
from slimtensors.folder.architecture import Architecture
from slimtensors.folder.architecture import Kind as TensorKind
from slimtensors.folder.compress import compress_with, decompress_with
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    CONFIG,
    QUANTIZATION_REPORT,
    describe_codes,
    parse_quantization,
    read_config,
    read_dtype,
    remove_compression,
    remove_sections,
    set_section,
)
from slimtensors.folder.experts import divide_experts, find_expert_stacks, make_stack
from slimtensors.folder.job import build_folder
from slimtensors.folder.processes import ProcessGroup
from slimtensors.folder.selection import (
    ROUTER,
    FolderLayer,
    StockLoader,
    build_architecture,
    list_layers,
    name_experts,
)
from slimtensors.folder.weights import FolderOptions, Weights
from slimtensors.parallel import Each, serially
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.fused import warn_unshared
from slimtensors.quantization.group_sizes import find_targets
from slimtensors.quantization.state_dict import (
    find_dense_shape,
    find_scheme,
    find_stored_layers,
    is_quantization_part,
    join_name,
)
from slimtensors.quantization.targets import choose_format
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)

SLIM = "slim"

Kind = Literal["dense", "slim", "compressed-tensors"]
"""How a folder can store its weights."""


class Rewrite(FolderOptions):
    """`FolderOptions` with its name and order of arguments in version 0.1."""

    def __init__(
        self,
        max_shard_size: int | str | None = None,
        replace: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
        storage_options: dict[str, Any] | None = None,
        ranks: ProcessGroup | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            max_shard_size=max_shard_size,
            replace=replace,
            threads=threads,
            progress=progress,
            storage_options=storage_options,
            ranks=ranks,
            **others,
        )


def convert_folder(
    source: StrPath | Archive, target: StrPath, *, to: Kind, how: FolderOptions | None = None
) -> Summary:
    """Write a model folder in another dialect, or with dense weights.

    Quantized weights keep their codes. With `to="dense"` they are dequantized to the dtype of the
    model.

    Args:
        source: model folder, its index file, a URL, or an open archive of one of them.
        target: folder or URL to write.
        to: `dense`, `slim` or `compressed-tensors`.
        how: shard size, threads and other options, as for `compress_folder`.
    """
    options = how or FolderOptions()
    archive = open_archive(source, options.storage_options)
    config = read_config(archive.location)
    try:
        quantization = parse_quantization(config)
        dtype = read_dtype(config) or main_dtype(archive)
    except ConfigError as error:
        raise ConfigError(f"{archive.path}: {error}") from error
    if quantization is not None:
        if to == COMPRESSED_TENSORS:
            raise ConfigError(f"{archive.path} already uses the dialect {COMPRESSED_TENSORS}")
        return _QuantizedFolder(archive, quantization, to, dtype).write(target, options)
    codecs = _find_quantized(archive)
    if codecs and to == COMPRESSED_TENSORS:
        check_config(config, archive.path)
        try:
            section = _make_config(archive, config, codecs)
        except ConfigError as error:
            raise ConfigError(f"{archive.path}: {error}") from error
        return _write_compressed_tensors(archive, codecs, section, target, options)
    if to == "dense":
        return decompress_with(archive, target, options.with_preset(presets.dense))
    preset = "lossless" if to == SLIM else "sparse"
    return compress_with(archive, target, options.with_preset(preset, to))


def check_config(config: Json, source: StrPath) -> None:
    """Raise if there is no `config.json`, which the dialect `compressed-tensors` requires."""
    if not config:
        raise ConfigError(f"{source}: {CONFIG} not found, required by {COMPRESSED_TENSORS}")


def main_dtype(archive: Archive) -> torch.dtype:
    """Return the dtype of most floating-point values; bfloat16 if there are none."""
    sizes: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for spec in map(archive.spec, archive):
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0]


@dataclass(frozen=True)
class _QuantizedFolder:
    """A folder quantized by compressed-tensors, and what to convert it to."""

    archive: Archive
    config: QuantizationConfig
    to: Kind
    dtype: torch.dtype

    def write(self, target: StrPath, options: FolderOptions) -> Summary:
        """Write each layer as one tensor."""
        layers = find_stored_layers(set(self.archive))
        if self.to == SLIM and self.config.has_activations:
            _LOG.warning(
                "%s: quantization of activations and caches is not kept", self.archive.path
            )
        for layer, suffixes in layers.items():
            if not {"weight", "weight_packed"} & set(suffixes):
                found = ", ".join(suffixes)
                raise CorruptFileError(
                    f"{self.archive.path}: {layer}: no weight or weight_packed; found {found}"
                )

        stacks = self._find_stacks(layers)

        def make_source(part: Archive) -> ArchiveSource:
            """Return the layers whose codes are in this file, and its other tensors."""
            items: list[TensorSource] = []
            for name in part:
                layer, _, suffix = name.rpartition(".")
                is_weight = suffix in ("weight", "weight_packed")
                if is_weight and (weight := join_name(layer, "weight")) in stacks:
                    items += stacks[weight]
                elif is_weight and layer in layers:
                    items.append(self._make_item(layer, layers[layer]))
                elif not is_quantization_part(name, layers):
                    items += as_source(part.select([name])).items
            return ArchiveSource(items)

        choose = presets.dense if self.to == "dense" else presets.lossless
        weights = Weights(self.archive, options.with_preset(choose), make_source=make_source)
        files = {QUANTIZATION_REPORT: None} if self.to == "dense" else None
        return build_folder(weights, target, self._describe, files=files)

    def _find_stacks(self, layers: Mapping[str, Sequence[str]]) -> dict[str, list[TensorSource]]:
        """Return the stack to write in place of the first of its experts; nothing for others."""
        plain = [name for name in self.archive if name.endswith(".weight")]
        weights = dict.fromkeys([*plain, *(join_name(layer, "weight") for layer in layers)])
        try:
            stacks = find_expert_stacks(weights, read_config(self.archive.location))
        except SlimError as error:
            raise type(error)(f"{self.archive.path}: {error}") from error
        if stacks and self.to == SLIM:
            raise ConfigError(
                f"{self.archive.path}: experts are stored one by one, which only quantized models"
                f" load; compress the original with --quantize and --dialect {SLIM}"
            )
        found: dict[str, list[TensorSource]] = {}
        for stack, matrices in stacks.items():
            items = {matrix.name: self._make_weight(matrix.name, layers) for matrix in matrices}
            found |= {name: [] for name in items}
            found[matrices[0].name] = [make_stack(stack, matrices, items)]
        return found

    def _make_weight(self, name: str, layers: Mapping[str, Sequence[str]]) -> TensorSource:
        layer = name.removesuffix(".weight")
        if layer in layers:
            return self._make_item(layer, layers[layer])
        return as_source(self.archive.select([name])).items[0]

    def _describe(self, config: Json, summary: Summary) -> Json:
        if self.to == "dense":
            return remove_sections(config)
        return describe_codes(config, summary, self.dtype)

    def _make_item(self, layer: str, suffixes: Sequence[str]) -> TensorSource:
        """Return the weight of a layer, read from its parts on demand."""
        with self._name_errors(layer):
            scheme = find_scheme(layer, self.config, {})
            format = formats.find(choose_format(scheme, self.config), version=self.config.version)
        args = scheme.weights
        assert args is not None, "only schemes with weights have stored layers"

        def read(each: Each) -> Tensor | Encoded:
            parts = {s: self.archive.load_one(join_name(layer, s), each) for s in suffixes}
            with self._name_errors(layer):
                codec = Quantized.in_whole_bytes(args)
                if self.to == "dense":
                    dense = format.decompress(parts, args, each)
                    if dense.dtype is self.dtype:
                        return dense
                    # Decode again from the codes: a cast would round twice.
                    return decode(codec.encoded(*format.parse(parts, args), self.dtype), each)
                codes, params = format.parse(parts, args)
                return codec.encoded(codes, params, self.dtype, then={"q": Plan(Huffman())})

        return TensorSource(
            join_name(layer, "weight"),
            Spec(self.dtype, self._shape_of(layer, suffixes, args)),
            read,
        )

    @contextmanager
    def _name_errors(self, layer: str) -> Iterator[None]:
        """Add the folder and the layer to errors."""
        try:
            yield
        except SlimError as error:
            raise type(error)(f"{self.archive.path}: {layer}: {error}") from error

    def _shape_of(
        self, layer: str, suffixes: Sequence[str], args: QuantizationArgs
    ) -> tuple[int, ...]:
        names = {suffix: join_name(layer, suffix) for suffix in suffixes}
        specs = {suffix: self.archive.spec(name) for suffix, name in names.items()}
        return find_dense_shape(
            specs, args, lambda: self.archive.load_one(names["weight_shape"], serially)
        )


def _find_quantized(archive: Archive) -> dict[str, Quantized]:
    """Return the codecs of the tensors that the dialect `slim` stores quantized."""
    plans = {name: archive.plan(name) for name in archive}
    return {n: p.codec for n, p in plans.items() if p and isinstance(p.codec, Quantized)}


def _write_compressed_tensors(
    archive: Archive,
    codecs: Mapping[str, Quantized],
    section: QuantizationConfig,
    target: StrPath,
    options: FolderOptions,
) -> Summary:
    scales: dict[str, Tensor] = {}

    def read(name: str, each: Each) -> Tensor | Encoded:
        encoded = archive.read_encoded(name, each) if name in codecs else None
        if encoded is None:
            return archive.load_one(name, each)
        codes, params = codecs[name].parse(decode_parts(encoded, each), encoded.spec.shape[-1])
        if params.global_scale is not None:
            scales[f"{name}_global_scale"] = params.global_scale.clone()
        return Quantized(codecs[name].args).encoded(codes, params, encoded.spec.dtype)

    def make_item(name: str) -> TensorSource:
        return TensorSource(name, archive.spec(name), lambda each: read(name, each))

    def make_source(part: Archive) -> ArchiveSource:
        tied = part.tied()
        return ArchiveSource([make_item(name) for name in part if name not in tied], tied)

    def describe(config: Json, _: Summary) -> Json:
        return set_section(remove_compression(config), section.to_dict())

    options = options.with_preset(presets.dense, COMPRESSED_TENSORS)
    weights = Weights(archive, options, make_source=make_source)
    summary = build_folder(weights, target, describe)
    warn_unshared(scales, archive.path)
    return summary


def _make_config(
    archive: Archive, config: Json, codecs: Mapping[str, Quantized]
) -> QuantizationConfig:
    """Return the config with which others load the codes; raise if they would not."""
    architecture = build_architecture(archive, config)
    if architecture is not None and divide_experts(archive, architecture) is not None:
        raise ConfigError(
            "transformers loads experts one by one if a model is quantized, but here they are"
            " stacked; compress the original with --quantize"
        )
    layers = list_layers(archive, architecture, for_others=True)
    all_names = [name for layer in layers for name in layer.names]
    keys = list(dict.fromkeys(str(codec.args) for codec in codecs.values()))
    used = {
        layer: f"group_{keys.index(str(codecs[layer.tensor].args))}"
        for layer in _find_layers(archive, codecs, layers, architecture)
    }
    schemes: dict[str, QuantizationScheme] = {}
    for layer, group in used.items():
        if group not in schemes:
            names = {name for each, its in used.items() if its == group for name in each.names}
            targets = find_targets(names, all_names)
            scheme = QuantizationScheme(targets, weights=codecs[layer.tensor].arguments)
            schemes[group] = replace(scheme, format=formats.infer(scheme))
    section = QuantizationConfig(
        schemes,
        format=formats.merge(str(scheme.format) for scheme in schemes.values()),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    stock = StockLoader(archive, section, architecture)
    _refuse({layer.name: reason for layer, reason in stock.find_unloadable(used).items()})
    stock.check_conversions(used)
    return replace(section, config_groups=name_experts(section.config_groups, used))


def _find_layers(
    archive: Archive,
    codecs: Mapping[str, Quantized],
    layers: Sequence[FolderLayer],
    architecture: Architecture | None,
) -> list[FolderLayer]:
    """Return the layers that have codes; raise if one is not loaded as it is stored."""
    by_tensor = {layer.tensor: layer for layer in layers}
    places = {} if architecture is None else architecture.place(archive)
    linear = {} if architecture is None else architecture.linear_layers
    found: list[FolderLayer] = []
    refused: dict[str, str] = {}
    for name in codecs:
        layer = by_tensor.get(name)
        if layer is None and name in places and places[name].kind is TensorKind.EMBEDDING:
            names = dict.fromkeys([places[name].module, name.rpartition(".")[0]])
            layer = FolderLayer(name, archive.spec(name), tuple(names))
        if layer is None:
            refused[name] = "not a layer of the model, or split on load"
        elif layer.dense and not (layer.dense == ROUTER and layer.name in linear):
            refused[name] = layer.dense
        else:
            found.append(layer)
    _refuse(refused)
    return found


def _refuse(reasons: Mapping[str, str]) -> None:
    """Raise if others do not load the codes of some layers, with the reasons."""
    if reasons:
        groups = group_names(reasons.items())
        found = "; ".join(f"{names} ({reason})" for reason, names in groups.items())
        raise ConfigError(
            f"transformers does not load these layers quantized: {found}; compress the original"
            " with --quantize, or convert to dense"
        )
