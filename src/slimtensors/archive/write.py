"""Write archives: save, or tell what saving would give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slimtensors import dialects, presets
from slimtensors.archive.read import Archive
from slimtensors.archive.workers import Workers
from slimtensors.container import (
    FileOutput,
    FolderOutput,
    Output,
    Piece,
    StrPath,
    check_name,
    local,
    parse_size,
)
from slimtensors.dialects import KEY, Dialect, Manifest
from slimtensors.errors import ConfigError
from slimtensors.plan import Plan
from slimtensors.presets import Choice, Chooser
from slimtensors.spec import Each, Spec, check_storable, dtype_name, on_cpu
from slimtensors.summary import Stored, Summary

Progress = Callable[[int], object]
"""Called with the number of dense bytes that were just done."""


def save(
    tensors: Mapping[str, Tensor] | Archive,
    path: StrPath,
    *,
    preset: str | Plan | Chooser = "sparse",
    dialect: str = "slim",
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write tensors to a file, or into a folder if `path` is one or `max_shard_size` is given.

    What was there is replaced in one step once everything is written. Tensors come back bit for
    bit, unless the preset says otherwise; a tensor that its plan would make larger stays plain.
    """
    choose, how = presets.find(preset), dialects.find(dialect)
    items, tied = _items(tensors, how)
    with Workers(threads) as workers, _output(path, max_shard_size, items, how) as output:
        done: dict[str, _Done] = {}
        for result in _encoded(items, choose, how, workers):
            output.add(result.pieces)
            done[result.item.name] = result.emptied()
            if progress:
                progress(result.item.spec.nbytes)
        files = output.commit(
            [piece.name for item in items for piece in done[item.name].pieces],
            lambda names, sums, table: _describe(how, done, tied, names, sums, table),
        )
    homes = {name: str(path) for path, names in files.items() for name in names}
    return _summary([done[item.name] for item in items], tied, homes)


def estimate(
    tensors: Mapping[str, Tensor] | Archive,
    *,
    preset: str | Plan | Chooser = "sparse",
    dialect: str = "slim",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Tell what `save` would store, without writing anything."""
    choose, how = presets.find(preset), dialects.find(dialect)
    items, tied = _items(tensors, how)
    done: dict[str, _Done] = {}
    with Workers(threads) as workers:
        for result in _encoded(items, choose, how, workers):
            done[result.item.name] = result.emptied()
            if progress:
                progress(result.item.spec.nbytes)
    return _summary([done[item.name] for item in items], tied, {})


@dataclass(frozen=True)
class _Item:
    """A tensor to be written, which may still have to be read."""

    name: str
    spec: Spec
    read: Callable[[Each], Tensor]


@dataclass(frozen=True)
class _Done:
    """A tensor ready to be written, and how."""

    item: _Item
    pieces: Sequence[Piece]
    plan: Plan | None
    note: str

    def emptied(self) -> "_Done":
        """Return this without the data."""
        return replace(self, pieces=[replace(piece, chunks=[]) for piece in self.pieces])


def _encoded(
    items: Sequence[_Item], choose: Chooser, how: Dialect, workers: Workers
) -> Iterator[_Done]:
    """Yield the tensors ready to be written, in the order in which they lie best."""

    def one(item: _Item) -> _Done:
        return _encode(item, choose, how, workers.each)

    # Largest items first, so that all tensors lie aligned although nothing pads them.
    ordered = sorted(items, key=lambda item: -item.spec.dtype.itemsize)
    seen: set[str] = set()
    for result in workers.in_order(one, ordered, lambda item: item.spec.nbytes):
        for piece in result.pieces:
            if piece.name in seen:
                raise ConfigError(f"{piece.name}: is the name of a tensor and of a part of another")
            seen.add(piece.name)
        yield result


def _items(
    tensors: Mapping[str, Tensor] | Archive, how: Dialect
) -> tuple[list[_Item], dict[str, str]]:
    """List what is to be stored, and the names that stand for one of these."""
    items, tied = _archived(tensors) if isinstance(tensors, Archive) else _given(tensors)
    for item in items:
        check_name(item.name)
        how.check(item.name, item.spec)
    for name in tied:
        check_name(name)
    return items, tied


def _archived(archive: Archive) -> tuple[list[_Item], dict[str, str]]:
    def item(name: str) -> _Item:
        return _Item(name, archive.spec(name), lambda each: archive.load_one(name, each))

    tied = archive.tied()
    return [item(name) for name in archive if name not in tied], tied


def _given(tensors: Mapping[str, Tensor]) -> tuple[list[_Item], dict[str, str]]:
    def item(name: str, x: Tensor) -> _Item:
        return _Item(name, Spec.of(x), lambda each: on_cpu(x))

    items: list[_Item] = []
    tied: dict[str, str] = {}
    homes: dict[object, str] = {}
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise ConfigError(f"names of tensors must be text, not {name!r}")
        x = check_storable(name, value)
        home = homes.setdefault(_view_of_memory(x), name)
        if home != name:
            tied[name] = home
            continue
        items.append(item(name, x))
    return items, tied


def _view_of_memory(x: Tensor) -> object:
    """Return what two tensors have in common if and only if they are the same memory."""
    if x.numel() == 0:
        return object()
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())


def _encode(item: _Item, choose: Chooser, how: Dialect, each: Each) -> _Done:
    x = item.read(each)
    choice = _choice(item.name, x, choose)
    try:
        pieces, plan = how.pieces(item.name, x, choice.plan, each)
    except ConfigError as error:
        raise ConfigError(f"{item.name}: {error}") from error
    size = _size(pieces)
    if choice.plan is None or size < item.spec.nbytes:
        return _Done(item, pieces, plan, choice.note)
    plain, used = how.pieces(item.name, x, None, each)
    if size < _size(plain):
        return _Done(item, pieces, plan, choice.note)
    note = f"{choice.plan} would take {size} bytes, plain takes {_size(plain)}"
    return _Done(item, plain, used, choice.note or note)


def _choice(name: str, x: Tensor, choose: Chooser) -> Choice:
    choice = choose(name, x) if x.numel() else None
    if choice is None or isinstance(choice, Plan):
        return Choice(choice)
    if not isinstance(choice, Choice):
        kind = type(choice).__name__
        raise ConfigError(f"{name}: the function that chooses plans returned a {kind}")
    return choice


def _size(pieces: Sequence[Piece]) -> int:
    return sum(piece.spec.nbytes for piece in pieces)


def _output(
    path: StrPath, max_shard_size: int | str | None, items: Sequence[_Item], how: Dialect
) -> Output:
    # Room for the header: the names, shapes and offsets of all tensors, in as many parts as the
    # dialect makes of one. An estimate that is too low costs time, one too high a few bytes.
    total = len(str(sum(item.spec.nbytes for item in items)))
    text = sum(
        2 * len(item.name.encode()) + 2 * total + 64 + 8 * len(item.spec.shape) for item in items
    )
    reserve = 256 + text * how.parts
    limit = parse_size(max_shard_size)
    target = local(path)
    if limit is None and not target.is_dir():
        return FileOutput(target, reserve=reserve)
    return FolderOutput(target, max_shard_size=limit, reserve=reserve)


def _describe(
    how: Dialect,
    done: Mapping[str, _Done],
    tied: Mapping[str, str],
    names: Sequence[str],
    checksums: Mapping[str, int | None],
    table: str,
) -> dict[str, str]:
    here = set(names)
    manifest = Manifest(
        how.name,
        [checksums[name] for name in names],
        tied={name: home for name, home in tied.items() if done[home].pieces[0].name in here},
        plans={
            name: str(result.plan)
            for name, result in done.items()
            if len(result.pieces) > 1 and result.pieces[0].name in here
        },
    )
    return {"format": "pt", KEY: manifest.to_text(table)}


def _summary(done: Sequence[_Done], tied: Mapping[str, str], homes: Mapping[str, str]) -> Summary:
    tensors = {
        result.item.name: Stored(
            result.item.name,
            dtype_name(result.item.spec.dtype),
            result.item.spec.shape,
            str(result.plan) if result.plan else "plain",
            result.item.spec.nbytes,
            _size(result.pieces),
            homes.get(result.pieces[0].name, ""),
            result.note,
        )
        for result in done
    }
    aliases = [replace(tensors[home], name=name).tied_to(home) for name, home in tied.items()]
    return Summary([*tensors.values(), *aliases], sorted(set(homes.values())))
