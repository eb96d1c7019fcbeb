"""Deltas: a model stored as its difference from another one, exactly."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from slimtensors import _core, presets
from slimtensors.archive import Archive, Progress
from slimtensors.archive.state import Item, State
from slimtensors.archive.write import write
from slimtensors.container import StrPath
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.memory import empty
from slimtensors.plan import Plan, encode
from slimtensors.presets import Choice, Chooser
from slimtensors.spec import QUANTIZED, Each, Spec, as_bytes, dtype_name, serially
from slimtensors.summary import Summary

_CHUNK = 1 << 20
_SAMPLE = 1 << 16


def diff(
    new: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "lossless",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write what `new` has that `base` has not. Lossless; `restore` needs the very same base.

    Tensors that are equal cost nothing, others are stored as differences where that is smaller.
    """
    after, before = _opened(new), _opened(base)
    choose = presets.find(preset)
    tied = after.tied()
    how: dict[str, list[str]] = {}

    def item(name: str) -> Item:
        spec = after.spec(name)
        has_base = name in before and before.spec(name) == spec and _can_subtract(spec)
        how[name] = ["whole"]  # in this order, whichever thread is first

        def read(each: Each) -> Tensor | None:
            x = after.load_one(name, each)
            if not has_base:
                return x
            y = before.load_one(name, each)
            if torch.equal(as_bytes(x), as_bytes(y)):
                how[name] = ["same", digest(y)]
                return None
            d = difference(x, y, each)
            if _cost(name, d, choose) >= _cost(name, x, choose):
                return x
            how[name] = ["difference", digest(y)]
            return d

        return Item(name, _difference_spec(spec) if has_base else spec, read, always_blob=True)

    state = State(
        [item(name) for name in after if name not in tied],
        tree=after.tree,
        delta={"tensors": how, "tied": tied},
    )
    return write(state, target, preset=choose, dialect="slim", threads=threads, progress=progress)


def restore(
    delta: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Plan | Chooser = "dense",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write the model that `diff` was given as `new`, bit for bit. Another base is refused."""
    return write(
        restored(delta, base),
        target,
        preset=preset,
        dialect="slim",
        threads=threads,
        progress=progress,
    )


def restored(delta: StrPath | Archive, base: StrPath | Archive) -> State:
    """Return the model that a delta and its base stand for, to be written or loaded."""
    changes, before = _opened(delta), _opened(base)
    if changes.delta is None:
        raise ConfigError(f"{changes.path}: is not a delta, but whole")
    how, tied = _parse(changes)

    def item(name: str, kind: str, want: str) -> Item:
        if kind == "whole":
            return Item(name, changes.spec(name), lambda each: changes.load_one(name, each))
        if name not in before:
            raise MismatchError(f"{before.path}: {name}: is missing; this is not the delta's base")
        spec = before.spec(name)

        def read(each: Each) -> Tensor:
            y = before.load_one(name, each)
            if digest(y) != want:
                raise MismatchError(
                    f"{before.path}: {name}: is not the tensor that {changes.path} was made from"
                )
            if kind == "same":
                return y
            return add_difference(changes.load_one(name, each), y, each)

        return Item(name, spec, read)

    items = [item(name, *(*entry, "")[:2]) for name, entry in how.items()]
    return State(items, tied, changes.tree)


def difference(x: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return how `x` differs from `base`, as integers: 0 where equal, small where close."""
    return _by_chunks(_core.difference, x, base, _difference_spec(Spec.of(x)), x.dtype, each)


def add_difference(d: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the tensor whose difference from `base` is `d`."""
    if Spec.of(d) != _difference_spec(Spec.of(base)):
        raise CorruptFileError(f"a difference of {d.dtype} {tuple(d.shape)} does not fit its base")
    return _by_chunks(_core.add_difference, d, base, Spec.of(base), base.dtype, each)


def digest(x: Tensor) -> str:
    """Return 128 bits of SHA-256 over dtype, shape and bytes."""
    found = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)}\n".encode())
    found.update(as_bytes(x).numpy().data)
    return found.hexdigest()[:32]


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _opened(archive: StrPath | Archive) -> Archive:
    return archive if isinstance(archive, Archive) else Archive(archive)


def _can_subtract(spec: Spec) -> bool:
    plain = not spec.dtype.is_complex and spec.dtype not in QUANTIZED
    return plain and spec.numel > 0 and spec.dtype.itemsize in _UNSIGNED


def _difference_spec(spec: Spec) -> Spec:
    return Spec(_UNSIGNED[spec.dtype.itemsize], spec.shape)


def _by_chunks(
    work: Callable[[Tensor, Tensor, int, bool, Tensor], None],
    first: Tensor,
    base: Tensor,
    like: Spec,
    dtype: torch.dtype,
    each: Each,
) -> Tensor:
    out = empty(like)
    arrays = [as_bytes(x) for x in (first, base, out)]

    def one(i: int) -> None:
        a, b, c = (array[i * _CHUNK : (i + 1) * _CHUNK] for array in arrays)
        work(a, b, dtype.itemsize, dtype.is_floating_point, c)

    each(one, -(-like.nbytes // _CHUNK))
    return out


def _cost(name: str, x: Tensor, choose: Chooser) -> float:
    """Estimate the bits per item of a tensor from a few pieces of it."""
    flat = x.reshape(-1)
    if flat.numel() > 3 * _SAMPLE:
        middle = flat.numel() // 2
        flat = torch.cat([flat[:_SAMPLE], flat[middle : middle + _SAMPLE], flat[-_SAMPLE:]])
    choice = choose(name, flat)
    plan = choice.plan if isinstance(choice, Choice) else choice
    if plan is None:
        return 8.0 * x.element_size()
    parts = encode(plan, flat).leaves()
    return min(8 * sum(leaf.nbytes for _, leaf in parts) / flat.numel(), 8.0 * x.element_size())


def _parse(changes: Archive) -> tuple[dict[str, list[str]], dict[str, str]]:
    assert changes.delta is not None
    match changes.delta:
        case {"tensors": dict(how), "tied": dict(tied)} if (
            all(map(_is_entry, how.values()))
            and tied.keys().isdisjoint(how)
            and set(tied.values()) <= how.keys()
        ):
            return how, tied
    raise CorruptFileError(f"{changes.path}: does not say how it differs from its base")


def _is_entry(entry: object) -> bool:
    match entry:
        case ["whole"]:
            return True
        case ["same" | "difference", str()]:
            return True
    return False
