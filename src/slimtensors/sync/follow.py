"""Follow a store: bring a model to the newest version, bit for bit, or not at all."""

import logging
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from slimtensors.archive.write import memory_key
from slimtensors.errors import (
    CorruptFileError,
    MismatchError,
    UnsupportedTensorError,
    describe_problems,
)
from slimtensors.parallel import Each, Workers, check_threads
from slimtensors.storage import StrPath
from slimtensors.sync.decode import (
    Decoder,
    DivergedError,
    Patch,
    Route,
    apply_patch,
    filter_versions,
    make_whole,
)
from slimtensors.sync.manifest import Version
from slimtensors.sync.store import Store, Traffic
from slimtensors.tensor import Json, Spec, check_storable, to_cpu

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Attempts to read a store whose old versions are being removed."""


def following(
    url: StrPath, *, threads: int | None = None, storage_options: dict[str, Any] | None = None
) -> "Follower":
    """Return a follower of the versions that `publishing` writes to `url`.

    Args:
        url: folder or URL of the store; any number of followers may read it.
        threads: number of threads; default: one per core.
        storage_options: passed to fsspec.

    Example:
        >>> import torch
        >>> from slimtensors.sync import following, publishing
        >>> trained, served = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
        >>> with publishing("memory://docs/run", trained) as out:
        ...     out.publish(step=1)
        >>> following("memory://docs/run").update(served).step
        1
        >>> bool(torch.equal(served["w"], trained["w"]))
        True
    """
    return Follower(Store(url, storage_options), threads)


@dataclass(frozen=True)
class Update:
    """What `Follower.update` did."""

    number: int
    """Version that the model has now."""
    step: int
    versions: int
    """Number of versions since the last one, or since the keyframe; 0 if nothing was new."""
    from_keyframe: bool
    """Whether a keyframe was read instead of deltas only."""
    tensors: int
    """Tensors that changed."""
    bytes: int
    """Bytes read from the store."""
    requests: int

    def to_json(self) -> Json:
        """Return the JSON form."""
        return dict(vars(self))


class Follower:
    """Reads the versions of a store; created by `following`."""

    def __init__(self, store: Store, threads: int | None = None) -> None:
        check_threads(threads)
        self._store, self._threads = store, threads
        self._run: str | None = None
        self._known: dict[int, tuple[Version, str]] = {}
        """Manifests that were read, with their SHA-256."""
        self._owner: weakref.ref[Any] | None = None
        """Whose version `_position` is: a module, or the first tensor of a dict."""
        self._position: int | None = None
        self._mirror: dict[str, Tensor] | None = None
        """The tensors of the last call of `patches`, and their version."""
        self._mirrored: int | None = None
        self._is_delivered = False
        """Whether all patches of that call were taken."""

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes so far."""
        return self._store.traffic

    def versions(self) -> list[Version]:
        """Return all complete versions, oldest first. Reads their manifests."""
        numbers, _ = self._find_newest()
        return [self._read(number)[0] for number in numbers]

    def update(
        self, model: nn.Module | Mapping[str, Tensor], *, number: int | None = None
    ) -> Update:
        """Change the tensors of a model in place to those of the newest version, or of `number`.

        Everything is downloaded, decoded and verified first; if that fails, the model is unchanged.
        The changed items are kept until then: little for a few percent of changes, up to the size
        of the model for a keyframe. Digests of all tensors are compared with those that were
        published. If the tensors are not those of a recent version, as at the first call, or were
        changed since, a keyframe is read. Without a new version, nothing is compared.

        Raises `MismatchError` if names, dtypes or shapes differ from those of the version.
        """
        tensors = model_tensors(model)
        owner = model if isinstance(model, nn.Module) else next(iter(tensors.values()), None)
        is_same = self._owner is not None and self._owner() is owner
        before = self.traffic.copy()
        numbers, _ = self._find_newest(number)
        position = self._position if is_same else None
        route, patches = self._stage(numbers, tensors, position, number)
        for patch in patches:
            apply_patch(patch, tensors[patch.name])
        return self._finish(route, owner, len(patches), before)

    def patches(self, *, number: int | None = None) -> Iterator[Patch]:
        """Yield what changed since the last call, all tensors in whole at the first one.

        The values are those of the newest version, or of `number`; all are decoded and verified
        before the first patch. For that, this object keeps a copy of all tensors in main memory; do
        not change the values. If not all patches of a call are taken, the next one yields all
        tensors in whole.
        """
        numbers, newest = self._find_newest(number)
        mirror, is_complete = self._mirror, self._is_delivered
        if mirror is not None and _describe_misfit(newest, mirror):
            mirror = None
        route, patches = self._stage(numbers, mirror, self._mirrored, number)
        target = route.target
        if mirror is None:
            mirror = {patch.name: patch.values for patch in patches}
            mirror |= {alias: mirror[home] for alias, home in target.tied.items()}
        else:
            for patch in patches:
                apply_patch(patch, mirror[patch.name])
            if not is_complete:
                patches = [make_whole(name, mirror[name]) for name in target.tensors]
        self._mirror, self._mirrored, self._is_delivered = mirror, target.number, False
        aliases = target.tied.items()
        for patch in patches:
            yield patch
            for alias, home in aliases:
                if home == patch.name:
                    yield replace(patch, name=alias)
        self._is_delivered = True

    def tensors(self) -> dict[str, Tensor]:
        """Return the copy that `patches` keeps; do not change it."""
        return dict(self._mirror or {})

    def newest(self) -> Version:
        """Return the newest version."""
        return self._find_newest()[1]

    def load(self) -> tuple[Update, dict[str, Tensor]]:
        """Return the tensors of the newest version, which `update` may change later."""
        before = self.traffic.copy()
        numbers, _ = self._find_newest()
        route, patches = self._stage(numbers, None, None)
        tensors = {patch.name: patch.values for patch in patches}
        tensors |= {alias: tensors[home] for alias, home in route.target.tied.items()}
        owner = next(iter(tensors.values()), None)
        return self._finish(route, owner, len(patches), before), tensors

    def _finish(
        self, route: Route, owner: nn.Module | Tensor | None, tensors: int, before: Traffic
    ) -> Update:
        """Note which version a model has now, and describe how it got there."""
        self._owner = None if owner is None else weakref.ref(owner)
        self._position = route.target.number
        traffic = self.traffic.since(before)
        return Update(
            number=route.target.number,
            step=route.target.step,
            versions=len(route.deltas) + route.is_keyframe,
            from_keyframe=route.is_keyframe,
            tensors=tensors,
            bytes=traffic.bytes,
            requests=traffic.requests,
        )

    def _find_newest(self, limit: int | None = None) -> tuple[list[int], Version]:
        """Return the numbers of all versions up to a limit, and the last of these."""
        found = self._store.numbers()
        numbers = [n for n in found if limit is None or n <= limit]
        if not found:
            raise FileNotFoundError(f"{self._store}: no versions (empty, deleted, or another path)")
        if limit is not None and numbers[-1:] != [limit]:
            raise FileNotFoundError(f"{self._store}: version {limit} not found")
        newest, _ = self._read(numbers[-1])
        if self._run not in (None, newest.run) or found[-1] < max(self._known):
            self._known.clear()  # another run, perhaps with the same numbers
            self._position = self._mirror = None
            newest, _ = self._read(numbers[-1])
        self._run = newest.run
        self._known = {n: known for n, known in self._known.items() if n in set(found)}
        return numbers, newest

    def _read(self, number: int) -> tuple[Version, str]:
        if number not in self._known:
            self._known[number] = self._store.read(number)
        return self._known[number]

    def _walk(self, numbers: Sequence[int]) -> Iterator[Version]:
        """Yield the newest version and those before it until one is missing; check their seals."""
        present = set(numbers)
        version, _ = self._read(numbers[-1])
        yield version
        while version.number - 1 in present:
            previous, sha256 = self._read(version.number - 1)
            if sha256 != version.previous or previous.run != version.run:
                raise CorruptFileError(
                    f"{self._store}: version {previous.number} is not the one from which version"
                    f" {version.number} was made"
                )
            yield previous
            version = previous

    def _plan(self, numbers: Sequence[int], position: int | None) -> Route:
        """Return the route to the newest version that needs the fewest bytes."""
        best: Route | None = None
        deltas: list[Version] = []
        cost = 0
        for version in self._walk(numbers):
            if version.number == position:
                if best is None or cost <= best.size:
                    best = Route(version, deltas[::-1], is_keyframe=False, size=cost)
                break
            if version.keyframe_bytes is not None:
                size = cost + version.keyframe_bytes
                if best is None or size < best.size:
                    best = Route(version, deltas[::-1], is_keyframe=True, size=size)
                if position is None or position > version.number:
                    break
            if version.delta_bytes is None:
                break
            deltas.append(version)
            cost += version.delta_bytes
            if best is not None and cost >= best.size:
                break
        if best is None:
            missing = deltas[-1].number - 1
            raise CorruptFileError(
                f"{self._store}: version {missing} is missing; version {numbers[-1]} needs it"
            )
        return best

    def _find_position(
        self, numbers: Sequence[int], tensors: Mapping[str, Tensor], each: Each
    ) -> int | None:
        """Return the newest version with these tensors, back to the last keyframe, or None."""
        found: list[Version] = []
        for version in self._walk(numbers):
            found.append(version)
            if version.keyframe is not None:
                break
        for name, x in tensors.items():
            found = filter_versions(found, name, to_cpu(x), each)
            if not found:
                return None
        return found[0].number

    def _stage(
        self,
        numbers: Sequence[int],
        tensors: Mapping[str, Tensor] | None,
        position: int | None,
        limit: int | None = None,
    ) -> tuple[Route, list[Patch]]:
        """Decode and verify what changes `tensors` to the newest version, without changing them."""
        for _ in range(_ATTEMPTS):
            try:
                return self._try_stage(numbers, tensors, position)
            except FileNotFoundError as error:  # perhaps of an old version that was just removed
                again, _newest = self._find_newest(limit)
                if again == numbers:
                    raise FileNotFoundError(
                        f"{error}; the store is incomplete; nothing was changed"
                    ) from error
                numbers = again
            except DivergedError as error:
                _log.warning("%s: %s; looking for another start", self._store, error)
                position = None
        raise FileNotFoundError(f"{self._store}: versions were removed while they were read")

    def _check_fit(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Raise unless a version has exactly the tensors of a model."""
        for name, x in tensors.items():
            try:
                check_storable(name, x)
            except UnsupportedTensorError as error:
                raise UnsupportedTensorError(f"{error}, nor updated in place") from error
        text = _describe_misfit(version, tensors)
        if text:
            raise MismatchError(
                f"{self._store}: version {version.number} does not fit the model: {text}"
            )

    def _try_stage(
        self,
        numbers: Sequence[int],
        tensors: Mapping[str, Tensor] | None,
        position: int | None,
    ) -> tuple[Route, list[Patch]]:
        with Workers(self._threads) as workers, ExitStack() as stack:
            if tensors is not None:
                self._check_fit(self._read(numbers[-1])[0], tensors)
            if tensors is not None and position is None:
                position = self._find_position(numbers, tensors, workers.each)
            route = self._plan(numbers, position if tensors is not None else None)
            if not route.deltas and not route.is_keyframe:
                return route, []
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slimtensors-")))
            decoder = Decoder(self._store, route, tensors, folder, workers)
            names = [*route.target.tensors, *_find_untied(route.target, tensors or {})]
            found = workers.in_order(partial(decoder.decode, workers.each), names, decoder.size)
            return route, [patch for patch in found if patch is not None]


def model_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model or dict by name, without the prefixes of wrappers.

    Raises `UnsupportedTensorError` if a value is not a tensor.
    """
    if isinstance(model, nn.Module):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = cast(nn.Module, model.module)
        state = {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}
    else:
        state = dict(model)
    for name, x in state.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise UnsupportedTensorError(
                f"{name}: expected a tensor, got {type(x).__name__}; a store contains tensors only"
            )
    return state


def find_tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return alias -> first name of tensors that share memory."""
    first: dict[object, str] = {}
    return {
        name: home
        for name, x in tensors.items()
        if (home := first.setdefault(memory_key(x), name)) != name
    }


def describe_differences(
    ours: Mapping[str, Spec], others: Mapping[str, Spec], missing: str, unexpected: str
) -> str:
    """Return the names that differ, with the reason; empty if there are none."""
    names = {*ours, *others}
    problems = [(name, missing) for name in names if name not in ours]
    problems += [(name, unexpected) for name in names if name not in others]
    problems += [
        (name, f"{ours[name]}, published as {others[name]}")
        for name in names
        if name in ours and name in others and ours[name] != others[name]
    ]
    return describe_problems(sorted(problems))


def _describe_misfit(version: Version, tensors: Mapping[str, Tensor]) -> str:
    """Return the names of tensors that a version and a model do not have in common."""
    ours = {name: Spec.of(x) for name, x in tensors.items()}
    text = describe_differences(ours, version.specs(), "not in the model", "not published")
    for alias, home in () if text else find_tied(tensors).items():
        if version.tied.get(alias, alias) != version.tied.get(home, home):
            return f"{alias} and {home} are one tensor in the model, but two were published"
    return text


def _find_untied(version: Version, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return published aliases that have memory of their own here."""
    keys = {name: memory_key(x) for name, x in tensors.items()}
    pairs = version.tied.items()
    return [alias for alias, home in pairs if alias in keys and keys[alias] != keys.get(home)]
