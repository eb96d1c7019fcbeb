"""Weights on their way from compressed files into a model, through transformers' own loader.

transformers renames, merges and places weights by a list of transforms. Ours stand in for those
that convert, and for plain copies: they remember which tensors were asked for, and read these
from the archive when their turn comes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.distributed.utils import is_dtensor
from transformers.integrations.accelerate import get_device

from slimtensors.archive import Archive
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.parallel import Workers
from slimtensors.runtime import CompressedTensor
from slimtensors.transformers.weights import QuantizedFiles

_ANY = "^(.+)$"


class Reader:
    """The compressed files that a model is being loaded from."""

    def __init__(
        self,
        files: Sequence[str],
        device_map: Mapping[str, Any] | None = None,
        *,
        run_compressed: bool = False,
        view: Callable[[Archive], Archive | QuantizedFiles] = lambda archive: archive,
    ) -> None:
        self.device_map = device_map
        """Where the parts of the model go, if that is not all one place."""
        self.run_compressed = run_compressed
        """Whether weights of linear layers stay as they are stored."""
        for file in files:
            if not file.endswith(".safetensors"):
                raise ConfigError(f"{file}: compressed weights are in .safetensors files")
            if not Path(file).exists():
                raise CorruptFileError(
                    f"{file}: is missing, but the index names it; get the folder again"
                )
        self.files = tuple(Path(file) for file in files)
        archive = Archive.of_files(self.files)
        archive.check_whole()
        self._archive = view(archive)
        self._open = ExitStack()
        self._workers = self._open.enter_context(Workers())
        self._used: set[str] = set()
        self._has_compressed = False

    @property
    def owners(self) -> Mapping[str, str]:
        """Which tensor each entry of the files belongs to."""
        return self._archive.owners

    def want(self, key: str) -> str:
        """Return the tensor to which an entry of the files belongs, and note that it has a use."""
        name = self.owners[key]
        self._used.add(name)
        return name

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read and decode a tensor; floats become `dtype`."""
        x = self._archive.load_one(name, self._workers.each)
        if dtype is None or not x.is_floating_point():
            return x
        return x.to(dtype)

    def read_compressed(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read a tensor that stays as it is stored, if that is possible; else decode it."""
        x = self._archive.load_compressed(name, self._workers.each)
        self._has_compressed |= isinstance(x, CompressedTensor)
        return x if dtype is None else x.to(dtype)

    def finish(self, model: nn.Module) -> None:
        """Let go of the files; raise if the model had no use for any tensor in them."""
        self._open.close()
        if not self._used:
            kind = type(model).__name__
            raise MismatchError(
                f"{self._archive.path}: none of its {len(self._archive)} tensors belongs to a"
                f" {kind}; load it as one of the 'architectures' that its config.json names"
            )
        if self.run_compressed and not self._has_compressed:
            raise ConfigError(
                f"{self._archive.path}: no linear layer is stored so that it can run compressed;"
                " load it without run_compressed"
            )


class DecodedConverter(WeightConverter):
    """A conversion of weights that come decoded from the files."""

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
        """What floats are to become; transformers says when it asks for a tensor."""
        self._reader = reader
        self._read = reader.read

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = copy(self)  # transformers asks for one per tensor, so it must be cheap
        twin.operations = deepcopy(self.operations, memo)
        twin.collected_tensors, twin.layer_targets = defaultdict(list), defaultdict(set)
        return twin

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: object
    ) -> None:
        """Note which tensor is wanted, instead of the bytes that transformers found."""
        if isinstance(future, Future):
            future.cancel()
        name = self._reader.want(source_key)
        wanted = self.collected_tensors[source_pattern]
        if name not in wanted:  # of a tensor in parts, every part comes here
            wanted.append(name)
        self.layer_targets[target_key].add(source_key)

    def materialize_tensors(self) -> dict[str, list[Tensor]]:
        """Read what was noted."""
        wanted = {pattern: list(names) for pattern, names in self.collected_tensors.items()}
        self.collected_tensors.clear()
        return {
            pattern: [self._read(name, self.dtype) for name in names]
            for pattern, names in wanted.items()
        }

    def convert(
        self, layer_name: str, model: Any = None, *, loading_info: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """Return the weights of the model; those of a wrong shape are reported, not returned."""
        if self._stays_compressed(layer_name, model):
            self._read = self._reader.read_compressed
        found = super().convert(layer_name, model=model, loading_info=loading_info, **options)
        fitting = {}
        for name, x in found.items():
            x = x[0] if isinstance(x, list) else x
            place = model.get_parameter_or_buffer(name)
            if is_dtensor(place):
                raise ConfigError(f"{name}: cannot be loaded in pieces; decompress the folder")
            if x.shape == place.shape:
                fitting[name] = x
            else:  # transformers checks this itself only where there is no quantizer
                loading_info.missing_keys.discard(name)
                loading_info.mismatched_keys.add((name, x.shape, place.shape))
        return fitting | self._tied_on_disk(model, fitting)

    def _stays_compressed(self, name: str, model: Any) -> bool:
        """Tell whether a weight can be one that is held as it is stored."""
        if not self._reader.run_compressed or not _is_plain_copy(self):
            return False
        places = self._reader.device_map
        is_on_disk = bool(places) and get_device(places, name) == "disk"
        layer, _, parameter = name.rpartition(".")
        is_weight = parameter == "weight" and isinstance(model.get_submodule(layer), nn.Linear)
        tied = model.all_tied_weights_keys
        is_tied = name in tied or name in tied.values()
        return is_weight and not is_tied and not is_on_disk

    def _tied_on_disk(self, model: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is tied to weights that go to the disk, where nothing can be tied.

        transformers would point to the entry of the compressed file instead.
        """
        places = self._reader.device_map
        if not places:
            return {}
        tied = model.all_tied_weights_keys.items()
        pairs = [(name, home) for name, home in tied if home in found]
        return {name: found[home] for name, home in pairs if get_device(places, name) == "disk"}


class _AsItIs(ConversionOps):
    """The conversion of a weight that needs none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def convert(
        self, input_dict: dict[str, list[Tensor]], *, full_layer_name: str, **_: Any
    ) -> dict[str, Tensor]:
        """Give the only tensor its name."""
        (tensors,) = input_dict.values()
        return {full_layer_name: tensors[0]}


class PartsRenaming(WeightRenaming):
    """Gives all parts of a tensor the name of the tensor."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        super().__init__("^$", "")  # the table decides, not a pattern
        self._owners = owners

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the owner of what stands in a file."""
        return self._owners.get(source_key, source_key), None


def decoded(transforms: Sequence[WeightTransform], reader: Reader) -> list[WeightTransform]:
    """Return transforms that do the same with what is in compressed files."""
    every_other = WeightConverter(_ANY, r"\1", [_AsItIs()])
    return [
        PartsRenaming(reader.owners),
        *(DecodedConverter(t, reader) if isinstance(t, WeightConverter) else t for t in transforms),
        DecodedConverter(every_other, reader),
    ]


def originals(transforms: Sequence[WeightTransform]) -> list[WeightTransform]:
    """Return the transforms that `decoded` was given, for saving the model later."""
    kept = [t.original if isinstance(t, DecodedConverter) else t for t in transforms]
    return [t for t in kept if not _is_ours(t)]


def _is_ours(transform: WeightTransform) -> bool:
    return isinstance(transform, PartsRenaming) or _is_plain_copy(transform)


def _is_plain_copy(transform: WeightTransform) -> bool:
    return any(isinstance(o, _AsItIs) for o in getattr(transform, "operations", []))
