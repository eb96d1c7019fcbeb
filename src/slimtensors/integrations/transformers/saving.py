"""Models that write themselves compressed: what `save_pretrained` does once a model is enabled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from slimtensors import presets
from slimtensors.archive.state import Item, State
from slimtensors.archive.workers import Workers
from slimtensors.archive.write import write
from slimtensors.container import INDEX, StrPath, local, note_parameters
from slimtensors.errors import ConfigError
from slimtensors.folder import described, edit_config
from slimtensors.formats import preset_of
from slimtensors.integrations.transformers.unchanged import unchanged
from slimtensors.sparsity import Sparsity, SparsityConfig, combined, parse_section, sparsity_of
from slimtensors.spec import Each, Json, Spec, check_storable, on_cpu

Model = TypeVar("Model", bound=nn.Module)

_WORTH_TELLING = 0.05
"""The share of zeros from which on `config.json` mentions them."""
_UNKNOWN_HERE = {
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
    attributes.slimtensors_origin = origin
    attributes.save_pretrained = MethodType(save_pretrained, model)
    return model


def save_pretrained(
    self: Any,
    save_directory: StrPath,
    *,
    sparsity_config: SparsityConfig | None = None,
    save_compressed: bool | None = None,
    skip_compression_stats: bool = False,
    **options: Any,
) -> None:
    """Save the model; its weights compressed if asked for, or if they were when it was loaded.

    `sparsity_config` names a sparse format. `save_compressed=True` finds one by itself: that of
    the folder it was loaded from, else sparse where at least 5 % are zeros, else lossless. A dense
    model with so many zeros has them described in `config.json`, unless `skip_compression_stats`
    is set. Other options are those of transformers.
    """
    if sparsity_config is not None and save_compressed is False:
        raise ConfigError("sparsity_config asks for what save_compressed=False refuses")
    folder = local(save_directory)
    preset = _preset(self, sparsity_config, save_compressed)
    if preset == "dense" or getattr(self, "_hf_peft_config_loaded", False):
        _save_as_transformers_does(self, folder, **options)
        found = None if skip_compression_stats else _describe_dense(self, folder, sparsity_config)
    else:
        found = _save_compressed(self, folder, preset, **options)
    self.sparsity_config = found


def _preset(
    model: Any, sparsity_config: SparsityConfig | None, save_compressed: bool | None
) -> str:
    remembered = model.slimtensors_origin.preset
    if sparsity_config is not None:
        return preset_of(sparsity_config.format)
    if save_compressed is False or (save_compressed is None and remembered is None):
        return "dense"
    if remembered is not None:
        return str(remembered)
    return "sparse" if _measured(model).share >= _WORTH_TELLING else "lossless"


def _save_as_transformers_does(model: Any, folder: Path, **options: Any) -> None:
    type(model).save_pretrained(model, folder, **options)


def _save_compressed(
    model: Any,
    folder: Path,
    preset: str,
    *,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    **options: Any,
) -> SparsityConfig | None:
    for option in _UNKNOWN_HERE.keys() & options.keys():
        if options[option]:
            raise ConfigError(
                f"{option}: cannot be done with compressed weights; {_UNKNOWN_HERE[option]}"
            )
    if not is_main_process:
        return getattr(model, "sparsity_config", None)
    # All but the weights; ours come after, because this removes shards that it did not write.
    _save_as_transformers_does(model, folder, state_dict={}, **options)
    given = model.state_dict() if state_dict is None else dict(state_dict)
    found: dict[str, Sparsity] = {}
    items = _items(model, given, save_original_format=save_original_format)
    if model.slimtensors_origin.preset == preset:
        items = unchanged(items, model.slimtensors_origin.files)
    summary = write(
        State([_measured_item(item, found) for item in items]),
        folder,
        preset=preset,
        dialect="slim",
        max_shard_size=max_shard_size,
    )
    note_parameters(folder / INDEX, summary.items)
    return _edit_config(
        folder, lambda config: described(config, summary, found, preset=preset, dialect="slim")
    )


def _items(model: Any, given: dict[str, Tensor], *, save_original_format: bool) -> list[Item]:
    """Return what is to be written under which name, as transformers would write it dense."""
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        given.pop(name, None)
    homes = {id(x): name for name, x in given.items() if x.is_meta}
    tensors: dict[str, Tensor] = remove_tied_weights_from_state_dict(given, model)
    if save_original_format:
        tensors = revert_weight_conversion(model, tensors)
        if any(x.is_meta and id(x) not in homes for x in tensors.values()):
            # Some weights are on disk, and converting them takes their numbers.
            here = {name: _present(model, name, x) for name, x in given.items()}
            tensors, homes = revert_weight_conversion(model, here), {}

    def item(name: str, x: Tensor) -> Item:
        if id(x) in homes:
            return Item(name, Spec.of(x), lambda each: _present(model, homes[id(x)], x))
        return Item(name, Spec.of(check_storable(name, x)), lambda each: on_cpu(x))

    # In the order in which safetensors itself lists them, so that equal models give equal files.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    return [item(name, x) for name, x in ordered]


def _measured_item(item: Item, found: dict[str, Sparsity]) -> Item:
    def read(each: Each) -> Tensor | None:
        x = item.read(each)
        if x is not None:
            found[item.name] = sparsity_of(x)
        return x

    return replace(item, read=read)


def _present(model: Any, name: str, x: Tensor) -> Tensor:
    """Return a weight in main memory, from the disk if accelerate has put it there."""
    return on_cpu(load_offloaded_parameter(model, name) if x.is_meta else x)


def _describe_dense(
    model: Any, folder: Path, sparsity_config: SparsityConfig | None
) -> SparsityConfig | None:
    overall = _measured(model)
    if overall.share < _WORTH_TELLING and sparsity_config is None:
        return None
    section = SparsityConfig(
        sparsity_structure=overall.structure, global_sparsity=round(overall.share, 4)
    )
    return _edit_config(folder, lambda config: {**config, "sparsity_config": section.to_dict()})


def _edit_config(folder: Path, edit: Any) -> SparsityConfig | None:
    sections: list[Json] = []

    def noting(config: Json) -> Json:
        edited: Json = edit(config)
        sections.append(edited.get("sparsity_config", {}))
        return edited

    edit_config(folder, noting)
    return parse_section(sections[0]) if sections and sections[0] else None


def _measured(model: Any) -> Sparsity:
    """Return how sparse all weights of a model are; tied ones count once."""
    with Workers() as workers:
        named = list(_weights(model))
        results = workers.in_order(
            lambda pair: sparsity_of(_present(model, *pair)), named, lambda pair: pair[1].nbytes
        )
        return combined(results)


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True)
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)
