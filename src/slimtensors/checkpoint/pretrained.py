"""Pretrained models as bases of checkpoints: open, match the names of tensors, find them again.

Names never decide what is stored: a tensor is used only if its digest matches.
"""

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from slimtensors.archive.base_places import VARIABLE, find_listed
from slimtensors.archive.delta_manifest import tensor_digest
from slimtensors.archive.read import Archive
from slimtensors.checkpoint.documents import is_plain_name
from slimtensors.checkpoint.manifest import PretrainedBase, is_checkpoint, is_local_path
from slimtensors.checkpoint.names import strip_wrappers
from slimtensors.checkpoint.tensor_entry import TensorEntry
from slimtensors.errors import ConfigError, MismatchError, MissingBaseError, SlimError
from slimtensors.parallel import Each, Workers
from slimtensors.quantization.checkpoint_layout import (
    convert_for_saving,
    is_from_transformers,
    outline_state,
)
from slimtensors.storage import Folder, LocalLocation, StrPath
from slimtensors.tensor import Spec

_log = logging.getLogger(__name__)

_MIN_SHARE = 0.1
"""Smallest share of the weights that a pretrained model must have; below, it is another one."""
_CASTABLE = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""Dtypes of a stored tensor that may be loaded in another of these."""

Names = tuple[str, ...]
"""Tensors of a pretrained model whose items, one after another, are a tensor of the state."""


class PretrainedModel:
    """An open model folder or file: dense, sharded or compressed."""

    def __init__(self, path: StrPath) -> None:
        self.path = path
        self.archive = Archive(path)
        self.archive.check_not_delta()
        identities = tuple(file.source.identity for file in self.archive.files)
        is_known = None not in identities
        self._digests = _share_digests(self.archive.path, identities) if is_known else {}
        self._homes = {**self.archive.tied(), **self.archive.copies()}

    def __contains__(self, name: object) -> bool:
        return name in self.archive

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return self.archive.keys()

    def fits(self, names: Names, like: Spec) -> bool:
        """Return True if these tensors have the items of one of this dtype and shape."""
        if any(name not in self.archive for name in names):
            return False
        specs = [self.archive.spec(name) for name in names]
        dtypes = {spec.dtype for spec in specs}
        if len(names) == 1 and specs[0].shape != like.shape:
            return False
        has_items = sum(spec.numel for spec in specs) == like.numel
        return has_items and (dtypes == {like.dtype} or {*dtypes, like.dtype} <= _CASTABLE)

    def load(self, names: Names, like: Spec, each: Each) -> Tensor:
        """Read tensors as one of this dtype and shape, which `fits` has accepted."""
        parts = [self.archive.load_one(name, each).to(like.dtype) for name in names]
        x = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return x.reshape(like.shape)

    def digest(self, names: Names, like: Spec, each: Each) -> str:
        """Return the digest of `load`, which is computed once per process."""
        key = tuple(self._homes.get(name, name) for name in names), like
        if key not in self._digests:
            self._digests[key] = tensor_digest(self.load(names, like, each))
        return self._digests[key]

    def compute_digests(self, *, threads: int | None = None) -> dict[str, str]:
        """Return the digests of all tensors, by name."""
        with Workers(threads) as workers:

            def compute(name: str) -> str:
                return self.digest((name,), self.archive.spec(name), workers.each)

            unique = [name for name in self.archive if name not in self._homes]
            results = workers.in_order(compute, unique, self.archive.stored_bytes)
            found = dict(zip(unique, results, strict=True))
        return {name: found[self._homes.get(name, name)] for name in self.archive}

    def find_difference(
        self, entries: Iterable[TensorEntry], *, threads: int | None = None
    ) -> str | None:
        """Return the name of a tensor that is not as entries of a checkpoint describe it."""
        ordered = sorted(entries, key=lambda entry: entry.like.nbytes)
        missing = (entry for entry in ordered if not self.fits(entry.pretrained, entry.like))
        if (entry := next(missing, None)) is not None:
            return entry.pretrained[0]
        with Workers(threads) as workers:

            def is_equal(entry: TensorEntry) -> bool:
                return self.digest(entry.pretrained, entry.like, workers.each) == entry.base

            results = workers.in_order(is_equal, ordered, lambda entry: entry.like.nbytes)
            pairs = zip(ordered, results, strict=True)
            return next((entry.pretrained[0] for entry, is_same in pairs if not is_same), None)


@lru_cache(maxsize=8)
def _share_digests(path: str, identities: object) -> dict[tuple[Names, Spec], str]:
    """Return the digests of an unchanged model, shared by all objects that have opened it."""
    return {}


def compute_id(digests: Mapping[str, str]) -> str:
    """Return a hash of the names and digests of all tensors, however they are stored."""
    lines = sorted(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Pretrained:
    """The pretrained model of a training run."""

    path: StrPath
    renamed: Mapping[str, Names] = field(default_factory=dict)
    """Tensors of the model in training -> names under which its library stores them."""

    @classmethod
    def of(cls, opened: PretrainedModel, models: Mapping[str, nn.Module]) -> "Pretrained":
        """Return the pretrained model of models, by the prefix of their parameters.

        Raise `MismatchError` if almost none of its tensors is one of theirs.
        Models of transformers, also inside of others, may have other names than in their files.
        """
        found = cls(opened.path)
        weights: dict[str, Spec] = {}
        for prefix, model in models.items():
            state = model.state_dict()
            specs = {name: Spec.of(x) for name, x in state.items() if isinstance(x, Tensor)}
            names = strip_wrappers(specs)
            weights |= {f"{prefix}{names[name]}": spec for name, spec in specs.items()}
            found = cls(opened.path, {**found.renamed, **_find_renamed(model)})
        found.match(opened, weights)
        return found

    def match(self, model: PretrainedModel, weights: Mapping[str, Spec]) -> dict[str, Names]:
        """Return the tensors of an open model that belong to these parameters.

        Names match if they are equal, or if one is the end of the other. Raise `MismatchError` if
        almost none matches.
        """
        ends = _index_ends(model.names())
        found: dict[str, Names] = {}
        for name, like in weights.items():
            candidates = self._list_candidates(name, ends)
            names = next((names for names in candidates if model.fits(names, like)), None)
            if names is not None:
                found[name] = names
        total = sum(spec.nbytes for spec in weights.values())
        share = sum(weights[name].nbytes for name in found) / total if total else 0.0
        if share < _MIN_SHARE and not self._has_shapes(model, weights):
            raise MismatchError(
                f"{self.path} is not the pretrained model of these weights: {len(found)} of"
                f" {len(weights)} tensors ({share:.0%} of bytes) match in name and shape"
            )
        return found

    def _has_shapes(self, model: PretrainedModel, weights: Mapping[str, Spec]) -> bool:
        """Return True if most tensors of the model have the shape of a weight under any name."""
        shapes = {spec.shape for spec in weights.values()}
        specs = [model.archive.spec(name) for name in model.names()]
        total = sum(spec.nbytes for spec in specs)
        return 2 * sum(spec.nbytes for spec in specs if spec.shape in shapes) > total

    def _list_candidates(self, name: str, ends: Mapping[str, str | None]) -> Iterator[Names]:
        parts = _strip_adapter(name).split(".")
        tails = [".".join(parts[i:]) for i in range(max(1, len(parts) - 1))]
        yield from (self.renamed[tail] for tail in tails if tail in self.renamed)
        for tail in tails:
            end = ends.get(tail)
            # Only the whole name may be the end of a longer one; a part of it must be a name.
            if end is not None and (tail == tails[0] or end == tail):
                yield (end,)


def _index_ends(names: Iterable[str]) -> dict[str, str | None]:
    """Return {end of a name: name}; None where several names have this end and none is equal."""
    found: dict[str, str | None] = {}
    all_names = list(names)
    for name in all_names:
        parts = name.split(".")
        for i in range(1, len(parts)):
            end = ".".join(parts[i:])
            found[end] = None if end in found else name
    return found | {name: name for name in all_names}


_ADAPTER = re.compile(r"(?:(?<=\.)|^)(?:base_model\.model|base_layer|original_module)\.")
_SAVED_COPY = re.compile(r"(?<=\.)modules_to_save\.[^.]+\.")


def _strip_adapter(name: str) -> str:
    """Return the name that a parameter had before peft wrapped its layer."""
    return _SAVED_COPY.sub("", _ADAPTER.sub("", name))


def _find_renamed(model: nn.Module) -> dict[str, Names]:
    """Return the tensors that models of transformers inside of a model rename or merge on load."""
    found: dict[str, Names] = {}
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if is_from_transformers(module) and not (inside and path.startswith(inside)):
            inside = (*inside, f"{path}." if path else "")
            found |= _trace_conversion(module)
    return found


def _trace_conversion(model: nn.Module) -> dict[str, Names]:
    """Return the tensors that have other names in files, by their name in a model.

    Tensors that transformers merges, such as experts, are traced by the numbers of their rows.
    """
    outline = {_strip_adapter(name): x for name, x in outline_state(model).items()}
    try:
        converted = convert_for_saving(model, outline)
        stored = {id(x): name for name, x in converted.items()}  # renamed: the same object
        found: dict[str, Names] = {
            name: (stored[id(x)],) for name, x in outline.items() if id(x) in stored
        }
        merged = {name: x for name, x in outline.items() if id(x) not in stored and x.dim() > 1}
        found |= _trace_rows(model, merged) if merged else {}
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        kind = type(model).__name__
        _log.warning("%s: names of stored tensors are unknown to transformers: %s", kind, error)
        return {}
    return {name: names for name, names in found.items() if names != (name,)}


def _trace_rows(model: nn.Module, merged: Mapping[str, Tensor]) -> dict[str, Names]:
    """Return the stored tensors whose rows, one after another, are those of merged tensors."""
    spans: dict[str, range] = {}
    numbers: dict[str, Tensor] = {}
    total = 0
    for name, x in merged.items():
        count = math.prod(x.shape[:-1])
        spans[name] = range(total, total := total + count)
        numbers[name] = torch.arange(spans[name].start, total).view(*x.shape[:-1], 1)
    parts: dict[int, tuple[int, str]] = {}
    for name, x in convert_for_saving(model, numbers).items():
        rows = x.reshape(-1)
        first, count = int(rows[0]) if len(rows) else 0, len(rows)
        if x.shape[-1:] == (1,) and torch.equal(rows, torch.arange(first, first + count)):
            parts[first] = count, name
    found = {}
    for name, span in spans.items():
        at, names = span.start, []
        while at < span.stop and at in parts:
            count, part = parts[at]
            names.append(part)
            at += count
        if at == span.stop and names:
            found[name] = tuple(names)
    return found


def describe_pretrained(
    model: PretrainedModel, target: Folder, *, threads: int | None = None
) -> PretrainedBase:
    """Return what a checkpoint `target` records of the model that it needs."""
    place = Path(model.archive.path.rstrip("/")).absolute()
    if place.parent.name == "snapshots":  # in the cache of the hub
        place = place.parent.parent
    name, hints = place.name.lstrip(".").replace("\\", "_"), []
    if isinstance(model.archive.location, LocalLocation):
        path = str(model.archive.location.path.absolute())
        hints = [path]
        if isinstance(target, Path):
            hints.insert(0, _relative_path(path, os.path.realpath(target.parent)))
    return PretrainedBase(
        name if is_plain_name(name) else "model",
        compute_id(model.compute_digests(threads=threads)),
        tuple(hint for hint in hints if is_local_path(hint)),
    )


def _relative_path(path: str, start: str) -> str:
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:  # another drive
        return ""


def find_pretrained(
    record: PretrainedBase,
    checkpoint: Folder,
    entries: Collection[TensorEntry],
    *,
    path: StrPath | None = None,
    threads: int | None = None,
) -> PretrainedModel:
    """Return the pretrained model of a checkpoint; raise `MissingBaseError` if it is not found.

    `path` is the only place to look if it is given. Other places are where the model was when the
    checkpoint was saved, the folders beside the checkpoint and beside its run, and those in
    `SLIMTENSORS_BASES`. A model counts as found if the digests of all needed tensors match.
    """
    needs = f"{checkpoint} needs the pretrained model {record.name} (id {record.id})"
    if path is not None:
        try:
            model = PretrainedModel(path)
        except OSError as error:
            raise MissingBaseError(f"{needs}; not found: {error}") from error
        if (name := model.find_difference(entries, threads=threads)) is not None:
            raise MissingBaseError(f"{needs}, but {path} is another one: {name} differs")
        return model
    different = []
    for place in _list_places(record, checkpoint):
        try:
            model = PretrainedModel(place)
            difference = model.find_difference(entries, threads=threads)
        except (SlimError, OSError) as error:
            _log.debug("%s: not a usable model: %s", place, error)
            continue
        if difference is None:
            _log.info("%s: pretrained model found in %s", checkpoint, place)
            return model
        different.append(f"{place} ({difference} differs)")
    others = f"; found others: {', '.join(different[:3])}" if different else ""
    raise MissingBaseError(
        f"{needs}, which was not found{others}; pass pretrained=, or add the folder that contains"
        f" it to the environment variable {VARIABLE}"
    )


def _list_places(record: PretrainedBase, checkpoint: Folder) -> Iterator[Path]:
    """Yield folders and files that may be a model, the likely ones first, each of them once."""
    near: list[Path] = []
    hints = [Path(hint) for hint in record.hints]
    if isinstance(checkpoint, Path):
        run = Path(os.path.realpath(checkpoint)).parent
        near, hints = [run, run.parent], [run / hint for hint in hints]
    seen: set[str] = set()
    places: list[Callable[[], Iterable[Path]]] = [
        lambda: (hint for hint in hints if hint.is_absolute()),
        lambda: (folder / record.name for folder in near),
        lambda: (child for folder in near for child in _list_children(folder)),
        lambda: (place.path for place in find_listed([])),
    ]
    for find in places:
        for place in find():
            real = os.path.realpath(place)
            if real not in seen and _is_model(Path(real)):
                yield place
            seen.add(real)


def _list_children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    """Return True for a folder with safetensors files that is no checkpoint, or for such a file."""
    try:
        if not path.is_dir():
            return path.is_file() and path.suffix == ".safetensors"
        return not is_checkpoint(path) and any(path.glob("*.safetensors"))
    except OSError:
        return False


def open_pretrained(
    path: StrPath | None, models: Mapping[str, nn.Module] | None = None
) -> Pretrained | None:
    """Return the pretrained model at a path, of `models` by the prefix of their parameters.

    Raise if it cannot be opened, or if it has other weights than the models.
    """
    if path is None:
        return None
    if "://" not in str(path) and is_checkpoint(Path(path)):
        raise ConfigError(f"pretrained: {path} is a checkpoint, not a model folder; pass base=")
    opened = PretrainedModel(path)
    return Pretrained(path) if models is None else Pretrained.of(opened, models)
