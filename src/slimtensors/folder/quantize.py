"""Round the weights of a model folder, told which layers are linear by the names of tensors."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary
from slimtensors.codecs import Bitmask, Huffman, presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Choice
from slimtensors.errors import ConfigError, nearest
from slimtensors.folder.compress import compress_folder, without_any_section
from slimtensors.folder.config_json import read_config
from slimtensors.folder.convert import (
    COMPRESSED_TENSORS,
    SLIM,
    Rewrite,
    check_config,
    quantization_of,
)
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    Quantized,
    formats,
)
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.codec import find_codec_format as written_format
from slimtensors.quantization.config import LAYOUT
from slimtensors.quantization.layers import (
    OUTPUT_LAYERS,
    TRANSPOSED_MODEL_TYPES,
    find_layer_name,
    is_expert_stack,
    is_linear_name,
)
from slimtensors.quantization.plans import choose_format, find_group, make_disjoint, matches_any
from slimtensors.storage import StrPath, locate
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)
_PLAIN = ("int-quantized", "float-quantized")


def quantize_folder(
    source: StrPath,
    target: StrPath,
    config: QuantizationConfig,
    *,
    dialect: str = COMPRESSED_TENSORS,
    how: Rewrite | None = None,
) -> Summary:
    """Round the weights of linear layers to nearest, file by file, into a new model folder.

    Linear layers are those with a matrix called `weight`, but for embeddings and routers. With the
    dialect `compressed-tensors` the folder is one that transformers and vLLM load; with `slim` it
    is smaller, and loads as dense weights.
    """
    how = how or Rewrite()
    if config.needs_data:
        raise ConfigError("static scales of activations need data; pass calibration data")
    where = locate(source, storage_options=how.storage_options)
    data = read_config(source, storage_options=how.storage_options)
    if dialect != SLIM:
        check_config(data, source)
    with Archive(source, storage_options=how.storage_options) as archive:
        try:
            _check_model(data)
            layers = Layers.of(archive, config)
            section = {} if dialect == SLIM else layers.described().to_dict()
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        if dialect == SLIM:
            return compress_folder(
                source,
                target,
                preset=layers.coded,
                dialect=SLIM,
                stands_for=config.to_dict(),
                **vars(how),
            )

        def edit(data: Json, _: Summary) -> Json:
            return {**without_any_section(data), "quantization_config": section}

        return how.run(
            archive,
            where,
            target,
            edit,
            choose=layers.plain,
            dialect=dialect,
            stands_for=config.to_dict(),
        )


@dataclass(frozen=True)
class Layers:
    """Which tensors of a folder are to be quantized, and which matrices are not."""

    config: QuantizationConfig
    groups: Mapping[str, str]
    """The group of each tensor that is quantized."""
    left: Sequence[str]
    """Layers with matrices that stay as they are."""

    @classmethod
    def of(cls, archive: Archive, config: QuantizationConfig) -> "Layers":
        """Find them; raise if a group of the config fits nothing, or something does not fit it."""
        _check_targets(archive, config)
        tied = archive.tied()
        groups: dict[str, str] = {}
        left: list[str] = []
        for name in archive:
            spec = archive.spec(name)
            if name in tied:
                continue
            if (layer := find_layer_name(name, spec)) is None:
                _check_left_out(name, spec, config)
                continue
            classes = ["Linear"] if is_linear_name(layer) else []
            group = find_group(config.config_groups, config.ignore, layer, classes)
            args = config.config_groups[group].weights if group else None
            if group is None or args is None:
                left.append(layer)
                continue
            if name in tied.values():
                raise ConfigError(f"{layer}: shares its weight with another layer; ignore it")
            _check(layer, spec, args)
            groups[name] = group
        for group in sorted(config.config_groups.keys() - set(groups.values())):
            targets = ", ".join(config.config_groups[group].targets)
            raise ConfigError(f"{group}: no layer fits {targets}, or all that do are ignored")
        if not groups:
            raise ConfigError("the config quantizes nothing of this model")
        return cls(config, groups, left)

    def plain(self, name: str, x: Tensor) -> Choice:
        """Quantize in the layout of compressed-tensors; leave the rest."""
        if (scheme := self._scheme(name)) is None or scheme.weights is None:
            return Choice(None, "is not quantized")
        is_packed = choose_format(scheme, self.config) == "pack-quantized"
        return Choice(Plan(Quantized(scheme.weights, packed=is_packed)))

    def coded(self, name: str, x: Tensor) -> Choice:
        """Quantize, then code the integers in as few bits as they need; the rest losslessly."""
        if (scheme := self._scheme(name)) is None or scheme.weights is None:
            return presets.lossless(name, x)
        return Choice(_coded_plan(scheme.weights, x))

    def described(self) -> QuantizationConfig:
        """Return what `config.json` says of the folder."""
        groups = {
            name: replace(scheme, format=_stored_format(name, scheme, self.config))
            for name, scheme in self.config.config_groups.items()
        }
        layers = {name.removesuffix(".weight"): group for name, group in self.groups.items()}
        unlisted = [layer for layer in self.left if not matches_any(self.config.ignore, layer, ())]
        if not any(matches_any([OUTPUT_LAYERS], layer, ()) for layer in (*layers, *self.left)):
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
    """Return how to store codes: where many are zero by a mask, else in whole bytes."""
    codec = Quantized(args, packed=False)
    q = presets.lossless("q", codec.encode(x)["q"]).plan
    if q is not None and isinstance(q.codec, Bitmask):
        return Plan(codec, {"q": q})
    return Plan(Quantized.in_whole_bytes(args), {"q": Plan(Huffman())})


def _stored_format(group: str, scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    """Return the format that a group is written in; raise if that cannot be the one it asks for."""
    asked = choose_format(scheme, config)
    assert scheme.weights is not None, "a group without weights fits no layer"
    written = written_format(Quantized(scheme.weights, packed=asked == "pack-quantized"))
    same = {written, "naive-quantized"} if written in _PLAIN else {written}
    if asked not in formats.list_names():
        raise ConfigError(
            f"{group}: unknown format {asked!r}; {nearest(asked, formats.list_names())}"
        )
    if asked not in same:
        raise ConfigError(f"{group}: the format {asked} cannot hold its codes; {written} can")
    return asked


def _check_targets(archive: Archive, config: QuantizationConfig) -> None:
    """Raise for a target, and warn of an ignored one, that fits nothing: it may be misspelt."""
    matrices = [
        x for name in archive if (x := find_layer_name(name, archive.spec(name))) is not None
    ]
    layers = [(layer, ["Linear"] if is_linear_name(layer) else []) for layer in matrices]
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(matches_any([target], *layer) for layer in layers):
                raise ConfigError(
                    f"{group}: no layer fits {target}; of classes, names tell only Linear"
                )
        if scheme.weights is not None and scheme.weights.actorder is not None:
            raise ConfigError(f"{group}: actorder is of the method gptq, which needs data")
    owners = {name.rpartition(".")[0] for name in archive}
    for target in config.ignore:
        is_absent = not any(matches_any([target], owner, ["Linear"]) for owner in owners)
        if is_absent and not matches_any([OUTPUT_LAYERS], target, ()):
            _LOG.warning("%s: %r, which is to be ignored, fits no layer", archive.path, target)


def _check_left_out(name: str, spec: Spec, config: QuantizationConfig) -> None:
    """Raise if a group claims a tensor that is no matrix called `weight`."""
    layer = name.rpartition(".")[0]
    classes = ["Linear"] if is_expert_stack(name, spec) else []
    is_weight = bool(classes) or (name.endswith(".weight") and len(spec.shape) > 2)
    if is_weight and find_group(config.config_groups, config.ignore, layer, classes):
        raise ConfigError(
            f"{name}: has shape {spec.shape}, which takes the model to quantize; ignore {layer},"
            " or use slimtensors.quantization.quantize_model"
        )


def _check(layer: str, spec: Spec, args: QuantizationArgs) -> None:
    try:
        check_weight(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), args)
    except ConfigError as error:
        raise ConfigError(f"{layer}: {error}; or ignore this layer") from error


def _check_model(data: Json) -> None:
    if quantization_of(data) is not None:
        raise ConfigError("is quantized already; slimtensors convert --to dense undoes that")
    if data.get("model_type") in TRANSPOSED_MODEL_TYPES:
        raise ConfigError(
            f"the layers of {data['model_type']} lie on their side, which names do not tell;"
            " quantize the model itself: slimtensors.quantization.quantize_model"
        )
