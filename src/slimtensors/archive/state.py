"""What is to be written: tensors that are there, in another archive, or yet to be computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slimtensors.archive.read import Archive
from slimtensors.container import check_name
from slimtensors.spec import Each, Json, Spec, check_storable, on_cpu
from slimtensors.tree import flatten


@dataclass(frozen=True)
class Item:
    """A tensor to be written, read or computed only when its turn comes."""

    name: str
    spec: Spec
    read: Callable[[Each], Tensor | None]
    """Returns it in main memory; none if it turns out that there is nothing to store."""
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


def as_state(tensors: Mapping[str, Any] | Archive) -> State:
    """Check that all of it can be stored, and return it."""
    state = _archived(tensors) if isinstance(tensors, Archive) else given(*flatten(tensors))
    for name in (*(item.name for item in state.items), *state.tied):
        check_name(name)
    return state


def _archived(archive: Archive) -> State:
    def item(name: str) -> Item:
        return Item(name, archive.spec(name), lambda each: archive.load_one(name, each))

    archive.check_whole()
    tied = archive.tied()
    return State([item(name) for name in archive if name not in tied], tied, archive.tree)


def given(tensors: Mapping[str, Tensor], tree: Json | None) -> State:
    """Return a state of these tensors; those that are the same memory are stored once."""

    def item(name: str, x: Tensor) -> Item:
        return Item(name, Spec.of(x), lambda each: on_cpu(x))

    items: list[Item] = []
    tied: dict[str, str] = {}
    homes: dict[object, str] = {}
    for name, value in tensors.items():
        x = check_storable(name, value)
        home = homes.setdefault(view_of_memory(x), name)
        if home == name:
            items.append(item(name, x))
        else:
            tied[name] = home
    return State(items, tied, tree)


def view_of_memory(x: Tensor) -> object:
    """Return what two tensors have in common if and only if they are the same memory."""
    if x.numel() == 0:
        return object()
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
