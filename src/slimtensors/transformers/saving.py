"""Models that write themselves compressed: what `save_pretrained` does once a model is enabled."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded
from slimtensors.codecs.statistics import Sparsity, sparsity_of
from slimtensors.compat.formats import preset_of
from slimtensors.errors import ConfigError, FormatError
from slimtensors.folder.compress import described
from slimtensors.folder.config_json import SparsityConfig, parse_section, read_config, update_config
from slimtensors.parallel import Each
from slimtensors.quantization import QuantizationConfig
from slimtensors.runtime import CompressedTensor, CsrTensor
from slimtensors.runtime.stored import to_encoded
from slimtensors.storage import INDEX, StrPath, local_path, note_parameters, parse_size
from slimtensors.tensor import Json
from slimtensors.transformers import weights
from slimtensors.transformers.weights import (
    QUANTIZED,
    QuantizedFiles,
    check_unchanged,
    copy_weights,
    same_weights,
    with_sections_of,
)

_log = logging.getLogger(__name__)


def find_unchanged(items: Sequence[TensorSource], files: Sequence[Path]) -> list[TensorSource]:
    """Return `items`, those that would else differ to be copied from there if equal."""
    if not files:
        return list(items)
    try:
        archive = Archive.of_files(files)
    except (OSError, FormatError) as error:
        _log.warning("weights are rounded anew, as they cannot be compared with the old: %s", error)
        return list(items)
    return [_copied(item, archive) for item in items]


def _copied(item: TensorSource, archive: Archive) -> TensorSource:
    name = item.name
    plan = archive.plan(name) if name in archive else None
    if plan is None or archive.spec(name) != item.spec:
        return item

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = item.read(each)
        is_held = isinstance(x, CompressedTensor)
        if not isinstance(x, Tensor) or not (is_held or plan.is_lossy):
            return x
        old = archive.load_compressed(name, each) if is_held else archive.load_one(name, each)
        return archive.packed(name) if same_weights(old, x) else x

    return replace(item, read=read)


Model = TypeVar("Model", bound=nn.Module)

_WORTH_TELLING = 0.05
"""The share of zeros from which on `config.json` mentions them."""
_NOT_COMPRESSED = {
    "push_to_hub": "call model.push_to_hub(name) instead",
    "variant": "save to a folder of its own instead",
    "distributed_checkpoint": "pass save_compressed=False",
}
"""Options of transformers that have no meaning for compressed weights, and what to do."""


@dataclass(frozen=True)
class Origin:
    """How a model's weights were stored where it comes from."""

    preset: str | None = None
    """None: dense."""
    files: tuple[Path, ...] = ()
    quantization: QuantizationConfig | None = None
    """How compressed-tensors quantized them, if it did."""


def enable(model: Model, *, preset: str | None = None) -> Model:
    """Give the `save_pretrained` of a model our arguments, and return the model.

    `preset` is how it saves weights when nothing else is asked for; with none it saves them dense.
    """
    if preset is not None:
        presets.find(preset)
    return enable_as(model, Origin(preset))


def enable_as(model: Model, origin: Origin) -> Model:
    """Do what `enable` does for a model that comes from compressed files."""
    config: Any = model.config
    section = getattr(config, "sparsity_config", None)
    if section is not None:
        del config.sparsity_config  # said anew whenever the model is saved
    attributes: Any = model
    attributes.sparsity_config = parse_section(section) if section else None
    attributes.save_pretrained = SavePretrained(model, origin)
    return model


def is_enabled(model: nn.Module) -> bool:
    """Tell whether a model has our `save_pretrained`."""
    return isinstance(model.save_pretrained, SavePretrained)


class SavePretrained:
    """The `save_pretrained` of one model. An object, so that it is copied and pickled with it."""

    def __init__(self, model: Any, origin: Origin) -> None:
        self._model, self._origin = model, origin

    def __call__(
        self,
        save_directory: StrPath,
        *,
        sparsity_config: SparsityConfig | None = None,
        save_compressed: bool | None = None,
        skip_compression_stats: bool = False,
        **options: Any,
    ) -> None:
        """Save the model; its weights compressed if asked for, or if they were when it was loaded.

        `sparsity_config` names a sparse format. `save_compressed=True` finds one by itself: that of
        the folder the model was loaded from, else sparse where at least 5 % are zeros, else
        lossless. A dense model with so many zeros has them described in `config.json`, unless
        `skip_compression_stats` is set. Other options are those of transformers.
        """
        if sparsity_config is not None and save_compressed is False:
            raise ConfigError("sparsity_config asks for what save_compressed=False refuses")
        folder = local_path(save_directory)
        preset = self._preset(sparsity_config, save_compressed)
        if preset != "dense" and not getattr(self._model, "_hf_peft_config_loaded", False):
            self._model.sparsity_config = self._compressed(folder, preset, **options)
            return
        self._as_ever(folder, **options)
        is_asked = sparsity_config is not None
        found = None if skip_compression_stats else self._described_dense(folder, is_asked)
        self._model.sparsity_config = found

    def _preset(self, sparsity_config: SparsityConfig | None, save_compressed: bool | None) -> str:
        if sparsity_config is not None:
            return preset_of(sparsity_config.format)
        if save_compressed is False:
            return "dense"
        if self._origin.preset is not None:
            return self._origin.preset
        if save_compressed is None:
            return "dense"
        return (
            "sparse"
            if weights.measured_weights(self._model).share >= _WORTH_TELLING
            else "lossless"
        )

    def _as_ever(self, folder: Path, **options: Any) -> None:
        given = options.get("state_dict")
        state = self._model.state_dict() if given is None else given
        if any(isinstance(x, CompressedTensor) for x in state.values()):
            options["state_dict"] = {name: weights.dense_weights(x) for name, x in state.items()}
        type(self._model).save_pretrained(self._model, folder, **options)

    def _compressed(
        self,
        folder: Path,
        preset: str,
        *,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
        save_original_format: bool = True,
        **options: Any,
    ) -> SparsityConfig | None:
        for option in _NOT_COMPRESSED.keys() & options.keys():
            if options[option]:
                advice = _NOT_COMPRESSED[option]
                raise ConfigError(f"{option}: cannot be done with compressed weights; {advice}")
        if not is_main_process:
            return None
        if folder.is_file():
            raise ConfigError(f"{folder}: is a file, not a folder")
        given = self._model.state_dict() if state_dict is None else dict(state_dict)
        items = weights.weight_items(self._model, given, save_original_format=save_original_format)
        if preset == QUANTIZED:
            self._as_it_was(folder, items, parse_size(max_shard_size), **options)
            return None
        found: dict[str, Sparsity] = {}
        items = [_measured(item, found) for item in items]
        if preset == self._origin.preset:
            items = find_unchanged(items, self._origin.files)
            items = [_stored_as(item, _codes) for item in items]
        else:
            items = [_stored_as(item, weights.dense_weights) for item in items]
        folder.mkdir(parents=True, exist_ok=True)
        # All but the weights goes to a place of its own first: transformers would remove the
        # shards of an older model, which must stay until the new ones are complete.
        with TemporaryDirectory(prefix=".", dir=folder) as others:
            self._as_ever(Path(others), state_dict={}, **options)
            summary = write(
                ArchiveSource(items),
                folder,
                preset=preset,
                dialect="slim",
                max_shard_size=max_shard_size,
            )
            note_parameters(folder / INDEX, summary.items)
            described_as = _edited(
                Path(others),
                lambda config: self._as_chosen(
                    described(config, summary, found, preset=preset, dialect="slim")
                ),
            )
            shutil.copytree(others, folder, dirs_exist_ok=True)
        return described_as

    def _as_chosen(self, config: Json) -> Json:
        """Return `config` with the choice of `run_compressed` that stood where the model was."""
        section = config.get("quantization_config")
        if section and self._origin.files and (source := self._origin.files[0].parent).is_dir():
            before = read_config(source).get("quantization_config", {})
            if "run_compressed" in before:
                section["run_compressed"] = before["run_compressed"]
        return config

    def _as_it_was(
        self, folder: Path, items: Sequence[TensorSource], limit: int | None, **options: Any
    ) -> None:
        """Copy the weights of the folder that the model came from, if they are still its own."""
        source, config = self._origin.files[0].parent, self._origin.quantization
        assert config is not None, "that is what the preset says"
        if any(not file.exists() for file in self._origin.files):
            raise ConfigError(f"{source}: is gone; pass save_compressed=False for dense weights")
        archive = Archive.of_files(self._origin.files)
        shards = archive.shards()
        for file in self._origin.files:
            is_divisible = len(shards.get(file.name, ())) > 1
            if is_divisible and limit is not None and file.stat().st_size > limit:
                raise ConfigError(
                    f"max_shard_size: quantized weights are copied as they are, and {file} is"
                    " larger; slimtensors convert writes them in other shards"
                )
        check_unchanged(items, QuantizedFiles(archive, config, self._model))
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder) as others:
            self._as_ever(Path(others), state_dict={}, **options)
            update_config(Path(others), lambda config: with_sections_of(config, source))
            copy_weights(source, folder)
            shutil.copytree(others, folder, dirs_exist_ok=True)

    def _described_dense(self, folder: Path, is_asked: bool) -> SparsityConfig | None:
        overall = weights.measured_weights(self._model)
        if overall.share < _WORTH_TELLING and not is_asked:
            return None
        section = SparsityConfig(
            sparsity_structure=overall.structure, global_sparsity=round(overall.share, 4)
        )
        return _edited(folder, lambda config: {**config, "sparsity_config": section.to_dict()})


def _measured(item: TensorSource, found: dict[str, Sparsity]) -> TensorSource:
    """Return an item that is measured on its way."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = item.read(each)
        if isinstance(x, Tensor):
            found[item.name] = sparsity_of(weights.dense_weights(x))
        return x

    return replace(item, read=read)


def _codes(x: CompressedTensor) -> Tensor | Encoded:
    is_for_running = isinstance(x, CsrTensor)  # and not to be stored: the preset says how
    return weights.dense_weights(x) if is_for_running else to_encoded(x)


def _stored_as(
    item: TensorSource, form: Callable[[CompressedTensor], Tensor | Encoded]
) -> TensorSource:
    """Return an item that `form` makes storable if it is a weight that runs compressed."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        x = item.read(each)
        return form(x) if isinstance(x, CompressedTensor) else x

    return replace(item, read=read)


def _edited(folder: Path, edit: Callable[[Json], Json]) -> SparsityConfig | None:
    """Edit `config.json`, and return what it then says about sparsity."""
    said: Json = {}

    def noting(config: Json) -> Json:
        edited = edit(config)
        said.update(edited.get("sparsity_config", {}))
        return edited

    update_config(folder, noting)
    return parse_section(said) if said else None
