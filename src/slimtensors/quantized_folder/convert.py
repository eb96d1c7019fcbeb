"""Model folders from one dialect to another, or to dense weights."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.archive import Archive
from slimtensors.archive.state import Item, State, as_state
from slimtensors.beside import read_config
from slimtensors.codecs import Huffman
from slimtensors.compressor.quantized import is_number, key_of, scheme_of, stored_layers
from slimtensors.container import Place, StrPath, place
from slimtensors.dialects import VERSION
from slimtensors.errors import ConfigError, CorruptFileError, SlimError
from slimtensors.folder import (
    compress_folder,
    decompress_folder,
    with_section,
    without_any_section,
    without_section,
)
from slimtensors.plan import Encoded, Plan, decode, plain_parts
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.plans import format_of
from slimtensors.quantized_folder.rewrite import (
    COMPRESSED_TENSORS,
    SLIM,
    Rewrite,
    check_config,
    dtype_of,
    main_dtype,
    quantization_of,
)
from slimtensors.spec import Each, Json, Spec, dtype_name, serially
from slimtensors.summary import Summary

_LOG = logging.getLogger(__name__)

Kind = Literal["dense", "slim", "compressed-tensors"]


def convert_folder(
    source: StrPath, target: StrPath, *, to: Kind, how: Rewrite | None = None
) -> Summary:
    """Write a model folder in another dialect, or dense; what is quantized keeps its codes.

    Dense weights are what the quantized ones stand for, in the dtype of the model.
    """
    how = how or Rewrite()
    where = place(source, storage_options=how.storage_options)
    data = read_config(source, storage_options=how.storage_options)
    with Archive(source, storage_options=how.storage_options) as archive:
        try:
            config, dtype = quantization_of(data), dtype_of(data) or main_dtype(archive)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        if config is not None:
            if to == COMPRESSED_TENSORS:
                raise ConfigError(f"{archive.path}: is in that dialect already")
            return _Quantized(archive, config, to, dtype).write(where, target, how)
        codecs = _quantized_by_us(archive)
        if codecs and to == COMPRESSED_TENSORS:
            check_config(data, source)
            return _to_compressed_tensors(archive, codecs, where, target, how)
    if to == "dense":
        options = {key: x for key, x in vars(how).items() if key != "max_shard_size"}
        return decompress_folder(source, target, **options)
    preset = "lossless" if to == SLIM else "sparse"
    return compress_folder(source, target, preset=preset, dialect=to, **vars(how))


@dataclass(frozen=True)
class _Quantized:
    """A folder that is quantized in the way of compressed-tensors, and what becomes of it."""

    archive: Archive
    config: QuantizationConfig
    to: Kind
    dtype: torch.dtype

    def write(self, where: Place, target: StrPath, how: Rewrite) -> Summary:
        """Write each layer as one tensor."""
        layers = stored_layers(set(self.archive))
        if self.to == SLIM and self.config.has_activations:
            _LOG.warning(
                "%s: how activations and caches are quantized is not kept", self.archive.path
            )
        for layer, suffixes in layers.items():
            if not {"weight", "weight_packed"} & set(suffixes):
                found = ", ".join(suffixes)
                raise CorruptFileError(f"{self.archive.path}: {layer}: lacks codes; has {found}")

        def state(part: Archive) -> State:
            """Return the layers whose codes are in this file, and what else is there."""
            items: list[Item] = []
            for name in part:
                layer, _, suffix = name.rpartition(".")
                if layer in layers and suffix in ("weight", "weight_packed"):
                    items.append(self._item(layer, layers[layer]))
                elif not is_number(name, layers):
                    items += as_state(part.select([name])).items
            return State(items)

        choose = presets.dense if self.to == "dense" else presets.lossless
        return how.run(
            self.archive, where, target, self._edited, choose=choose, dialect=SLIM, state=state
        )

    def _edited(self, data: Json, summary: Summary) -> Json:
        plain = without_any_section(data)
        if self.to == "dense":
            return plain
        items = sum(tensor.items for tensor in summary.tensors)
        bits = round(8 * summary.stored_bytes / max(items, 1), 3)
        section = {
            "quant_method": "slimtensors",
            "version": VERSION,
            "preset": "lossless",
            "dtype": dtype_name(self.dtype),
            "bits_per_weight": bits,
        }
        return with_section(plain, section)

    def _item(self, layer: str, suffixes: Sequence[str]) -> Item:
        """Return the weight of a layer, to be read from its parts when its turn comes."""
        with self._named(layer):
            scheme = scheme_of(layer, self.config, {})
            stored = formats.find(format_of(scheme, self.config), version=self.config.version)
        args = scheme.weights
        assert args is not None, "a scheme was found because it has some"

        def read(each: Each) -> Tensor | Encoded:
            parts = {s: self.archive.load_one(key_of(layer, s), each) for s in suffixes}
            with self._named(layer):
                codec = Quantized.in_whole_bytes(args)
                if self.to == "dense":
                    dense = stored.decompress(parts, args, each)
                    if dense.dtype is self.dtype:
                        return dense
                    # From the codes again: a cast would round what was rounded already.
                    return decode(codec.encoded(*stored.parse(parts, args), self.dtype), each)
                codes, params = stored.parse(parts, args)
                return codec.encoded(codes, params, self.dtype, then={"q": Plan(Huffman())})

        return Item(key_of(layer, "weight"), Spec(self.dtype, self._shape(layer, suffixes)), read)

    @contextmanager
    def _named(self, layer: str) -> Iterator[None]:
        """Let errors say which layer of which folder they are about."""
        try:
            yield
        except SlimError as error:
            raise type(error)(f"{self.archive.path}: {layer}: {error}") from error

    def _shape(self, layer: str, suffixes: Sequence[str]) -> tuple[int, ...]:
        if "weight_shape" in suffixes:
            stored = self.archive.load_one(key_of(layer, "weight_shape"), serially)
            return tuple(int(size) for size in stored.flatten())
        if "weight" in suffixes:
            return self.archive.spec(key_of(layer, "weight")).shape
        *outer, width = self.archive.spec(key_of(layer, "weight_packed")).shape
        return *outer, 2 * width  # 4-bit floats, two per byte


def _quantized_by_us(archive: Archive) -> dict[str, Quantized]:
    plans = {name: archive.plan(name) for name in archive}
    return {n: p.codec for n, p in plans.items() if p and isinstance(p.codec, Quantized)}


def _to_compressed_tensors(
    archive: Archive, codecs: Mapping[str, Quantized], where: Place, target: StrPath, how: Rewrite
) -> Summary:
    def read(name: str, each: Each) -> Tensor | Encoded:
        encoded = archive.encoded(name, each) if name in codecs else None
        if encoded is None:
            return archive.load_one(name, each)
        codes, params = codecs[name].parsed(plain_parts(encoded, each), encoded.spec.shape[-1])
        return Quantized(codecs[name].args).encoded(codes, params, encoded.spec.dtype)

    def item(name: str) -> Item:
        return Item(name, archive.spec(name), lambda each: read(name, each))

    def state(part: Archive) -> State:
        tied = part.tied()
        return State([item(name) for name in part if name not in tied], tied)

    def edit(data: Json, _: Summary) -> Json:
        section = _config_of(codecs).to_dict()
        return {**without_section(data), "quantization_config": section}

    return how.run(
        archive,
        where,
        target,
        edit,
        choose=presets.dense,
        dialect=COMPRESSED_TENSORS,
        state=state,
    )


def _config_of(codecs: Mapping[str, Quantized]) -> QuantizationConfig:
    """Return the config that loaders of compressed-tensors need; layers are named one by one."""
    groups: dict[str, list[str]] = {}
    for name, codec in codecs.items():
        groups.setdefault(str(codec.args), []).append(name.removesuffix(".weight"))
    found = {str(codec.args): codec.arguments for codec in codecs.values()}
    schemes = [
        QuantizationScheme(sorted(layers), weights=found[key]) for key, layers in groups.items()
    ]
    kinds = [formats.infer(scheme) for scheme in schemes]
    return QuantizationConfig(
        {
            f"group_{i}": replace(scheme, format=kind)
            for i, (scheme, kind) in enumerate(zip(schemes, kinds, strict=True))
        },
        format=formats.of_all(kinds),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
