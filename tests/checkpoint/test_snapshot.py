"""Copies of a state for background saves."""

import copy

import pytest
import torch
from strategies import bits, same_bits
from torch import nn

from slimtensors.checkpoint import checkpointing, load_checkpoint
from slimtensors.checkpoint.snapshot import Snapshot
from slimtensors.tensor import DTYPES


def check_copies(snapshot, state):
    """Take a copy of a flat state and compare it: bits, and which names share memory."""
    copies = snapshot.take({**state, "n": 1}).tensors
    originals = {name: x.detach().resolve_conj() for name, x in state.items()}
    assert all(same_bits(copies[name], x) for name, x in originals.items())
    for a, x in state.items():
        for b, y in state.items():
            is_same = x.data_ptr() == y.data_ptr() and x.stride() == y.stride()
            is_tied = is_same and x.shape == y.shape and x.dtype == y.dtype
            one, two = (copies[name].untyped_storage().data_ptr() for name in (a, b))
            assert (one == two) == is_tied, (a, b)
    return copies


def test_an_extra_that_becomes_a_copy_does_not_change_the_saved_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    teacher = copy.deepcopy(model)
    returned = [lambda: dict(model.state_dict()), lambda: dict(teacher.state_dict())]
    with checkpointing(
        tmp_path, model, every=1, extra=lambda: {"ema": returned[0]()}, base=None
    ) as ckpt:
        ckpt.step()
        ckpt.wait()
        returned.pop(0)
        model.weight.data.add_(1)
        ckpt.step()
    state = load_checkpoint(tmp_path / "step-00000002")
    assert same_bits(state["model"]["weight"], model.weight.detach())
    assert same_bits(state["ema"]["weight"], teacher.weight.detach())


def test_ties_may_appear_and_disappear():
    snapshot = Snapshot()
    x, y, z = torch.randn(3, 4, 5)
    for state in (
        {"a": x, "b": x, "c": y},
        {"a": x, "b": y, "c": z},
        {"a": z, "b": z, "c": z},
        {"c": x, "a": y, "b": z},
        {"a": y},
        {"d": x, "a": x, "b": y, "c": y, "e": z},
    ):
        check_copies(snapshot, state)


def test_overlapping_views_are_copied_separately():
    snapshot = Snapshot()
    x = torch.randn(6, 6)
    for _ in range(2):
        state = {"a": x[:4], "b": x[2:], "c": x[1:5], "d": x.t()[:4], "e": x[:4], "f": x[::2]}
        check_copies(snapshot, state)
        x.add_(1)
        check_copies(snapshot, dict(reversed(state.items())))


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_may_change_dtype_shape_and_strides(name):
    snapshot = Snapshot()
    x, other = bits(1, 24, DTYPES[name], 0.9), torch.randn(4, 6)
    for first in (
        x,
        x.view(4, 6),
        x.view(4, 6).t(),
        other,
        x.view(2, 3, 4).permute(2, 0, 1),
        x[:5],
    ):
        check_copies(snapshot, {"a": first, "b": other, "c": first})


def test_copies_keep_strides_that_are_dense():
    x = torch.randn(2, 3, 4, 5)
    state = {
        "last": x.to(memory_format=torch.channels_last),
        "turned": x.transpose(0, 2),
        "gaps": x[:, :, ::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "small": torch.randn(3, 1, 4, 1).to(memory_format=torch.channels_last),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "step": torch.tensor(3),
        "byte": (x > 0).to(memory_format=torch.channels_last),
    }
    copies = check_copies(Snapshot(), state)
    for name in ("last", "turned", "small", "byte"):
        assert copies[name].stride() == state[name].stride(), name
    for name in ("gaps", "expanded", "none"):
        assert copies[name].is_contiguous(), name


def test_memory_that_is_not_needed_any_more_is_released():
    snapshot = Snapshot()
    large = snapshot.take({"a": torch.randn(100), "b": torch.randn(50)}).tensors
    address = large["b"].data_ptr()
    assert snapshot.take({"b": torch.randn(50)}).tensors["b"].data_ptr() == address
    assert [len(buffers) for buffers in snapshot._buffers.values()] == [1]


def test_a_snapshot_reuses_memory_and_keeps_tied_tensors_tied():
    x = torch.randn(4, 5)
    state = {"a": x, "b": {"c": x.t(), "again": x}, "n": 1}
    snapshot = Snapshot()
    copies = snapshot.take(state).tensors
    addresses = {name: y.data_ptr() for name, y in copies.items()}
    assert copies["a"] is copies["b.again"]
    x.add_(1)
    assert not same_bits(copies["a"], x)
    copies = snapshot.take(state).tensors
    assert {name: y.data_ptr() for name, y in copies.items()} == addresses
    assert same_bits(copies["a"], x)
    assert same_bits(copies["b.c"], x.t())


def test_a_snapshot_contains_plain_tensors():
    state = {
        "weight": nn.Parameter(torch.randn(3, 3)),
        "small": torch.randn(8).to(torch.float8_e5m2),
        "other": torch.randn(2, dtype=torch.complex64).conj(),
        "none": torch.empty(0),
    }
    copies = Snapshot().take(state).tensors
    assert not any(y.requires_grad or y.is_conj() for y in copies.values())
    assert all(same_bits(y, state[name].detach().resolve_conj()) for name, y in copies.items())
