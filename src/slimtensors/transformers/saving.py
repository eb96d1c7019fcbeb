"""Save models compressed: the `save_pretrained` of an enabled model."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slimtensors.archive import Archive
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.dialects.compressed_tensors import find_prefixes
from slimtensors.archive.dialects.slim import NAME as SLIM
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded
from slimtensors.codecs.statistics import Sparsity, sparsity_of
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.compat.model_state import match_targets
from slimtensors.compat.sparse_formats import find_preset
from slimtensors.errors import ConfigError, shorten_list
from slimtensors.folder.architecture import Architecture
from slimtensors.folder.compress import Keep, restrict_to, select_all
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    CONFIG,
    METHOD,
    SparsityConfig,
    add_sparsity_section,
    copy_sections,
    describe_codes,
    describe_compression,
    parse_sparsity,
    read_config,
    read_quantization_section,
    read_sparsity_section,
    stop_other_loaders,
    update_config,
)
from slimtensors.parallel import Each
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.checkpoint_layout import describe_unstorable, find_unstorable
from slimtensors.quantization.state import LayerPlan, get_quantization
from slimtensors.quantization.state_dict import find_stored_layers, is_quantization_part
from slimtensors.quantization.targets import PACKED_ZERO_POINTS, has_packed_zero_points
from slimtensors.runtime import CompressedTensor
from slimtensors.runtime.serialization import find_encoded
from slimtensors.storage import (
    INDEX,
    StrPath,
    local_path,
    note_parameters,
    parse_size,
    temporary_folder,
)
from slimtensors.storage.atomic import apply_umask, move_files
from slimtensors.tensor import Json, Spec
from slimtensors.transformers.weights import (
    QUANTIZED,
    QuantizedArchive,
    check_names,
    check_unchanged,
    collect_dense_weights,
    collect_weights,
    copy_weight_files,
    encode_quantized,
    measure_sparsity,
    reuse_stored,
    to_dense,
)

_LOG = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

_FP8 = torch.float8_e4m3fn
_MIN_SPARSITY = 0.05
"""Fraction of zeros from which a model counts as sparse."""

_UNSUPPORTED_OPTIONS = {
    "push_to_hub": "call model.push_to_hub(name) instead",
    "variant": "save to another folder instead",
    "distributed_checkpoint": "pass save_compressed=False",
}
"""Options of transformers that compressed weights do not support, and the alternative."""


def enable(model: Model, *, preset: str | None = None) -> Model:
    """Let the `save_pretrained` of a transformers model write compressed weights; return the model.

    Models loaded from compressed folders are enabled already.

    Args:
        model: model of transformers, changed in place.
        preset: preset that `save_pretrained` uses by default; None saves dense weights unless
            `save_compressed=True` or a `sparsity_config` is passed to it.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from slimtensors.transformers import enable
        >>> model = enable(AutoModelForCausalLM.from_pretrained("my-model"), preset="lossless")
        >>> model.save_pretrained("my-model-slim")
    """
    if preset is not None:
        presets.find(preset)
    return attach_saver(model, StoredWeights(Layout.of(preset)))


@dataclass(frozen=True)
class Layout:
    """How compressed weights are written: the preset and the dialect."""

    preset: str
    dialect: str = SLIM

    @classmethod
    def of(cls, preset: str | None) -> Self | None:
        """Return the layout of a preset in the dialect `slim`; None for dense weights."""
        return None if preset in (None, "dense") else cls(str(preset))


@dataclass(frozen=True)
class StoredWeights:
    """How the weights of a model are stored in the folder it was loaded from."""

    layout: Layout | None = None
    """None for dense weights."""
    files: tuple[Path, ...] = ()
    quantization: QuantizationConfig | None = None
    """The config of compressed-tensors, if it quantized them."""


def attach_saver(model: Model, stored: StoredWeights) -> Model:
    """Replace the `save_pretrained` of a model that was loaded from `stored`."""
    config: Any = model.config
    section = getattr(config, "sparsity_config", None)
    if section is not None:
        del config.sparsity_config  # written again by each save
    attributes: Any = model
    attributes.sparsity_config = parse_sparsity(section) if section else None
    attributes.save_pretrained = SavePretrained(model, stored)
    return model


def save_quantized(
    model: Any, folder: Path, compressor: ModelCompressor, **options: Any
) -> tuple[str, list[str]]:
    """Write a model that is quantized in memory; return the format, and notes.

    The dialect is compressed-tensors, unless it cannot store a weight of the model: then slim.
    """
    quantized = [found for module in model.modules() if (found := get_quantization(module))]
    if unstorable := find_unstorable_weights(model, [found.plan for found in quantized]):
        config = compressor.quantization_config
        check_codes_suffice(unstorable, config, is_sparse=compressor.sparsity_config is not None)
        return "slim", [
            f"stored in the dialect slim, which only slimtensors loads, because"
            f" {describe_unstorable(unstorable)}",
            *save_codes(model, folder, **options),
        ]
    state = compressor.compress(model, options.pop("state_dict", None))
    try:
        stored = collect_weights(model, dict(state), save_original_format=True)
        check_names(model, stored)
        type(model).save_pretrained(model, folder, state_dict=state, **options)
        if folder.is_dir():  # created by the main process only
            apply_umask(folder)
        if options.get("is_main_process", True) and find_prefixes(state):
            update_config(folder, stop_other_loaders)
        notes = explain_stock_failure(model, stored, compressor.quantization_config)
        return str(model.config.quantization_config["format"]), notes
    finally:
        del model.config.quantization_config  # the weights of the model in memory are dense


def find_unstorable_weights(model: Any, plans: Iterable[LayerPlan]) -> dict[str, str]:
    """Return why the dialect compressed-tensors cannot store weights, quantized or dense."""
    plans = list(plans)
    reasons = find_unstorable(model, plans)
    if reasons or not plans or not isinstance(model, PreTrainedModel):
        return reasons
    # Random weights would take the place of stacks that are not quantized.
    replaced = Architecture(model, ()).list_replaced_modules()
    return dict.fromkeys(replaced, "transformers loads experts one by one if a model is quantized")


def explain_stock_failure(
    model: Any, stored: Iterable[TensorSource], config: QuantizationConfig | None
) -> list[str]:
    """Return a note if transformers cannot load a model quantized with compressed-tensors."""
    states = {
        name: state
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (state := get_quantization(module)) is not None
    }
    parts = {
        name: {suffix: Spec.of(x) for suffix, x in state.tensors().items()}
        for name, state in states.items()
    }
    try:
        data = model.config.to_dict() | {"architectures": [type(model).__name__]}
        architecture = Architecture.build(data)
    except ConfigError as error:
        return [f"whether transformers can load the result is not known: {error}"]
    broken = {
        name: PACKED_ZERO_POINTS
        for name, state in states.items()
        if has_packed_zero_points(state.plan.weight_args, state.plan.format)
    }
    broken |= architecture.find_unloadable(parts) | architecture.find_failing_splits(parts)
    names = {source.name for source in stored}
    layers = find_stored_layers(names)
    dense = [name for name in names if not is_quantization_part(name, layers)]
    groups = config.config_groups.values() if config is not None else ()
    if not all(group.weights is None or group.weights.dtype is _FP8 for group in groups):
        for name, place in architecture.place(dense).items():
            if place.dequantizes:  # transformers would treat it as quantized
                broken[name] = f"dense, but transformers merges it into {place.parameter}"
    reason = next((f"{name}: {reason}" for name, reason in broken.items()), None)
    if reason is None:
        return []
    return [architecture.describe_failure(reason)]


def check_codes_suffice(
    unstorable: Mapping[str, str], config: QuantizationConfig | None, *, is_sparse: bool = False
) -> None:
    """Raise `ConfigError` if weights require the dialect slim, which cannot store the config."""
    if is_sparse or config is None or config.has_activations:
        raise ConfigError(
            f"{describe_unstorable(unstorable)}, and the dialect slim stores neither scales of"
            " activations nor a sparse format of compressed-tensors; ignore these layers, or"
            " quantize only weights"
        )


def save_codes(
    model: Any,
    folder: Path,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> list[str]:
    """Write a model that is quantized in memory in the dialect slim; return notes.

    Each weight is stored by its codes, under the name and in the layout of dense checkpoints.
    """
    _check_options(options)
    if not is_main_process:
        return []
    sources, dense = encode_quantized(model, collect_dense_weights(model))
    check_names(model, sources)
    with temporary_folder(folder / CONFIG) as temporary:
        type(model).save_pretrained(model, temporary, state_dict={}, **options)
        apply_umask(temporary)
        writing = WriteOptions(preset=presets.lossless, max_shard_size=max_shard_size)
        summary = write(ArchiveSource(sources), folder, writing).summary()
        note_parameters(folder / INDEX, summary.items)
        update_config(temporary, lambda config: describe_codes(config, summary, model.dtype))
        move_files(temporary, folder)
    if not dense:
        return []
    return [f"rounded, but stored without quantization: {shorten_list(sorted(dense))}"]


def _check_options(options: Mapping[str, Any]) -> None:
    for option in _UNSUPPORTED_OPTIONS.keys() & options.keys():
        if options[option]:
            raise ConfigError(
                f"{option} is not supported with compressed weights; {_UNSUPPORTED_OPTIONS[option]}"
            )


def is_enabled(model: nn.Module) -> bool:
    """Return True if `enable` was called for a model."""
    return isinstance(model.save_pretrained, SavePretrained)


class SavePretrained:
    """The `save_pretrained` of one model; an object, so that it is copied and pickled with it."""

    def __init__(self, model: Any, stored: StoredWeights) -> None:
        self._model, self._stored = model, stored

    def __call__(
        self,
        save_directory: StrPath,
        *,
        sparsity_config: SparsityConfig | None = None,
        save_compressed: bool | None = None,
        skip_compression_stats: bool = False,
        quantization_format: str | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> None:
        """Save the model, compressed if requested or if it was loaded compressed.

        Args:
            save_directory: folder to write.
            sparsity_config: sparse format to use; its weights are stored in parts, as SparseML
                stores them.
            save_compressed: True chooses a format: that of the folder that the model was loaded
                from, else that of compressed-tensors for a model quantized in memory, else the
                bitmask of SparseML with at least 5 % zeros, else `lossless`. False saves dense
                weights, even if a sparsity_config is given.
            skip_compression_stats: do not describe the sparsity of a dense model in `config.json`.
            quantization_format: format of a model that is quantized in memory; must be the one
                chosen when its config was applied, which is the default.
            preset: preset of the dialect `slim` to use, such as `sparse`: smaller files.
            options: arguments of `save_pretrained` of transformers.
        """
        if preset is not None and (sparsity_config is not None or save_compressed is False):
            raise ConfigError("preset cannot be combined with sparsity_config or dense weights")
        if isinstance(sparsity_config, dict | str):
            raise ConfigError(
                f"sparsity_config must be an object such as BitmaskConfig(), got {sparsity_config}"
            )
        folder = local_path(save_directory)
        is_requested = save_compressed or sparsity_config is not None or quantization_format
        is_free = save_compressed is not False and preset is None and self._stored.layout is None
        if is_requested and is_free and self._is_quantized():
            compressor = ModelCompressor.from_pretrained_model(
                self._model, sparsity_config, quantization_format
            )
            assert compressor is not None, "the model is quantized"
            _, notes = save_quantized(self._model, folder, compressor, **options)
            for note in notes:
                _LOG.warning("%s: %s", folder, note)
            self._model.sparsity_config = compressor.sparsity_config
            return
        if quantization_format is not None:
            raise ConfigError("quantization_format requires a model that is quantized in memory")
        if preset is None:
            layout = self._choose_layout(sparsity_config, save_compressed)
        else:
            presets.find(preset)
            layout = Layout.of(preset)
        if layout is not None and not getattr(self._model, "_hf_peft_config_loaded", False):
            keep = match_targets(self._model, sparsity_config) if sparsity_config else select_all
            section = self._save_compressed(folder, layout, keep, **options)
            self._model.sparsity_config = section
            if (
                sparsity_config is not None
                and section is None
                and options.get("is_main_process", True)
            ):
                _LOG.warning(
                    "%s: no weight gets smaller as %s; all are stored dense",
                    folder,
                    sparsity_config.format,
                )
            return
        self._save_dense(folder, **options)
        has_config = sparsity_config is not None
        self._model.sparsity_config = (
            None if skip_compression_stats else self._describe_sparsity(folder, has_config)
        )

    def _is_quantized(self) -> bool:
        """Return True if layers of the model are quantized in memory."""
        return any(get_quantization(module) is not None for module in self._model.modules())

    def _choose_layout(
        self, sparsity_config: SparsityConfig | None, save_compressed: bool | None
    ) -> Layout | None:
        """Return how to write the weights, or None to write them dense."""
        if sparsity_config is not None:
            preset = find_preset(sparsity_config.format)
            is_dense = preset == "dense" or save_compressed is False
            return None if is_dense else Layout(preset, COMPRESSED_TENSORS)
        if save_compressed is False:
            return None
        if self._stored.layout is not None or save_compressed is None:
            return self._stored.layout
        if measure_sparsity(self._model).share >= _MIN_SPARSITY:
            return Layout("bitmask", COMPRESSED_TENSORS)
        return Layout("lossless")

    def _save_dense(self, folder: Path, **options: Any) -> None:
        state = options.get("state_dict")
        state = self._model.state_dict() if state is None else state
        if any(isinstance(x, CompressedTensor) for x in state.values()):
            options["state_dict"] = {name: to_dense(x) for name, x in state.items()}
        type(self._model).save_pretrained(self._model, folder, **options)
        if folder.is_dir():  # created by the main process only
            apply_umask(folder)

    def _save_compressed(
        self,
        folder: Path,
        layout: Layout,
        keep: Keep,
        *,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
        save_original_format: bool = True,
        **options: Any,
    ) -> SparsityConfig | None:
        _check_options(options)
        if not is_main_process:
            return None
        if folder.is_file():
            raise ConfigError(f"{folder} is a file, not a folder")
        state = self._model.state_dict() if state_dict is None else dict(state_dict)
        sources = collect_weights(self._model, state, save_original_format=save_original_format)
        if layout.preset == QUANTIZED:
            self._copy_quantized(folder, sources, parse_size(max_shard_size), **options)
            return None
        sparsity: dict[str, Sparsity] = {}
        sources = [_measure_on_read(source, sparsity) for source in sources]
        if layout == self._stored.layout and layout.dialect == SLIM:
            sources = reuse_stored(sources, self._stored.files)
            sources = [_convert_on_read(source, _encode) for source in sources]
        else:
            sources = [_convert_on_read(source, to_dense) for source in sources]
        # Other files are written to a temporary folder first: transformers would remove the shards
        # of an older model, which must stay until the new ones are complete.
        with temporary_folder(folder / CONFIG) as temporary:
            self._save_dense(temporary, state_dict={}, **options)
            writing = WriteOptions(
                preset=restrict_to(presets.find(layout.preset), keep),
                dialect=layout.dialect,
                max_shard_size=max_shard_size,
            )
            summary = write(ArchiveSource(sources), folder, writing).summary()
            note_parameters(folder / INDEX, summary.items)
            section = _update_config(
                temporary,
                lambda config: self._keep_run_compressed(
                    describe_compression(
                        config,
                        summary,
                        sparsity,
                        preset=layout.preset,
                        dialect=layout.dialect,
                        method=METHOD,
                    )
                ),
            )
            move_files(temporary, folder)
        return section

    def _keep_run_compressed(self, config: Json) -> Json:
        """Copy `run_compressed` from the folder that the model was loaded from."""
        section = read_quantization_section(config)
        if section and self._stored.files and (source := self._stored.files[0].parent).is_dir():
            before = read_quantization_section(read_config(source))
            if "run_compressed" in before:
                section["run_compressed"] = before["run_compressed"]
        return config

    def _copy_quantized(
        self, folder: Path, sources: Sequence[TensorSource], limit: int | None, **options: Any
    ) -> None:
        """Copy the files that the model was loaded from; raise if its weights have changed."""
        source, config = self._stored.files[0].parent, self._stored.quantization
        assert config is not None, "the preset QUANTIZED implies a config"
        for file in self._stored.files:
            if not file.exists():
                raise ConfigError(
                    f"{file} no longer exists; pass save_compressed=False to save dense weights"
                )
        archive = Archive.from_files(self._stored.files)
        shards = archive.shards()
        for file in self._stored.files:
            is_divisible = len(shards.get(file.name, ())) > 1
            if is_divisible and limit is not None and file.stat().st_size > limit:
                raise ConfigError(
                    f"max_shard_size is smaller than {file}, and files with quantized weights are"
                    " copied unchanged; use slimtensors convert to write other shards"
                )
        check_unchanged(sources, QuantizedArchive(archive, config, self._model))
        with temporary_folder(folder / CONFIG) as temporary:
            self._save_dense(temporary, state_dict={}, **options)
            update_config(temporary, lambda config: copy_sections(config, read_config(source)))
            copy_weight_files(source, folder)
            move_files(temporary, folder)

    def _describe_sparsity(self, folder: Path, is_requested: bool) -> SparsityConfig | None:
        """Add a `sparsity_config` to the `config.json` of a dense model with many zeros."""
        overall = measure_sparsity(self._model)
        if overall.share < _MIN_SPARSITY and not is_requested:
            return None
        section = SparsityConfig(
            sparsity_structure=overall.structure, global_sparsity=round(overall.share, 4)
        )
        return _update_config(folder, lambda config: add_sparsity_section(config, section))


def _measure_on_read(source: TensorSource, sparsity: dict[str, Sparsity]) -> TensorSource:
    """Return a source that adds its sparsity to `sparsity` when it is read."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = source.read(each)
        if isinstance(x, Tensor):
            sparsity[source.name] = sparsity_of(to_dense(x))
        return x

    return replace(source, read=read)


def _convert_on_read(
    source: TensorSource, convert: Callable[[CompressedTensor], Tensor | Encoded]
) -> TensorSource:
    """Return a source that converts weights that are compressed in memory."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = source.read(each)
        return convert(x) if isinstance(x, CompressedTensor) else x

    return replace(source, read=read)


def _encode(x: CompressedTensor) -> Tensor | Encoded:
    # The preset chooses how a weight without an encoded form is stored.
    encoded = find_encoded(x)
    return to_dense(x) if encoded is None else encoded


def _update_config(folder: Path, edit: Callable[[Json], Json]) -> SparsityConfig | None:
    """Edit `config.json` and return its new `sparsity_config`, if any."""
    section: Json = {}

    def edit_and_record(config: Json) -> Json:
        edited = edit(config)
        section.update(read_sparsity_section(edited))
        return edited

    update_config(folder, edit_and_record)
    return parse_sparsity(section) if section else None
