"""Quantize model folders without running the model."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.dialects.slim import pack_pieces
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import (
    DenseLayer,
    LayerGroupSize,
    QuantizationSummary,
    Summary,
    count_noun,
)
from slimtensors.archive.write import ArchiveSource, TensorSource, as_source
from slimtensors.codecs import Bitmask, Huffman, presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Choice
from slimtensors.errors import ConfigError, suggest
from slimtensors.folder.architecture import Architecture
from slimtensors.folder.compress import compress_with
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    QUANTIZATION_REPORT,
    describe_coded,
    parse_quantization,
    read_config,
    replace_sections,
)
from slimtensors.folder.convert import SLIM, check_config
from slimtensors.folder.experts import Tensors, divide_experts
from slimtensors.folder.job import build_folder, describe_job
from slimtensors.folder.selection import (
    STACKED,
    FolderLayer,
    StockLoader,
    build_architecture,
    fit_layers,
    list_layers,
    name_experts,
    replace_numbers,
)
from slimtensors.folder.weights import FolderOptions, Weights
from slimtensors.parallel import Each
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.args import QuantizationStrategy
from slimtensors.quantization.codec import find_codec_format, pack_quantized
from slimtensors.quantization.config import LAYOUT
from slimtensors.quantization.fused import group_fused, share_global_scale
from slimtensors.quantization.layers import OUTPUT_LAYERS, TRANSPOSED_MODEL_TYPES
from slimtensors.quantization.targets import choose_format, make_disjoint, matches_any
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)
_UNPACKED = ("int-quantized", "float-quantized")
IGNORED = "ignored"
NOT_TARGETED = "not targeted"
_NAMED_STACK = "stacked experts that a target names (use slimtensors.quantization.quantize_model)"


def quantize_folder(
    source: StrPath | Archive,
    target: StrPath,
    config: QuantizationConfig,
    *,
    dialect: str = COMPRESSED_TENSORS,
    coded: bool = False,
    how: FolderOptions | None = None,
) -> Summary:
    """Write a model folder with quantized linear layers, rounded to nearest without data.

    Linear layers are those of the model that transformers builds from `config.json`, or else those
    with a matrix called `weight`, except embeddings; routers and shared weights stay dense. Layers
    that vLLM fuses share a global scale, if they have one.

    Args:
        source: model folder, its index file, a URL, or an open archive of one of them.
        target: folder or URL to write.
        config: which layers to quantize, and how.
        dialect: `compressed-tensors`, which transformers and vLLM load, or `slim`, which is smaller
            and loads as dense weights.
        coded: whether to entropy-code the tensors of `compressed-tensors`. vLLM and transformers
            then need slimtensors to load the folder, and run the same kernels as without.
        how: shard size, threads and other options, as for `compress_folder`.

    Example:
        >>> from pathlib import Path
        >>> import slimtensors, torch
        >>> from slimtensors.folder import quantize_folder
        >>> from slimtensors.quantization import QuantizationConfig
        >>> Path("dense").mkdir()
        >>> _ = Path("dense/config.json").write_text('{"model_type": "llama"}')
        >>> weights = {"layers.0.mlp.weight": torch.randn(256, 256)}
        >>> _ = slimtensors.save(weights, "dense/model.safetensors", preset="dense")
        >>> quantize_folder("dense", "w4", QuantizationConfig.preset("W4A16")).ratio > 7
        True
    """
    options = how or FolderOptions()
    if coded and dialect == SLIM:
        raise ConfigError(f"coded requires the dialect {COMPRESSED_TENSORS}; {SLIM} is coded")
    if config.needs_data:
        raise ConfigError("static activation scales need calibration data")
    archive = open_archive(source, options.storage_options)
    model_config = read_config(archive.location)
    if dialect != SLIM:
        check_config(model_config, archive.path)
    if parse_quantization(model_config) is not None:
        raise ConfigError(
            f"{archive.path}: already quantized; use slimtensors convert --to dense first"
        )
    architecture = build_architecture(archive, model_config)
    tensors: Tensors = archive
    make_source: Callable[[Archive], ArchiveSource] = as_source
    try:
        _check_model(model_config, architecture)
        if (
            architecture is not None
            and dialect != SLIM
            and (divided := divide_experts(archive, architecture)) is not None
        ):
            tensors, architecture, make_source = divided, divided.architecture, divided.make_source
        layers = QuantizedLayers.find(tensors, config, architecture, for_others=dialect != SLIM)
        section = {} if dialect == SLIM else layers.make_config().to_dict()
    except ConfigError as error:
        raise ConfigError(f"{archive.path}: {error}") from error
    key = config.to_dict()
    quantization = layers.summarize(tensors)
    files = {QUANTIZATION_REPORT: quantization.to_json()}
    if dialect == SLIM:
        options = options.with_preset(layers.choose_coded)
        summary = compress_with(
            archive, target, options, preset_key=key, is_lossy=True, files=files
        )
    else:
        choose = presets.lossless if coded else layers.choose_plain
        options = options.with_preset(choose, SLIM if coded else dialect)
        settings = {"quantize": key, "dialect": dialect, "max_shard_size": options.max_shard_size}
        packer = LayerPacker(layers, layers.split_rows(make_source(archive)), coded=coded)

        def describe(config: Json, summary: Summary) -> Json:
            quantized = replace_sections(config, section)
            return describe_coded(quantized, summary) if coded else quantized

        summary = build_folder(
            Weights(archive, options, lambda x: packer.pack(layers.split_rows(make_source(x)))),
            target,
            describe,
            job=describe_job(archive, settings | {"coded": True} if coded else settings),
            files=files,
        )
    return replace(summary, quantization=quantization)


@dataclass(frozen=True)
class QuantizedLayers:
    """The layers of a folder to quantize, and those to leave unchanged."""

    config: QuantizationConfig
    groups: Mapping[str, str]
    """Tensor to quantize -> group of the config."""
    layers: Sequence[FolderLayer]
    """All layers of the folder and of its model."""
    dense: Mapping[str, str]
    """Layer that is not quantized -> reason."""
    architecture: Architecture | None = None
    """The model of the folder; None if layers are recognized by the names of tensors."""
    group_sizes: Sequence[LayerGroupSize] = ()
    """Layers with another group size than the preset."""

    @classmethod
    def find(
        cls,
        archive: Tensors,
        config: QuantizationConfig,
        architecture: Architecture | None = None,
        *,
        for_others: bool = True,
    ) -> "QuantizedLayers":
        """Match layers and groups; raise if a group matches nothing, or a layer does not fit.

        If transformers and vLLM are to load the result, layers that they cannot load quantized, or
        that would not get smaller, are left dense.
        """
        layers = list_layers(archive, architecture, for_others=for_others)
        _check_targets(layers, config, archive)
        fitted = fit_layers(config, layers)
        config = fitted.config
        chosen: dict[FolderLayer, str] = {}
        dense: dict[str, str] = {}
        refused: dict[str, list[str]] = {}
        for layer in layers:
            group = layer.find_group(config)
            args = config.config_groups[group].weights if group else None
            if group is None or args is None:
                dense[layer.name] = IGNORED if layer.matches(config.ignore) else NOT_TARGETED
            elif layer.dense == STACKED and matches_any(
                config.config_groups[group].targets, layer.name, ()
            ):
                refused.setdefault(_NAMED_STACK, []).append(layer.tensor)
            elif layer.dense:
                dense[layer.name] = layer.dense
            elif (problem := _find_problem(layer.spec, args)) is not None:
                refused.setdefault(problem, []).append(layer.name)
            else:
                chosen[layer] = group
        if refused:
            raise ConfigError(_describe_refused(refused))
        if for_others:
            stock = StockLoader(archive, config, architecture)
            for find in (stock.find_larger, stock.find_unloadable):
                for layer, reason in find(chosen).items():
                    dense[layer.name] = reason
                    del chosen[layer]
            stock.check_conversions(chosen)
        config = fitted.restrict_to(set(chosen.values()))
        _check_groups(config, set(chosen.values()), dense)
        groups = {layer.tensor: group for layer, group in chosen.items()}
        used = {layer.name for layer in chosen}
        smaller = [each for each in fitted.smaller if each.name in used]
        return cls(config, groups, layers, dense, architecture, smaller)

    def split_rows(self, source: ArchiveSource) -> ArchiveSource:
        """Return the tensors to write; a tensor with several quantized layers is split."""
        parts: dict[str, list[FolderLayer]] = {}
        for layer in self.layers:
            parts.setdefault(layer.part_of, []).append(layer)
        split = {layer.part_of for layer in self.layers if layer.tensor in self.groups} - {""}
        if not split:
            return source
        source = source.expand_copies()
        items: list[TensorSource] = []
        for item in source.items:
            layers = parts[item.name] if item.name in split else []
            items += [_select_rows(item, layer) for layer in layers] or [item]
        return replace(source, items=items)

    def has_global_scale(self, name: str) -> bool:
        """Return True if the scales of a quantized tensor have a common divisor."""
        scheme = self._scheme(name)
        args = scheme.weights if scheme is not None else None
        return args is not None and args.strategy is QuantizationStrategy.TENSOR_GROUP

    def choose_plain(self, name: str, x: Tensor | None = None) -> Choice:
        """Return the plan for compressed-tensors; None for tensors that are not quantized."""
        if (scheme := self._scheme(name)) is None or scheme.weights is None:
            return Choice(None, "not quantized")
        is_packed = choose_format(scheme, self.config) == "pack-quantized"
        return Choice(Plan(Quantized(scheme.weights, packed=is_packed)))

    def choose_coded(self, name: str, x: Tensor) -> Choice:
        """Return a plan with entropy-coded integers; a lossless one for other tensors."""
        if (scheme := self._scheme(name)) is None or scheme.weights is None:
            return presets.lossless(name, x)
        return Choice(_coded_plan(scheme.weights, x))

    def make_config(self) -> QuantizationConfig:
        """Return the config for `config.json` of the quantized folder."""
        groups = {
            name: replace(scheme, format=_stored_format(name, scheme, self.config))
            for name, scheme in self.config.config_groups.items()
            if not scheme.is_empty
        }
        quantized = {
            name: (self.groups[layer.tensor], layer.classes)
            for layer in self.layers
            if layer.tensor in self.groups
            for name in layer.names
        }
        unlisted = [
            name
            for layer in self.layers
            if layer.tensor not in self.groups
            for name in self._list_names(layer)
            if name not in quantized and not matches_any(self.config.ignore, name, layer.classes)
        ]
        has_output = any(layer.is_output for layer in self.layers)
        if not has_output and not any(matches_any([OUTPUT_LAYERS], x, ()) for x in quantized):
            unlisted.append(OUTPUT_LAYERS)  # a tied one, if the folder is loaded in such a class
        return replace(
            self.config,
            config_groups=name_experts(make_disjoint(groups, quantized), self._used()),
            format=formats.merge(str(scheme.format) for scheme in groups.values()),
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=[*self.config.ignore, *dict.fromkeys(unlisted)],
            version=LAYOUT,
        )

    def _used(self) -> dict[FolderLayer, str]:
        return {x: self.groups[x.tensor] for x in self.layers if x.tensor in self.groups}

    def _list_names(self, layer: FolderLayer) -> list[str]:
        """Return the names of a layer in the model, in its base model and in the files."""
        names = list(layer.names)
        prefix = f"{self.architecture.model.base_model_prefix}." if self.architecture else ""
        if layer.name.startswith(prefix):
            names.append(layer.name.removeprefix(prefix))
        return names

    def summarize(self, archive: Tensors) -> QuantizationSummary:
        """Return how much of the folder is quantized, and which linear layers stay dense."""
        tied = archive.tied()
        sizes = {name: 0 if name in tied else archive.spec(name).numel for name in archive}
        dense = [
            DenseLayer(
                layer.tensor if layer.dense == STACKED else layer.name,
                self.dense[layer.name],
                0 if layer.tensor in tied or not layer.tensor else layer.spec.numel,
            )
            for layer in self.layers
            if layer.tensor not in self.groups and layer.is_linear
        ]
        quantized = sum(x.spec.numel for x in self.layers if x.tensor in self.groups)
        return QuantizationSummary(
            len(self.groups) + len(dense),
            sum(sizes.values()),
            quantized,
            dense,
            self.group_sizes,
        )

    def _scheme(self, name: str) -> QuantizationScheme | None:
        return self.config.config_groups[self.groups[name]] if name in self.groups else None


class LayerPacker:
    """Packs the quantized layers of a folder that are not stored as a dialect would do it alone.

    These are layers that share a global scale, and all of them if they are entropy-coded.
    """

    def __init__(self, layers: QuantizedLayers, source: ArchiveSource, *, coded: bool) -> None:
        self._layers, self._coded = layers, coded
        items = {item.name: item for item in source.items}
        scaled = [x for x in layers.groups if x.endswith(".weight") and layers.has_global_scale(x)]
        self._fused: dict[str, Sequence[TensorSource]] = {}
        for group in group_fused(name.removesuffix(".weight") for name in scaled):
            members = [items[f"{layer}.weight"] for layer in group]
            self._fused |= {member.name: members for member in members}
        self._scales: dict[str, Tensor] = {}
        self._lock = Lock()

    def pack(self, source: ArchiveSource) -> ArchiveSource:
        """Return the source with these layers in the form in which they are stored."""
        return replace(source, items=[self._pack_item(item) for item in source.items])

    def _pack_item(self, item: TensorSource) -> TensorSource:
        name = item.name
        plan = self._layers.choose_plain(name).plan
        if plan is None or not (self._coded or name in self._fused):
            return item
        codec = plan.codec
        assert isinstance(codec, Quantized)

        def read(each: Each) -> PackedTensor:
            x = item.read(each)
            assert isinstance(x, Tensor), "archives return tensors"
            scale = self._find_scale(name, each) if name in self._fused else None
            try:
                packed = pack_quantized(name, x, codec, each, global_scale=scale)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            return pack_pieces(packed, presets.lossless, each) if self._coded else packed

        return replace(item, read=read)

    def _find_scale(self, name: str, each: Each) -> Tensor:
        """Return the global scale of all layers that are fused with this one."""
        with self._lock:
            if name not in self._scales:
                members = self._fused[name]
                scale = share_global_scale(_read_ranges(members, each))
                self._scales |= {member.name: scale for member in members}
            return self._scales[name]


def _read_ranges(items: Sequence[TensorSource], each: Each) -> Iterator[Tensor]:
    """Yield the min and max of each weight, reading one at a time."""
    for item in items:
        x = item.read(each)
        assert isinstance(x, Tensor), "archives return tensors"
        yield torch.stack(torch.aminmax(x))


def _coded_plan(args: QuantizationArgs, x: Tensor) -> Plan:
    """Return the plan for codes: with a mask if many are zero, else in whole bytes."""
    codec = Quantized(args, packed=False)
    q = presets.lossless("q", codec.encode(x)["q"]).plan
    if q is not None and isinstance(q.codec, Bitmask):
        return Plan(codec, {"q": q})
    return Plan(Quantized.in_whole_bytes(args), {"q": Plan(Huffman())})


def _stored_format(group: str, scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    """Return the format of a group; raise if its codes do not fit the requested one."""
    requested = choose_format(scheme, config)
    assert scheme.weights is not None, "a group without weights matches no layer"
    written = find_codec_format(Quantized(scheme.weights, packed=requested == "pack-quantized"))
    same = {written, "naive-quantized"} if written in _UNPACKED else {written}
    if requested not in formats.list_names():
        hint = suggest(requested, formats.list_names())
        raise ConfigError(f"{group}: unknown format {requested!r}; {hint}")
    if requested not in same:
        raise ConfigError(f"{group}: format {requested} does not fit its codes; use {written}")
    return requested


def _check_targets(
    layers: Sequence[FolderLayer], config: QuantizationConfig, archive: Tensors
) -> None:
    """Raise for a target, and warn of an ignored layer, that matches nothing."""
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(layer.matches([target]) for layer in layers):
                why = (
                    "the model has no linear layers"
                    if target == "Linear"
                    else "folders support only the class Linear"
                )
                raise ConfigError(f"{group}: no layer matches {target}; {why}")
        if scheme.weights is not None and scheme.weights.actorder is not None:
            raise ConfigError(f"{group}: actorder needs the method gptq and calibration data")
    owners = {name.rpartition(".")[0] for name in archive}
    for target in config.ignore:
        if (
            not any(layer.matches([target]) for layer in layers)
            and not any(matches_any([target], owner, ["Linear"]) for owner in owners)
            and not matches_any([OUTPUT_LAYERS], target, ())
        ):
            _LOG.warning("%s: %r in ignore matches no layer", archive.path, target)


def _check_groups(
    config: QuantizationConfig, used: Collection[str], dense: Mapping[str, str]
) -> None:
    """Raise if a group quantizes no layer."""
    for group, scheme in sorted(config.config_groups.items()):
        if group not in used and not scheme.is_empty:
            reasons = sorted(set(dense.values()) - {NOT_TARGETED})
            raise ConfigError(
                f"{group}: no layer matches {', '.join(scheme.targets)} and can be quantized;"
                f" layers left dense: {', '.join(reasons) or 'none'}"
            )
    if not used:
        raise ConfigError("the config quantizes nothing: all of its groups are empty")


def _describe_refused(refused: Mapping[str, Sequence[str]]) -> str:
    """Return one message about all layers that cannot be quantized, by reason."""
    count = count_noun(sum(map(len, refused.values())), "layer")
    reasons = [f"  {_list_names(names)}: {reason}" for reason, names in refused.items()]
    head = f"{count} cannot be quantized; change the scheme or add to ignore:"
    return "\n".join([head, *reasons])


def _list_names(names: Sequence[str]) -> str:
    """Return the names; those that differ in numbers only are counted: `layers.*.mlp.up (32)`."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(replace_numbers(name, "*"), []).append(name)
    return ", ".join(
        f"{pattern} ({len(group)})" if len(group) > 1 else group[0]
        for pattern, group in alike.items()
    )


def _select_rows(item: TensorSource, layer: FolderLayer) -> TensorSource:
    """Return the weight of a layer that is a part of a tensor."""
    rows = slice(layer.first_row, layer.first_row + layer.spec.shape[0])

    def read(each: Each) -> Tensor:
        x = item.read(each)
        assert isinstance(x, Tensor), "archives return tensors"
        return x[rows].clone()

    return replace(item, name=layer.tensor, spec=layer.spec, read=read)


def _find_problem(spec: Spec, args: QuantizationArgs) -> str | None:
    """Return why a weight cannot be quantized with these arguments; None if it can."""
    try:
        check_weight(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), args)
    except ConfigError as error:
        return str(error)
    return None


def _check_model(config: Json, architecture: Architecture | None) -> None:
    model_type = config.get("model_type")
    if architecture is None and model_type in list(TRANSPOSED_MODEL_TYPES):  # may be unhashable
        raise ConfigError(
            f"weights of {model_type} are transposed, which is not supported for folders;"
            " use slimtensors.quantization.quantize_model"
        )
