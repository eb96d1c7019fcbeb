"""Import paths of earlier versions, resolved to the same objects."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: dict[str, tuple[str, ...]] = {
    "calibration": ("recipe.calibration",),
    "checkpoint.io": ("checkpoint", "checkpoint.store", "checkpoint.manifest"),
    "checkpoint.rng": ("checkpoint.state",),
    "compressor": ("compat.compressor",),
    "delta": ("archive.delta",),
    "delta_folder": ("folder.delta",),
    "distributed": ("checkpoint.distributed",),
    "formats": ("compat.sparse_formats",),
    "integrations.trainer": ("transformers.trainer",),
    "integrations.training": ("transformers",),
    "integrations.transformers": ("transformers",),
    "model": ("compat",),
    "plan": ("codecs.plan",),
    "presets": ("codecs.presets",),
    "pruning": ("layerwise",),
    "quantization.algorithms": ("layerwise",),
    "quantized_folder": ("folder", "transformers.calibrate"),
    "sparsity": ("compat", "codecs.statistics", "codecs.presets", "folder.config_json"),
    "sparsity.config": ("folder.config_json",),
    "spec": ("tensor", "parallel"),
    "summary": ("archive.summary",),
    "tensors": ("runtime",),
    "tensors.compressed": ("runtime.compressed",),
    "torchao": ("integrations.torchao",),
    "tree": ("archive.tree",),
}
"""Earlier path -> the modules that define its names now, all below `slimtensors`."""

RENAMED = {
    "plan": {"plain_parts": "decode_parts", "plan_of": "parse_plan", "sizes_of": "parse_sizes"},
    "sparsity": {
        "combined": "merge",
        "mask_plan": "choose_mask_plan",
        "parse_section": "parse_sparsity",
        "stacked": "merge_rows",
    },
    "sparsity.config": {"parse_section": "parse_sparsity"},
    "summary": {"Stored": "TensorSummary"},
    "checkpoint.rng": {"capture": "capture_rng", "check": "check_rng", "restore": "restore_rng"},
    "pruning": {"Method": "PruningMethod", "Wanted": "PruningTarget"},
    "quantization.algorithms": {"Method": "QuantizationMethod"},
    "spec": {
        "QUANTIZED": "QUANTIZED_DTYPES",
        "allocate": "_allocate_plain",
        "fill": "copy_into",
        "is_text": "is_valid_text",
        "on_cpu": "to_cpu",
        "same_bits": "bitwise_equal",
        "view": "view_as",
    },
}
"""Renamed names: earlier path -> {earlier name: current name}."""

_ROOT = __name__.rpartition(".")[0]


class Renamed:
    """A method or attribute under its earlier name: `dense = Renamed("decompress")`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(owner if instance is None else instance, self._name)


class _MovedModule(ModuleType):
    """A module that looks up its names in the modules that define them now."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.removeprefix(f"{_ROOT}.")
        if name == "__all__":
            return self._public_names(path)
        if not name.startswith("__"):
            current = RENAMED.get(path, {}).get(name, name)
            for target in MOVED[path]:
                module = import_module(f"{_ROOT}.{target}")
                if hasattr(module, current):
                    return getattr(module, current)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._public_names(self.__name__.removeprefix(f"{_ROOT}."))})

    @staticmethod
    def _public_names(path: str) -> list[str]:
        names = set(RENAMED.get(path, ()))
        for target in MOVED[path]:
            module = import_module(f"{_ROOT}.{target}")
            values = vars(module).items()
            defined = [k for k, v in values if k[0] != "_" and not isinstance(v, ModuleType)]
            names |= set(getattr(module, "__all__", defined))
        return sorted(names - sys.stdlib_module_names)  # as `from datetime import datetime`


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root != _ROOT or rest not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=any(p.startswith(f"{rest}.") for p in MOVED))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""


def install() -> None:
    """Register a finder of the earlier paths, after those of real modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
