"""Load compressed folders through the model loader of transformers.

transformers calls `SlimQuantizer` for folders whose `config.json` names our `quant_method`. Its
loader renames, merges and places weights by a list of transforms. We replace the converting ones,
and plain copies, by transforms that record which tensors are needed and later decode them from the
archive.
"""

import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Self
from weakref import finalize

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.distributed.utils import is_dtensor
from transformers.integrations.accelerate import get_device
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from slimtensors.archive import Archive
from slimtensors.archive.read import open_archive
from slimtensors.checkpoint.store import STATE
from slimtensors.codecs import Trellis
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    MismatchError,
    UnsupportedVersionError,
    suggest,
)
from slimtensors.folder.architecture import Architecture
from slimtensors.folder.config_json import (
    CHECKPOINT_VERSION,
    COMPRESSED_TENSORS,
    FORMER_METHODS,
    METHOD,
    VERSION,
    is_sparse_only,
    parse_quantization,
    read_dtype,
    read_method,
    read_quantization_sections,
    read_sparsity_section,
    stops_other_loaders,
)
from slimtensors.folder.experts import list_stack_patterns
from slimtensors.parallel import Workers
from slimtensors.quantization import QuantizationConfig
from slimtensors.runtime import CompressedTensor, decode_ahead
from slimtensors.storage import DELTA, SINGLE
from slimtensors.tensor import Json, dtype_name, find_dtype
from slimtensors.transformers.saving import Layout, StoredWeights, attach_saver
from slimtensors.transformers.weights import QUANTIZED, CheckpointWeights, QuantizedArchive

_ANY = "^(.+)$"


@register_quantization_config(METHOD)
class SlimConfig(QuantizationConfigMixin):
    """The `quantization_config` section of a compressed folder.

    Decoding does not depend on it: each tensor describes itself.
    """

    dequantize = True
    """After loading, weights are dense, and transformers removes this section."""

    def __init__(
        self,
        *,
        quant_method: str = METHOD,
        version: int = VERSION,
        preset: str = "sparse",
        dtype: str | None = None,
        codecs: dict[str, int] | None = None,
        bits_per_weight: float | None = None,
        before: Json | None = None,
        run_compressed: bool = False,
        delta: Json | None = None,
        how_to_load: str | None = None,
        original: str | None = None,
        checkpoint: bool = False,
        **unknown: Any,
    ) -> None:
        if not (delta is None or isinstance(delta, dict)):
            raise ConfigError("config.json: quantization_config: delta must be a JSON object")
        if version > CHECKPOINT_VERSION:
            raise UnsupportedVersionError(
                f"config.json: quantization_config: format version {version} is newer than the"
                f" supported version {CHECKPOINT_VERSION}; upgrade slimtensors"
            )
        known = {"version", "preset", "dtype", "codecs", "bits_per_weight", "before"}
        known |= {"run_compressed", "how_to_load", "original", "checkpoint", "delta"}
        for key in unknown:
            raise ConfigError(
                f"config.json: quantization_config: unknown key {key!r}; {suggest(key, known)}"
            )
        self.quant_method = quant_method
        self.version = version
        self.preset = preset
        self.dtype = dtype
        self.codecs = codecs or {}
        self.bits_per_weight = bits_per_weight
        self.before = before or {}
        self.run_compressed = run_compressed
        self.how_to_load = how_to_load
        self.original = original
        self.checkpoint = checkpoint
        self.delta = delta


def find_section(config: Json) -> Json | None:
    """Return the `quantization_config` for our loader, or None if transformers needs none."""
    sections = read_quantization_sections(config)
    for section in sections.values():
        if section.get("quant_method") == METHOD:
            return section
    is_sparse = is_sparse_only(config)
    methods = {read_method(section) for section in sections.values()}
    if not is_sparse and methods != {COMPRESSED_TENSORS}:
        return None
    if is_sparse or parse_quantization(sections) is None:
        # Dense, unless the files turn out to contain sparse weights.
        return {"quant_method": METHOD, "preset": "dense", "before": sections}
    dtype = read_dtype(config)
    section = {"quant_method": METHOD, "preset": QUANTIZED, "before": sections}
    return section | ({"dtype": dtype_name(dtype)} if dtype else {})


class FormerConfig(QuantizationConfigMixin):
    """A section of compressed-tensors with a former `quant_method`, which transformers lacks."""

    @classmethod
    def from_dict(
        cls, config_dict: Json, return_unused_kwargs: bool = False, **options: Any
    ) -> Any:
        """Return the section as a `SlimConfig`, which selects our loader."""
        section = dict(config_dict)
        runtime = {"run_compressed": section.pop("run_compressed", False)}
        found = find_section({"quantization_config": section})
        assert found is not None, "former methods are those of compressed-tensors"
        return SlimConfig.from_dict(found | runtime, return_unused_kwargs, **options)


for _method in FORMER_METHODS:
    register_quantization_config(_method)(FormerConfig)


@register_quantizer(METHOD)
class SlimQuantizer(HfQuantizer):
    """Load a compressed folder into an ordinary model, tensor by tensor."""

    quantization_config: SlimConfig

    def __init__(self, quantization_config: SlimConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise ConfigError(
                "SlimConfig describes a compressed folder and cannot compress a dense one; load"
                " the model without it, then call"
                " slimtensors.transformers.enable(model, preset=...)"
            )
        for section in read_quantization_sections(quantization_config.before).values():
            if (method := read_method(section)) not in (METHOD, COMPRESSED_TENSORS):
                raise ConfigError(
                    f"the weights are also quantized by {method}, which requires another loader;"
                    " run slimtensors decompress and load the result"
                )
        self._quantization = parse_quantization(quantization_config.before)
        self._reader: Reader | None = None
        self._device_map: dict[str, Any] | None = None
        self._ignored_keys: Any = None
        """The model's own patterns of keys to ignore."""

    def validate_environment(
        self, *, device_map: str | dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Record the device map, which transformers may pass before or after files are opened."""
        if isinstance(device_map, dict):
            self._device_map = device_map
            if self._reader:
                self._reader.device_map = device_map

    def update_attn_implementation(self, config: Any) -> Any:
        """Set which file of weights transformers loads, in the only method called before that.

        That of a checkpoint or delta is not in `config.json`: loaders without slimtensors must find
        no weights. Beside weights in parts, a sentence stops these loaders.
        """
        if self.quantization_config.checkpoint:
            config.transformers_weights = STATE
        elif self.quantization_config.delta is not None:
            config.transformers_weights = DELTA
        elif stops_other_loaders(getattr(config, "transformers_weights", None)):
            del config.transformers_weights
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weights if transformers inferred it from compressed bytes."""
        if dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
        if self.quantization_config.dtype is None:
            raise ConfigError("config.json contains no dtype; pass dtype= to from_pretrained")
        return find_dtype(self.quantization_config.dtype)

    def get_new_dtype(
        self, converter: WeightTransform, param: object, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Move the dtype to our converter, which applies it after decoding."""
        if isinstance(converter, DecodingConverter):
            converter.dtype, dtype = dtype, None
        return dtype

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: nn.Module
    ) -> list[WeightTransform]:
        """Add decoding to the transforms; those of the model apply to names in its files only."""
        if not self._reader:
            return weight_conversions
        is_checkpoint = self.quantization_config.checkpoint  # which has the names of the modules
        stacking = _make_stacking(model) if self._quantization is not None else []
        transforms = [] if is_checkpoint else [*weight_conversions, *stacking]
        return add_decoding(transforms, self._reader)

    def _process_model_before_weight_loading(
        self, model: nn.Module, *, checkpoint_files: list[str] | None = None, **_: Any
    ) -> nn.Module:
        if checkpoint_files:  # None if the caller passes a state dict
            self._reader = Reader(
                checkpoint_files,
                model,
                self._quantization,
                device_map=self._device_map,
                run_compressed=self.quantization_config.run_compressed,
                is_checkpoint=self.quantization_config.checkpoint,
            )
            if self._reader.is_delta:
                checkpoint_files[:] = [self._reader.write_outline()]
            attributes: Any = model
            self._ignored_keys = attributes._keys_to_ignore_on_load_unexpected
            if self._reader.other_keys:
                known = self._ignored_keys or ()
                attributes._keys_to_ignore_on_load_unexpected = {*known, *self._reader.other_keys}
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        stored = StoredWeights(Layout.of(self.quantization_config.preset))
        if self._reader:
            self._reader.finish(model)
            stored = self._reader.describe(stored.layout)
            model._weight_conversions = remove_decoding(model._weight_conversions)
            model._keys_to_ignore_on_load_unexpected = self._ignored_keys
            if self._device_map and "disk" in self._device_map.values():
                model.tie_weights(recompute_mapping=False)  # tied weights are two files on disk
            if self._reader.run_compressed:
                decode_ahead([model])  # its modules are defined in the order in which they run
        if self.quantization_config.delta is not None:
            del model.config.transformers_weights
        if self.quantization_config.checkpoint:
            del model.config.transformers_weights
            model._weight_conversions = None  # saved like a model that was not loaded
            return attach_saver(model, StoredWeights())
        section = read_sparsity_section(self.quantization_config.before)
        if section and not hasattr(model.config, "sparsity_config"):
            model.config.sparsity_config = section  # as releases that write it at the top level
        return attach_saver(model, stored)

    def is_serializable(self) -> bool:
        """Return True: the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained; its weights are dense."""
        return True


class Reader:
    """The compressed files that a model is loaded from."""

    def __init__(
        self,
        files: Sequence[str],
        model: nn.Module,
        quantization: QuantizationConfig | None = None,
        *,
        device_map: Mapping[str, Any] | None = None,
        run_compressed: bool = False,
        is_checkpoint: bool = False,
    ) -> None:
        for file in files:
            if not file.endswith(".safetensors"):
                raise ConfigError(f"{file}: compressed weights must be .safetensors files")
            if not Path(file).exists():
                raise CorruptFileError(
                    f"{file}: listed in the index but not found; download the folder again"
                )
        self.files = tuple(Path(file) for file in files)
        self.device_map = device_map
        """Device of each module, if there are several."""
        self.run_compressed = run_compressed
        """Whether weights of linear layers, and coded embeddings, stay compressed in memory."""
        self.other_keys: set[str] = set()
        """Patterns of entries that do not belong to the model, such as an optimizer's state."""
        self._stored = Archive.from_files(self.files)
        self._quantization = quantization
        self._archive: Archive | QuantizedArchive | CheckpointWeights = self._stored
        if is_checkpoint:
            self._archive = CheckpointWeights(self.files[0].parent)
            others = set(self._stored) - self._archive.owners.keys()
            self.other_keys = {f"^{re.escape(key)}$" for key in others}
        else:
            with torch.device("cpu"):  # models are created on the device `meta`
                self._stored = self._archive = open_archive(self._stored)
            if quantization is not None:
                self._archive = QuantizedArchive(self._stored, quantization, model)
        self._resources = ExitStack()
        self._workers = self._resources.enter_context(Workers())
        self._used: set[str] = set()
        self._has_compressed = False

    @property
    def is_delta(self) -> bool:
        """Whether the files contain differences from a base."""
        return self._stored.residuals is not None

    def write_outline(self) -> str:
        """Write a file with the names of all tensors of a delta, and return its path.

        transformers finds the names of tensors only in files, and those that a delta shares with
        its base are not in its own. The file is removed with this object.
        """
        folder = tempfile.mkdtemp(prefix="slimtensors-")
        finalize(self, shutil.rmtree, folder)
        tied = self._stored.tied()
        path = Path(folder, SINGLE)
        save_file(
            {
                x: torch.empty(0, dtype=torch.uint8, device="cpu")
                for x in self._stored
                if x not in tied
            },
            path,
        )
        return str(path)

    @property
    def owners(self) -> Mapping[str, str]:
        """Map from the entries of the files to the tensors that they belong to."""
        return self._archive.owners

    def mark_used(self, key: str) -> str:
        """Return the tensor that an entry of the files belongs to, and record its use."""
        name = self.owners[key]
        self._used.add(name)
        return name

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read and decode a tensor; cast it to `dtype`."""
        x = self._archive.load_one(name, self._workers.each)
        return x if dtype is None else x.to(dtype)

    def read_compressed(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read a tensor without decoding it; decode it if its codec cannot run compressed."""
        x = self._archive.load_compressed(name, self._workers.each)
        self._has_compressed |= isinstance(x, CompressedTensor)
        return x if dtype is None else x.to(dtype)

    def is_coded(self, keys: Collection[str]) -> bool:
        """Return True if entries of the files are tensors that stay coded, even as embeddings."""
        if self._archive is not self._stored or any(key not in self._stored for key in keys):
            return False
        plans = [self._stored.plan(key) for key in keys]
        return bool(plans) and all(plan and isinstance(plan.codec, Trellis) for plan in plans)

    def describe(self, layout: Layout | None) -> StoredWeights:
        """Return how the weights are stored, given the layout in `config.json`.

        A model that was loaded from a delta is saved like one with dense weights.
        """
        if self.is_delta:
            return StoredWeights()
        if self._quantization is not None:
            return StoredWeights(Layout(QUANTIZED), self.files, self._quantization)
        owners = self._stored.owners
        plans = [self._stored.plan(name) for key, name in owners.items() if key != name]
        codecs = {plan.codec.name for plan in plans if plan is not None}
        if codecs:
            # The presets of single formats have the names of their codecs.
            preset = codecs.pop() if len(codecs) == 1 else "sparse"
            layout = Layout(preset, COMPRESSED_TENSORS)
        return StoredWeights(layout, self.files)

    def finish(self, model: nn.Module) -> None:
        """Release the files; raise if no tensor was used, or none runs compressed on request."""
        self._resources.close()
        if not self._used:
            raise MismatchError(
                f"{self._archive.path}: none of its {len(self._archive)} tensors belongs to a"
                f" {type(model).__name__}; use a class listed under 'architectures' in its"
                " config.json"
            )
        if self.run_compressed and not self._has_compressed:
            raise ConfigError(
                f"{self._archive.path}: no linear layer is stored in a format that can run"
                " compressed; load it without run_compressed"
            )


def add_decoding(transforms: Sequence[WeightTransform], reader: Reader) -> list[WeightTransform]:
    """Return transforms that have the same result for compressed files."""
    plain_copy = WeightConverter(_ANY, r"\1", [_Copy()])
    return [
        PartsRenaming(reader.owners),
        *(
            DecodingConverter(t, reader) if isinstance(t, WeightConverter) else t
            for t in transforms
        ),
        DecodingConverter(plain_copy, reader),
    ]


def remove_decoding(transforms: Sequence[WeightTransform]) -> list[WeightTransform]:
    """Return the transforms that were passed to `add_decoding`; saving needs them."""
    originals = [t.original if isinstance(t, DecodingConverter) else t for t in transforms]
    return [
        t
        for t in originals
        if not isinstance(t, PartsRenaming | _Stacking) and not _is_plain_copy(t)
    ]


class _Stacking(WeightConverter):
    """Makes a stack of experts from the linear layers that only quantized folders contain."""


def _make_stacking(model: nn.Module) -> list[WeightTransform]:
    """Return the conversions that load experts of quantized folders into a dense model."""
    found: list[WeightTransform] = []
    for stack, (parts, is_transposed) in list_stack_patterns(Architecture(model, ())).items():
        operations: list[ConversionOps] = [MergeModulelist(dim=0)]
        operations += [Concatenate(dim=1)] if len(parts) > 1 else []
        operations += [Transpose(1, 2)] if is_transposed else []
        found.append(_Stacking(parts, stack, operations))
    return found


class DecodingConverter(WeightConverter):
    """A weight conversion whose inputs are decoded from compressed files."""

    def __init__(self, original: WeightConverter, reader: Reader) -> None:
        super().__init__(
            list(original._original_source_patterns),
            list(original._original_target_patterns),
            original.operations,
            force_cpu=True,
        )
        self.scope_prefix = original.scope_prefix
        self.base_model_prefix = original.base_model_prefix
        self.original = original
        self.dtype: torch.dtype | None = None
        """Target dtype, set by transformers with each request for a tensor."""
        self._reader = reader
        self._read = reader.read

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = copy(self)  # transformers copies it once per tensor, so it must be cheap
        clone.operations = deepcopy(self.operations, memo)
        clone.collected_tensors, clone.layer_targets = defaultdict(list), defaultdict(set)
        return clone

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: object
    ) -> None:
        """Record the name of a tensor in place of the bytes that transformers has read."""
        if isinstance(future, Future):
            future.cancel()
        name = self._reader.mark_used(source_key)
        names = self.collected_tensors[source_pattern]
        if name not in names:  # called once for each part of a tensor
            names.append(name)
        self.layer_targets[target_key].add(source_key)

    def materialize_tensors(self) -> dict[str, list[Tensor]]:
        """Read the recorded tensors."""
        collected = {pattern: list(names) for pattern, names in self.collected_tensors.items()}
        self.collected_tensors.clear()
        return {
            pattern: [self._read(name, self.dtype) for name in names]
            for pattern, names in collected.items()
        }

    def convert(
        self, layer_name: str, model: Any = None, *, loading_info: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """Return the weights of the model; report those of another shape in `loading_info`."""
        if self._can_stay_compressed(layer_name, model):
            self._read = self._reader.read_compressed
        converted = super().convert(layer_name, model=model, loading_info=loading_info, **options)
        matching = {}
        for name, x in converted.items():
            x = x[0] if isinstance(x, list) else x
            parameter = model.get_parameter_or_buffer(name)
            if is_dtensor(parameter):
                raise ConfigError(
                    f"{name}: tensor-parallel loading is not supported; decompress the folder first"
                )
            if x.shape == parameter.shape:
                matching[name] = x
            else:  # with a quantizer, transformers does not check shapes itself
                loading_info.missing_keys.discard(name)
                loading_info.mismatched_keys.add((name, x.shape, parameter.shape))
        return matching | self._copy_tied_to_disk(model, matching)

    def _can_stay_compressed(self, name: str, model: Any) -> bool:
        """Return True if a weight may stay compressed in memory."""
        if not self._reader.run_compressed or not _is_plain_copy(self):
            return False
        device_map = self._reader.device_map
        is_on_disk = bool(device_map) and get_device(device_map, name) == "disk"
        layer, _, parameter = name.rpartition(".")
        if parameter != "weight" or is_on_disk:
            return False
        module = model.get_submodule(layer)
        if self._reader.is_coded(self.layer_targets[name]):
            return isinstance(module, nn.Linear | nn.Embedding)
        tied = model.all_tied_weights_keys
        is_tied = name in tied or name in tied.values()
        return isinstance(module, nn.Linear) and not is_tied

    def _copy_tied_to_disk(self, model: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies for weights that are tied to `found` and offloaded to disk.

        Files cannot be tied, and transformers would refer to the compressed file instead.
        """
        device_map = self._reader.device_map
        if not device_map:
            return {}
        tied = model.all_tied_weights_keys.items()
        pairs = [(name, source) for name, source in tied if source in found]
        return {
            name: found[source] for name, source in pairs if get_device(device_map, name) == "disk"
        }


class PartsRenaming(WeightRenaming):
    """Rename all parts of a tensor to the tensor."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        super().__init__("^$", "")  # the table is used, not the pattern
        self._owners = owners

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the tensor that an entry of a file belongs to."""
        return self._owners.get(source_key, source_key), None


class _Copy(ConversionOps):
    """The conversion that returns a weight unchanged."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def convert(
        self, input_dict: dict[str, list[Tensor]], *, full_layer_name: str, **_: Any
    ) -> dict[str, Tensor]:
        """Return the only tensor under the name of the layer."""
        (tensors,) = input_dict.values()
        return {full_layer_name: tensors[0]}


def _is_plain_copy(transform: WeightTransform) -> bool:
    return any(isinstance(o, _Copy) for o in getattr(transform, "operations", []))
