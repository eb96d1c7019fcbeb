"""Checkpoints on disk: one folder each, with `state.safetensors` and `checkpoint.json`."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from slimtensors.archive.copies import find_copies
from slimtensors.archive.read import Archive, rebuild_state
from slimtensors.archive.summary import Summary, format_bytes
from slimtensors.archive.tree import flatten as flatten_tree
from slimtensors.archive.tree import unflatten
from slimtensors.archive.write import ArchiveSource, WriteOptions, source_from_tensors, write
from slimtensors.checkpoint.coding import (
    PretrainedWeights,
    StateEncoder,
    make_int8_chooser,
    measure_decay,
)
from slimtensors.checkpoint.documents import check_chain, is_plain_name
from slimtensors.checkpoint.manifest import (
    MANIFEST,
    CheckpointBase,
    CheckpointManifest,
    PretrainedBase,
    content_id,
    is_checkpoint,
    read_manifest,
    read_metrics,
    to_integer,
    write_manifest,
)
from slimtensors.checkpoint.pretrained import (
    Pretrained,
    PretrainedModel,
    describe_pretrained,
    find_pretrained,
    open_pretrained,
)
from slimtensors.checkpoint.profiles import (
    BUFFERS,
    WEIGHT_MATRICES,
    WEIGHTS,
    Filter,
    Profile,
    StateTensorInfo,
    describe_tensors,
    find_profile,
    select_tensors,
)
from slimtensors.checkpoint.tensor_entry import WHOLE, TensorEntry, TensorFile
from slimtensors.codecs.presets import Chooser
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    MismatchError,
    MissingBaseError,
    UnsupportedTensorError,
    report_malformed,
)
from slimtensors.parallel import Each, Workers
from slimtensors.storage import (
    Folder,
    RemoteLocation,
    StrPath,
    local_path,
    locate_folder,
    parent_of,
)
from slimtensors.storage.atomic import create_folder, write_file_atomically
from slimtensors.storage.upload import check_vacant, remove_interrupted, upload_folder
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Spec

STATE = "state.safetensors"

Place = Callable[[Tensor], Tensor]
"""Returns a tensor on the device where it is needed."""


@dataclass(frozen=True)
class Saved:
    """Result of `save_checkpoint`."""

    path: Folder
    manifest: CheckpointManifest
    summary: Summary
    """Stored form and size of each tensor."""
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    """Tensors that should have been rounded but were stored exactly, with the reason."""
    unmatched: Sequence[str] = ()
    """Weights that the pretrained model lacks; they are stored without it."""

    @property
    def errors(self) -> Mapping[str, float]:
        """Measured relative RMS error of each tensor that is not exact."""
        return self.manifest.errors

    def __str__(self) -> str:
        manifest = self.manifest
        base = f" from {manifest.needed}" if manifest.needed else ""
        size = format_bytes(manifest.bytes)
        return f"{self.path.name}: {manifest.kind}{base}, {manifest.profile}, {size}"


def save_checkpoint(
    checkpoint: Mapping[str, Any],
    path: StrPath,
    *,
    base: StrPath | None = None,
    pretrained: StrPath | None = None,
    profile: str | Profile = "exact",
    quantize_i8: bool = False,
    lossy: Filter | None = None,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Saved:
    """Write a training state to a new or empty folder or fsspec URL, bit for bit by default.

    With `base`, another checkpoint in the same parent folder, only differences are stored;
    unchanged tensors take no space. `pretrained` is a model folder or file anywhere, from which
    weights are stored as differences; it must stay as it is, and may also be passed as `base`.
    `profile` selects what may be rounded (see `PROFILES`); `quantize_i8` rounds weight matrices to
    8-bit integers. `lossy` restricts rounding to some tensors, or selects other tensors for
    `quantize_i8`. Tensors with NaN or infinity stay exact. The result contains the error of each
    rounded tensor. `storage_options` are passed to fsspec.

    Example:
        >>> state = {"model": {"weight": torch.randn(64, 64)}, "step": 100}
        >>> save_checkpoint(state, "run/100").errors
        {}
        >>> state["step"] = 200
        >>> saved = save_checkpoint(state, "run/200", base="run/100", profile="optimizer")
        >>> saved.manifest.kind
        'delta'
    """
    if base is not None and pretrained is None and _is_model(base, storage_options):
        base, pretrained = None, base
    options = SaveOptions(
        locate_folder(base, storage_options) if base is not None else None,
        profile,
        quantize_i8=quantize_i8,
        lossy=lossy,
        threads=threads,
        pretrained=open_pretrained(pretrained),
    )
    target = locate_folder(path, storage_options)
    if isinstance(target, Path):
        return save_state(FlatState.of(checkpoint), target, options)
    return _save_remote(FlatState.of(checkpoint), target, options)


def _is_model(path: StrPath, storage_options: dict[str, Any] | None) -> bool:
    """Return True for weights that are no checkpoint: a file, a URL, or a folder with weights."""
    place = locate_folder(path, storage_options)
    if is_checkpoint(place):
        return False
    if not isinstance(place, Path):
        return place.exists()
    return place.is_file() or any(place.glob("*.safetensors"))


def load_checkpoint(
    path: StrPath,
    *,
    base: StrPath | None = None,
    pretrained: StrPath | None = None,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a training state from a folder or URL and verify all checksums.

    A delta needs its base, by default the folder of that name next to it. A pretrained model is
    searched where it was, beside the checkpoint, and in the folders of the environment variable
    `SLIMTENSORS_BASES`. Both arguments are refused for a checkpoint that does not need them.

    Example:
        >>> saved = save_checkpoint({"step": 100, "scale": torch.ones(3)}, "run/first")
        >>> load_checkpoint("run/first")
        {'step': 100, 'scale': tensor([1., 1., 1.])}
    """
    if base is not None and pretrained is None and _is_model(base, storage_options):
        base, pretrained = None, base
    base_folder = locate_folder(base, storage_options) if base is not None else None
    folder = locate_folder(path, storage_options)
    stored = StoredState(folder, base=base_folder, pretrained=pretrained)
    if pretrained is not None and not stored.needs_pretrained:
        raise ConfigError(f"{path} needs no pretrained model, but {pretrained} was passed")
    return stored.load_state(threads=threads)


def flatten(
    path: StrPath,
    target: StrPath,
    *,
    pretrained: StrPath | None = None,
    threads: int | None = None,
) -> Saved:
    """Write a copy of a checkpoint that needs no base and no pretrained model."""
    stored = StoredState(local_path(path), pretrained=pretrained)
    return _flatten(stored, local_path(target), SaveOptions(threads=threads))


def flatten_in_place(
    folder: Path, *, pretrained: Pretrained | None = None, threads: int | None = None
) -> Saved:
    """Replace a checkpoint by a copy that needs no base; additional files in it stay.

    Every weight has an entry of its own, as loaders of the folder may need. With `pretrained`, the
    copy needs this model.
    """
    stored = StoredState(folder, pretrained=pretrained.path if pretrained else None)
    options = SaveOptions(
        threads=threads, merge=True, stores_all_weights=True, pretrained=pretrained
    )
    return _flatten(stored, folder, options)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder and its subfolders by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _flatten(stored: "StoredState", target: Path, options: "SaveOptions") -> Saved:
    state = FlatState.of(stored.load_state(threads=options.threads))
    separate = _find_separate(state, options)
    if options.pretrained is None:
        content = _Content(_source_with_copies(state, separate))
    else:
        content = _encode(state, find_profile("exact"), target, options, separate)
    manifest = stored.manifest
    content = replace(content, profile=manifest.profile, errors=manifest.errors)
    return _write(state, target, content, options)


def load_state_file(
    path: Path, *, threads: int | None = None, place: Place | None = None
) -> dict[str, Any]:
    """Read a training state from the `state.safetensors` of a checkpoint without a base."""
    return _load_state(TensorFile(path, lambda name, like, each: None), threads, place)


@dataclass(frozen=True)
class FlatState:
    """A state split into its tensors by name and a JSON outline of the rest."""

    tensors: Mapping[str, Tensor]
    tree: Json | None
    original: Mapping[str, Any]
    """The nested state; its tensors may have changed since."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "FlatState":
        """Flatten a state; raise `UnsupportedTensorError` with the path of an unsupported value."""
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise UnsupportedTensorError(
                f"expected a dict, as returned by build_checkpoint, got {kind}"
            )
        found, tree = flatten_tree(state)
        tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        for name in found.keys() - tensors.keys():
            raise UnsupportedTensorError(f"{name}: already encoded; pass the tensor instead")
        return cls(tensors, tree, state)

    def select_model(self) -> "FlatState":
        """Return the models and their metadata; all other values are None."""
        kept = {"model", "layout", "epoch", "step", "global_step", "metrics"}
        layout = self.original.get("layout")
        if not isinstance(layout, dict):
            kept.add("state_dict")  # not a state of build_checkpoint, where it would be an extra
        elif "models" in layout:
            kept.add("models")
        state = dict(self.tensors) if self.tree is None else unflatten(self.tree, self.tensors)
        return FlatState.of({key: x if key in kept else None for key, x in state.items()})


def find_weights(tree: Json | None) -> dict[str, str]:
    """Return the names of the tensors in `model` by parameter, from the outline of a state."""
    outlines = [node for key, node in (tree or {}).get("dict", []) if key == "model"]
    table = outlines[0] if outlines and isinstance(outlines[0], dict) else {}
    pairs = table.get("ordered") or table.get("dict") or []
    tensors = [(key, node) for key, node in pairs if isinstance(node, dict)]
    names = [(key, node.get("tensor", node.get("parameter"))) for key, node in tensors]
    return {key: name for key, name in names if isinstance(name, str)}


@dataclass(frozen=True)
class SaveOptions:
    """Options of `save_state`; `save_checkpoint` documents them."""

    base: Folder | None = None
    profile: str | Profile = "exact"
    quantize_i8: bool = False
    lossy: Filter | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Additional small files to write into the folder, by relative path."""
    threads: int | None = None
    replace: bool = False
    """Replace an existing checkpoint once the new one is complete."""
    merge: bool = False
    """Replace any folder, but keep the files in it that the new checkpoint lacks."""
    stores_all_weights: bool = False
    """Store every weight of the model under its name, also unchanged and equal ones, for loaders
    that take the names from the file. Those of the pretrained model have no bytes."""
    pretrained: Pretrained | None = None
    """The model from which weights are differences."""


def save_state(
    state: FlatState, path: Path, options: SaveOptions, target: Folder | None = None
) -> Saved:
    """Write a flattened state to a new or empty folder, as `save_checkpoint` does.

    `target` is where the folder will be moved to, by default `path`.
    """
    profile, lossy = find_profile(options.profile), options.lossy
    has_base = options.base is not None or options.pretrained is not None
    if options.quantize_i8 and (has_base or not profile.is_exact):
        raise ConfigError("quantize_i8 cannot be combined with a base or a profile")
    if lossy is not None and profile.is_exact and not options.quantize_i8:
        raise ConfigError("lossy selects tensors to round, but the profile is exact; pass profile=")
    if profile.is_model_only:
        state = state.select_model()
    separate = _find_separate(state, options)
    if options.quantize_i8:
        infos = describe_tensors(state.tensors, state.original)
        names = select_tensors(lossy or WEIGHT_MATRICES, infos)
        source = _source_with_copies(state, separate.union(names))
        content = _Content(source, make_int8_chooser(names), "int8", rounded=names)
    elif not has_base and profile.is_exact:
        content = _Content(_source_with_copies(state, separate))
    else:
        content = _encode(state, profile, target or path, options, separate)
    return _write(state, path, content, options)


def _save_remote(state: FlatState, target: RemoteLocation, options: "SaveOptions") -> Saved:
    """Write a state to a local temporary folder and upload it."""
    check_vacant(target)
    remove_interrupted(target.parent(), manifest=MANIFEST)
    with TemporaryDirectory(prefix="slimtensors-") as folder:
        saved = save_state(state, Path(folder, "checkpoint"), options, target)
        upload_folder(Path(folder, "checkpoint"), target, manifest=MANIFEST)
    return replace(saved, path=target)


def _find_separate(state: FlatState, options: SaveOptions) -> set[str]:
    """Return the tensors that are stored even if they equal others."""
    return set(find_weights(state.tree).values()) if options.stores_all_weights else set()


def _source_with_copies(state: FlatState, separate: Collection[str] = ()) -> ArchiveSource:
    """Return the tensors of a state; those with the same bits are stored once, but `separate`."""
    source = source_from_tensors(state.tensors, state.tree)
    names = [item.name for item in source.items if item.name not in separate]
    exact = {name: state.tensors[name] for name in names}
    return source.with_copies(find_copies(exact, set(source.tied.values())))


@dataclass(frozen=True)
class _Content:
    """Tensors to write, the preset that codes them, and what the manifest records of them."""

    source: ArchiveSource
    preset: str | Chooser = "lossless"
    profile: str = "exact"
    base: CheckpointBase | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    rounded: Collection[str] = ()
    """Tensors that the preset should round."""
    pretrained: PretrainedBase | None = None
    unmatched: Collection[str] = ()
    """Weights that the pretrained model lacks; filled as tensors are written."""


def _encode(
    state: FlatState,
    profile: Profile,
    path: Folder,
    options: SaveOptions,
    separate: Collection[str],
) -> _Content:
    infos, lossy = describe_tensors(state.tensors, state.original), options.lossy
    pretrained = _open_pretrained(options.pretrained, infos, options.threads)
    model_path = options.pretrained.path if options.pretrained else None
    base = None
    if options.base is not None:
        base = _open_base(options.base, path, model_path)
    encoder = StateEncoder(
        state.tensors,
        infos,
        step=state.original.get("step"),
        decay=measure_decay(base, state.tensors, state.original),
        profile=profile,
        lossy_names=select_tensors(lossy, infos) if lossy is not None else set(infos),
        base=base,
        stores_copies_once=True,
        separate=separate,
        pretrained=pretrained,
    )
    return _Content(
        encoder.build_source(state.tree),
        "lossless-max",
        profile.name,
        base=CheckpointBase(base.folder.name, base.manifest.id) if base else None,
        errors=encoder.errors,
        kept_exact=encoder.kept_exact,
        pretrained=describe_pretrained(pretrained.model, path) if pretrained else None,
        unmatched=pretrained.unmatched if pretrained else (),
    )


def _open_pretrained(
    pretrained: Pretrained | None, infos: Mapping[str, StateTensorInfo], threads: int | None
) -> PretrainedWeights | None:
    """Open the pretrained model and find the weights of a state in it."""
    if pretrained is None:
        return None
    try:
        model = PretrainedModel(pretrained.path)
    except FileNotFoundError as error:
        raise MissingBaseError(f"pretrained model not found: {error}") from error
    weights = {
        name: info
        for name, info in infos.items()
        if not info.roles.isdisjoint((WEIGHTS, BUFFERS)) and info.spec.dtype not in QUANTIZED_DTYPES
    }
    specs = {info.parameter: info.spec for info in weights.values()}
    matches = pretrained.match(model, specs)
    return PretrainedWeights(
        model,
        {
            name: matches[info.parameter]
            for name, info in weights.items()
            if info.parameter in matches
        },
        weights,
        {digest: name for name, digest in model.compute_digests(threads=threads).items()},
    )


def _write(state: FlatState, path: StrPath, content: _Content, options: SaveOptions) -> Saved:
    with create_folder(path, replace=options.replace, merge=options.merge) as folder:
        file = folder / STATE
        coding = WriteOptions(preset=content.preset, threads=options.threads)
        summary = write(content.source, file, coding).summary()
        measured = {t.name: t.error for t in summary.tensors if t.error is not None}
        entries = (content.source.delta or {}).get("checkpoint", {}).values()
        needs_pretrained = any("from" in entry for entry in entries)
        manifest = CheckpointManifest(
            id=content_id(file),
            step=_find_number(state.original, "step", "global_step"),
            epoch=_find_number(state.original, "epoch"),
            profile=content.profile,
            bytes=file.stat().st_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=_find_metrics(state.original),
            base=content.base,
            errors={**measured, **content.errors},
            pretrained=content.pretrained if needs_pretrained else None,
        )
        for name, raw in options.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_file_atomically(folder / name, raw)
        write_manifest(folder, manifest)
    exact = (t for t in summary.tensors if t.name in content.rounded and t.error is None)
    kept_exact = {**{t.name: t.note for t in exact}, **content.kept_exact}
    return Saved(local_path(path), manifest, summary, kept_exact, sorted(content.unmatched))


def _find_number(state: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = to_integer(state.get(key))
        if value is not None:
            if abs(value) >= 1 << 63:
                raise ConfigError(f"{key} does not fit 64 bits: {hex(value)[:40]}")
            return value
    return None


def _find_metrics(state: Mapping[str, Any]) -> dict[str, float]:
    metrics = state.get("metrics")
    return read_metrics(metrics) if isinstance(metrics, dict) else {}


def _open_base(base: Folder, path: Folder, pretrained: StrPath | None) -> "StoredState":
    folder, target = (Path(os.path.realpath(p)) if isinstance(p, Path) else p for p in (base, path))
    if parent_of(folder) != parent_of(target):
        raise ConfigError(f"{base}: a base must be in the same parent folder as its deltas")
    if not is_plain_name(folder.name):
        raise ConfigError(f"{base}: the name of a base must not be hidden or contain a backslash")
    return StoredState(folder, deltas=[target], pretrained=pretrained)


class StoredState:
    """A checkpoint on disk; tensors are decoded on demand."""

    def __init__(
        self,
        folder: Folder,
        *,
        base: Folder | None = None,
        deltas: Sequence[Folder] = (),
        pretrained: StrPath | None = None,
    ) -> None:
        """Open a checkpoint and its bases; `deltas` are those that need it, the nearest last.

        `pretrained` is the model that it needs, which is searched by default, on first use.
        """
        self.folder = folder
        self.bases: Sequence[Folder] = ()
        """Folders of all direct and indirect bases, the nearest first."""
        self.manifest = read_manifest(folder)
        check_chain(folder, deltas)
        state = folder / STATE
        if not state.is_file():
            raise CorruptFileError(f"{state} not found; the checkpoint is incomplete")
        if content_id(state) != self.manifest.id:
            raise CorruptFileError(f"{state}: content differs from the id in {MANIFEST}")
        self._pretrained_path = pretrained
        self._pretrained: PretrainedModel | None = None
        self._lock = threading.Lock()
        stored_base = self._base = self._open_base(base, deltas)
        if stored_base is not None:
            self.bases = [stored_base.folder, *stored_base.bases]

        def load_base(name: str, like: Spec, each: Each) -> Tensor | None:
            if stored_base is None or name not in stored_base:
                return None
            return stored_base.load(name, each)

        def load_pretrained(entry: TensorEntry, each: Each) -> Tensor:
            return self._find_pretrained().load(entry.pretrained, entry.like, each)

        self._file = TensorFile(state, load_base, load_pretrained)

    @property
    def needs_pretrained(self) -> bool:
        """Whether the checkpoint or one of its bases needs a pretrained model."""
        is_needed = self.manifest.pretrained is not None
        return is_needed or (self._base is not None and self._base.needs_pretrained)

    def find_pretrained(self) -> PretrainedModel | None:
        """Return the pretrained model of the checkpoint or of its nearest base that needs one.

        All needed tensors of the models are read; raise `MissingBaseError` if one is not found.
        """
        found = self._base.find_pretrained() if self._base is not None else None
        return found if self.manifest.pretrained is None else self._find_pretrained()

    def _find_pretrained(self) -> PretrainedModel:
        with self._lock:  # tensors are loaded by several threads
            if self._pretrained is None:
                if self.manifest.pretrained is None:
                    raise CorruptFileError(f"{MANIFEST} does not name the pretrained model")
                entries = [e for e in self._file.entries.values() if e.pretrained]
                path = self._pretrained_path
                self._pretrained = find_pretrained(
                    self.manifest.pretrained, self.folder, entries, path=path
                )
            return self._pretrained

    @property
    def archive(self) -> Archive:
        """The open file."""
        return self._file.archive

    @property
    def tree(self) -> Json | None:
        """Outline of the state without its tensors."""
        return self._file.archive.tree

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that share the tensor of another name."""
        return self._file.tied

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors except tied ones."""
        return iter(self._file)

    def __contains__(self, name: object) -> bool:
        return name in self._file

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self._file.spec(name)

    def kind(self, name: str) -> str:
        """Return the kind of a tensor's entry."""
        if name in self._file.copies:
            return "copy"
        return self._file.entries[name].kind if self._file.entries else WHOLE

    def has_entry(self, name: str) -> bool:
        """Return True if the file has an entry of this name, perhaps without bytes."""
        return name in self._file.archive

    def load(self, name: str, each: Each) -> Tensor:
        """Read and decode a tensor."""
        return self._file.load(name, each)

    def find_weights(self) -> dict[str, str]:
        """Return the names of the tensors in `model` by the names of the parameters."""
        with report_malformed(str(self.folder / STATE)):
            return find_weights(self.tree)

    def load_weights(self, *, threads: int | None = None) -> dict[str, Tensor]:
        """Read and decode the tensors in `model`, by the names of the parameters."""
        names = self.find_weights()
        unique = list(dict.fromkeys(self.tied.get(name, name) for name in names.values()))
        with Workers(threads) as workers:
            results = workers.in_order(
                lambda name: self.load(name, workers.each),
                unique,
                lambda name: self.spec(name).nbytes,
            )
            found = dict(zip(unique, results, strict=True))
        return {key: found[self.tied.get(name, name)] for key, name in names.items()}

    def load_metrics(self) -> dict[str, float]:
        """Read the metrics in the state, of which early versions omitted some in the manifest."""
        with report_malformed(str(self.folder / STATE)):
            pairs = (self.tree or {}).get("dict", [])
            outlines = [pair[1] for pair in pairs if pair[0] == "metrics"]
            metrics = unflatten(outlines[0], self._file) if outlines else {}
        return read_metrics(metrics) if isinstance(metrics, dict) else {}

    def load_state(
        self, *, threads: int | None = None, place: Place | None = None
    ) -> dict[str, Any]:
        """Read and decode all tensors and return the nested state; `place` may move each tensor."""
        return _load_state(self._file, threads, place)

    def _open_base(self, path: Folder | None, deltas: Sequence[Folder]) -> "StoredState | None":
        base = self.manifest.base
        if base is None:
            if path is not None:
                raise ConfigError(f"{self.folder} needs no base, but base={path} was passed")
            return None
        folder = path or parent_of(self.folder) / base.name
        delta = f"{self.folder} is a delta of {base.name} (id {base.id})"
        if not is_checkpoint(folder):
            raise MismatchError(
                f"{delta}, which was not found at {folder}; copy it there, or pass base="
            )
        if (have := read_manifest(folder).id) != base.id:
            raise MismatchError(f"{delta}, but the checkpoint at {folder} has id {have}")
        return StoredState(folder, deltas=[*deltas, self.folder], pretrained=self._pretrained_path)


def _load_state(file: TensorFile, threads: int | None, place: Place | None) -> dict[str, Any]:
    tensors = file.load_all(threads=threads)
    if place is not None:
        tensors = {name: place(x) for name, x in tensors.items()}
    return rebuild_state(file.archive, tensors)
