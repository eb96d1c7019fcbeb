"""Deltas: store an archive as its exact difference from a base."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from slimtensors.archive.base_places import describe_base, is_hub_name
from slimtensors.archive.bases import MAX_CHAIN, chain_length, resolve
from slimtensors.archive.decompress import make_exact_file
from slimtensors.archive.delta_manifest import BaseHint, tensor_digest
from slimtensors.archive.originals import find_originals, store_originals
from slimtensors.archive.prefixes import PrefixMatch, match_names
from slimtensors.archive.read import Archive, Progress, open_archive, open_stored
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, as_source, write
from slimtensors.codecs import Dense, presets
from slimtensors.codecs.changes import choose_kind, encode_changes
from slimtensors.codecs.plan import Encoded, Plan, encode
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.codecs.residual import choose_residual
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.parallel import Each
from slimtensors.storage import StrPath, check_separate, locate
from slimtensors.tensor import QUANTIZED_DTYPES, Json, bitwise_equal

_SAMPLE, _SAMPLES = 1 << 14, 8
"""Items per sample and number of samples encoded to estimate the size of a tensor."""
_MIN_SHARE = 0.1
"""Smallest share of a model that its base must have; below, the models are not related."""


def diff(
    new: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "lossless",
    unrelated: bool = False,
    base_model: str | None = None,
    base_revision: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the difference of `new` from `base`. Lossless; loading it needs the same base.

    Equal tensors take no space; others are stored as residuals where that is smaller. Names may
    differ by a prefix. Raises `MismatchError` if the models have almost no tensors in common.

    Args:
        new, base: paths or open archives; deltas stand for the models that they represent.
        target: path of the delta, a file or a folder.
        preset: a lossless preset, plan, or function that chooses plans for the residuals.
        unrelated: whether to accept a base with other tensors.
        base_model, base_revision: name and revision of the base on the hub, with which its cache
            is searched; by default those of a `base` in that cache.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> weight = torch.randn(256, 256, dtype=torch.bfloat16)
        >>> _ = slimtensors.save({"w": weight}, "base.safetensors")
        >>> _ = slimtensors.save({"w": weight * 1.01}, "new.safetensors")
        >>> _ = slimtensors.diff("new.safetensors", "base.safetensors", "delta.safetensors")
        >>> _ = slimtensors.restore("delta.safetensors", "base.safetensors", "again.safetensors")
        >>> bool(slimtensors.verify("again.safetensors", against="new.safetensors"))
        True
    """
    choose = require_lossless(presets.find(preset))
    after, before = open_archive(new, storage_options), open_archive(base, storage_options)
    hint = make_hint(before, base_model, base_revision)
    to = locate(target, storage_options=storage_options)
    check_separate(to, [*after.paths(), *before.paths()])
    if not unrelated:
        BaseMatch.of(after, before).check()
    source = make_delta_source(after, before, choose, hint=hint)
    options = WriteOptions(
        preset=choose, threads=threads, progress=progress, storage_options=storage_options
    )
    return write(source, target, options).summary()


def restore(
    delta: StrPath | Archive,
    base: StrPath | Archive | None,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "dense",
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the archive that was passed to `diff` as `new`, bit for bit.

    If that was one plain file and `preset` is unchanged, the file is identical, byte for byte.
    Raises `MismatchError` if `base` is not the base of the delta. See `diff` for an example.

    Args:
        delta, base: paths or open archives; for None, the base is searched for as `open` does.
        target: path of the restored archive, a file or a folder.
        preset: how to store the restored tensors; default: plain.
        max_shard_size: maximum bytes per file, such as `"5GB"`; writes shards and an index.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
    """
    model = open_restored(delta, base, storage_options)
    check_separate(locate(target, storage_options=storage_options), model.paths())
    source = as_source(model)
    options = WriteOptions(
        preset=preset,
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )
    if preset == "dense" and max_shard_size is None:
        source = make_exact_file(source, find_originals(model), target, options)
    return write(source, target, options).summary()


@dataclass(frozen=True)
class BaseMatch:
    """How much of a model has a tensor of the same name, dtype and shape in the base.

    Names may differ by a prefix.
    """

    new: str
    base: str
    tensors: int
    """Tensors of the model, without tied ones."""
    matched: int
    """Those with a counterpart in the base."""
    share: float
    """Fraction of the bytes that have a counterpart."""
    prefixes: tuple[PrefixMatch, ...] = ()
    """Prefixes by which names differ."""

    @classmethod
    def of(cls, new: Archive, base: Archive) -> "BaseMatch":
        """Compare the descriptions of all tensors."""
        tied = new.tied()
        specs = {name: new.spec(name) for name in new if name not in tied}
        matched, prefixes = match_names(specs, {name: base.spec(name) for name in base})
        total = sum(spec.nbytes for spec in specs.values())
        share = sum(specs[name].nbytes for name in matched) / total if total else 1.0
        return cls(new.path, base.path, len(specs), len(matched), share, tuple(prefixes))

    def __str__(self) -> str:
        share = f"{self.share:.0%} of bytes"
        renamed = "".join(f"; {prefix}" for prefix in self.prefixes)
        return f"{self.matched} of {self.tensors} tensors match the base ({share}){renamed}"

    def check(self) -> None:
        """Raise if a delta would not be smaller than the model itself."""
        if self.share < _MIN_SHARE:
            raise MismatchError(
                f"{self.new} and {self.base} have little in common: {self} in name, dtype and"
                " shape; use another base, compress the model instead, or pass unrelated=True"
                " (--force)"
            )

    def to_json(self) -> Json:
        """Return the JSON form."""
        renamed = [asdict(prefix) for prefix in self.prefixes]
        found = {"tensors": self.tensors, "matched": self.matched, "share": self.share}
        return found | ({"prefixes": renamed} if renamed else {})


def make_hint(base: Archive, model: str | None, revision: str | None) -> BaseHint:
    """Return what a delta records about its base; raise if the chain of deltas becomes too long."""
    if chain_length(base) >= MAX_CHAIN:
        raise ConfigError(
            f"{base.path} is the last of {MAX_CHAIN} deltas, the maximum of a chain; restore it,"
            " and use the result as base"
        )
    if revision is not None and model is None:
        raise ConfigError("base_revision (--base-revision) requires base_model (--base-model)")
    if model is not None and not is_hub_name(model):
        raise ConfigError(f"base_model: expected OWNER/NAME, got {model!r}")
    found = describe_base(base)
    return found if model is None else BaseHint(found.name, model, revision)


def make_delta_source(
    new: Archive,
    base: Archive,
    choose: Chooser,
    *,
    hint: BaseHint = BaseHint(),  # noqa: B008 - frozen
    files: Mapping[str, Any] | None = None,
) -> ArchiveSource:
    """Return the delta from `base` to `new`, to be written.

    `files` are the fields `index` and `files` of `DeltaManifest`.
    """
    new.check_not_delta()
    base.check_not_delta()
    tied = new.tied()
    plain = {
        name: spec
        for name in new
        if name not in tied and (spec := new.spec(name)).dtype not in QUANTIZED_DTYPES
    }  # those have scales beside their bytes
    homes, _ = match_names(plain, {name: base.spec(name) for name in base})
    names = {name: home for name, home in homes.items() if home != name}
    originals = store_originals(find_originals(new), new.keys(), new.path)
    entries: dict[str, list[str]] = {}

    def make_item(name: str) -> TensorSource:
        spec, home = new.spec(name), homes.get(name)
        entries[name] = ["whole"]  # now, so that the order does not depend on threads

        def read(each: Each) -> Tensor | Encoded | None:
            x = new.load_one(name, each)
            if home is None:
                return x
            y = base.load_one(home, each)
            if bitwise_equal(x, y):
                entries[name] = ["same", tensor_digest(y)]
                return None
            kind, r = choose_form(name, x, y, choose, each)
            if kind != "whole":
                entries[name] = [kind, tensor_digest(y)]
            return r

        return TensorSource(name, spec, read, always_blob=True)

    return ArchiveSource(
        [make_item(name) for name in new if name not in tied],
        tree=new.tree,
        delta={
            "tensors": entries,
            "tied": tied,
            **({"names": names} if names else {}),
            **({"base": described} if (described := hint.to_json()) else {}),
            **(files or {}),
        },
        originals=originals,
    )


def open_restored(
    delta: StrPath | Archive,
    base: StrPath | Archive | None,
    storage_options: dict[str, Any] | None = None,
) -> Archive:
    """Return the model that a delta represents; raise `ConfigError` if it is not a delta."""
    found = open_stored(delta, storage_options)
    if found.residuals is not None and base is None:
        return found
    return resolve(found.residuals or found, base, storage_options)


def choose_form(
    name: str, x: Tensor, base: Tensor, choose: Chooser, each: Each
) -> tuple[str, Tensor | Encoded]:
    """Return the smallest kind of residual, and the residual."""

    def estimate(r: Tensor) -> float:
        return estimate_bytes(name, r, choose)

    change = choose_kind(x, base)
    best: tuple[str, Tensor] = ("whole", x)
    if change != "sparse-change":
        best = choose_residual(x, base, estimate, each=each)
    if change is not None:
        stream = encode_changes(change, x, base, each)
        if stream.nbytes < estimate(best[1]):
            return change, encode(Plan(Dense()), stream)
    return best


def estimate_bytes(name: str, x: Tensor, choose: Chooser) -> float:
    """Estimate the encoded size of a tensor from a few samples of it."""
    flat = x.reshape(-1)
    if not flat.numel():
        return 0.0
    samples = [flat]
    if flat.numel() > _SAMPLE * _SAMPLES:
        last = flat.numel() - _SAMPLE
        starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        samples = [flat[start : start + _SAMPLE] for start in starts]
    coded = sum(_coded_bytes(name, sample, choose) for sample in samples)
    return coded * flat.numel() / sum(sample.numel() for sample in samples)


def require_lossless(choose: Chooser) -> Chooser:
    """Return a chooser that raises where `choose` would round."""

    def choose_lossless(name: str, x: Tensor) -> Choice | Plan | None:
        choice = choose(name, x)
        plan = _plan_of(choice)
        if plan is not None and plan.is_lossy:
            raise ConfigError(f"{name}: {plan} is lossy; a delta needs a lossless preset")
        return choice

    return choose_lossless


def _plan_of(choice: Choice | Plan | None) -> Plan | None:
    return choice.plan if isinstance(choice, Choice) else choice


def _coded_bytes(name: str, x: Tensor, choose: Chooser) -> int:
    plan = _plan_of(choose(name, x))
    if plan is None:
        return x.nbytes
    return min(sum(leaf.nbytes for _, leaf in encode(plan, x).leaves()), x.nbytes)
