"""Quantize model folders; linear layers are recognized by the names of their tensors."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary
from slimtensors.codecs import Bitmask, Huffman, presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Choice
from slimtensors.errors import ConfigError, suggest
from slimtensors.folder.compress import compress_with
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    parse_quantization,
    read_config,
    replace_sections,
)
from slimtensors.folder.convert import SLIM, check_config
from slimtensors.folder.job import build_folder, describe_job
from slimtensors.folder.weights import FolderOptions, Weights
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.codec import find_codec_format
from slimtensors.quantization.config import LAYOUT
from slimtensors.quantization.layers import (
    OUTPUT_LAYERS,
    TRANSPOSED_MODEL_TYPES,
    find_layer_name,
    is_expert_stack,
    is_linear_name,
)
from slimtensors.quantization.targets import choose_format, find_group, make_disjoint, matches_any
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)
_UNPACKED = ("int-quantized", "float-quantized")


def quantize_folder(
    source: StrPath | Archive,
    target: StrPath,
    config: QuantizationConfig,
    *,
    dialect: str = COMPRESSED_TENSORS,
    how: FolderOptions | None = None,
) -> Summary:
    """Write a model folder with quantized linear layers, rounded to nearest without data.

    Linear layers are those with a matrix called `weight`, except embeddings and routers.

    Args:
        source: model folder, its index file, a URL, or an open archive of one of them.
        target: folder or URL to write.
        config: which layers to quantize, and how.
        dialect: `compressed-tensors`, which transformers and vLLM load, or `slim`, which is smaller
            and loads as dense weights.
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
    if config.needs_data:
        raise ConfigError("static activation scales need calibration data")
    archive = open_archive(source, options.storage_options)
    model_config = read_config(archive.location)
    if dialect != SLIM:
        check_config(model_config, archive.path)
    try:
        _check_model(model_config)
        layers = QuantizedLayers.find(archive, config)
        section = {} if dialect == SLIM else layers.make_config().to_dict()
    except ConfigError as error:
        raise ConfigError(f"{archive.path}: {error}") from error
    key = config.to_dict()
    if dialect == SLIM:
        options = options.with_preset(layers.choose_coded)
        return compress_with(archive, target, options, preset_key=key, is_lossy=True)
    options = options.with_preset(layers.choose_plain, dialect)
    settings = {"quantize": key, "dialect": dialect, "max_shard_size": options.max_shard_size}
    return build_folder(
        Weights(archive, options),
        target,
        lambda config, _: replace_sections(config, section),
        job=describe_job(archive, settings),
    )


@dataclass(frozen=True)
class QuantizedLayers:
    """The layers of a folder to quantize, and those to leave unchanged."""

    config: QuantizationConfig
    groups: Mapping[str, str]
    """Tensor to quantize -> group of the config."""
    unquantized: Sequence[str]
    """Layers with matrices that are not quantized."""

    @classmethod
    def find(cls, archive: Archive, config: QuantizationConfig) -> "QuantizedLayers":
        """Match layers and groups; raise if a group matches nothing, or a layer does not fit."""
        _check_targets(archive, config)
        tied = archive.tied()
        groups: dict[str, str] = {}
        unquantized: list[str] = []
        for name in archive:
            spec = archive.spec(name)
            if name in tied:
                continue
            if (layer := find_layer_name(name, spec)) is None:
                _check_not_targeted(name, spec, config)
                continue
            classes = ["Linear"] if is_linear_name(layer) else []
            group = find_group(config.config_groups, config.ignore, layer, classes)
            args = config.config_groups[group].weights if group else None
            if group is None or args is None:
                unquantized.append(layer)
                continue
            if name in tied.values():
                raise ConfigError(
                    f"{layer}: shares its weight with another layer; add it to ignore"
                )
            _check_weight(layer, spec, args)
            groups[name] = group
        for group, scheme in sorted(config.config_groups.items()):
            if group not in groups.values() and not scheme.is_empty:
                targets = ", ".join(scheme.targets)
                raise ConfigError(
                    f"{group}: no layer matches {targets}, or all matches are ignored"
                )
        if not groups:
            raise ConfigError("the config quantizes nothing: all of its groups are empty")
        return cls(config, groups, unquantized)

    def choose_plain(self, name: str, x: Tensor) -> Choice:
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
        layers = {name.removesuffix(".weight"): group for name, group in self.groups.items()}
        unlisted = [x for x in self.unquantized if not matches_any(self.config.ignore, x, ())]
        if not any(
            matches_any([OUTPUT_LAYERS], layer, ()) for layer in (*layers, *self.unquantized)
        ):
            unlisted.append(OUTPUT_LAYERS)
        return replace(
            self.config,
            config_groups=make_disjoint(
                groups, {x: (group, ("Linear",)) for x, group in layers.items()}
            ),
            format=formats.merge(str(scheme.format) for scheme in groups.values()),
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=[*self.config.ignore, *unlisted],
            version=LAYOUT,
        )

    def _scheme(self, name: str) -> QuantizationScheme | None:
        return self.config.config_groups[self.groups[name]] if name in self.groups else None


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


def _check_targets(archive: Archive, config: QuantizationConfig) -> None:
    """Raise for a target, and warn of an ignored layer, that matches nothing."""
    matrices = [
        x for name in archive if (x := find_layer_name(name, archive.spec(name))) is not None
    ]
    layers = [(layer, ["Linear"] if is_linear_name(layer) else []) for layer in matrices]
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(matches_any([target], *layer) for layer in layers):
                raise ConfigError(
                    f"{group}: no layer matches {target}; folders support only the class Linear"
                )
        if scheme.weights is not None and scheme.weights.actorder is not None:
            raise ConfigError(f"{group}: actorder needs the method gptq and calibration data")
    owners = {name.rpartition(".")[0] for name in archive}
    for target in config.ignore:
        is_absent = not any(matches_any([target], owner, ["Linear"]) for owner in owners)
        if is_absent and not matches_any([OUTPUT_LAYERS], target, ()):
            _LOG.warning("%s: %r in ignore matches no layer", archive.path, target)


def _check_not_targeted(name: str, spec: Spec, config: QuantizationConfig) -> None:
    """Raise if a group matches a tensor that cannot be quantized without the model."""
    layer = name.rpartition(".")[0]
    classes = ["Linear"] if is_expert_stack(name, spec) else []
    is_weight = bool(classes) or (name.endswith(".weight") and len(spec.shape) > 2)
    if is_weight and find_group(config.config_groups, config.ignore, layer, classes):
        raise ConfigError(
            f"{name}: tensors of shape {spec.shape} cannot be quantized without the model; add"
            f" {layer} to ignore, or use slimtensors.quantization.quantize_model"
        )


def _check_weight(layer: str, spec: Spec, args: QuantizationArgs) -> None:
    try:
        check_weight(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), args)
    except ConfigError as error:
        raise ConfigError(f"{layer}: {error}; or add the layer to ignore") from error


def _check_model(config: Json) -> None:
    if parse_quantization(config) is not None:
        raise ConfigError("already quantized; use slimtensors convert --to dense first")
    if config.get("model_type") in TRANSPOSED_MODEL_TYPES:
        raise ConfigError(
            f"weights of {config['model_type']} are transposed, which is not supported for folders;"
            " use slimtensors.quantization.quantize_model"
        )
