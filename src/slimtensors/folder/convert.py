"""Convert model folders between dialects, or to dense weights."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.dialects import VERSION
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, as_source
from slimtensors.codecs import Huffman, presets
from slimtensors.codecs.plan import Encoded, Plan, decode, decode_parts
from slimtensors.codecs.presets import Chooser
from slimtensors.errors import ConfigError, CorruptFileError, SlimError
from slimtensors.folder.compress import (
    compress_folder,
    decompress_folder,
    with_section,
    without_any_section,
    without_section,
)
from slimtensors.folder.config_json import read_config
from slimtensors.folder.job import job_of, make_folder
from slimtensors.folder.processes import ProcessGroup, SingleProcess
from slimtensors.folder.weights import WeightOptions, Weights
from slimtensors.parallel import Each, serially
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.plans import choose_format
from slimtensors.quantization.state_dict import (
    find_scheme,
    find_stored_layers,
    is_quantization_part,
    join_name,
)
from slimtensors.storage import Location, StrPath, locate
from slimtensors.tensor import Json, Spec, dtype_name, find_dtype

COMPRESSED_TENSORS, SLIM = "compressed-tensors", "slim"


@dataclass(frozen=True)
class Rewrite:
    """How a folder is written anew."""

    max_shard_size: int | str | None = None
    """By default, files are as they were."""
    replace: bool = False
    threads: int | None = None
    progress: Progress | None = None
    storage_options: dict[str, Any] | None = None
    ranks: ProcessGroup | None = None
    """The processes that share the work; by default there is one."""

    def run(
        self,
        archive: Archive,
        where: Location,
        target: StrPath,
        edit: Callable[[Json, Summary], Json],
        *,
        choose: Chooser,
        dialect: str,
        state: Callable[[Archive], ArchiveSource] = as_source,
        stands_for: Json | None = None,
    ) -> Summary:
        """Write what `state` makes of each file of a folder, and its config as `edit` says.

        If `stands_for` tells what all of that does, a run that was stopped can go on.
        """
        options = {
            "quantize": stands_for,
            "dialect": dialect,
            "max_shard_size": self.max_shard_size,
        }
        how = WeightOptions(
            choose,
            dialect,
            self.max_shard_size,
            self.threads,
            self.progress,
            state=state,
            ranks=self.ranks or SingleProcess(),
        )
        return make_folder(
            Weights(archive, where, how),
            target,
            edit,
            job=job_of(archive, where, options) if stands_for is not None else None,
            replace=self.replace,
            storage_options=self.storage_options,
        )


def quantization_of(data: Json) -> QuantizationConfig | None:
    """Return how the tensors of a folder are quantized in the way of compressed-tensors, if so."""
    before = without_section(data)  # of what we coded, the section from before
    section = before.get("quantization_config") or before.get("compression_config")
    if not isinstance(section, dict):
        return None
    if section.get("quant_method", COMPRESSED_TENSORS) != COMPRESSED_TENSORS:
        raise ConfigError(f"is quantized by {section['quant_method']}, another library")
    config = QuantizationConfig.from_dict(before)
    return config if config.config_groups else None


def check_config(data: Json, source: StrPath) -> None:
    """Raise if there is no `config.json`, which alone tells what codes of that dialect mean."""
    if not data:
        raise ConfigError(f"{source}: has no config.json, which {COMPRESSED_TENSORS} needs")


def describe_codes(config: Json, summary: Summary, dtype: torch.dtype) -> Json:
    """Return `config.json` for quantized weights in the dialect slim."""
    items = sum(tensor.items for tensor in summary.tensors)
    section = {
        "quant_method": "slimtensors",
        "version": VERSION,
        "preset": "lossless",
        "dtype": dtype_name(dtype),
        "bits_per_weight": round(8 * summary.stored_bytes / max(items, 1), 3),
    }
    return with_section(without_any_section(config), section)


def main_dtype(archive: Archive) -> torch.dtype:
    """Return the dtype of most weights and scales that are left."""
    sizes: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for spec in map(archive.spec, archive):
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0]


def dtype_of(data: Json) -> torch.dtype | None:
    """Return the dtype of a model's weights, if its config says it."""
    said = data.get("dtype") or data.get("torch_dtype")
    if said is None:
        return None
    name = str(said).removeprefix("torch.")
    try:
        return find_dtype(name)
    except KeyError:
        raise ConfigError(f"config.json: the dtype {name!r} does not exist") from None


_LOG = logging.getLogger(__name__)

Kind = Literal["dense", "slim", "compressed-tensors"]


def convert_folder(
    source: StrPath, target: StrPath, *, to: Kind, how: Rewrite | None = None
) -> Summary:
    """Write a model folder in another dialect, or dense; what is quantized keeps its codes.

    Dense weights are what the quantized ones stand for, in the dtype of the model.
    """
    how = how or Rewrite()
    where = locate(source, storage_options=how.storage_options)
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

    def write(self, where: Location, target: StrPath, how: Rewrite) -> Summary:
        """Write each layer as one tensor."""
        layers = find_stored_layers(set(self.archive))
        if self.to == SLIM and self.config.has_activations:
            _LOG.warning(
                "%s: how activations and caches are quantized is not kept", self.archive.path
            )
        for layer, suffixes in layers.items():
            if not {"weight", "weight_packed"} & set(suffixes):
                found = ", ".join(suffixes)
                raise CorruptFileError(f"{self.archive.path}: {layer}: lacks codes; has {found}")

        def state(part: Archive) -> ArchiveSource:
            """Return the layers whose codes are in this file, and what else is there."""
            items: list[TensorSource] = []
            for name in part:
                layer, _, suffix = name.rpartition(".")
                if layer in layers and suffix in ("weight", "weight_packed"):
                    items.append(self._item(layer, layers[layer]))
                elif not is_quantization_part(name, layers):
                    items += as_source(part.select([name])).items
            return ArchiveSource(items)

        choose = presets.dense if self.to == "dense" else presets.lossless
        return how.run(
            self.archive, where, target, self._edited, choose=choose, dialect=SLIM, state=state
        )

    def _edited(self, data: Json, summary: Summary) -> Json:
        if self.to == "dense":
            return without_any_section(data)
        return describe_codes(data, summary, self.dtype)

    def _item(self, layer: str, suffixes: Sequence[str]) -> TensorSource:
        """Return the weight of a layer, to be read from its parts when its turn comes."""
        with self._named(layer):
            scheme = find_scheme(layer, self.config, {})
            stored = formats.find(choose_format(scheme, self.config), version=self.config.version)
        args = scheme.weights
        assert args is not None, "a scheme was found because it has some"

        def read(each: Each) -> Tensor | Encoded:
            parts = {s: self.archive.load_one(join_name(layer, s), each) for s in suffixes}
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

        return TensorSource(
            join_name(layer, "weight"), Spec(self.dtype, self._shape(layer, suffixes)), read
        )

    @contextmanager
    def _named(self, layer: str) -> Iterator[None]:
        """Let errors say which layer of which folder they are about."""
        try:
            yield
        except SlimError as error:
            raise type(error)(f"{self.archive.path}: {layer}: {error}") from error

    def _shape(self, layer: str, suffixes: Sequence[str]) -> tuple[int, ...]:
        if "weight_shape" in suffixes:
            stored = self.archive.load_one(join_name(layer, "weight_shape"), serially)
            return tuple(int(size) for size in stored.flatten())
        if "weight" in suffixes:
            return self.archive.spec(join_name(layer, "weight")).shape
        *outer, width = self.archive.spec(join_name(layer, "weight_packed")).shape
        return *outer, 2 * width  # 4-bit floats, two per byte


def _quantized_by_us(archive: Archive) -> dict[str, Quantized]:
    plans = {name: archive.plan(name) for name in archive}
    return {n: p.codec for n, p in plans.items() if p and isinstance(p.codec, Quantized)}


def _to_compressed_tensors(
    archive: Archive,
    codecs: Mapping[str, Quantized],
    where: Location,
    target: StrPath,
    how: Rewrite,
) -> Summary:
    def read(name: str, each: Each) -> Tensor | Encoded:
        encoded = archive.encoded(name, each) if name in codecs else None
        if encoded is None:
            return archive.load_one(name, each)
        codes, params = codecs[name].parse(decode_parts(encoded, each), encoded.spec.shape[-1])
        return Quantized(codecs[name].args).encoded(codes, params, encoded.spec.dtype)

    def item(name: str) -> TensorSource:
        return TensorSource(name, archive.spec(name), lambda each: read(name, each))

    def state(part: Archive) -> ArchiveSource:
        tied = part.tied()
        return ArchiveSource([item(name) for name in part if name not in tied], tied)

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
        format=formats.merge(kinds),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
