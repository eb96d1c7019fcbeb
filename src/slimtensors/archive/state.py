"""What is to be written: tensors that are there, in another archive, or yet to be computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slimtensors.archive.read import Archive
from slimtensors.container import check_name
from slimtensors.dialects import Packed
from slimtensors.plan import Encoded
from slimtensors.spec import Each, Json, Spec, check_storable, on_cpu
from slimtensors.tensors import CompressedTensor, CsrTensor
from slimtensors.tensors.stored import encoded
from slimtensors.tree import flatten


@dataclass(frozen=True)
class Item:
    """A tensor to be written, read or computed only when its turn comes."""

    name: str
    spec: Spec
    read: Callable[[Each], Tensor | Encoded | Packed | None]
    """Returns it in main memory; none if it turns out that there is nothing to store.

    What is encoded already, or even ready to be written, is stored in that form.
    """
    runs_from_file: bool = False
    """Whether its parts may be used where they lie in the file, as if in memory."""
    always_blob: bool = False
    """Whether other readers must never take it for the tensor of its name."""


@dataclass(frozen=True)
class State:
    """Everything that goes into an archive."""

    items: Sequence[Item]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for one of the items."""
    tree: Json | None = None
    """What is not a tensor, as `slimtensors.tree` outlines it."""
    delta: Mapping[str, Any] | None = None
    """How the tensors differ from those of a base; complete once all items have been read."""

    def __post_init__(self) -> None:
        for name in (*(item.name for item in self.items), *self.tied):
            check_name(name)


def as_state(tensors: Mapping[str, Any] | Archive) -> State:
    """Check that all of it can be stored, and return it."""
    return _archived(tensors) if isinstance(tensors, Archive) else given(*flatten(tensors))


def _archived(archive: Archive) -> State:
    def item(name: str) -> Item:
        return Item(name, archive.spec(name), lambda each: archive.load_one(name, each))

    archive.check_whole()
    tied = archive.tied()
    return State([item(name) for name in archive if name not in tied], tied, archive.tree)


def given(tensors: Mapping[str, Tensor | Encoded], tree: Json | None) -> State:
    """Return a state of these tensors; those that are the same memory are stored once."""

    def item(name: str, x: Tensor) -> Item:
        return Item(name, Spec.of(x), lambda each: on_cpu(x))

    items: list[Item] = []
    tied: dict[str, str] = {}
    homes: dict[object, str] = {}
    for name, value in tensors.items():
        if isinstance(value, Encoded):
            items.append(_encoded(name, value))
            continue
        home = homes.setdefault(_memory(name, value), name)
        if home != name:
            tied[name] = home
        elif isinstance(value, CompressedTensor):
            items.append(_compressed(name, value))
        else:
            items.append(item(name, value))
    return State(items, tied, tree)


def _encoded(name: str, value: Encoded) -> Item:
    for path, leaf in value.leaves():
        check_storable(f"{name}: {path}", leaf)
    return Item(name, value.spec, lambda each: value, runs_from_file=True)


def _compressed(name: str, x: CompressedTensor) -> Item:
    spec = Spec(x.dtype, tuple(x.shape))
    if isinstance(x, CsrTensor):  # a way to run, not to store: the preset says how
        return Item(name, spec, lambda each: on_cpu(x.dequantize()))
    return _encoded(name, encoded(x))


def _memory(name: str, value: Tensor) -> object:
    """Check that a tensor can be stored, and return what tied ones have in common."""
    if not isinstance(value, CompressedTensor):
        return view_of_memory(check_storable(name, value))
    leaves = [check_storable(f"{name}: {path}", leaf) for path, leaf in value.leaves()]
    return value.dtype, *map(view_of_memory, leaves)


def view_of_memory(x: Tensor) -> object:
    """Return what two tensors have in common if and only if they are the same memory."""
    if x.numel() == 0:
        return object()
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
